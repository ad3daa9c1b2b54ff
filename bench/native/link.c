/* A long, narrow link to a TCP server: `link PORT TARGET_PORT BITS_PER_SECOND ROUND_TRIP_SECONDS`.
 *
 * All connections share one rate in each direction; every byte arrives half a round trip after it had its turn,
 * and a connection is there a round trip after it was asked for. Nothing is lost or reordered, and there is no
 * slow start: what is measured is how well a client fills a link that others would find full.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STEP_BYTES (64u << 10)
#define WINDOW_BYTES (4u << 20)
#define SLACK_SECONDS 0.002
#define LATE_SECONDS 0.02

typedef struct { pthread_mutex_t lock; double free_at; } Lane;

typedef struct Packet {
    struct Packet *next;
    double due;
    size_t count;
    char data[];
} Packet;

typedef struct {
    int from, to;
    Lane *lane;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Packet *first, **last;
    size_t held;
    int is_ended, is_broken;
    pthread_t writer;
} Way;

static double bytes_per_second, delay_seconds;
static int target_port;
static Lane lanes[2] = {{PTHREAD_MUTEX_INITIALIZER, 0}, {PTHREAD_MUTEX_INITIALIZER, 0}};

static double now_seconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static void sleep_until(double at) {
    struct timespec when = {.tv_sec = (time_t)at, .tv_nsec = (long)((at - (double)(time_t)at) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL)) {}
}

/* When the last of `count` bytes has had its turn; what lay here already may use time that we slept through. */
static double turn_of(Lane *lane, size_t count, int has_waited) {
    pthread_mutex_lock(&lane->lock);
    double first = now_seconds() - (has_waited ? LATE_SECONDS : 0);
    if (lane->free_at < first) lane->free_at = first;
    lane->free_at += (double)count / bytes_per_second;
    double at = lane->free_at;
    pthread_mutex_unlock(&lane->lock);
    return at;
}

static void *deliver(void *given) {
    Way *way = given;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (!way->first && !way->is_ended) pthread_cond_wait(&way->changed, &way->lock);
        Packet *packet = way->first;
        if (packet && !(way->first = packet->next)) way->last = &way->first;
        pthread_mutex_unlock(&way->lock);
        if (!packet) break;
        sleep_until(packet->due);
        size_t sent = 0;
        while (!way->is_broken && sent < packet->count) {
            ssize_t some = send(way->to, packet->data + sent, packet->count - sent, MSG_NOSIGNAL);
            if (some <= 0) way->is_broken = 1;
            else sent += (size_t)some;
        }
        pthread_mutex_lock(&way->lock);
        way->held -= packet->count;
        pthread_cond_broadcast(&way->changed);
        pthread_mutex_unlock(&way->lock);
        free(packet);
    }
    shutdown(way->to, SHUT_WR);
    return NULL;
}

static void *carry(void *given) {
    Way *way = given;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->held >= WINDOW_BYTES && !way->is_broken) pthread_cond_wait(&way->changed, &way->lock);
        pthread_mutex_unlock(&way->lock);
        Packet *packet = malloc(sizeof *packet + STEP_BYTES);
        ssize_t got = way->is_broken ? 0 : recv(way->from, packet->data, STEP_BYTES, MSG_DONTWAIT);
        int has_waited = got > 0;
        if (got < 0 && errno == EAGAIN) got = recv(way->from, packet->data, STEP_BYTES, 0);
        if (got <= 0) {
            free(packet);
            break;
        }
        double turn = turn_of(way->lane, (size_t)got, has_waited);
        *packet = (Packet){.next = NULL, .due = turn + delay_seconds, .count = (size_t)got};
        pthread_mutex_lock(&way->lock);
        *way->last = packet;
        way->last = &packet->next;
        way->held += (size_t)got;
        pthread_cond_broadcast(&way->changed);
        pthread_mutex_unlock(&way->lock);
        /* what has not had its turn stays with the sender, as behind a full queue */
        sleep_until(turn - SLACK_SECONDS);
    }
    pthread_mutex_lock(&way->lock);
    way->is_ended = 1;
    pthread_cond_broadcast(&way->changed);
    pthread_mutex_unlock(&way->lock);
    return NULL;
}

static void *join_ends(void *given) {
    int near = (int)(intptr_t)given, one = 1, far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)target_port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sleep_until(now_seconds() + 2 * delay_seconds);
    if (!connect(far, (struct sockaddr *)&at, sizeof at)) {
        setsockopt(far, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Way ways[2] = {{.from = near, .to = far, .lane = &lanes[0]}, {.from = far, .to = near, .lane = &lanes[1]}};
        pthread_t readers[2];
        for (int i = 0; i < 2; i++) {
            pthread_mutex_init(&ways[i].lock, NULL);
            pthread_cond_init(&ways[i].changed, NULL);
            ways[i].last = &ways[i].first;
            pthread_create(&ways[i].writer, NULL, deliver, &ways[i]);
            pthread_create(&readers[i], NULL, carry, &ways[i]);
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(readers[i], NULL);
            pthread_join(ways[i].writer, NULL);
            /* one way's end ends a client that was killed in the other */
            if (ways[i].is_broken) shutdown(ways[i].from, SHUT_RDWR);
        }
    }
    close(near);
    close(far);
    return NULL;
}

int main(int count, char **words) {
    if (count != 5) {
        fprintf(stderr, "link PORT TARGET_PORT BITS_PER_SECOND ROUND_TRIP_SECONDS\n");
        return 64;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 10000UL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* a network does not wait for the CPU; where that is not allowed it does */
    setpriority(PRIO_PROCESS, 0, -15);
    target_port = atoi(words[2]);
    bytes_per_second = atof(words[3]) / 8;
    delay_seconds = atof(words[4]) / 2;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) {
        perror("link");
        return 71;
    }
    for (;;) {
        int near = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (near >= 0 && pthread_create(&thread, NULL, join_ends, (void *)(intptr_t)near) == 0) pthread_detach(thread);
        else if (near >= 0) close(near);
    }
}
