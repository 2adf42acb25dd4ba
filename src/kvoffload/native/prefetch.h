#ifndef KVOFFLOAD_PREFETCH_H
#define KVOFFLOAD_PREFETCH_H

#include <stdint.h>
#include <string.h>

#define kvo_prefetch(address) __builtin_prefetch((const void *)(address), 0, 3)
#define kvo_prefetch_write(address) __builtin_prefetch((const void *)(address), 1, 3)

/* Bit i is set where word i of the eight words at `tags` equals `tag`. */
#ifdef __SSE2__
#include <emmintrin.h>
static inline unsigned kvo_match8(const uint32_t *tags, uint32_t tag) {
    const __m128i *words = (const __m128i *)tags, wanted = _mm_set1_epi32((int)tag);
    __m128i low = _mm_cmpeq_epi32(_mm_loadu_si128(words), wanted);
    __m128i high = _mm_cmpeq_epi32(_mm_loadu_si128(words + 1), wanted);
    return (unsigned)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(low, high), _mm_setzero_si128()));
}
#else
static inline unsigned kvo_match8(const uint32_t *tags, uint32_t tag) {
    unsigned found = 0;
    for (int way = 0; way < 8; way++) found |= (unsigned)(tags[way] == tag) << way;
    return found;
}
#endif

#endif
