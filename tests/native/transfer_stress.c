/* The native loop of copies under a sanitizer: an engine that overwrites device blocks behind fences, and both copying
   threads, over a driver that copies at once and whose events are reached later. Prints how many jobs were right.

   transfer_stress ROUNDS refuse|batch: the driver refuses batches, or not. With -DNO_FENCES the engine forgets them. */

#include <stdio.h>

#include "transfer.h"

enum { BLOCKS = 64, SLOTS = 64, PER_JOB = 8, ROW = 96, DIRECT_ROW = 64, SLOT = 2 * ROW, FACTOR = 2, EVENTS = 400 };

static char pages[2][BLOCKS][ROW / 2], direct[BLOCKS][DIRECT_ROW];
static char *pool; /* of SLOTS slots */
static kvt_piece_run staged_runs[2], direct_run;
static int events[EVENTS], num_events, refuses, num_refused;

static void *new_event(void) { return &events[num_events++]; }

static int copy(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
    (void)stream;
    memcpy((void *)target, (void *)source, nbytes);
    return 0;
}

static int copy_batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, kvt_attributes *attributes,
                      size_t *first, size_t num_attributes, size_t *failed, void *stream) {
    (void)attributes, (void)first, (void)num_attributes, (void)failed;
    if (refuses) {
        __atomic_add_fetch(&num_refused, 1, __ATOMIC_RELAXED);
        return KVT_NOT_SUPPORTED;
    }
    for (size_t i = 0; i < count; i++) copy(targets[i], sources[i], sizes[i], stream);
    return 0;
}

static int launch(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                  unsigned shared, void *stream, void **arguments, void **extra) {
    (void)x, (void)y, (void)z, (void)threads, (void)ty, (void)tz, (void)shared, (void)stream, (void)extra;
    const kvt_piece_run *runs = (const kvt_piece_run *)*(uint64_t *)arguments[0];
    uint64_t staging = *(uint64_t *)arguments[1], row_bytes = *(uint64_t *)arguments[2];
    uint32_t num_runs = *(uint32_t *)arguments[3], num_rows = *(uint32_t *)arguments[4];
    const int32_t *blocks = arguments[5];
    for (uint32_t i = 0; i < num_rows; i++) {
        for (uint32_t r = 0; r < num_runs; r++) {
            char *page = (char *)(runs[r].base + blocks[i] * runs[r].stride);
            char *row = (char *)(staging + i * row_bytes + (uint64_t)runs[r].offset);
            int is_gather = function == (void *)1;
            memcpy(is_gather ? row : page, is_gather ? page : row, (size_t)runs[r].nbytes);
        }
    }
    return 0;
}

/* An event is reached when it has been asked about a few times. */
static int record(void *event, void *stream) {
    (void)stream;
    __atomic_store_n((int *)event, 2, __ATOMIC_RELEASE);
    return 0;
}

static int wait_event(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return 0;
}

static int query(void *event) { return __atomic_fetch_sub((int *)event, 1, __ATOMIC_ACQ_REL) > 0 ? KVT_NOT_READY : 0; }

static int elapsed(float *milliseconds, void *start, void *end) {
    (void)start, (void)end;
    *milliseconds = 1;
    return 0;
}

static void add_chunk(kvt_lane *lane, int64_t rows, kvt_stage *stage) {
    kvt_chunk *chunk = calloc(1, sizeof *chunk);
    chunk->rows = calloc((size_t)rows, sizeof *chunk->rows);
    chunk->begin = new_event(), chunk->copied = new_event(), chunk->kernel = new_event();
    chunk->stage = stage;
    chunk->next = lane->free;
    lane->free = chunk;
}

static kvt_stage new_stage(void) {
    return (kvt_stage){(uint64_t)aligned_alloc(256, 4096), NULL};
}

