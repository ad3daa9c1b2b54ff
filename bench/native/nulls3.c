/* An S3 server for measuring clients: `nulls3 PORT crc64nvme|md5|plain SOURCE_DIR`.
 *
 * Bodies are counted and thrown away. Small documents (below 1 MiB, under `_ckptd/`) and objects of at most
 * 4 KiB are kept; any other object is served from SOURCE_DIR, from the file whose path is the key
 * without its bucket, or as zeros. With `crc64nvme` every body is hashed, a checksum that was sent is
 * compared, and HEAD tells it; with `md5` ETags are MD5s and Content-MD5 is compared, as older servers do; with
 * `plain` nothing is hashed. GET /_stats, POST /_reset.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "crc64nvme.h"
#include "md5.h"

#define BUCKETS 65536
#define PARTS 10001
#define DOCUMENT_BYTES (1u << 20)
#define KEPT_BYTES 4096
#define STEP_BYTES (256u << 10)
#define PAGE 1000

typedef struct Object {
    struct Object *next;
    char *key, *body;
    uint64_t size, crc;
    char etag[48];
    time_t mtime;
} Object;

typedef struct { uint64_t size, crc; uint8_t md5[16]; char etag[48]; } Part;

typedef struct Upload {
    struct Upload *next;
    char *key;
    uint64_t id;
    Part *parts;
} Upload;

typedef struct {
    int fd;
    size_t at, end;
    char head[65536];
    uint8_t *step;
} Peer;

typedef struct {
    char method[16], key[4096], query[4096], range[128];
    char checksum[64], md5[32], match[16], encoding[128], payload[128];
    uint64_t length;
    int is_expecting, is_chunked, is_checksum_wanted;
} Request;

typedef struct { uint64_t size, crc; Md5 md5; char *body; size_t room; } Sink;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object *objects[BUCKETS];
static size_t object_count;
static Upload *uploads;
static uint64_t next_id = 1;
static int is_hashing, is_md5;
static const char *source_dir;
static struct { uint64_t data_bytes, data_bodies, parts_again, requests, commits; double last_data, commit_after; } stats;

static double now_seconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static Object **slot_of(const char *key) {
    uint64_t hash = 1469598103934665603ULL;
    for (const char *c = key; *c; c++) hash = (hash ^ (uint8_t)*c) * 1099511628211ULL;
    Object **slot = &objects[hash % BUCKETS];
    while (*slot && strcmp((*slot)->key, key)) slot = &(*slot)->next;
    return slot;
}

static void drop(Object **slot) {
    Object *gone = *slot;
    if (!gone) return;
    *slot = gone->next;
    free(gone->key);
    free(gone->body);
    free(gone);
    object_count--;
}

static void keep(const char *key, uint64_t size, uint64_t crc, const char *etag, char *body) {
    Object **slot = slot_of(key);
    drop(slot);
    slot = slot_of(key);
    Object *made = calloc(1, sizeof *made);
    *made = (Object){.next = *slot, .key = strdup(key), .body = body, .size = size, .crc = crc,
                     .mtime = time(NULL)};
    strcpy(made->etag, etag);
    *slot = made;
    object_count++;
}

static Upload **upload_of(uint64_t id) {
    Upload **slot = &uploads;
    while (*slot && (*slot)->id != id) slot = &(*slot)->next;
    return slot;
}

static void drop_upload(Upload **slot) {
    Upload *gone = *slot;
    if (!gone) return;
    *slot = gone->next;
    free(gone->key);
    free(gone->parts);
    free(gone);
}

/* --- HTTP ------------------------------------------------------------------------------------------------ */

static int send_all(int fd, const void *data, size_t count, int flags) {
    const char *at = data;
    while (count) {
        ssize_t sent = send(fd, at, count, MSG_NOSIGNAL | flags);
        if (sent <= 0) return -1;
        at += sent;
        count -= (size_t)sent;
    }
    return 0;
}

