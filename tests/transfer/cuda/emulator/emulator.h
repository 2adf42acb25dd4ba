/* A CUDA driver on the CPU: memory of the host, streams whose work is deferred, and kernels whose PTX is interpreted.
 *
 * All state belongs to one mutex, which every function of driver.c holds. */

#ifndef EMULATOR_H
#define EMULATOR_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int type;
    int id;
} location;

typedef struct {
    int source_order;
    location source;
    location target;
    unsigned int flags;
} attributes;

/* Errors of the driver, by its numbers. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};

enum { ORDER_STREAM = 1, ORDER_ANY = 3, PREFER_OVERLAP = 1, PORTABLE = 1, RELAXED = 2, NON_BLOCKING = 1, NO_TIMES = 2 };
enum { ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76, ATTRIBUTE_HOST_POINTERS = 91, ATTRIBUTE_REGISTER = 99, NUM_ATTRIBUTES = 160 };

/* When work runs: at once, when it must, or at random moments. */
enum { EARLIEST, LATEST, RANDOM };

enum { MAX_PARAMETER_BYTES = 4096, MAX_THREADS = 1024 };

/* memory.c: what the device can reach. */
enum { DEVICE_MEMORY, PINNED_MEMORY, REGISTERED_MEMORY, STAGED_MEMORY };

typedef struct {
    uintptr_t from, to;
    int kind;
} range;

const range *find_memory(uint64_t address, size_t nbytes); /* the one that has all of these bytes, or NULL */
int overlaps_memory(uintptr_t from, uintptr_t to);
void add_memory(uintptr_t from, uintptr_t to, int kind);
int remove_memory(uintptr_t from, int kind); /* 0: there is none */
int allocate_memory(uint64_t *address, size_t nbytes, int kind);
int free_memory(uint64_t address, int kind);
size_t bytes_of(int kind);
void reset_memory(void);

/* ptx.c: modules and kernels. */
typedef struct kernel kernel;
typedef struct module module;

typedef struct {
    const kernel *kernel;
    unsigned blocks, threads;
    uint8_t parameters[MAX_PARAMETER_BYTES];
} launch;

module *load_module(const char *text, int *code);
void unload_module(module *m);
const kernel *find_kernel(const module *m, const char *name);
int read_parameters(launch *l, void **parameters);
unsigned max_threads(const kernel *k);
int run_block(const launch *l, unsigned block, int backwards); /* all threads of one block: an error of the device */

/* streams.c: work that is deferred. */
typedef struct stream stream;
typedef struct event event;

typedef struct {
    uint64_t target, source;
    size_t nbytes;
} copy_piece;

void reset_streams(uint64_t seed, int timing, size_t queue_size);
stream *new_stream(void);
event *new_event(int has_time);
void issue_copies(stream *s, const copy_piece *pieces, size_t count); /* in any order */
void issue_fill(stream *s, uint64_t target, int value, size_t nbytes);
void issue_launch(stream *s, const launch *l);
void issue_record(stream *s, event *e);
void issue_wait(stream *s, event *e);
int query_event(event *e);
int milliseconds_between(float *out, event *a, event *b);
void run_stream(stream *s); /* all of it */
void run_event(event *e);
void run_all(void);
void run_some(void); /* what happens to run beside a call */
void tick(int steps);
size_t random_below(size_t n);

/* driver.c */
enum { STREAM, EVENT, MODULE, FUNCTION };
enum { COUNT_COPIES, COUNT_BATCHES, COUNT_LAUNCHES, NUM_COUNTS };
enum { ANY_TIME = 0, NEEDS_CONTEXT = 1, UNSAFE_WHILE_CAPTURING = 2 };

extern int sticky, attribute_values[NUM_ATTRIBUTES], driver_version, fail_copy;
extern size_t max_registration, max_registered; /* bytes of one and of all; 0: no limit */
extern int64_t counts[NUM_COUNTS];

int enter(const char *function, int needs); /* takes the mutex, and returns the error with which the call must end, if any */
int leave(int code);
int leave_later(int code); /* for calls beside which work goes on */
void *new_handle(int kind, void *object);
void *find_object(const void *value, int kind); /* NULL: there is none */
void end_handle(const void *value, int kind);
void note(const char *format, ...);
void problem(const char *format, ...); /* something that the caller must not do */

#endif