static void make(kvt_loop *loop, kvt_group *groups, kvt_stage *stages) {
    kvt_init(loop);
    loop->calls = (kvt_calls){copy_batch, copy, launch, record, wait_event, query, elapsed};
    loop->limits = (kvt_limits){5 * ROW, 6, 4 * ROW, 3 * ROW, 2 * ROW};
    loop->pool = (kvt_pool){pool, SLOTS, SLOT, 20, 8};
    for (int i = 0; i < 2; i++)
        staged_runs[i] = (kvt_piece_run){(int64_t)pages[i], ROW / 2, ROW / 2, i * ROW / 2};
    direct_run = (kvt_piece_run){(int64_t)direct, DIRECT_ROW, DIRECT_ROW, 0};
    groups[0] = (kvt_group){BLOCKS, FACTOR, ROW, ROW, staged_runs, 2, {(void *)1, (void *)2, (uint64_t)staged_runs, 2, 32, 4, 2}};
    groups[1] = (kvt_group){.num_blocks = BLOCKS, .factor = 1, .block_bytes = DIRECT_ROW, .runs = &direct_run, .num_runs = 1};
    loop->groups = groups;
    loop->num_groups = 2;
    for (int d = 0; d < KVT_DIRECTIONS; d++) {
        kvt_direction *self = &loop->directions[d];
        self->sorted = calloc(6, sizeof *self->sorted);
        self->counts = calloc(2, sizeof *self->counts);
        for (int l = 0; l < KVT_LANES; l++) {
            kvt_lane *lane = &self->lanes[l];
            lane->kernels.end = new_event(), lane->copies.end = new_event();
            lane->max_bytes = loop->limits.chunk_bytes;
            lane->max_staged = l == KVT_FENCE ? loop->limits.fence_bytes : loop->limits.stage_bytes;
        }
        self->lanes[KVT_FENCE].stage = new_stage();
        for (int i = 0; i < 4; i++) {
            stages[4 * d + i] = new_stage();
            add_chunk(&self->lanes[KVT_ORDINARY], 6, &stages[4 * d + i]);
        }
        for (int i = 0; i < 8; i++) {
            kvt_bounce *bounce = calloc(1, sizeof *bounce);
            *bounce = (kvt_bounce){self->bounces, malloc(2 * ROW)};
            self->bounces = bounce;
        }
    }
}

static void point(kvt_loop *loop) {
    while (!kvt_renew_point(loop)) {
        kvt_point *new = calloc(1, sizeof *new);
        new->event = new_event();
        kvt_add_point(loop, new);
    }
    if (kvt_record_point(loop, NULL)) abort();
}

static void *run(void *direction) {
    kvt_run(direction);
    return NULL;
}

static uint64_t state = 88172645463325252ull;
static int64_t below(int64_t end) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)(state % (uint64_t)end);
}

/* What a slot was given to hold, and who uses it. */
static char wanted[SLOTS][SLOT];
static int64_t user_of_block[2][BLOCKS], user_of_slot[SLOTS];

static void look(int64_t group, int64_t block, char *row) {
    if (group) memcpy(row, direct[block], DIRECT_ROW);
    else for (int i = 0; i < 2; i++) memcpy(row + i * ROW / 2, pages[i][block], ROW / 2);
}

static void fill(int64_t group, int64_t block, int value) {
    if (group) memset(direct[block], value, DIRECT_ROW);
    else for (int i = 0; i < 2; i++) memset(pages[i][block], value, ROW / 2);
}

typedef struct {
    int64_t sizes[2], blocks[PER_JOB], slots[PER_JOB], num_slots;
    int is_store;
} stress_job;
static stress_job jobs[1 << 16];

static int64_t num_right, num_failed, num_open;

static void take(kvt_loop *loop) {
    char row[ROW];
    for (kvt_job *job = kvt_take_results(loop), *next; job; job = next) {
        const stress_job *own = &jobs[job->id];
        next = job->next;
        for (int64_t i = 0; i < own->num_slots; i++) user_of_slot[own->slots[i]] = 0;
        for (int64_t i = 0; i < PER_JOB; i++) {
            int64_t group = i >= own->sizes[0], slot = group ? i - own->sizes[0] + own->sizes[0] / FACTOR : i / FACTOR;
            int64_t nbytes = group ? DIRECT_ROW : ROW, at = group ? 0 : i % FACTOR * ROW;
            if (user_of_block[group][own->blocks[i]] == job->id) user_of_block[group][own->blocks[i]] = 0;
            if (!job->ok) continue;
            const char *held = pool + own->slots[slot] * SLOT + at;
            if (!own->is_store) {
                look(group, own->blocks[i], row);
                held = row;
            }
            if (memcmp(held, wanted[own->slots[slot]] + at, (size_t)nbytes)) {
                printf("wrong bytes of %s %ld\n", own->is_store ? "store" : "load", (long)job->id);
                exit(3);
            }
        }
        num_right += job->ok, num_failed += !job->ok, num_open--;
        free(job);
    }
}

static void fence(kvt_loop *loop, int64_t id, const int64_t *block) {
    point(loop);
    for (int d = 0; d < KVT_DIRECTIONS; d++) {
        kvt_direction *self = &loop->directions[d];
        kvt_fence named = {.jobs = &id, .blocks = block, .num_jobs = 1, .num_blocks = 1};
        kvt_hold(self, 1, -1);
        while (kvt_fence_now(self, &named, NULL) == KVT_NEEDS_CHUNK)
            add_chunk(&self->lanes[KVT_FENCE], 6, &self->lanes[KVT_FENCE].stage);
        kvt_let_go(self, 1);
    }
    point(loop);
}