static int answer(Peer *peer, const Request *asked, int status, const char *more, const char *body) {
    char head[2048];
    size_t length = body ? strlen(body) : 0;
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %d %s\r\nServer: nulls3\r\n%sContent-Length: %zu\r\n%s\r\n", status,
                        status < 300 ? "OK" : "Refused", body ? "Content-Type: application/xml\r\n" : "",
                        length, more ? more : "");
    int is_head = !strcmp(asked->method, "HEAD");
    if (send_all(peer->fd, head, (size_t)size, length && !is_head ? MSG_MORE : 0)) return -1;
    return length && !is_head ? send_all(peer->fd, body, length, 0) : 0;
}

static int refuse(Peer *peer, const Request *asked, int status, const char *code) {
    char body[256];
    snprintf(body, sizeof body, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>%s</Message></Error>",
             code, code);
    return answer(peer, asked, status, NULL, body);
}

static size_t decode_percent(char *text, int is_query) {
    char *to = text;
    for (char *c = text; *c; c++) {
        unsigned value;
        if (*c == '%' && sscanf(c + 1, "%2x", &value) == 1) *to++ = (char)value, c += 2;
        else *to++ = is_query && *c == '+' ? ' ' : *c;
    }
    *to = 0;
    return (size_t)(to - text);
}

static int query_has(const Request *asked, const char *name) {
    size_t length = strlen(name);
    for (const char *c = asked->query; c; c = strchr(c, '&')) {
        if (*c == '&') c++;
        if (!strncmp(c, name, length) && (c[length] == 0 || c[length] == '=' || c[length] == '&')) return 1;
    }
    return 0;
}

static char *query_of(const Request *asked, const char *name, char *into, size_t room) {
    size_t length = strlen(name);
    *into = 0;
    for (const char *c = asked->query; c; c = strchr(c, '&')) {
        if (*c == '&') c++;
        if (strncmp(c, name, length) || c[length] != '=') continue;
        const char *begin = c + length + 1;
        size_t count = strcspn(begin, "&");
        if (count >= room) count = room - 1;
        memcpy(into, begin, count);
        into[count] = 0;
        decode_percent(into, 1);
        return into;
    }
    return NULL;
}

static void copy_value(char *into, size_t room, const char *value) {
    size_t count = strnlen(value, room - 1);
    memcpy(into, value, count);
    into[count] = 0;
}

static void take_header(Request *asked, const char *name, const char *value) {
    if (!strcasecmp(name, "content-length")) asked->length = strtoull(value, NULL, 10);
    else if (!strcasecmp(name, "expect")) asked->is_expecting = 1;
    else if (!strcasecmp(name, "range")) copy_value(asked->range, sizeof asked->range, value);
    else if (!strcasecmp(name, "if-none-match")) copy_value(asked->match, sizeof asked->match, value);
    else if (!strcasecmp(name, "content-encoding")) copy_value(asked->encoding, sizeof asked->encoding, value);
    else if (!strcasecmp(name, "x-amz-content-sha256")) copy_value(asked->payload, sizeof asked->payload, value);
    else if (!strcasecmp(name, "x-amz-checksum-crc64nvme")) copy_value(asked->checksum, sizeof asked->checksum, value);
    else if (!strcasecmp(name, "content-md5")) copy_value(asked->md5, sizeof asked->md5, value);
    else if (!strcasecmp(name, "x-amz-checksum-mode")) asked->is_checksum_wanted = 1;
}

/* 0: closed or not HTTP */
static int read_request(Peer *peer, Request *asked) {
    memset(asked, 0, sizeof *asked);
    char *stop = NULL;
    size_t seen = peer->at;
    for (;;) {
        if (peer->end > seen + 3 || peer->end > peer->at + 3)
            stop = memmem(peer->head + peer->at, peer->end - peer->at, "\r\n\r\n", 4);
        if (stop) break;
        if (peer->at) {
            memmove(peer->head, peer->head + peer->at, peer->end - peer->at);
            peer->end -= peer->at;
            peer->at = 0;
        }
        if (peer->end == sizeof peer->head) return 0;
        ssize_t got = recv(peer->fd, peer->head + peer->end, sizeof peer->head - peer->end, 0);
        if (got <= 0) return 0;
        peer->end += (size_t)got;
    }
    *stop = 0;
    char *line = peer->head + peer->at, *next = strstr(line, "\r\n"), target[8192];
    if (next) *next = 0;
    if (sscanf(line, "%15s %8191s", asked->method, target) != 2) return 0;
    while (next) {
        line = next + 2;
        next = strstr(line, "\r\n");
        if (next) *next = 0;
        char *colon = strchr(line, ':');
        if (!colon) continue;
        *colon = 0;
        take_header(asked, line, colon + 1 + strspn(colon + 1, " "));
    }
    peer->at = (size_t)(stop + 4 - peer->head);
    char *mark = strchr(target, '?');
    if (mark) {
        *mark = 0;
        copy_value(asked->query, sizeof asked->query, mark + 1);
    }
    decode_percent(target, 0);
    copy_value(asked->key, sizeof asked->key, target + 1);
    asked->is_chunked = strstr(asked->encoding, "aws-chunked") || !strncmp(asked->payload, "STREAMING", 9);
    return 1;
}

