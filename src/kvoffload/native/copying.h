/* Copies many pieces of memory, on one thread or two, with stores that bypass the caches where the processor has them.

Nothing here touches Python. The caller has checked every address. */

#ifndef KVOFFLOAD_COPYING_H
#define KVOFFLOAD_COPYING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifndef KVO_CAN_BYPASS
#if defined(__x86_64__) && defined(__GNUC__)
#define KVO_CAN_BYPASS 1
#else
#define KVO_CAN_BYPASS 0
#endif
#endif
#if KVO_CAN_BYPASS
#include <immintrin.h>
#endif

/* The pieces that are copied in turn, and the bytes of a turn. If pieces are read one after another, the processor waits
   at the begin of each page of memory, because it reads ahead only inside one. With several in turn it rarely does. */
enum { KVO_STREAMS = 8, KVO_TURN = 128, KVO_LINE = 64 };

/* Shorter pieces are copied by memcpy, which is as fast. */
enum { KVO_MIN_STREAMED = 2048 };

/* Bytes of each device block in one piece: those of block `b` are at data + b * block_step, and in a row at host_at. */
typedef struct {
    char *data;
    ptrdiff_t block_step, page_bytes, host_at;
} kvo_run;

/* A device block and the row in the host pool that holds its pages. */
typedef struct {
    int64_t block;
    char *host;
} kvo_row;

typedef struct {
    const kvo_run *runs;
    ptrdiff_t num_runs;
    const kvo_row *rows;
    ptrdiff_t num_rows;
    ptrdiff_t rows_at_once;
    ptrdiff_t next; /* the first row that no thread has taken */
    int is_store;
} kvo_job;

typedef struct {
    char *to[KVO_STREAMS];
    const char *from[KVO_STREAMS];
    int num, bypasses;
    ptrdiff_t nbytes; /* of each piece */
} kvo_batch;

#if KVO_CAN_BYPASS
/* Stores that bypass the caches write whole aligned lines. memcpy copies what is before and behind these. */
__attribute__((target("avx2"))) static void kvo_copy_batch(kvo_batch *batch) {
    char *to[KVO_STREAMS];
    const char *from[KVO_STREAMS];
    ptrdiff_t nbytes[KVO_STREAMS];
    for (int i = 0; i < batch->num; i++) {
        ptrdiff_t head = (ptrdiff_t)(-(uintptr_t)batch->to[i] & (KVO_LINE - 1));
        to[i] = batch->to[i] + head;
        from[i] = batch->from[i] + head;
        nbytes[i] = (batch->nbytes - head) & ~(ptrdiff_t)(KVO_LINE - 1);
        memcpy(batch->to[i], batch->from[i], head);
        memcpy(to[i] + nbytes[i], from[i] + nbytes[i], batch->nbytes - head - nbytes[i]);
    }
    for (ptrdiff_t at = 0; at < batch->nbytes; at += KVO_TURN) {
        for (int i = 0; i < batch->num; i++) {
            ptrdiff_t end = at + KVO_TURN < nbytes[i] ? at + KVO_TURN : nbytes[i];
            for (ptrdiff_t j = at; j < end; j += KVO_LINE) {
                __m256i low = _mm256_loadu_si256((const __m256i *)(from[i] + j));
                __m256i high = _mm256_loadu_si256((const __m256i *)(from[i] + j + KVO_LINE / 2));
                _mm256_stream_si256((__m256i *)(to[i] + j), low);
                _mm256_stream_si256((__m256i *)(to[i] + j + KVO_LINE / 2), high);
            }
        }
    }
    batch->num = 0;
}
#endif

static inline void kvo_copy_piece(kvo_batch *batch, char *to, const char *from, ptrdiff_t nbytes) {
#if KVO_CAN_BYPASS
    if (batch->bypasses && nbytes >= KVO_MIN_STREAMED) {
        if (batch->num == KVO_STREAMS || batch->nbytes != nbytes) kvo_copy_batch(batch);
        batch->to[batch->num] = to;
        batch->from[batch->num] = from;
        batch->nbytes = nbytes;
        batch->num++;
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

/* Copies the rows from `first` to `last`. Consecutive pieces belong to different rows, so that each stream goes on in
   the host pool where it ended before. */
static void kvo_copy_some_rows(const kvo_job *job, kvo_batch *batch, ptrdiff_t first, ptrdiff_t last) {
    for (const kvo_run *run = job->runs; run < job->runs + job->num_runs; run++) {
        for (const kvo_row *row = job->rows + first; row < job->rows + last; row++) {
            char *page = run->data + row->block * run->block_step, *host = row->host + run->host_at;
            if (job->is_store)
                kvo_copy_piece(batch, host, page, run->page_bytes);
            else
                kvo_copy_piece(batch, page, host, run->page_bytes);
        }
    }
}

/* Copies rows until no row is left to take. Ends when what this thread has written can be seen by every thread that
   sees the end. */
static void *kvo_copy_rows(void *argument) {
    kvo_job *job = argument;
    kvo_batch batch = {.num = 0};
#if KVO_CAN_BYPASS
    batch.bypasses = __builtin_cpu_supports("avx2") != 0;
#endif
    for (;;) {
        ptrdiff_t first = __atomic_fetch_add(&job->next, job->rows_at_once, __ATOMIC_RELAXED);
        if (first >= job->num_rows) break;
        ptrdiff_t last = first + job->rows_at_once;
        if (last > job->num_rows) last = job->num_rows;
        for (; first < last; first += KVO_STREAMS)
            kvo_copy_some_rows(job, &batch, first, first + KVO_STREAMS < last ? first + KVO_STREAMS : last);
    }
#if KVO_CAN_BYPASS
    if (batch.num) kvo_copy_batch(&batch);
    _mm_sfence();
#endif
    return NULL;
}

/* Whether the calling thread may run on several processors, so that a second thread can help. */
static int kvo_may_share(void) {
    cpu_set_t set;
    /* The call fails where there are more processors than a set has bits. */
    return sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) > 1;
}

/* Runs the job, with the help of a second thread if `wants_help`, and returns the number of threads that ran it. The
   second thread ends before this returns, so there is none to close, and none that a fork could lose. */
static int kvo_run_job(kvo_job *job, int wants_help) {
    pthread_t helper;
    int has_helper = 0;
    if (wants_help && kvo_may_share()) {
        /* Signals are for Python's threads. */
        sigset_t all, before;
        sigfillset(&all);
        if (pthread_sigmask(SIG_SETMASK, &all, &before) == 0) {
            has_helper = pthread_create(&helper, NULL, kvo_copy_rows, job) == 0;
            pthread_sigmask(SIG_SETMASK, &before, NULL);
        }
    }
    kvo_copy_rows(job);
    if (has_helper) pthread_join(helper, NULL);
    return 1 + has_helper;
}

#endif
