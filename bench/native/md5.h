/* MD5 (RFC 1321), streamed: what S3 servers without other checksums name objects and parts by. */
#ifndef MD5_H
#define MD5_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { uint32_t state[4]; uint64_t count; uint8_t rest[64]; } Md5;

static uint32_t md5_sines[64];

static void md5_prepare(void) {
    for (int i = 0; i < 64; i++) md5_sines[i] = (uint32_t)(int64_t)(fabs(sin(i + 1)) * 4294967296.0);
}

#define MD5_ROUND(f, g, shift_0, shift_1, shift_2, shift_3)                                    \
    for (int i = 0; i < 16; i++, step++) {                                                     \
        static const int shifts[4] = {shift_0, shift_1, shift_2, shift_3};                     \
        uint32_t word, sum;                                                                    \
        memcpy(&word, block + 4 * ((g) & 15), 4);                                              \
        sum = a + (f) + md5_sines[step] + word;                                                \
        a = d, d = c, c = b, b += sum << shifts[i & 3] | sum >> (32 - shifts[i & 3]);          \
    }

static void md5_block(Md5 *md5, const uint8_t *block) {
    uint32_t a = md5->state[0], b = md5->state[1], c = md5->state[2], d = md5->state[3];
    int step = 0;
    MD5_ROUND(d ^ (b & (c ^ d)), i, 7, 12, 17, 22)
    MD5_ROUND(c ^ (d & (b ^ c)), 5 * i + 1, 5, 9, 14, 20)
    MD5_ROUND(b ^ c ^ d, 3 * i + 5, 4, 11, 16, 23)
    MD5_ROUND(c ^ (b | ~d), 7 * i, 6, 10, 15, 21)
    md5->state[0] += a, md5->state[1] += b, md5->state[2] += c, md5->state[3] += d;
}

static void md5_begin(Md5 *md5) {
    *md5 = (Md5){.state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476}};
}

static void md5_update(Md5 *md5, const uint8_t *data, size_t count) {
    size_t held = md5->count & 63;
    md5->count += count;
    if (held) {
        size_t some = count < 64 - held ? count : 64 - held;
        memcpy(md5->rest + held, data, some);
        data += some, count -= some;
        if (held + some < 64) return;
        md5_block(md5, md5->rest);
    }
    for (; count >= 64; data += 64, count -= 64) md5_block(md5, data);
    memcpy(md5->rest, data, count);
}

static void md5_end(Md5 *md5, uint8_t digest[16]) {
    uint64_t bits = md5->count * 8;
    static const uint8_t padding[64] = {0x80};
    md5_update(md5, padding, 1 + ((119 - (md5->count & 63)) & 63));
    md5_update(md5, (const uint8_t *)&bits, 8);
    memcpy(digest, md5->state, 16);
}

#endif
