/* The functions of libcuda.so.1. emu_reset starts anew; the other emu_ functions change how the driver behaves, and say
 * what happened. */

#define _GNU_SOURCE
#include "emulator.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE = 100 };            /* a handle, which is not the ordinal */
enum { OF_ANOTHER_DEVICE = 1 };   /* a context's number is so much above the device's own */
enum { THREAD_STREAM = 2 };       /* the last of the handles of the default stream */
enum { FIRST_HANDLE = 0x5500, HANDLE_STEP = 16 };

typedef struct {
    int kind;
    void *object; /* NULL: it was destroyed */
} handle;

int sticky, attribute_values[NUM_ATTRIBUTES], driver_version, fail_copy;
size_t max_registration, max_registered;
int64_t counts[NUM_COUNTS];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread uint64_t current_context; /* 0: none */
static __thread struct {
    uint64_t context;
    int mode;
} capture; /* the mode is that of this context only */
static uint64_t context, num_retained;
static int is_capturing;
static handle *handles;
static size_t num_handles;
static stream *default_stream;
static char calls[1 << 16], problems[1 << 12];
static char fail_function[64];
static int fail_code, fail_after, fail_is_sticky;

void problem(const char *format, ...) {
    size_t used = strlen(problems);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problems + used, sizeof problems - used - 1, format, arguments);
    va_end(arguments);
    strcat(problems, "\n");
}

void note(const char *format, ...) {
    size_t used = strlen(calls);
    if (used > sizeof calls - 256)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(calls + used, 255, format, arguments);
    va_end(arguments);
    strcat(calls, "\n");
}

void *new_handle(int kind, void *object) {
    handles = realloc(handles, (num_handles + 1) * sizeof *handles);
    handles[num_handles] = (handle){kind, object};
    return (void *)(uintptr_t)(FIRST_HANDLE + HANDLE_STEP * num_handles++);
}

static handle *find_handle(const void *value, int kind) {
    size_t i = ((uintptr_t)value - FIRST_HANDLE) / HANDLE_STEP;
    return (uintptr_t)value % HANDLE_STEP == 0 && i < num_handles && handles[i].kind == kind ? &handles[i] : NULL;
}

void *find_object(const void *value, int kind) {
    handle *found = find_handle(value, kind);
    return kind == STREAM && (uintptr_t)value <= THREAD_STREAM ? default_stream : found ? found->object : NULL;
}

void end_handle(const void *value, int kind) { find_handle(value, kind)->object = NULL; }

static int mode_of_thread(void) { return capture.context == context ? capture.mode : 0; }

/* Takes the mutex. Returns the error with which the call must end, if any. */
int enter(const char *function, int needs) {
    pthread_mutex_lock(&mutex);
    if (needs & NEEDS_CONTEXT && (!current_context || current_context != context || !num_retained))
        return INVALID_CONTEXT;
    if (needs & NEEDS_CONTEXT && sticky)
        return sticky;
    if (needs & UNSAFE_WHILE_CAPTURING && is_capturing && mode_of_thread() != RELAXED) {
        problem("%s is called while a graph is captured, which ends the capture", function);
        return CAPTURE_UNSUPPORTED;
    }
    if (strcmp(function, fail_function) == 0 && fail_after-- <= 0) {
        sticky = fail_is_sticky ? fail_code : sticky;
        return fail_code;
    }
    return SUCCESS;
}

int leave(int code) {
    pthread_mutex_unlock(&mutex);
    return code;
}

/* For calls beside which work goes on. */
int leave_later(int code) {
    run_some();
    return leave(code);
}

void emu_reset(uint64_t seed, int timing, size_t queue_size, int version) {
    pthread_mutex_lock(&mutex);
    reset_streams(seed, timing, queue_size);
    for (size_t i = 0; i < num_handles; i++)
        if (handles[i].kind == MODULE && handles[i].object)
            unload_module(handles[i].object);
    reset_memory();
    default_stream = new_stream();
    num_handles = 0, driver_version = version, context += 0x1000000000, num_retained = 0, is_capturing = 0;
    calls[0] = problems[0] = fail_function[0] = 0;
    sticky = 0, fail_copy = -1, max_registration = max_registered = 0;
    memset(counts, 0, sizeof counts);
    memset(attribute_values, 0, sizeof attribute_values);
    pthread_mutex_unlock(&mutex);
}

