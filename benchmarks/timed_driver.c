/* A stand-in for the CUDA driver that does nothing but take time: functions with the driver's signatures, over a device
   whose work ends at computed moments of the machine's clock. A copy of n bytes takes n / BUS of the bus of its direction, a
   gather n / MEMORY of the device. Calls keep the processor busy for as long as real ones do, roughly. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define BUS 55.0      /* bytes per ns */
#define MEMORY 2000.0
#define DEVICE ((uint64_t)1 << 50) /* addresses from here on are on the device */
enum { MAX_HANDLES = 4096, CALL_NS = 1000, LAUNCH_NS = 2000, BATCH_NS = 2000, COPY_NS = 100, NOT_READY = 600 };

static double handles[MAX_HANDLES]; /* when the work of a stream ends, or an event is reached, in ns; from 1 on */
static int num_handles = 1;
static double bus_end[2];
static double call_share = 1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static double later(double a, double b) { return a > b ? a : b; }

static double *at(void *handle) { return &handles[(uintptr_t)handle]; }

static void spend(double ns) {
    double end = now() + call_share * ns;
    while (now() < end) {}
}

uint64_t timed_new(void) { return (uint64_t)num_handles++; }

/* How much of their usual time calls take. */
void timed_calls(double share) { call_share = share; }

void timed_reset(void) {
    for (int i = 0; i < MAX_HANDLES; i++) handles[i] = 0;
    num_handles = 1;
    bus_end[0] = bus_end[1] = 0;
}

/* How long the stream still has work, in ns. */
double timed_left(void *stream) { return later(*at(stream) - now(), 0); }

int timed_record(void *event, void *stream) {
    spend(CALL_NS);
    pthread_mutex_lock(&mutex);
    *at(event) = later(*at(stream), now());
    pthread_mutex_unlock(&mutex);
    return 0;
}

int timed_wait(void *stream, void *event, unsigned flags) {
    (void)flags;
    spend(CALL_NS);
    pthread_mutex_lock(&mutex);
    *at(stream) = later(*at(stream), *at(event));
    pthread_mutex_unlock(&mutex);
    return 0;
}

int timed_query(void *event) {
    spend(CALL_NS);
    pthread_mutex_lock(&mutex);
    int is_reached = *at(event) <= now();
    pthread_mutex_unlock(&mutex);
    return is_reached ? 0 : NOT_READY;
}

int timed_elapsed(float *milliseconds, void *start, void *end) {
    spend(CALL_NS);
    pthread_mutex_lock(&mutex);
    *milliseconds = (float)((*at(end) - *at(start)) * 1e-6);
    pthread_mutex_unlock(&mutex);
    return 0;
}

static void bus(uint64_t target, double nbytes, void *stream) {
    double *end = &bus_end[target >= DEVICE];
    pthread_mutex_lock(&mutex);
    *end = later(later(*end, *at(stream)), now()) + nbytes / BUS;
    *at(stream) = *end;
    pthread_mutex_unlock(&mutex);
}

int timed_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
    (void)source;
    spend(CALL_NS);
    bus(target, (double)nbytes, stream);
    return 0;
}

int timed_copy_batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, void *attributes, size_t *first,
                     size_t num_attributes, size_t *failed, void *stream) {
    (void)sources, (void)attributes, (void)first, (void)num_attributes, (void)failed;
    double nbytes = 0;
    for (size_t i = 0; i < count; i++) nbytes += (double)sizes[i];
    spend(BATCH_NS + COPY_NS * (double)count);
    bus(targets[0], nbytes, stream);
    return 0;
}

int timed_launch(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                 unsigned shared, void *stream, void **arguments, void **extra) {
    (void)function, (void)x, (void)y, (void)z, (void)threads, (void)ty, (void)tz, (void)shared, (void)extra;
    double nbytes = (double)*(uint64_t *)arguments[2] * (double)*(uint32_t *)arguments[4];
    spend(LAUNCH_NS);
    pthread_mutex_lock(&mutex);
    *at(stream) = later(*at(stream), now()) + nbytes / MEMORY;
    pthread_mutex_unlock(&mutex);
    return 0;
}
