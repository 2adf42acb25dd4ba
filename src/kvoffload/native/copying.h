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
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Pieces that are copied in turn, and bytes of a turn. Reads of one piece after another are slow where pieces are a few
   KiB, because the processor reads ahead only inside a page of memory; eight streams at once hide that. */
enum { KVO_STREAMS = 8, KVO_TURN = 256, KVO_LINE = 64 };

/* Shorter pieces are copied by memcpy. */
enum { KVO_MIN_STREAMED = 512 };

/* Layers of equal pages at equal distances: page `layer` of device block `b` is at
   data + layer * layer_step + b * block_step. */
typedef struct {
    char *data;
    ptrdiff_t layer_step, block_step;
    ptrdiff_t num_layers, page_bytes;
} kvo_run;

/* A device block and the memory in the host pool that holds its pages one after another. */
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
    int is_store, bypass_caches;
} kvo_job;

typedef struct {
    char *to[KVO_STREAMS];
    const char *from[KVO_STREAMS];
    int num;
    ptrdiff_t nbytes; /* of each piece */
} kvo_batch;

#ifdef __SSE2__
static void kvo_stream(kvo_batch *batch) {
    ptrdiff_t left[KVO_STREAMS], longest = 0;
    /* Bypassing stores take whole aligned lines; memcpy copies what is before and behind them. */
    for (int i = 0; i < batch->num; i++) {
        ptrdiff_t head = -(uintptr_t)batch->to[i] & (KVO_LINE - 1);
        left[i] = (batch->nbytes - head) & ~(ptrdiff_t)(KVO_LINE - 1);
        ptrdiff_t end = head + left[i];
        memcpy(batch->to[i], batch->from[i], head);
        memcpy(batch->to[i] + end, batch->from[i] + end, batch->nbytes - end);
        batch->to[i] += head;
        batch->from[i] += head;
        if (left[i] > longest) longest = left[i];
    }
    for (ptrdiff_t at = 0; at < longest; at += KVO_TURN) {
        for (int i = 0; i < batch->num; i++) {
            char *to = batch->to[i];
            const char *from = batch->from[i];
            ptrdiff_t end = at + KVO_TURN < left[i] ? at + KVO_TURN : left[i];
            for (ptrdiff_t j = at; j < end; j += KVO_LINE) {
                __m128i a = _mm_loadu_si128((const __m128i *)(from + j));
                __m128i b = _mm_loadu_si128((const __m128i *)(from + j + 16));
                __m128i c = _mm_loadu_si128((const __m128i *)(from + j + 32));
                __m128i d = _mm_loadu_si128((const __m128i *)(from + j + 48));
                _mm_stream_si128((__m128i *)(to + j), a);
                _mm_stream_si128((__m128i *)(to + j + 16), b);
                _mm_stream_si128((__m128i *)(to + j + 32), c);
                _mm_stream_si128((__m128i *)(to + j + 48), d);
            }
        }
    }
    batch->num = 0;
}
#else
static void kvo_stream(kvo_batch *batch) {
    for (int i = 0; i < batch->num; i++) memcpy(batch->to[i], batch->from[i], batch->nbytes);
    batch->num = 0;
}
#endif

static inline void kvo_copy_piece(kvo_batch *batch, char *to, const char *from, ptrdiff_t nbytes, int bypass_caches) {
    if (!bypass_caches || nbytes < KVO_MIN_STREAMED) {
        memcpy(to, from, nbytes);
        return;
    }
    if (batch->num == KVO_STREAMS || (batch->num && batch->nbytes != nbytes)) kvo_stream(batch);
    batch->to[batch->num] = to;
    batch->from[batch->num] = from;
    batch->nbytes = nbytes;
    batch->num++;
}

/* Copies rows until no row is left to take. Ends when what this thread has written can be seen by every thread that
   sees the end. */
static void *kvo_copy_rows(void *argument) {
    kvo_job *job = argument;
    kvo_batch batch = {.num = 0};
    for (;;) {
        ptrdiff_t first = __atomic_fetch_add(&job->next, job->rows_at_once, __ATOMIC_RELAXED);
        if (first >= job->num_rows) break;
        ptrdiff_t last = first + job->rows_at_once;
        if (last > job->num_rows) last = job->num_rows;
        for (ptrdiff_t r = first; r < last; r++) {
            char *host = job->rows[r].host;
            for (const kvo_run *run = job->runs; run < job->runs + job->num_runs; run++) {
                char *page = run->data + job->rows[r].block * run->block_step;
                for (ptrdiff_t layer = 0; layer < run->num_layers; layer++) {
                    if (job->is_store)
                        kvo_copy_piece(&batch, host, page, run->page_bytes, job->bypass_caches);
                    else
                        kvo_copy_piece(&batch, page, host, run->page_bytes, job->bypass_caches);
                    host += run->page_bytes;
                    page += run->layer_step;
                }
            }
        }
    }
    kvo_stream(&batch);
#ifdef __SSE2__
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
