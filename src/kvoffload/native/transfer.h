/* The loop of a CUDA transfer: from jobs to results, without Python.

The engine's thread makes jobs, records points of its stream, fences and takes results. Each direction has a thread that
runs `kvt_run`. Whoever plans, issues or ends chunks of a direction holds it (`kvt_hold`): its thread for one step at a
time, the engine's thread for one fence. The driver is called through a table of functions.

A chunk of a store is gathered into its piece of staging memory on the kernel stream of its lane, then copied to its slots
on the copy stream; a load goes the other way. Each chunk of the ordinary lane has staging memory of its own, so its gather
waits for nothing but the engine's work before its point. Rows that a fence needs at once have a lane with other streams
and a small piece of staging memory: their gather does not queue behind chunks that wait for the bus. */

#ifndef KVOFFLOAD_TRANSFER_H
#define KVOFFLOAD_TRANSFER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

enum { KVT_LOAD, KVT_STORE, KVT_DIRECTIONS };
enum { KVT_ORDINARY, KVT_FENCE, KVT_LANES };
enum { KVT_MAX_BLOCKS = 960, KVT_MAX_COPIES = 1024, KVT_ROW_ALIGNMENT = 256 };
enum { KVT_SUCCESS = 0, KVT_INVALID_VALUE = 1, KVT_NOT_READY = 600, KVT_NOT_SUPPORTED = 801 };
/* Steps and fences: nothing to do; something was done; the caller must add a chunk; the device has failed. */
enum { KVT_IDLE, KVT_DONE, KVT_NEEDS_CHUNK, KVT_FAILED };
/* How long a thread sleeps between two looks at chunks in flight: doubled while nothing ends. */
enum { KVT_MIN_PAUSE_NS = 80000, KVT_MAX_PAUSE_NS = 160000 };

/* CUmemcpyAttributes: in the order of the stream, places unknown, beside other work. */
typedef struct {
    int source_order;
    struct { int type, id; } source, target;
    unsigned flags;
} kvt_attributes;

/* Functions of the driver. */
typedef struct {
    int (*copy_batch)(uint64_t *, uint64_t *, size_t *, size_t, kvt_attributes *, size_t *, size_t, size_t *, void *);
    int (*copy)(uint64_t, uint64_t, size_t, void *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*record)(void *, void *);
    int (*wait)(void *, void *, unsigned);
    int (*query)(void *);
    int (*elapsed)(float *, void *, void *);
} kvt_calls;

/* Bytes of each device block in one piece: block b has them at base + b * stride, at `offset` of its row. */
typedef struct {
    int64_t base, stride, nbytes, offset;
} kvt_piece_run;

typedef struct {
    void *gather, *scatter; /* NULL: the runs are copied one by one */
    uint64_t pieces;
    uint32_t num_pieces;
    unsigned threads, max_programs;
    double rows_per_program;
} kvt_kernel;

/* A device block has `block_bytes`, and a row of a slot `row_bytes`. If these are more, the others are of other ranks,
   and nothing is staged. */
typedef struct {
    int64_t num_blocks, factor, block_bytes, row_bytes;
    kvt_piece_run *runs;
    int64_t num_runs;
    kvt_kernel kernel;
} kvt_group;

typedef struct {
    char *data;
    int64_t num_slots, slot_bytes;
    int64_t num_ready;      /* the device may copy to and from the slots below it; read and written atomically */
    int64_t boundary_slots; /* one copy must not cross a multiple of it */
} kvt_pool;

typedef struct {
    int64_t chunk_bytes, chunk_rows, stage_bytes, fence_bytes, bounce_bytes;
} kvt_limits;

/* A point of the engine's stream. `jobs`: how many have rows that are not issued. */
typedef struct kvt_point {
    struct kvt_point *next;
    void *event;
    int64_t number, jobs;
} kvt_point;

typedef struct {
    int64_t block, slot;
    int32_t group, part; /* part -1: the row has been taken */
} kvt_row;

typedef struct kvt_job {
    struct kvt_job *next;           /* in the list that it is in: new stores, inbox, queue or results */
    struct kvt_job *newer, *older;  /* among all jobs */
    int64_t id;
    int64_t num_rows, first;        /* the first row that has not been taken */
    int64_t num_waiting, num_left;  /* rows that have not been taken, that have not ended */
    kvt_point *point;
    int64_t nbytes;
    double seconds;
    int ok, is_store;
    kvt_row rows[];
} kvt_job;

typedef struct {
    kvt_job *first, *last;
} kvt_jobs;

typedef struct {
    kvt_job *job;
    int64_t block, slot, offset; /* the offset of its row in the pool */
    int64_t group;
} kvt_chunk_row;

/* Staging memory. `busy_until`: the event after which nothing needs what is in it; NULL: nothing does. */
typedef struct {
    uint64_t address;
    void *busy_until;
} kvt_stage;

typedef struct kvt_bounce {
    struct kvt_bounce *next;
    char *data;
} kvt_bounce;

/* Rows that are issued together. */
typedef struct kvt_chunk {
    struct kvt_chunk *next;
    kvt_chunk_row *rows;
    int64_t num_rows, nbytes, staged_bytes;
    void *begin, *copied, *kernel; /* events; the last: the rows are gathered, or scattered */
    int is_direct;                 /* some row is copied without staging */
    kvt_stage *stage;
    kvt_bounce *bounce;
    kvt_point *point;              /* the last point of its jobs; only while it is issued */
} kvt_chunk;

