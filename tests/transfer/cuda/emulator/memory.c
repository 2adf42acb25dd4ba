/* Memory that the device can reach, as ranges in the order of their addresses. */

#include "emulator.h"
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xEE, ALIGNMENT = 512 };

static range *ranges;
static size_t num_ranges, room;
static void **freed; /* kept until the next reset, so that no address is used twice */
static size_t num_freed;

/* Returns how many ranges begin at or before `address`. */
static size_t position(uintptr_t address) {
    size_t low = 0, high = num_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].from <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const range *find_memory(uint64_t address, size_t nbytes) {
    size_t i = position(address);
    return i && nbytes <= ranges[i - 1].to - ranges[i - 1].from && address <= ranges[i - 1].to - nbytes ? &ranges[i - 1] : NULL;
}

int overlaps_memory(uintptr_t from, uintptr_t to) {
    size_t i = position(to - 1);
    return i && ranges[i - 1].to > from;
}

void add_memory(uintptr_t from, uintptr_t to, int kind) {
    if (num_ranges == room)
        ranges = realloc(ranges, (room = 2 * room + 16) * sizeof *ranges);
    size_t i = position(from);
    memmove(ranges + i + 1, ranges + i, (num_ranges++ - i) * sizeof *ranges);
    ranges[i] = (range){from, to, kind};
}

int remove_memory(uintptr_t from, int kind) {
    size_t i = position(from);
    if (!i || ranges[i - 1].from != from || ranges[i - 1].kind != kind)
        return 0;
    memmove(ranges + i - 1, ranges + i, (num_ranges-- - i) * sizeof *ranges);
    return 1;
}

int allocate_memory(uint64_t *address, size_t nbytes, int kind) {
    if (!nbytes)
        return INVALID_VALUE;
    size_t rounded = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, rounded);
    if (!memory)
        return OUT_OF_MEMORY;
    memset(memory, POISON, rounded);
    *address = (uint64_t)memory;
    add_memory(*address, *address + nbytes, kind);
    return SUCCESS;
}

int free_memory(uint64_t address, int kind) {
    const range *found = find_memory(address, 1);
    if (!found || found->from != address || found->kind != kind)
        return INVALID_VALUE;
    memset((void *)address, POISON, found->to - found->from);
    remove_memory(address, kind);
    freed = realloc(freed, (num_freed + 1) * sizeof *freed);
    freed[num_freed++] = (void *)address;
    return SUCCESS;
}

size_t bytes_of(int kind) {
    size_t sum = 0;
    for (size_t i = 0; i < num_ranges; i++)
        sum += ranges[i].kind == kind ? ranges[i].to - ranges[i].from : 0;
    return sum;
}

void reset_memory(void) {
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].kind != REGISTERED_MEMORY)
            free((void *)ranges[i].from);
    while (num_freed)
        free(freed[--num_freed]);
    num_ranges = 0;
}
