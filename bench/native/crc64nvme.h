/* CRC64NVME (reflected, polynomial 0x9a6c9329ac4bc9b5, all ones in and out), by carry-less multiplication. */
#ifndef CRC64NVME_H
#define CRC64NVME_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define CRC64_POLY 0x9a6c9329ac4bc9b5ULL

static uint64_t crc64_table[256];
static uint64_t crc64_fold_far[2], crc64_fold_near[2];

/* x^n mod P; bit 63 is x^0 */
static uint64_t crc64_power_of_x(uint64_t n) {
    uint64_t value = 1ULL << 63;
    while (n--) value = (value >> 1) ^ ((value & 1) ? CRC64_POLY : 0);
    return value;
}

static void crc64_prepare(void) {
    for (uint64_t i = 0; i < 256; i++) {
        uint64_t value = i;
        for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ ((value & 1) ? CRC64_POLY : 0);
        crc64_table[i] = value;
    }
    /* the product of two reflected words is short by one x */
    crc64_fold_far[0] = crc64_power_of_x(512 + 63);
    crc64_fold_far[1] = crc64_power_of_x(512 - 1);
    crc64_fold_near[0] = crc64_power_of_x(128 + 63);
    crc64_fold_near[1] = crc64_power_of_x(128 - 1);
}

static uint64_t crc64_bytes(uint64_t state, const uint8_t *data, size_t count) {
    while (count--) state = crc64_table[(state ^ *data++) & 0xff] ^ (state >> 8);
    return state;
}

__attribute__((target("pclmul,sse4.1")))
static __m128i crc64_fold(__m128i value, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1")))
static uint64_t crc64_folded(uint64_t state, const uint8_t *data, size_t count) {
    __m128i far_by = _mm_set_epi64x((long long)crc64_fold_far[1], (long long)crc64_fold_far[0]);
    __m128i near_by = _mm_set_epi64x((long long)crc64_fold_near[1], (long long)crc64_fold_near[0]);
    __m128i lane[4];
    for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128((const __m128i *)data + i);
    lane[0] = _mm_xor_si128(lane[0], _mm_set_epi64x(0, (long long)state));
    for (data += 64, count -= 64; count >= 64; data += 64, count -= 64)
        for (int i = 0; i < 4; i++)
            lane[i] = crc64_fold(lane[i], far_by, _mm_loadu_si128((const __m128i *)data + i));
    __m128i all = lane[0];
    for (int i = 1; i < 4; i++) all = crc64_fold(all, near_by, lane[i]);
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, all);
    return crc64_bytes(crc64_bytes(0, rest, 16), data, count);
}

static uint64_t crc64_update(uint64_t crc, const uint8_t *data, size_t count) {
    static int can_fold = -1;
    if (can_fold < 0) can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    if (can_fold && count >= 64) return ~crc64_folded(~crc, data, count);
    return ~crc64_bytes(~crc, data, count);
}

static uint64_t crc64_multiply(uint64_t a, uint64_t b) {
    uint64_t product = 0;
    for (int bit = 63; bit >= 0; bit--) {
        if ((a >> bit) & 1) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? CRC64_POLY : 0);
    }
    return product;
}

/* CRC of two pieces in a row; `count` is the length of the second */
static uint64_t crc64_combine(uint64_t first, uint64_t second, uint64_t count) {
    uint64_t shift = 1ULL << 63, step = crc64_power_of_x(8);
    for (; count; count >>= 1, step = crc64_multiply(step, step))
        if (count & 1) shift = crc64_multiply(shift, step);
    return crc64_multiply(shift, first) ^ second;
}

#endif
