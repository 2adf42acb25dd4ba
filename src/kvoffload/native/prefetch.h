#ifndef KVOFFLOAD_PREFETCH_H
#define KVOFFLOAD_PREFETCH_H

#include <stdint.h>
#include <string.h>

#define kvo_prefetch(address) __builtin_prefetch((const void *)(address), 0, 3)
#define kvo_prefetch_write(address) __builtin_prefetch((const void *)(address), 1, 3)

/* Bit i is set where word i of the eight words at `tags` equals `tag`. Compilers make vector code of the loop. */
static inline unsigned kvo_match8(const uint32_t *tags, uint32_t tag) {
    unsigned found = 0;
    for (int way = 0; way < 8; way++) found |= (unsigned)(tags[way] == tag) << way;
    return found;
}

#endif