/* --- bodies ---------------------------------------------------------------------------------------------- */

static void pour(Sink *sink, const uint8_t *data, size_t count) {
    if (is_hashing) sink->crc = crc64_update(sink->crc, data, count);
    if (is_md5) md5_update(&sink->md5, data, count);
    if (sink->body && sink->size + count <= sink->room) memcpy(sink->body + sink->size, data, count);
    sink->size += count;
}

typedef struct { enum { LINE, DATA, BREAK, TRAILER } state; uint64_t left; char line[256]; size_t filled; } Chunks;

/* A line behind the last chunk: a checksum there counts as one in the head. */
static void take_trailer(Request *asked, char *line) {
    line[strcspn(line, "\r")] = 0;
    char *colon = strchr(line, ':');
    if (!colon) return;
    *colon = 0;
    take_header(asked, line, colon + 1 + strspn(colon + 1, " "));
}

static void unchunk(Chunks *chunks, Request *asked, Sink *sink, const uint8_t *data, size_t count) {
    while (count) {
        if (chunks->state == DATA) {
            size_t some = count < chunks->left ? count : (size_t)chunks->left;
            pour(sink, data, some);
            data += some, count -= some;
            if (!(chunks->left -= some)) chunks->state = BREAK;
            continue;
        }
        char c = (char)*data++;
        count--;
        if (chunks->state == BREAK) {
            if (c == '\n') chunks->state = LINE;
        } else {
            if (c != '\n') {
                if (chunks->filled + 1 < sizeof chunks->line) chunks->line[chunks->filled++] = c;
                continue;
            }
            chunks->line[chunks->filled] = 0;
            chunks->filled = 0;
            if (chunks->state == TRAILER) {
                take_trailer(asked, chunks->line);
                continue;
            }
            chunks->left = strtoull(chunks->line, NULL, 16);
            chunks->state = chunks->left ? DATA : TRAILER;
        }
    }
}

/* 0: the connection broke */
static int read_body(Peer *peer, Request *asked, Sink *sink) {
    uint64_t left = asked->length;
    Chunks chunks = {.state = LINE};
    md5_begin(&sink->md5);
    if (asked->is_expecting && left && send_all(peer->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0)) return 0;
    while (left) {
        uint8_t *data = peer->step;
        size_t count = left < STEP_BYTES ? (size_t)left : STEP_BYTES;
        if (peer->at < peer->end) {
            if (count > peer->end - peer->at) count = peer->end - peer->at;
            data = (uint8_t *)peer->head + peer->at;
            peer->at += count;
        } else {
            int is_thrown = !is_hashing && !is_md5 && !sink->body && !asked->is_chunked;
            ssize_t got = recv(peer->fd, is_thrown ? NULL : data, count, is_thrown ? MSG_TRUNC : 0);
            if (got <= 0) return 0;
            count = (size_t)got;
            if (is_thrown) {
                sink->size += count;
                left -= count;
                continue;
            }
        }
        if (asked->is_chunked) unchunk(&chunks, asked, sink, data, count);
        else pour(sink, data, count);
        left -= count;
    }
    return 1;
}

static int is_data(const char *key) { return !strstr(key, "/_ckptd/"); }