/* `after`: the number of the last point of the engine's stream for which the stream waits. */
typedef struct {
    void *handle, *end;
    int64_t after;
} kvt_stream;

/* Two streams. Their chunks end in order. */
typedef struct {
    kvt_stream kernels, copies;
    int64_t max_bytes, max_staged;
    kvt_chunk *free, *first, *last; /* chunks that are not used, and chunks in flight, oldest first */
    kvt_stage stage;                /* of the fence lane, shared by its chunks */
} kvt_lane;

/* Copies that will be issued by one call. */
typedef struct {
    uint64_t targets[KVT_MAX_COPIES], sources[KVT_MAX_COPIES];
    size_t sizes[KVT_MAX_COPIES];
    size_t count;
    int64_t section;
} kvt_batch;

/* What a fence names, sorted. num_blocks < 0: all device blocks. */
typedef struct {
    const int64_t *jobs, *blocks;
    int64_t num_jobs, num_blocks;
    const kvt_job *job; /* the last job that was asked about, and the answer */
    int is_named;
} kvt_fence;

typedef struct {
    struct kvt_loop *loop;
    int is_store;
    pthread_mutex_t mutex; /* of the members up to `inbox` */
    pthread_cond_t changed;
    int is_held, engine_waits, is_poked;
    kvt_jobs inbox;
    kvt_jobs queue; /* the rest belongs to who holds the direction */
    kvt_lane lanes[KVT_LANES];
    kvt_bounce *bounces;
    kvt_batch batch;
    kvt_chunk_row *sorted;
    int64_t *counts;
} kvt_direction;

typedef struct {
    int code;
    const char *what;
    size_t num_copies, copy;
} kvt_error;

typedef struct kvt_loop {
    kvt_calls calls;
    kvt_group *groups;
    int64_t num_groups;
    kvt_pool pool;
    kvt_limits limits;
    int is_closing, has_failed, batches_are_off; /* read and written atomically */
    kvt_direction directions[KVT_DIRECTIONS];
    pthread_mutex_t mutex; /* of error, results, points and the list of all jobs */
    pthread_cond_t ended;
    kvt_error error;
    kvt_jobs results;
    kvt_point *free_points;
    kvt_job *newest;
    kvt_point *point; /* from here on only of the engine's thread */
    int is_point_used;
    kvt_jobs new_stores;
} kvt_loop;

#define KVT_TRY(call) \
    do { \
        if ((call) != KVT_SUCCESS) return KVT_FAILED; \
    } while (0)

