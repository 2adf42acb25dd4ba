/* A stand-in for libcuda.so that copies at once, checks its arguments, and logs its calls.
 *
 * stub_set changes how it behaves, stub_log returns what was called. Built with -DREAL_HEADER it only checks that the
 * declarations here are those of NVIDIA's cuda.h.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

_Static_assert(sizeof(location) == 8, "CUmemLocation");
_Static_assert(sizeof(attributes) == 24, "CUmemcpyAttributes");
_Static_assert(offsetof(attributes, source) == 4, "srcLocHint");
_Static_assert(offsetof(attributes, target) == 12, "dstLocHint");
_Static_assert(offsetof(attributes, flags) == 20, "flags");

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { ORDER_STREAM = 1, PREFER_OVERLAP = 1, PORTABLE = 1, RELAXED = 2, NON_BLOCKING = 1 };

#ifdef REAL_HEADER
#include <cuda.h>
#include <cudaTypedefs.h>
_Static_assert(sizeof(location) == sizeof(CUmemLocation), "CUmemLocation");
_Static_assert(sizeof(attributes) == sizeof(CUmemcpyAttributes), "CUmemcpyAttributes");
_Static_assert(offsetof(attributes, source_order) == offsetof(CUmemcpyAttributes, srcAccessOrder), "srcAccessOrder");
_Static_assert(offsetof(attributes, source) == offsetof(CUmemcpyAttributes, srcLocHint), "srcLocHint");
_Static_assert(offsetof(attributes, target) == offsetof(CUmemcpyAttributes, dstLocHint), "dstLocHint");
_Static_assert(offsetof(attributes, flags) == offsetof(CUmemcpyAttributes, flags), "flags");
_Static_assert((int)ORDER_STREAM == (int)CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, "order");
_Static_assert((int)PREFER_OVERLAP == (int)CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, "overlap");
_Static_assert((int)PORTABLE == (int)CU_MEMHOSTREGISTER_PORTABLE, "portable");
_Static_assert((int)NON_BLOCKING == (int)CU_STREAM_NON_BLOCKING, "non-blocking");
_Static_assert((int)RELAXED == (int)CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed");
_Static_assert((int)OUT_OF_MEMORY == (int)CUDA_ERROR_OUT_OF_MEMORY, "out of memory");
_Static_assert(sizeof(CUdevice) == sizeof(int) && sizeof(CUdeviceptr) == 8 && sizeof(CUresult) == sizeof(int), "handles");
/* Compiled with -Werror=incompatible-pointer-types: what the driver takes and returns is what the stub does. */
CUresult batch(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream);
PFN_cuMemcpyBatchAsync_v12080 batch_of_12_8 = batch;
CUresult (*create_stream)(CUstream *, unsigned int) = cuStreamCreate;
CUresult (*destroy_stream)(CUstream) = cuStreamDestroy;
CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = cuMemcpyAsync;
CUresult (*allocate)(CUdeviceptr *, size_t) = cuMemAlloc;
CUresult (*release_memory)(CUdeviceptr) = cuMemFree;
CUresult (*host_register)(void *, size_t, unsigned int) = cuMemHostRegister;
CUresult (*host_unregister)(void *) = cuMemHostUnregister;
CUresult (*set_current)(CUcontext) = cuCtxSetCurrent;
CUresult (*retain)(CUcontext *, CUdevice) = cuDevicePrimaryCtxRetain;
CUresult (*release)(CUdevice) = cuDevicePrimaryCtxRelease;
CUresult (*bus_id)(char *, int, CUdevice) = cuDeviceGetPCIBusId;
CUresult (*address)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = cuGetProcAddress;
CUresult (*exchange)(CUstreamCaptureMode *) = cuThreadExchangeStreamCaptureMode;
CUresult (*error_name)(CUresult, const char **) = cuGetErrorName;
#define STRING(name) #name
#define IS_NAMED(name, symbol) _Static_assert(__builtin_strcmp(STRING(name), symbol) == 0, symbol)
IS_NAMED(cuMemHostRegister, "cuMemHostRegister_v2");
IS_NAMED(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
IS_NAMED(cuMemAlloc, "cuMemAlloc_v2");
IS_NAMED(cuMemFree, "cuMemFree_v2");
IS_NAMED(cuStreamCreate, "cuStreamCreate");
IS_NAMED(cuStreamDestroy, "cuStreamDestroy_v2");
IS_NAMED(cuGetProcAddress, "cuGetProcAddress_v2");
IS_NAMED(cuMemcpyAsync, "cuMemcpyAsync");
#else

#define MAX_REGISTERED 64
static char calls[1 << 16];
static int driver_version = 12080, num_allocated, num_streams, fail_code, fail_after, fail_copy = -1, max_registered_bytes_mib;
static char fail_function[64];
static __thread int is_current;
static struct {
    uintptr_t from, to;
} registered[MAX_REGISTERED];

static void note(const char *text) {
    if (strlen(calls) + strlen(text) + 2 < sizeof calls) {
        strcat(calls, text);
        strcat(calls, "\n");
    }
}

/* Returns the error that the test wants for this call, else success. */
static int begin(const char *function) {
    if (strcmp(function, fail_function) == 0 && fail_after-- <= 0)
        return fail_code;
    return SUCCESS;
}

void stub_reset(void) {
    calls[0] = fail_function[0] = 0;
    driver_version = 12080;
    fail_copy = -1;
    max_registered_bytes_mib = 0;
    is_current = num_allocated = num_streams = 0;
    memset(registered, 0, sizeof registered);
}

const char *stub_log(void) { return calls; }
int stub_allocated(void) { return num_allocated; }
void stub_version(int version) { driver_version = version; }
void stub_max_registration(int mebibytes) { max_registered_bytes_mib = mebibytes; }

/* The call of `function` after `after` others fails with `code`, and those behind it too. */
void stub_fail(const char *function, int code, int after) {
    snprintf(fail_function, sizeof fail_function, "%s", function);
    fail_code = code;
    fail_after = after;
}

/* A batch fails at its copy number `copy`, of which none runs. */
void stub_fail_copy(int copy) { fail_copy = copy; }

int cuDriverGetVersion(int *version) {
    *version = driver_version;
    return SUCCESS;
}

int cuInit(unsigned int flags) { return flags ? INVALID_VALUE : begin("cuInit"); }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal + 100; /* a handle, which is not the ordinal */
    return begin("cuDeviceGet");
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:3B:00.%d", device - 100);
    return begin("cuDeviceGetPCIBusId");
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(0x1000000000 + device);
    note("retain");
    return begin("cuDevicePrimaryCtxRetain");
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    char text[64];
    snprintf(text, sizeof text, "release %d", device);
    note(text);
    return begin("cuDevicePrimaryCtxRelease_v2");
}