/* What a body cost the line, also one that broke off. */
static void count_body(const char *key, uint64_t size, int is_whole) {
    pthread_mutex_lock(&lock);
    if (is_data(key)) {
        stats.data_bytes += size;
        stats.data_bodies += (uint64_t)is_whole;
        stats.last_data = now_seconds();
    } else if (strstr(key, "/_ckptd/commits/")) {
        stats.commits += (uint64_t)is_whole;
        if (stats.last_data > 0) stats.commit_after = now_seconds() - stats.last_data;
    }
    pthread_mutex_unlock(&lock);
}

static void to_base64(const uint8_t *bytes, size_t count, char *into) {
    static const char *digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < count; i += 3) {
        unsigned three = (unsigned)bytes[i] << 16;
        if (i + 1 < count) three |= (unsigned)bytes[i + 1] << 8;
        if (i + 2 < count) three |= bytes[i + 2];
        for (size_t j = 0; j < 4; j++) *into++ = i + j <= count ? digits[three >> (18 - 6 * j) & 63] : '=';
    }
    *into = 0;
}

static void crc_to_base64(uint64_t crc, char *into) {
    uint64_t big = __builtin_bswap64(crc);
    to_base64((const uint8_t *)&big, 8, into);
}

static void to_hex(const uint8_t *bytes, size_t count, char *into) {
    for (size_t i = 0; i < count; i++) sprintf(into + 2 * i, "%02x", bytes[i]);
}

/* The body as a part: its MD5, and an ETag that is it where the server names by MD5. */
static Part measured(Sink *sink) {
    Part part = {.size = sink->size, .crc = sink->crc};
    if (is_md5) {
        md5_end(&sink->md5, part.md5);
        to_hex(part.md5, 16, part.etag);
    } else {
        snprintf(part.etag, sizeof part.etag, "%016llx", (unsigned long long)__atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED));
    }
    return part;
}

static int is_wrong(const Request *asked, uint64_t crc) {
    char right[16];
    crc_to_base64(crc, right);
    return is_hashing && *asked->checksum && strcmp(asked->checksum, right);
}

static int is_changed(const Request *asked, const Part *part) {
    char right[32];
    to_base64(part->md5, 16, right);
    return is_wrong(asked, part->crc) || (is_md5 && *asked->md5 && strcmp(asked->md5, right));
}

/* --- verbs ----------------------------------------------------------------------------------------------- */

/* ETag, and the checksum that was computed, as the answer to PUT names it. */
static int tell_stored(Peer *peer, const Request *asked, const char *etag, uint64_t crc) {
    char more[160], digits[16];
    int size = snprintf(more, sizeof more, "ETag: \"%s\"\r\n", etag);
    crc_to_base64(crc, digits);
    if (is_hashing) snprintf(more + size, sizeof more - (size_t)size, "x-amz-checksum-crc64nvme: %s\r\n", digits);
    return answer(peer, asked, 200, more, NULL);
}

static int put_object(Peer *peer, Request *asked) {
    Sink sink = {0};
    if ((!is_data(asked->key) && asked->length < DOCUMENT_BYTES) || asked->length <= KEPT_BYTES) {
        sink.room = asked->length;
        sink.body = malloc(sink.room + 1);
    }
    int is_whole = read_body(peer, asked, &sink);
    count_body(asked->key, sink.size, is_whole);
    if (!is_whole) {
        free(sink.body);
        return -1;
    }
    Part part = measured(&sink);
    if (is_changed(asked, &part)) {
        free(sink.body);
        return refuse(peer, asked, 400, "BadDigest");
    }
    pthread_mutex_lock(&lock);
    int is_taken = *asked->match && *slot_of(asked->key);
    if (!is_taken) keep(asked->key, sink.size, sink.crc, part.etag, sink.body);
    pthread_mutex_unlock(&lock);
    if (is_taken) {
        free(sink.body);
        return refuse(peer, asked, 412, "PreconditionFailed");
    }
    return tell_stored(peer, asked, part.etag, sink.crc);
}

