#ifndef KVOFFLOAD_GHOSTS_H
#define KVOFFLOAD_GHOSTS_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvo_xxh3 reads little-endian words; kvoffload runs without native code here"
#endif

/* Bit i is set where word i of the sixteen words at `tags` equals `tag`. */
#ifdef __SSE2__
#include <emmintrin.h>
static inline unsigned kvo_match16(const uint32_t *tags, uint32_t tag) {
    const __m128i *words = (const __m128i *)tags, wanted = _mm_set1_epi32((int)tag);
    __m128i same[4];
    for (int i = 0; i < 4; i++) same[i] = _mm_cmpeq_epi32(_mm_loadu_si128(words + i), wanted);
    return (unsigned)_mm_movemask_epi8(
        _mm_packs_epi16(_mm_packs_epi32(same[0], same[1]), _mm_packs_epi32(same[2], same[3])));
}
#else
static inline unsigned kvo_match16(const uint32_t *tags, uint32_t tag) {
    unsigned found = 0;
    for (int way = 0; way < 16; way++) found |= (unsigned)(tags[way] == tag) << way;
    return found;
}
#endif

/* XXH3, 64 bits, without a seed, of 17 to 64 bytes, as its specification defines it. */

static const uint8_t kvo_secret[64] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
};

static inline uint64_t kvo_read64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t kvo_mix16(const uint8_t *at, const uint8_t *secret) {
    unsigned __int128 product = (unsigned __int128)(kvo_read64(at) ^ kvo_read64(secret)) *
                                (kvo_read64(at + 8) ^ kvo_read64(secret + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t kvo_xxh3(const uint8_t *at, int64_t size) {
    uint64_t sum = (uint64_t)size * 0x9E3779B185EBCA87ULL;
    if (size > 32) sum += kvo_mix16(at + 16, kvo_secret + 32) + kvo_mix16(at + size - 32, kvo_secret + 48);
    sum += kvo_mix16(at, kvo_secret) + kvo_mix16(at + size - 16, kvo_secret + 16);
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

#endif