int cuCtxSetCurrent(void *context) {
    is_current = context == (void *)(uintptr_t)0x1000000064;
    note(is_current ? "current" : "other context");
    return begin("cuCtxSetCurrent");
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    char text[64];
    snprintf(text, sizeof text, "capture mode %d", *mode);
    note(text);
    *mode = 0;
    return begin("cuThreadExchangeStreamCaptureMode");
}

int cuStreamCreate(void **stream, unsigned int flags) {
    if (!is_current)
        return INVALID_CONTEXT;
    if (flags != NON_BLOCKING)
        return INVALID_VALUE;
    *stream = (void *)(uintptr_t)(0x5500 + 16 * num_streams++);
    note("new stream");
    return begin("cuStreamCreate");
}

int cuStreamDestroy_v2(void *stream) {
    char text[64];
    snprintf(text, sizeof text, "destroy stream %#zx", (size_t)stream);
    note(text);
    return begin("cuStreamDestroy_v2");
}

int cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    if (!is_current)
        return INVALID_CONTEXT;
    int code = begin("cuMemAlloc_v2");
    if (code)
        return code;
    size_t rounded = (nbytes + 511) / 512 * 512;
    void *memory = aligned_alloc(512, rounded);
    memset(memory, 0xEE, rounded);
    *address = (uint64_t)memory;
    num_allocated++;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    int code = begin("cuMemFree_v2");
    if (code)
        return code;
    free((void *)address);
    num_allocated--;
    return SUCCESS;
}