static int put_part(Peer *peer, Request *asked) {
    char text[64];
    uint64_t id = query_of(asked, "uploadId", text, sizeof text) ? strtoull(text, NULL, 16) : 0;
    unsigned number = query_of(asked, "partNumber", text, sizeof text) ? (unsigned)atoi(text) : 0;
    Sink sink = {0};
    int is_whole = read_body(peer, asked, &sink);
    count_body(asked->key, sink.size, is_whole);
    if (!is_whole) return -1;
    if (number < 1 || number >= PARTS) return refuse(peer, asked, 400, "InvalidArgument");
    Part part = measured(&sink);
    if (is_changed(asked, &part)) return refuse(peer, asked, 400, "BadDigest");
    pthread_mutex_lock(&lock);
    Upload *upload = *upload_of(id);
    if (upload) {
        stats.parts_again += *upload->parts[number].etag != 0;
        upload->parts[number] = part;
    }
    pthread_mutex_unlock(&lock);
    if (!upload) return refuse(peer, asked, 404, "NoSuchUpload");
    return tell_stored(peer, asked, part.etag, sink.crc);
}

static int begin_upload(Peer *peer, Request *asked) {
    Sink ignored = {0};
    if (!read_body(peer, asked, &ignored)) return -1;
    Upload *made = calloc(1, sizeof *made);
    made->key = strdup(asked->key);
    made->parts = calloc(PARTS, sizeof *made->parts);
    pthread_mutex_lock(&lock);
    made->id = next_id++;
    made->next = uploads;
    uploads = made;
    pthread_mutex_unlock(&lock);
    const char *slash = strchr(asked->key, '/');
    char body[8192];
    snprintf(body, sizeof body,
             "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>%.*s</Bucket><Key>%s</Key>"
             "<UploadId>%llx</UploadId></InitiateMultipartUploadResult>",
             slash ? (int)(slash - asked->key) : 0, asked->key, slash ? slash + 1 : "",
             (unsigned long long)made->id);
    return answer(peer, asked, 200, NULL, body);
}

/* The parts that the body lists, in its order, as one; 0: one is not there. */
static int join(const Upload *upload, const char *listed, Part *whole) {
    Md5 md5;
    int count = 0;
    md5_begin(&md5);
    for (const char *c = listed; (c = strstr(c, "<PartNumber>")); c++) {
        int number = atoi(c + 12);
        if (number < 1 || number >= PARTS || !*upload->parts[number].etag) return 0;
        const Part *part = &upload->parts[number];
        if (is_hashing) whole->crc = crc64_combine(whole->crc, part->crc, part->size);
        md5_update(&md5, part->md5, 16);
        whole->size += part->size;
        count++;
    }
    md5_end(&md5, whole->md5);
    to_hex(whole->md5, 16, whole->etag);
    sprintf(whole->etag + 32, "-%d", count);
    return 1;
}

static int complete(Peer *peer, Request *asked) {
    char text[64];
    uint64_t id = query_of(asked, "uploadId", text, sizeof text) ? strtoull(text, NULL, 16) : 0;
    Sink listed = {.room = asked->length, .body = calloc(1, asked->length + 1)};
    if (!read_body(peer, asked, &listed)) {
        free(listed.body);
        return -1;
    }
    Part whole = {0};
    const char *refused = NULL;
    pthread_mutex_lock(&lock);
    Upload **slot = upload_of(id);
    if (!*slot) refused = "NoSuchUpload";
    else if (!join(*slot, listed.body, &whole)) refused = "InvalidPart";
    else if (*asked->match && *slot_of(asked->key)) refused = "PreconditionFailed";
    else if (is_wrong(asked, whole.crc)) refused = "BadDigest";
    else {
        drop_upload(slot);
        keep(asked->key, whole.size, whole.crc, whole.etag, NULL);
    }
    pthread_mutex_unlock(&lock);
    free(listed.body);
    if (refused) {
        int status = !strcmp(refused, "NoSuchUpload") ? 404 : !strcmp(refused, "PreconditionFailed") ? 412 : 400;
        return refuse(peer, asked, status, refused);
    }
    char body[8192], digits[16];
    crc_to_base64(whole.crc, digits);
    snprintf(body, sizeof body,
             "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Location>/%s</Location><Key>%s</Key>"
             "<ETag>\"%s\"</ETag>%s%s%s</CompleteMultipartUploadResult>",
             asked->key, strchr(asked->key, '/') ? strchr(asked->key, '/') + 1 : "", whole.etag,
             is_hashing ? "<ChecksumType>FULL_OBJECT</ChecksumType><ChecksumCRC64NVME>" : "",
             is_hashing ? digits : "", is_hashing ? "</ChecksumCRC64NVME>" : "");
    return answer(peer, asked, 200, NULL, body);
}