void emu_set_attribute(int number, int value) { attribute_values[number] = value; }
void emu_set_version(int version) { driver_version = version; }
void emu_capture(int captures) { is_capturing = captures; }
const char *emu_log(void) { return calls; }
const char *emu_problems(void) { return problems; }
int64_t emu_count(int which) { return counts[which]; }
size_t emu_bytes(int kind) { return bytes_of(kind); }

/* One registration has at most `each` bytes, all together `all`; 0: no limit. */
void emu_limit_registrations(size_t each, size_t all) { max_registration = each, max_registered = all; }

/* The call of `function` after `after` others fails with `code`, and those behind it too. Sticky: all calls do. */
void emu_fail(const char *function, int code, int after, int is_sticky) {
    snprintf(fail_function, sizeof fail_function, "%s", function);
    fail_code = code, fail_after = after, fail_is_sticky = is_sticky;
}

/* Batches fail with INVALID_VALUE at their copy number `copy`, of which none runs. */
void emu_fail_copy(int copy) { fail_copy = copy; }

/* Runs some pieces of work; -1: all. */
void emu_tick(int steps) {
    pthread_mutex_lock(&mutex);
    if (steps < 0)
        run_all();
    else
        tick(steps);
    pthread_mutex_unlock(&mutex);
}

/* The device and its context. */

int cuInit(unsigned int flags) {
    int code = enter("cuInit", ANY_TIME);
    return leave(code ? code : flags ? INVALID_VALUE : SUCCESS);
}

int cuDriverGetVersion(int *version) {
    int code = enter("cuDriverGetVersion", ANY_TIME);
    *version = driver_version;
    return leave(code);
}

int cuDeviceGetCount(int *count) {
    int code = enter("cuDeviceGetCount", ANY_TIME);
    *count = 1;
    return leave(code);
}

int cuDeviceGet(int *device, int ordinal) {
    int code = enter("cuDeviceGet", ANY_TIME);
    *device = DEVICE + ordinal;
    return leave(code ? code : ordinal ? INVALID_DEVICE : SUCCESS);
}

int cuDeviceGetAttribute(int *value, int number, int device) {
    int code = enter("cuDeviceGetAttribute", ANY_TIME);
    if (!code && (device != DEVICE || number <= 0 || number >= NUM_ATTRIBUTES))
        code = device != DEVICE ? INVALID_DEVICE : INVALID_VALUE;
    if (!code)
        *value = attribute_values[number];
    return leave(code);
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    int code = enter("cuDeviceGetPCIBusId", ANY_TIME);
    if (!code)
        snprintf(text, length, "0000:3B:00.0");
    return leave(code ? code : device == DEVICE ? SUCCESS : INVALID_DEVICE);
}

int cuDevicePrimaryCtxRetain(void **out, int device) {
    int code = enter("cuDevicePrimaryCtxRetain", ANY_TIME);
    note("retain");
    if (!code && device != DEVICE)
        code = INVALID_DEVICE;
    if (!code)
        num_retained++, *out = (void *)(uintptr_t)context;
    return leave(code);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int code = enter("cuDevicePrimaryCtxRelease_v2", ANY_TIME);
    note("release %d", device);
    if (!code && (device != DEVICE || !num_retained))
        code = device != DEVICE ? INVALID_DEVICE : INVALID_CONTEXT;
    if (!code)
        num_retained--;
    return leave(code);
}

int cuCtxGetCurrent(void **out) {
    int code = enter("cuCtxGetCurrent", ANY_TIME);
    *out = (void *)(uintptr_t)(current_context - context <= OF_ANOTHER_DEVICE ? current_context : 0);
    return leave(code);
}

int cuCtxSetCurrent(void *wanted) {
    int code = enter("cuCtxSetCurrent", ANY_TIME);
    note("current");
    if (!code && wanted && (uintptr_t)wanted - context > OF_ANOTHER_DEVICE)
        code = INVALID_CONTEXT;
    if (!code)
        current_context = (uintptr_t)wanted;
    return leave(code);
}

int cuCtxSynchronize(void) {
    int code = enter("cuCtxSynchronize", NEEDS_CONTEXT | UNSAFE_WHILE_CAPTURING);
    if (!code)
        run_all();
    return leave(code ? code : sticky);
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int code = enter("cuThreadExchangeStreamCaptureMode", ANY_TIME), former = mode_of_thread();
    note("capture mode %d", *mode);
    if (!code && (*mode < 0 || *mode > RELAXED))
        code = INVALID_VALUE;
    if (!code)
        capture.context = context, capture.mode = *mode, *mode = former;
    return leave(code);
}