int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned int flags) {
    char text[128];
    snprintf(text, sizeof text, "register %zu flags %u", nbytes, flags);
    note(text);
    if (!is_current)
        return INVALID_CONTEXT;
    int code = begin("cuMemHostRegister_v2");
    if (code)
        return code;
    if (max_registered_bytes_mib && nbytes > (size_t)max_registered_bytes_mib << 20)
        return OUT_OF_MEMORY;
    uintptr_t from = (uintptr_t)memory, to = from + nbytes;
    for (int i = 0; i < MAX_REGISTERED; i++)
        if (from < registered[i].to && registered[i].from < to)
            return ALREADY_REGISTERED;
    for (int i = 0; i < MAX_REGISTERED; i++)
        if (!registered[i].to) {
            registered[i].from = from;
            registered[i].to = to;
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

int cuMemHostUnregister(void *memory) {
    note("unregister");
    for (int i = 0; i < MAX_REGISTERED; i++)
        if (registered[i].to && registered[i].from == (uintptr_t)memory) {
            registered[i].from = registered[i].to = 0;
            return begin("cuMemHostUnregister");
        }
    return NOT_REGISTERED;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
    char text[128];
    snprintf(text, sizeof text, "copy %zu stream %#zx", nbytes, (size_t)stream);
    note(text);
    if (!is_current)
        return INVALID_CONTEXT;
    int code = begin("cuMemcpyAsync");
    if (code)
        return code;
    memcpy((void *)target, (void *)source, nbytes);
    return SUCCESS;
}

static int batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, attributes *attrs, size_t *first,
                 size_t num_attrs, size_t *failed, void *stream) {
    char text[256];
    snprintf(text, sizeof text, "batch %zu stream %#zx order %d flags %u", count, (size_t)stream, attrs->source_order,
             attrs->flags);
    note(text);
    if (!is_current)
        return INVALID_CONTEXT;
    if (num_attrs != 1 || first[0] != 0 || !count || attrs->source_order != ORDER_STREAM || (size_t)stream < 2)
        return INVALID_VALUE;
    location none = {0, 0};
    if (memcmp(&attrs->source, &none, sizeof none) || memcmp(&attrs->target, &none, sizeof none))
        return INVALID_VALUE;
    int code = begin("cuMemcpyBatchAsync");
    if (code) {
        *failed = SIZE_MAX;
        return code;
    }
    if (fail_copy >= 0 && (size_t)fail_copy < count) {
        *failed = fail_copy;
        return INVALID_VALUE;
    }
    for (size_t i = count; i-- > 0;) /* in another order than the caller's */
        memcpy((void *)targets[i], (void *)sources[i], sizes[i]);
    return SUCCESS;
}

/* What a caller of 12.8's function would reach if it asked for the newest one: its ninth argument is not there. */
static int batch_v13000(void) { abort(); }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    *function = NULL;
    *status = 1;
    if (version > driver_version || flags)
        return INVALID_VALUE;
    if (strcmp(symbol, "cuMemcpyBatchAsync") == 0 && version >= 12080) {
        *function = version >= 13000 ? (void *)batch_v13000 : (void *)batch;
        *status = 0;
    }
    return SUCCESS;
}

int cuGetErrorName(int code, const char **text) {
    *text = code == INVALID_VALUE        ? "CUDA_ERROR_INVALID_VALUE"
            : code == OUT_OF_MEMORY      ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == INVALID_CONTEXT    ? "CUDA_ERROR_INVALID_CONTEXT"
            : code == ALREADY_REGISTERED ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
            : code == NOT_REGISTERED     ? "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
                                         : NULL;
    return *text ? SUCCESS : INVALID_VALUE;
}
#endif