static int list_parts(Peer *peer, const Request *asked) {
    char text[64];
    uint64_t id = query_of(asked, "uploadId", text, sizeof text) ? strtoull(text, NULL, 16) : 0;
    int after = query_of(asked, "part-number-marker", text, sizeof text) ? atoi(text) : 0, count = 0, last = 0;
    char *body = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&body, &size);
    pthread_mutex_lock(&lock);
    Upload *upload = *upload_of(id);
    fprintf(out, "<?xml version=\"1.0\"?><ListPartsResult><UploadId>%llx</UploadId>", (unsigned long long)id);
    int number = after + 1;
    for (; upload && number < PARTS && count < PAGE; number++) {
        const Part *part = &upload->parts[number];
        if (!*part->etag) continue;
        fprintf(out, "<Part><PartNumber>%d</PartNumber><ETag>\"%s\"</ETag><Size>%llu</Size></Part>", number,
                part->etag, (unsigned long long)part->size);
        count++;
        last = number;
    }
    int is_cut = 0;
    for (; upload && number < PARTS; number++) is_cut |= *upload->parts[number].etag != 0;
    pthread_mutex_unlock(&lock);
    fprintf(out, "<IsTruncated>%s</IsTruncated><NextPartNumberMarker>%d</NextPartNumberMarker></ListPartsResult>",
            is_cut ? "true" : "false", last);
    fclose(out);
    int result = upload ? answer(peer, asked, 200, NULL, body) : refuse(peer, asked, 404, "NoSuchUpload");
    free(body);
    return result;
}

static int by_key(const void *a, const void *b) {
    return strcmp((*(Object *const *)a)->key, (*(Object *const *)b)->key);
}

static int list_objects(Peer *peer, const Request *asked) {
    char prefix[2048], after[2048], delimiter[16], whole[8192];
    query_of(asked, "prefix", prefix, sizeof prefix);
    query_of(asked, "delimiter", delimiter, sizeof delimiter);
    if (!query_of(asked, "continuation-token", after, sizeof after)) query_of(asked, "start-after", after, sizeof after);
    size_t bucket = strcspn(asked->key, "/");
    snprintf(whole, sizeof whole, "%.*s/%s", (int)bucket, asked->key, prefix);
    size_t skip = bucket + 1, wanted = strlen(whole), count = 0, shown = 0;
    char *body = NULL, *folder = NULL, *last = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&body, &size);
    fprintf(out, "<?xml version=\"1.0\"?><ListBucketResult><Name>%.*s</Name><Prefix>%s</Prefix><MaxKeys>%d</MaxKeys>",
            (int)bucket, asked->key, prefix, PAGE);
    pthread_mutex_lock(&lock);
    Object **found = malloc((object_count + 1) * sizeof *found);
    for (size_t i = 0; i < BUCKETS; i++)
        for (Object *o = objects[i]; o; o = o->next)
            if (!strncmp(o->key, whole, wanted) && strcmp(o->key + skip, after) > 0) found[count++] = o;
    qsort(found, count, sizeof *found, by_key);
    size_t i = 0;
    for (; i < count && shown < PAGE; i++) {
        const char *key = found[i]->key + skip, *cut = *delimiter ? strstr(found[i]->key + wanted, delimiter) : NULL;
        free(last);
        last = strdup(key);
        if (cut) {
            size_t length = (size_t)(cut + strlen(delimiter) - key);
            if (folder && strlen(folder) == length && !strncmp(folder, key, length)) continue;
            free(folder);
            folder = strndup(key, length);
            fprintf(out, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", folder);
        } else {
            char at[32];
            strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%S.000Z", gmtime(&found[i]->mtime));
            fprintf(out, "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>\"%s\"</ETag>"
                         "<Size>%llu</Size><StorageClass>STANDARD</StorageClass></Contents>",
                    key, at, found[i]->etag, (unsigned long long)found[i]->size);
        }
        shown++;
    }
    free(found);
    pthread_mutex_unlock(&lock);
    fprintf(out, "<KeyCount>%zu</KeyCount><IsTruncated>%s</IsTruncated>", shown, i < count ? "true" : "false");
    if (i < count && last) fprintf(out, "<NextContinuationToken>%s</NextContinuationToken>", last);
    fprintf(out, "</ListBucketResult>");
    fclose(out);
    int result = answer(peer, asked, 200, NULL, body);
    free(body);
    free(folder);
    free(last);
    return result;
}