/* Submits a store or load of free blocks and slots. Returns whether there were enough. */
static int submit(kvt_loop *loop, int64_t id) {
    stress_job *own = &jobs[id];
    int64_t firsts[2] = {0, 0}, filled[2], given[PER_JOB];
    kvt_fault fault;
    own->is_store = id < 40 || below(3) > 0;
    own->sizes[0] = FACTOR * below(PER_JOB / FACTOR + 1), own->sizes[1] = PER_JOB - own->sizes[0];
    own->num_slots = own->sizes[0] / FACTOR + own->sizes[1];
    int64_t num_slots = 0, num_blocks[2] = {0, 0};
    for (int64_t i = 0; i < SLOTS; i++) num_slots += !user_of_slot[i];
    for (int64_t i = 0; i < BLOCKS; i++)
        for (int g = 0; g < 2; g++) num_blocks[g] += !user_of_block[g][i];
    if (num_slots < own->num_slots || num_blocks[0] < own->sizes[0] || num_blocks[1] < own->sizes[1]) return 0;
    for (int64_t i = 0; i < own->num_slots; i++) {
        do own->slots[i] = below(SLOTS);
        while (user_of_slot[own->slots[i]]);
        user_of_slot[own->slots[i]] = id;
    }
    for (int64_t i = 0; i < PER_JOB; i++) {
        int64_t *user = user_of_block[i >= own->sizes[0]];
        do own->blocks[i] = below(BLOCKS);
        while (user[own->blocks[i]]);
        user[own->blocks[i]] = id;
    }
    memcpy(given, own->slots, sizeof given);
    for (int64_t i = 0; i < PER_JOB; i++) {
        int64_t group = i >= own->sizes[0], slot = group ? i - own->sizes[0] + own->sizes[0] / FACTOR : i / FACTOR;
        char *want = wanted[own->slots[slot]] + (group ? 0 : i % FACTOR * ROW);
        if (own->is_store) look(group, own->blocks[i], want);
        else memcpy(want, pool + own->slots[slot] * SLOT + (group ? 0 : i % FACTOR * ROW), group ? DIRECT_ROW : ROW);
    }
    if (!kvt_counts_fit(loop, own->sizes, firsts, filled, PER_JOB, own->num_slots)) abort();
    kvt_job *job = kvt_new_job(loop, id, own->sizes, firsts, own->blocks, given, &fault);
    if (!job) abort();
    kvt_submit(loop, job, own->is_store);
    num_open++;
    return 1;
}

int main(int count, char **arguments) {
    static kvt_loop loop;
    kvt_group groups[2];
    kvt_stage stages[8];
    pthread_t threads[KVT_DIRECTIONS];
    int64_t rounds = count > 1 ? atoll(arguments[1]) : 1000, last = 0;
    refuses = count > 2 && !strcmp(arguments[2], "refuse");
    pool = calloc(SLOTS, SLOT);
    make(&loop, groups, stages);
    point(&loop);
    for (int d = 0; d < KVT_DIRECTIONS; d++) pthread_create(&threads[d], NULL, run, &loop.directions[d]);
    for (int64_t i = 0; i < rounds && last + 1 < 1 << 16; i++) {
        last += submit(&loop, last + 1);
        if (below(2)) point(&loop);
        /* The engine gives a block that is stored to another request. */
        int64_t group = below(2), block = below(BLOCKS), user = user_of_block[group][block];
        if (user && jobs[user].is_store) {
#ifndef NO_FENCES
            fence(&loop, user, &block);
#endif
            fill(group, block, (int)i);
            user_of_block[group][block] = 0;
        }
        if (i % 50 == 0 && loop.pool.num_ready < SLOTS) kvt_set_ready(&loop, loop.pool.num_ready + 1);
        if (below(8) == 0) kvt_wait_any(&loop, 0.001);
        take(&loop);
    }
    point(&loop);
    while (num_open) {
        kvt_wait_any(&loop, 1.0);
        take(&loop);
    }
    last += submit(&loop, last + 1);
    kvt_close(&loop);
    for (int d = 0; d < KVT_DIRECTIONS; d++) pthread_join(threads[d], NULL);
    for (int d = 0; d < KVT_DIRECTIONS; d++)
        if (kvt_mark_end(&loop.directions[d], NULL)) abort();
    for (int d = 0; d < KVT_DIRECTIONS; d++)
        while (kvt_query_end(&loop.directions[d]) == KVT_NOT_READY) {}
    kvt_free_jobs(&loop);
    printf("%ld right, %ld without a bounce buffer, %d batches refused\n", (long)num_right, (long)num_failed, num_refused);
    return 0;
}