static inline int kvt_get(const int *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static inline void kvt_set(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

/* Lists, and time. */

static void kvt_append(kvt_jobs *list, kvt_job *job) {
    job->next = NULL;
    if (list->last) list->last->next = job;
    else list->first = job;
    list->last = job;
}

static void kvt_move(kvt_jobs *from, kvt_jobs *to) {
    if (!from->first) return;
    if (to->last) to->last->next = from->first;
    else to->first = from->first;
    to->last = from->last;
    from->first = from->last = NULL;
}

static struct timespec kvt_after(double seconds) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += (time_t)seconds;
    time.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return time;
}

/* Calls of the driver. The first error stops the loop. */

static int kvt_check(kvt_loop *loop, const char *what, int code, size_t num_copies, size_t copy) {
    if (code == KVT_SUCCESS) return KVT_SUCCESS;
    pthread_mutex_lock(&loop->mutex);
    if (!kvt_get(&loop->has_failed)) {
        loop->error = (kvt_error){code, what, num_copies, copy};
        kvt_set(&loop->has_failed);
    }
    pthread_cond_broadcast(&loop->ended);
    pthread_mutex_unlock(&loop->mutex);
    return code;
}

static int kvt_record(kvt_loop *loop, void *event, void *stream) {
    return kvt_check(loop, "cuEventRecord", loop->calls.record(event, stream), 0, 0);
}

static int kvt_wait(kvt_loop *loop, void *stream, void *event) {
    return kvt_check(loop, "cuStreamWaitEvent", loop->calls.wait(stream, event, 0), 0, 0);
}

static int kvt_wait_for_point(kvt_loop *loop, kvt_stream *stream, const kvt_point *point) {
    if (point->number <= stream->after) return KVT_SUCCESS;
    KVT_TRY(kvt_wait(loop, stream->handle, point->event));
    stream->after = point->number;
    return KVT_SUCCESS;
}

/* Gathers, or scatters, the blocks of rows of one group, whose staging memory begins at `staging`. */
static int kvt_launch(kvt_direction *self, void *stream, const kvt_chunk_row *rows, int64_t num_rows, uint64_t staging) {
    const kvt_group *group = &self->loop->groups[rows->group];
    const kvt_kernel *kernel = &group->kernel;
    uint64_t pieces = kernel->pieces, row_bytes = (uint64_t)group->block_bytes;
    uint32_t num_pieces = kernel->num_pieces;
    struct { int32_t n[KVT_MAX_BLOCKS]; } blocks;
    for (int64_t first = 0; first < num_rows; first += KVT_MAX_BLOCKS) {
        uint32_t count = (uint32_t)(num_rows - first < KVT_MAX_BLOCKS ? num_rows - first : KVT_MAX_BLOCKS);
        for (uint32_t i = 0; i < count; i++) blocks.n[i] = (int32_t)rows[first + i].block;
        uint64_t at = staging + (uint64_t)first * row_bytes;
        void *arguments[] = {&pieces, &at, &row_bytes, &num_pieces, &count, &blocks};
        double programs = (double)count / kernel->rows_per_program;
        unsigned grid = programs >= kernel->max_programs ? kernel->max_programs : (unsigned)programs + 1;
        void *function = self->is_store ? kernel->gather : kernel->scatter;
        int code = self->loop->calls.launch(function, grid, 1, 1, kernel->threads, 1, 1, 0, stream, arguments, NULL);
        KVT_TRY(kvt_check(self->loop, "cuLaunchKernel", code, 0, 0));
    }
    return KVT_SUCCESS;
}

/* Issues the copies of the batch. A batch that the driver refuses is copied once more, copy by copy, and there are no
   batches any more: some drivers refuse all of them. */
static int kvt_flush(kvt_direction *self, void *stream) {
    kvt_batch *batch = &self->batch;
    kvt_loop *loop = self->loop;
    size_t count = batch->count, first = 0, failed = SIZE_MAX;
    batch->count = 0;
    if (count && loop->calls.copy_batch && !kvt_get(&loop->batches_are_off)) {
        kvt_attributes attributes = {.source_order = 1, .flags = 1};
        int code = loop->calls.copy_batch(batch->targets, batch->sources, batch->sizes, count, &attributes, &first, 1,
                                          &failed, stream);
        if (code != KVT_INVALID_VALUE && code != KVT_NOT_SUPPORTED)
            return kvt_check(loop, "cuMemcpyBatchAsync", code, count, failed);
        kvt_set(&loop->batches_are_off);
    }
    for (size_t i = 0; i < count; i++) {
        int code = loop->calls.copy(batch->targets[i], batch->sources[i], batch->sizes[i], stream);
        KVT_TRY(kvt_check(loop, "cuMemcpyAsync", code, count, i));
    }
    return KVT_SUCCESS;
}

/* Adds a copy. One that follows the last one on both sides, in the same section of the pool, becomes a part of it. */
static int kvt_add_copy(kvt_direction *self, void *stream, uint64_t device, const char *host, int64_t nbytes,
                        int64_t section) {
    kvt_batch *batch = &self->batch;
    uint64_t target = self->is_store ? (uint64_t)(uintptr_t)host : device;
    uint64_t source = self->is_store ? device : (uint64_t)(uintptr_t)host;
    if (batch->count && batch->section == section) {
        size_t last = batch->count - 1, size = batch->sizes[last];
        if (batch->targets[last] + size == target && batch->sources[last] + size == source) {
            batch->sizes[last] = size + (size_t)nbytes;
            return KVT_SUCCESS;
        }
    }
    if (batch->count == KVT_MAX_COPIES) KVT_TRY(kvt_flush(self, stream));
    batch->targets[batch->count] = target;
    batch->sources[batch->count] = source;
    batch->sizes[batch->count++] = (size_t)nbytes;
    batch->section = section;
    return KVT_SUCCESS;
}

/* Jobs. */

/* What is wrong with a job. `filled`: how many slots its device blocks fill. */
typedef struct {
    enum { KVT_NO_FAULT, KVT_BLOCK, KVT_SLOT } kind;
    int64_t group;
} kvt_fault;

/* Writes how many slots each group of a job fills, and returns whether the device blocks and slots given are as many as
   there must be. `firsts` are changed to the place in its slot of the first device block. */
static int kvt_counts_fit(const kvt_loop *loop, const int64_t *sizes, int64_t *firsts, int64_t *filled,
                          int64_t num_blocks, int64_t num_slots) {
    int fits = 1;
    for (int64_t g = 0; g < loop->num_groups; g++) {
        int64_t factor = loop->groups[g].factor;
        firsts[g] = (firsts[g] % factor + factor) % factor;
        filled[g] = sizes[g] > 0 ? (sizes[g] - 1 + firsts[g]) / factor + 1 : 0;
        /* Compared before it is subtracted, so that no number of a job overflows. */
        fits &= sizes[g] >= 0 && sizes[g] <= num_blocks && filled[g] <= num_slots;
        if (fits) num_blocks -= sizes[g], num_slots -= filled[g];
    }
    return fits && num_blocks == 0 && num_slots == 0;
}

/* Returns a job with its rows, or NULL. Then `fault` says why; without a fault there is no memory. */
static kvt_job *kvt_new_job(kvt_loop *loop, int64_t id, const int64_t *sizes, const int64_t *firsts,
                            const int64_t *blocks, const int64_t *slots, kvt_fault *fault) {
    int64_t num_rows = 0;
    *fault = (kvt_fault){KVT_NO_FAULT, 0};
    for (int64_t g = 0; g < loop->num_groups; g++) num_rows += loop->groups[g].num_blocks ? sizes[g] : 0;
    kvt_job *job = calloc(1, sizeof *job + (size_t)num_rows * sizeof *job->rows);
    if (!job) return NULL;
    kvt_row *row = job->rows;
    for (int64_t g = 0; g < loop->num_groups; g++) {
        const kvt_group *group = &loop->groups[g];
        int64_t at = 0, part = firsts[g];
        for (int64_t i = 0; i < sizes[g]; i++, part++) {
            if (part == group->factor) part = 0, at++;
            if (!group->num_blocks) continue;
            int is_block = (uint64_t)blocks[i] < (uint64_t)group->num_blocks;
            if (!is_block || (uint64_t)slots[at] >= (uint64_t)loop->pool.num_slots) {
                *fault = (kvt_fault){is_block ? KVT_SLOT : KVT_BLOCK, g};
                free(job);
                return NULL;
            }
            *row++ = (kvt_row){blocks[i], slots[at], (int32_t)g, (int32_t)part};
        }
        blocks += sizes[g];
        slots += sizes[g] ? at + 1 : 0;
    }
    job->id = id;
    job->num_rows = job->num_waiting = job->num_left = num_rows;
    job->ok = 1;
    return job;
}

static void kvt_end_job(kvt_loop *loop, kvt_job *job) {
    pthread_mutex_lock(&loop->mutex);
    kvt_append(&loop->results, job);
    pthread_cond_broadcast(&loop->ended);
    pthread_mutex_unlock(&loop->mutex);
}

static void kvt_send(kvt_loop *loop, kvt_jobs *jobs, int is_store) {
    kvt_direction *self = &loop->directions[is_store];
    pthread_mutex_lock(&loop->mutex);
    for (kvt_job *job = jobs->first; job; job = job->next) {
        job->point = loop->point;
        loop->point->jobs++;
    }
    pthread_mutex_unlock(&loop->mutex);
    loop->is_point_used = 1;
    pthread_mutex_lock(&self->mutex);
    kvt_move(jobs, &self->inbox);
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

/* Stores wait for the next point, loads are copied after the last one. Engine's thread. */
static void kvt_submit(kvt_loop *loop, kvt_job *job, int is_store) {
    kvt_jobs one = {NULL, NULL};
    job->is_store = is_store;
    pthread_mutex_lock(&loop->mutex);
    job->older = loop->newest;
    if (loop->newest) loop->newest->newer = job;
    loop->newest = job;
    pthread_mutex_unlock(&loop->mutex);
    if (!job->num_rows) {
        kvt_end_job(loop, job);
    } else if (is_store) {
        kvt_append(&loop->new_stores, job);
    } else {
        kvt_append(&one, job);
        kvt_send(loop, &one, KVT_LOAD);
    }
}

/* Takes the jobs that have ended. Engine's thread, which frees each. */
static kvt_job *kvt_take_results(kvt_loop *loop) {
    pthread_mutex_lock(&loop->mutex);
    kvt_job *first = loop->results.first;
    loop->results.first = loop->results.last = NULL;
    for (kvt_job *job = first; job; job = job->next) {
        if (job->newer) job->newer->older = job->older;
        else loop->newest = job->older;
        if (job->older) job->older->newer = job->newer;
    }
    pthread_mutex_unlock(&loop->mutex);
    return first;
}

/* Waits until a job has ended, the device has failed or the loop is closed. */
static void kvt_wait_any(kvt_loop *loop, double timeout_s) {
    struct timespec deadline = kvt_after(timeout_s);
    int code = 0;
    pthread_mutex_lock(&loop->mutex);
    while (code == 0 && !loop->results.first && !kvt_get(&loop->has_failed) && !kvt_get(&loop->is_closing))
        code = pthread_cond_timedwait(&loop->ended, &loop->mutex, &deadline);
    pthread_mutex_unlock(&loop->mutex);
}

/* Points. */

static void kvt_add_point(kvt_loop *loop, kvt_point *point) {
    pthread_mutex_lock(&loop->mutex);
    point->next = loop->free_points;
    loop->free_points = point;
    pthread_mutex_unlock(&loop->mutex);
}

/* Makes sure that the next point can be recorded. Returns 0 if a point must be added first. Engine's thread. */
static int kvt_renew_point(kvt_loop *loop) {
    kvt_point *before = loop->point;
    if (before && !loop->is_point_used) return 1;
    pthread_mutex_lock(&loop->mutex);
    kvt_point *next = loop->free_points;
    if (next) {
        loop->free_points = next->next;
        next->number = before ? before->number + 1 : 0;
        loop->point = next;
        loop->is_point_used = 0;
        if (before && !before->jobs) {
            before->next = loop->free_points;
            loop->free_points = before;
        }
    }
    pthread_mutex_unlock(&loop->mutex);
    return next != NULL;
}

/* Records the point on the engine's stream: new stores, and loads submitted from now on, are copied after it. */
static int kvt_record_point(kvt_loop *loop, void *stream) {
    KVT_TRY(kvt_record(loop, loop->point->event, stream));
    if (loop->new_stores.first) kvt_send(loop, &loop->new_stores, KVT_STORE);
    return KVT_SUCCESS;
}

static void kvt_release_point(kvt_loop *loop, kvt_point *point) {
    pthread_mutex_lock(&loop->mutex);
    if (--point->jobs == 0 && point != loop->point) {
        point->next = loop->free_points;
        loop->free_points = point;
    }
    pthread_mutex_unlock(&loop->mutex);
}

/* Fences: what they name. */

static int kvt_contains(const int64_t *sorted, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (sorted[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low < count && sorted[low] == value;
}

static int kvt_names_job(kvt_fence *fence, const kvt_job *job) {
    if (fence->job != job) {
        fence->job = job;
        fence->is_named = kvt_contains(fence->jobs, fence->num_jobs, job->id);
    }
    return fence->is_named;
}

static int kvt_names(kvt_fence *fence, const kvt_job *job, int64_t block) {
    return kvt_names_job(fence, job) &&
           (fence->num_blocks < 0 || kvt_contains(fence->blocks, fence->num_blocks, block));
}

/* Chunks: which rows. */

static void kvt_set_ready(kvt_loop *loop, int64_t num_slots) {
    __atomic_store_n(&loop->pool.num_ready, num_slots, __ATOMIC_RELEASE);
}

/* Adds a row, if it is within the limits. The first row that is not registered makes the chunk go through a bounce
   buffer, unless more is in it than that holds. Returns whether it was added. */
static int kvt_fill_row(kvt_direction *self, const kvt_lane *lane, kvt_chunk *chunk, kvt_job *job, kvt_row *row) {
    const kvt_loop *loop = self->loop;
    const kvt_group *group = &loop->groups[row->group];
    int64_t nbytes = group->block_bytes, after = chunk->nbytes + nbytes;
    int is_staged = group->kernel.gather != NULL;
    int is_ready = row->slot < __atomic_load_n(&loop->pool.num_ready, __ATOMIC_ACQUIRE);
    if (chunk->num_rows == loop->limits.chunk_rows) return 0;
    if (chunk->num_rows && after > (chunk->bounce ? loop->limits.bounce_bytes : lane->max_bytes)) return 0;
    if (is_staged && chunk->staged_bytes + nbytes > lane->max_staged) return 0;
    if (!is_ready && !chunk->bounce) {
        if (!self->bounces || (chunk->num_rows && after > loop->limits.bounce_bytes)) return 0;
        chunk->bounce = self->bounces;
        self->bounces = chunk->bounce->next;
    }
    int64_t offset = row->slot * loop->pool.slot_bytes + row->part * group->row_bytes;
    chunk->rows[chunk->num_rows++] = (kvt_chunk_row){job, row->block, row->slot, offset, row->group};
    chunk->nbytes = after;
    if (is_staged) chunk->staged_bytes += nbytes;
    else chunk->is_direct = 1;
    chunk->point = job->point;
    return 1;
}

static void kvt_take_row(kvt_job *job, kvt_row *row) {
    row->part = -1;
    job->num_waiting--;
    while (job->first < job->num_rows && job->rows[job->first].part < 0) job->first++;
}

/* Takes the first rows of the queue, or the first that the fence names. Returns whether there are any. */
static int kvt_fill(kvt_direction *self, kvt_lane *lane, kvt_chunk *chunk, kvt_fence *fence) {
    chunk->num_rows = chunk->nbytes = chunk->staged_bytes = 0;
    chunk->is_direct = 0;
    chunk->bounce = NULL;
    for (kvt_job *job = self->queue.first; job; job = job->next) {
        if (fence && !kvt_names_job(fence, job)) continue;
        for (int64_t i = job->first; i < job->num_rows; i++) {
            kvt_row *row = &job->rows[i];
            if (row->part < 0 || (fence && !kvt_names(fence, job, row->block))) continue;
            if (!kvt_fill_row(self, lane, chunk, job, row)) return chunk->num_rows > 0;
            kvt_take_row(job, row);
        }
    }
    return chunk->num_rows > 0;
}

/* Orders the rows by group, so that one kernel takes those of a group. */
static void kvt_sort(kvt_direction *self, kvt_chunk *chunk) {
    int64_t *counts = self->counts, num_groups = self->loop->num_groups, at = 0;
    int is_sorted = 1;
    memset(counts, 0, (size_t)num_groups * sizeof *counts);
    for (int64_t i = 0; i < chunk->num_rows; i++) {
        counts[chunk->rows[i].group]++;
        is_sorted &= !i || chunk->rows[i - 1].group <= chunk->rows[i].group;
    }
    if (is_sorted) return;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t count = counts[g];
        counts[g] = at;
        at += count;
    }
    for (int64_t i = 0; i < chunk->num_rows; i++) self->sorted[counts[chunk->rows[i].group]++] = chunk->rows[i];
    kvt_chunk_row *before = chunk->rows;
    chunk->rows = self->sorted;
    self->sorted = before;
}

/* Removes the jobs from the queue of which all rows are issued; with `all` not only those at its head. */
static void kvt_drop_issued(kvt_direction *self, int all) {
    kvt_job *before = NULL, *next;
    for (kvt_job *job = self->queue.first; job; job = next) {
        next = job->next;
        if (job->num_waiting) {
            if (!all) return;
            before = job;
            continue;
        }
        if (before) before->next = next;
        else self->queue.first = next;
        if (!next) self->queue.last = before;
        kvt_release_point(self->loop, job->point);
        if (!job->num_left) kvt_end_job(self->loop, job);
    }
}

/* Chunks: issue and end. */

/* Copies between the bounce buffer of a chunk and its slots: staged rows as a whole, others run by run. In the buffer
   they follow one another, without what other ranks have in the same slots. */
static void kvt_copy_bounce(const kvt_direction *self, const kvt_chunk *chunk) {
    char *bounce = chunk->bounce->data;
    for (int64_t i = 0; i < chunk->num_rows; i++) {
        const kvt_group *group = &self->loop->groups[chunk->rows[i].group];
        char *row = self->loop->pool.data + chunk->rows[i].offset;
        int is_staged = group->kernel.gather != NULL;
        const kvt_piece_run whole = {.nbytes = group->block_bytes}, *runs = is_staged ? &whole : group->runs;
        int64_t num_runs = is_staged ? 1 : group->num_runs;
        for (const kvt_piece_run *run = runs; run < runs + num_runs; run++) {
            char *slot = row + run->offset;
            memcpy(self->is_store ? slot : bounce, self->is_store ? bounce : slot, (size_t)run->nbytes);
            bounce += run->nbytes;
        }
    }
}

/* Issues the kernels of the staged rows, group by group. */
static int kvt_issue_kernels(kvt_direction *self, kvt_lane *lane, const kvt_chunk *chunk) {
    uint64_t staging = chunk->stage->address;
    for (int64_t i = 0, end; i < chunk->num_rows; i = end) {
        const kvt_group *group = &self->loop->groups[chunk->rows[i].group];
        for (end = i + 1; end < chunk->num_rows && chunk->rows[end].group == chunk->rows[i].group;) end++;
        if (!group->kernel.gather) continue;
        KVT_TRY(kvt_launch(self, lane->kernels.handle, &chunk->rows[i], end - i, staging));
        uint64_t nbytes = (uint64_t)((end - i) * group->block_bytes);
        staging += (nbytes + KVT_ROW_ALIGNMENT - 1) / KVT_ROW_ALIGNMENT * KVT_ROW_ALIGNMENT;
    }
    return KVT_SUCCESS;
}

/* Issues the copies over the bus: staged rows as a whole, others run by run. */
static int kvt_issue_copies(kvt_direction *self, kvt_lane *lane, const kvt_chunk *chunk) {
    uint64_t staging = chunk->staged_bytes ? chunk->stage->address : 0;
    char *bounce = chunk->bounce ? chunk->bounce->data : NULL;
    for (int64_t i = 0; i < chunk->num_rows; i++) {
        const kvt_chunk_row *row = &chunk->rows[i];
        const kvt_group *group = &self->loop->groups[row->group];
        int64_t section = chunk->bounce ? 0 : row->slot / self->loop->pool.boundary_slots;
        char *slot = self->loop->pool.data + row->offset;
        int is_staged = group->kernel.gather != NULL;
        if (is_staged) {
            if (i && row[-1].group != row->group)
                staging = (staging + KVT_ROW_ALIGNMENT - 1) / KVT_ROW_ALIGNMENT * KVT_ROW_ALIGNMENT;
            char *host = bounce ? bounce : slot;
            KVT_TRY(kvt_add_copy(self, lane->copies.handle, staging, host, group->block_bytes, section));
            staging += (uint64_t)group->block_bytes;
            if (bounce) bounce += group->block_bytes;
        }
        for (const kvt_piece_run *run = group->runs; !is_staged && run < group->runs + group->num_runs; run++) {
            uint64_t device = (uint64_t)(run->base + row->block * run->stride);
            char *host = bounce ? bounce : slot + run->offset;
            KVT_TRY(kvt_add_copy(self, lane->copies.handle, device, host, run->nbytes, section));
            if (bounce) bounce += run->nbytes;
        }
    }
    return kvt_flush(self, lane->copies.handle);
}

/* Makes a stream wait until the staging memory of the chunk is free. The chunk needs it until `until`. */
static int kvt_take_stage(kvt_direction *self, kvt_chunk *chunk, void *stream, void *until) {
    if (chunk->stage->busy_until) KVT_TRY(kvt_wait(self->loop, stream, chunk->stage->busy_until));
    chunk->stage->busy_until = until;
    return KVT_SUCCESS;
}

static int kvt_issue_bus(kvt_direction *self, kvt_lane *lane, kvt_chunk *chunk) {
    if (chunk->is_direct) KVT_TRY(kvt_wait_for_point(self->loop, &lane->copies, chunk->point));
    KVT_TRY(kvt_record(self->loop, chunk->begin, lane->copies.handle));
    KVT_TRY(kvt_issue_copies(self, lane, chunk));
    return kvt_record(self->loop, chunk->copied, lane->copies.handle);
}

static int kvt_issue_store(kvt_direction *self, kvt_lane *lane, kvt_chunk *chunk) {
    kvt_loop *loop = self->loop;
    if (chunk->staged_bytes) {
        KVT_TRY(kvt_wait_for_point(loop, &lane->kernels, chunk->point));
        KVT_TRY(kvt_take_stage(self, chunk, lane->kernels.handle, chunk->copied));
        KVT_TRY(kvt_issue_kernels(self, lane, chunk));
        KVT_TRY(kvt_record(loop, chunk->kernel, lane->kernels.handle));
        KVT_TRY(kvt_wait(loop, lane->copies.handle, chunk->kernel));
    }
    return kvt_issue_bus(self, lane, chunk);
}

static int kvt_issue_load(kvt_direction *self, kvt_lane *lane, kvt_chunk *chunk) {
    kvt_loop *loop = self->loop;
    if (chunk->bounce) kvt_copy_bounce(self, chunk);
    if (chunk->staged_bytes) KVT_TRY(kvt_take_stage(self, chunk, lane->copies.handle, chunk->kernel));
    KVT_TRY(kvt_issue_bus(self, lane, chunk));
    if (!chunk->staged_bytes) return KVT_SUCCESS;
    KVT_TRY(kvt_wait(loop, lane->kernels.handle, chunk->copied));
    KVT_TRY(kvt_wait_for_point(loop, &lane->kernels, chunk->point));
    KVT_TRY(kvt_issue_kernels(self, lane, chunk));
    return kvt_record(loop, chunk->kernel, lane->kernels.handle);
}

/* Issues the first rows of the queue, or the first that the fence names, in the lane. */
static int kvt_issue(kvt_direction *self, kvt_lane *lane, kvt_fence *fence) {
    kvt_chunk *chunk = lane->free;
    if (!chunk) return KVT_NEEDS_CHUNK;
    if (!self->queue.first || !kvt_fill(self, lane, chunk, fence)) return KVT_IDLE;
    kvt_sort(self, chunk);
    lane->free = chunk->next;
    chunk->next = NULL;
    if (lane->last) lane->last->next = chunk;
    else lane->first = chunk;
    lane->last = chunk;
    KVT_TRY(self->is_store ? kvt_issue_store(self, lane, chunk) : kvt_issue_load(self, lane, chunk));
    kvt_drop_issued(self, fence != NULL);
    return KVT_DONE;
}

static void *kvt_end_of(const kvt_direction *self, const kvt_chunk *chunk) {
    return self->is_store || !chunk->staged_bytes ? chunk->copied : chunk->kernel;
}

/* Ends the oldest chunk of the lane, if the device has. */
static int kvt_finish(kvt_direction *self, kvt_lane *lane) {
    kvt_loop *loop = self->loop;
    kvt_chunk *chunk = lane->first;
    if (!chunk) return KVT_IDLE;
    int code = loop->calls.query(kvt_end_of(self, chunk));
    if (code == KVT_NOT_READY) return KVT_IDLE;
    float milliseconds = 0;
    KVT_TRY(kvt_check(loop, "cuEventQuery", code, 0, 0));
    KVT_TRY(kvt_check(loop, "cuEventElapsedTime", loop->calls.elapsed(&milliseconds, chunk->begin, chunk->copied), 0, 0));
    lane->first = chunk->next;
    if (!lane->first) lane->last = NULL;
    void *busy_until = chunk->stage ? chunk->stage->busy_until : NULL;
    if (busy_until && (busy_until == chunk->copied || busy_until == chunk->kernel)) chunk->stage->busy_until = NULL;
    if (chunk->bounce) {
        if (self->is_store) kvt_copy_bounce(self, chunk);
        chunk->bounce->next = self->bounces;
        self->bounces = chunk->bounce;
    }
    for (int64_t i = 0; i < chunk->num_rows; i++) {
        kvt_job *job = chunk->rows[i].job;
        int64_t nbytes = loop->groups[chunk->rows[i].group].block_bytes;
        job->nbytes += nbytes;
        job->seconds += milliseconds * 1e-3 * (double)nbytes / (double)chunk->nbytes;
        if (--job->num_left == 0) kvt_end_job(loop, job);
    }
    chunk->next = lane->free;
    lane->free = chunk;
    return KVT_DONE;
}

/* Who holds a direction. */

/* Returns 0 if that took longer than the timeout (negative: none). The engine's thread comes first. */
static int kvt_hold(kvt_direction *self, int is_engine, double timeout_s) {
    struct timespec deadline = kvt_after(timeout_s < 0 ? 0 : timeout_s);
    int code = 0;
    pthread_mutex_lock(&self->mutex);
    self->engine_waits += is_engine;
    while (code == 0 && (self->is_held || (!is_engine && self->engine_waits))) {
        if (timeout_s < 0) pthread_cond_wait(&self->changed, &self->mutex);
        else code = pthread_cond_timedwait(&self->changed, &self->mutex, &deadline);
    }
    self->engine_waits -= is_engine;
    int is_mine = !self->is_held;
    if (is_mine) {
        self->is_held = 1;
        kvt_move(&self->inbox, &self->queue);
        self->is_poked = 0;
    }
    pthread_mutex_unlock(&self->mutex);
    return is_mine;
}

/* `pokes`: the thread of the direction has something to look at. */
static void kvt_let_go(kvt_direction *self, int pokes) {
    pthread_mutex_lock(&self->mutex);
    self->is_held = 0;
    self->is_poked |= pokes;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

/* One step, by who holds the direction. */
static int kvt_step(kvt_direction *self) {
    if (kvt_get(&self->loop->is_closing) || kvt_get(&self->loop->has_failed)) return KVT_FAILED;
    for (int i = 0; i < KVT_LANES; i++) {
        int result = kvt_finish(self, &self->lanes[i]);
        if (result != KVT_IDLE) return result;
    }
    int result = kvt_issue(self, &self->lanes[KVT_ORDINARY], NULL);
    return result == KVT_NEEDS_CHUNK ? KVT_IDLE : result;
}

static int kvt_is_in_flight(const kvt_direction *self) {
    return self->lanes[KVT_ORDINARY].first || self->lanes[KVT_FENCE].first;
}

/* Sleeps until there are jobs, a fence has issued something, the loop is closed, or for `pause_ns` if it is not 0. */
static void kvt_sleep(kvt_direction *self, long pause_ns) {
    struct timespec deadline = kvt_after((double)pause_ns * 1e-9);
    int code = 0;
    pthread_mutex_lock(&self->mutex);
    while (code == 0 && !self->inbox.first && !self->is_poked && !kvt_get(&self->loop->is_closing)) {
        if (pause_ns) code = pthread_cond_timedwait(&self->changed, &self->mutex, &deadline);
        else pthread_cond_wait(&self->changed, &self->mutex);
    }
    pthread_mutex_unlock(&self->mutex);
}

/* Makes steps until the loop is closed or the device has failed. */
static void kvt_run(kvt_direction *self) {
    long pause_ns = KVT_MIN_PAUSE_NS;
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    for (;;) {
        kvt_hold(self, 0, -1);
        int result = kvt_step(self), is_in_flight = kvt_is_in_flight(self);
        kvt_let_go(self, 0);
        if (result == KVT_FAILED) return;
        if (result == KVT_DONE) {
            pause_ns = KVT_MIN_PAUSE_NS;
            continue;
        }
        kvt_sleep(self, is_in_flight ? pause_ns : 0);
        pause_ns = 2 * pause_ns < KVT_MAX_PAUSE_NS ? 2 * pause_ns : KVT_MAX_PAUSE_NS;
    }
}

/* Makes the threads return, and who waits for results. */
static void kvt_close(kvt_loop *loop) {
    kvt_set(&loop->is_closing);
    for (int i = 0; i < KVT_DIRECTIONS; i++) {
        pthread_mutex_lock(&loop->directions[i].mutex);
        pthread_cond_broadcast(&loop->directions[i].changed);
        pthread_mutex_unlock(&loop->directions[i].mutex);
    }
    pthread_mutex_lock(&loop->mutex);
    pthread_cond_broadcast(&loop->ended);
    pthread_mutex_unlock(&loop->mutex);
}

/* Fences, by the engine's thread, which holds the direction. */

/* Ends the rows that the fence names and that could not be issued. */
static void kvt_reject(kvt_direction *self, kvt_fence *fence) {
    for (kvt_job *job = self->queue.first; job; job = job->next) {
        for (int64_t i = job->first; i < job->num_rows; i++) {
            kvt_row *row = &job->rows[i];
            if (row->part < 0 || !kvt_names(fence, job, row->block)) continue;
            kvt_take_row(job, row);
            job->num_left--;
            job->ok = 0;
        }
    }
    kvt_drop_issued(self, 1);
}

/* Makes the engine's stream wait until the rows that the fence names have been read, or filled. */
static int kvt_make_wait(kvt_direction *self, kvt_fence *fence, void *engine) {
    for (int l = 0; l < KVT_LANES; l++) {
        /* The events of one stream are reached in order: the last on each stream is enough. */
        void *last_kernel = NULL, *last_copied = NULL;
        for (kvt_chunk *chunk = self->lanes[l].first; chunk; chunk = chunk->next) {
            int is_named = 0;
            for (int64_t i = 0; i < chunk->num_rows && !is_named; i++)
                is_named = kvt_names(fence, chunk->rows[i].job, chunk->rows[i].block);
            if (!is_named) continue;
            void *event = self->is_store && !chunk->is_direct ? chunk->kernel : kvt_end_of(self, chunk);
            if (event == chunk->kernel) last_kernel = event;
            else last_copied = event;
        }
        if (last_kernel) KVT_TRY(kvt_wait(self->loop, engine, last_kernel));
        if (last_copied) KVT_TRY(kvt_wait(self->loop, engine, last_copied));
    }
    return KVT_SUCCESS;
}

/* Issues the rows that the fence names before all others, and makes the engine's stream wait for them. Rows for which
   there is no bounce buffer are not copied: their jobs fail. Returns KVT_NEEDS_CHUNK if it must be called again with one
   more chunk in the lane for fences. */
static int kvt_fence_now(kvt_direction *self, kvt_fence *fence, void *engine) {
    if (kvt_get(&self->loop->has_failed)) return KVT_FAILED;
    int result;
    while ((result = kvt_issue(self, &self->lanes[KVT_FENCE], fence)) == KVT_DONE) {}
    if (result != KVT_IDLE) return result;
    kvt_reject(self, fence);
    KVT_TRY(kvt_make_wait(self, fence, engine));
    return KVT_DONE;
}

/* Records the end of all that was issued, even of a chunk whose issuing has failed halfway, and makes the engine's later
   work come after it. Works after an error. Returns the driver's code. */
static int kvt_mark_end(kvt_direction *self, void *engine) {
    for (int l = 0; l < KVT_LANES; l++) {
        kvt_stream *streams[] = {&self->lanes[l].kernels, &self->lanes[l].copies};
        for (int i = 0; i < 2; i++) {
            int code = self->loop->calls.record(streams[i]->end, streams[i]->handle);
            if (!code) code = self->loop->calls.wait(engine, streams[i]->end, 0);
            if (code) return code;
        }
    }
    return KVT_SUCCESS;
}

/* Returns KVT_SUCCESS if the device has reached the end, KVT_NOT_READY, or the code of an error. */
static int kvt_query_end(kvt_direction *self) {
    for (int l = 0; l < KVT_LANES; l++) {
        int code = self->loop->calls.query(self->lanes[l].kernels.end);
        if (!code) code = self->loop->calls.query(self->lanes[l].copies.end);
        if (code) return code;
    }
    return KVT_SUCCESS;
}

/* Memory of the loop itself. What the lists point to belongs to the caller, except for jobs. */

static void kvt_init(kvt_loop *loop) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&loop->mutex, NULL);
    pthread_cond_init(&loop->ended, &attributes);
    for (int i = 0; i < KVT_DIRECTIONS; i++) {
        kvt_direction *self = &loop->directions[i];
        self->loop = loop;
        self->is_store = i == KVT_STORE;
        for (int l = 0; l < KVT_LANES; l++) self->lanes[l].kernels.after = self->lanes[l].copies.after = -1;
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->changed, &attributes);
    }
    pthread_condattr_destroy(&attributes);
}

static void kvt_free_jobs(kvt_loop *loop) {
    while (loop->newest) {
        kvt_job *job = loop->newest;
        loop->newest = job->older;
        free(job);
    }
}

#endif