static int send_range(Peer *peer, const char *key, const char *body, uint64_t begin, uint64_t count) {
    static const char zeros[STEP_BYTES];
    if (body) return send_all(peer->fd, body + begin, count, 0);
    const char *rest = strchr(key, '/');
    char path[8192];
    snprintf(path, sizeof path, "%s/%s", source_dir, rest ? rest + 1 : "");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && !fstat(fd, &status) && S_ISREG(status.st_mode) && (uint64_t)status.st_size >= begin + count) {
        off_t at = (off_t)begin;
        ssize_t sent = 1;
        while (count && (sent = sendfile(peer->fd, fd, &at, count)) > 0) count -= (uint64_t)sent;
        close(fd);
        return count ? -1 : 0;
    }
    if (fd >= 0) close(fd);
    for (; count; count -= count < STEP_BYTES ? count : STEP_BYTES)
        if (send_all(peer->fd, zeros, count < STEP_BYTES ? count : STEP_BYTES, 0)) return -1;
    return 0;
}

static int get_object(Peer *peer, const Request *asked) {
    pthread_mutex_lock(&lock);
    Object *held = *slot_of(asked->key), found = {0};
    if (held) {
        found = *held;
        if (held->body) {
            found.body = malloc(held->size + 1);
            memcpy(found.body, held->body, held->size);
        }
    }
    pthread_mutex_unlock(&lock);
    if (!held) return refuse(peer, asked, 404, "NoSuchKey");
    uint64_t begin = 0, end = found.size;
    int is_partial = !strncmp(asked->range, "bytes=", 6);
    if (is_partial) {
        char *dash;
        begin = strtoull(asked->range + 6, &dash, 10);
        if (*dash == '-' && dash[1]) end = strtoull(dash + 1, NULL, 10) + 1;
        if (end > found.size) end = found.size;
        if (begin >= end) {
            free(found.body);
            return refuse(peer, asked, 416, "InvalidRange");
        }
    }
    char head[1024], date[64], sum[96] = "", range[128] = "";
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime(&found.mtime));
    if (is_hashing && asked->is_checksum_wanted && !is_partial) {
        char digits[16];
        crc_to_base64(found.crc, digits);
        snprintf(sum, sizeof sum, "x-amz-checksum-crc64nvme: %s\r\nx-amz-checksum-type: FULL_OBJECT\r\n", digits);
    }
    if (is_partial)
        snprintf(range, sizeof range, "Content-Range: bytes %llu-%llu/%llu\r\n", (unsigned long long)begin,
                 (unsigned long long)end - 1, (unsigned long long)found.size);
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %d OK\r\nServer: nulls3\r\nContent-Length: %llu\r\nETag: \"%s\"\r\n"
                        "Content-Type: binary/octet-stream\r\nAccept-Ranges: bytes\r\nLast-Modified: %s\r\n%s%s\r\n",
                        is_partial ? 206 : 200, (unsigned long long)(end - begin), found.etag, date,
                        range, sum);
    int has_body = strcmp(asked->method, "HEAD") && end > begin;
    int result = send_all(peer->fd, head, (size_t)size, has_body ? MSG_MORE : 0);
    if (!result && has_body) result = send_range(peer, asked->key, found.body, begin, end - begin);
    free(found.body);
    return result;
}

static int delete_object(Peer *peer, const Request *asked) {
    char text[64];
    pthread_mutex_lock(&lock);
    int is_known = 1;
    if (query_of(asked, "uploadId", text, sizeof text)) {
        Upload **slot = upload_of(strtoull(text, NULL, 16));
        is_known = *slot != NULL;
        drop_upload(slot);
    } else {
        drop(slot_of(asked->key));
    }
    pthread_mutex_unlock(&lock);
    return is_known ? answer(peer, asked, 204, NULL, NULL) : refuse(peer, asked, 404, "NoSuchUpload");
}

static int tell_stats(Peer *peer, const Request *asked) {
    char body[512];
    pthread_mutex_lock(&lock);
    snprintf(body, sizeof body,
             "{\"data_bytes\": %llu, \"data_bodies\": %llu, \"parts_again\": %llu, \"requests\": %llu, "
             "\"objects\": %zu, \"commits\": %llu, \"commit_after_seconds\": %.6f, \"uploads_open\": %s}",
             (unsigned long long)stats.data_bytes, (unsigned long long)stats.data_bodies,
             (unsigned long long)stats.parts_again, (unsigned long long)stats.requests, object_count,
             (unsigned long long)stats.commits, stats.commit_after, uploads ? "true" : "false");
    pthread_mutex_unlock(&lock);
    return answer(peer, asked, 200, NULL, body);
}

static int reset(Peer *peer, const Request *asked) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < BUCKETS; i++)
        while (objects[i]) drop(&objects[i]);
    while (uploads) drop_upload(&uploads);
    memset(&stats, 0, sizeof stats);
    stats.commit_after = -1;
    pthread_mutex_unlock(&lock);
    return answer(peer, asked, 200, NULL, NULL);
}

static int serve(Peer *peer, Request *asked) {
    const char *slash = strchr(asked->key, '/');
    int is_bucket = !slash || !slash[1];
    if (!strcmp(asked->key, "_stats")) return tell_stats(peer, asked);
    if (!strcmp(asked->key, "_reset")) return reset(peer, asked);
    pthread_mutex_lock(&lock);
    stats.requests++;
    pthread_mutex_unlock(&lock);
    if (!strcmp(asked->method, "PUT")) {
        if (is_bucket) {
            Sink ignored = {0};
            return read_body(peer, asked, &ignored) ? answer(peer, asked, 200, NULL, NULL) : -1;
        }
        return query_has(asked, "uploadId") ? put_part(peer, asked) : put_object(peer, asked);
    }
    if (!strcmp(asked->method, "POST") && !is_bucket) {
        if (query_has(asked, "uploads")) return begin_upload(peer, asked);
        if (query_has(asked, "uploadId")) return complete(peer, asked);
    }
    if (!strcmp(asked->method, "DELETE")) return delete_object(peer, asked);
    if (!strcmp(asked->method, "HEAD")) return is_bucket ? answer(peer, asked, 200, NULL, NULL) : get_object(peer, asked);
    if (!strcmp(asked->method, "GET")) {
        if (query_has(asked, "location"))
            return answer(peer, asked, 200, NULL, "<?xml version=\"1.0\"?><LocationConstraint/>");
        if (is_bucket && query_has(asked, "uploads"))
            return answer(peer, asked, 200, NULL, "<?xml version=\"1.0\"?><ListMultipartUploadsResult/>");
        if (is_bucket) return list_objects(peer, asked);
        return query_has(asked, "uploadId") ? list_parts(peer, asked) : get_object(peer, asked);
    }
    /* what it does not know may have a body: the connection ends, so that nothing of it is taken for a request */
    refuse(peer, asked, 501, "NotImplemented");
    return -1;
}

static void *talk(void *given) {
    Peer *peer = given;
    Request *asked = malloc(sizeof *asked);
    while (read_request(peer, asked) && !serve(peer, asked)) {}
    free(asked);
    close(peer->fd);
    free(peer->step);
    free(peer);
    return NULL;
}

int main(int count, char **words) {
    if (count != 4) {
        fprintf(stderr, "nulls3 PORT crc64nvme|md5|plain SOURCE_DIR\n");
        return 64;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    crc64_prepare();
    md5_prepare();
    is_hashing = !strcmp(words[2], "crc64nvme");
    is_md5 = !strcmp(words[2], "md5");
    source_dir = words[3];
    stats.commit_after = -1;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) {
        perror("nulls3");
        return 71;
    }
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Peer *peer = calloc(1, sizeof *peer);
        peer->fd = fd;
        peer->step = malloc(STEP_BYTES);
        pthread_t thread;
        if (pthread_create(&thread, NULL, talk, peer)) {
            close(fd);
            free(peer->step);
            free(peer);
            continue;
        }
        pthread_detach(thread);
    }
}
