/* The functions of libcuda.so.1 that use streams, memory and kernels. */

#include "emulator.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ON_HOST = NEEDS_CONTEXT | UNSAFE_WHILE_CAPTURING };

int cuStreamCreate(void **out, unsigned int flags) {
    int code = enter("cuStreamCreate", NEEDS_CONTEXT);
    if (!code && flags != NON_BLOCKING)
        code = INVALID_VALUE; /* streams that wait for the default stream are not emulated */
    if (!code)
        *out = new_handle(STREAM, new_stream());
    return leave(code);
}

int cuStreamDestroy_v2(void *handle) {
    int code = enter("cuStreamDestroy_v2", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    note("destroy stream %#zx", (size_t)handle);
    if (!code && (!s || (uintptr_t)handle < 3))
        code = INVALID_HANDLE;
    if (!code)
        end_handle(handle, STREAM);
    return leave(code);
}

int cuStreamSynchronize(void *handle) {
    int code = enter("cuStreamSynchronize", ON_HOST);
    stream *s = find_object(handle, STREAM);
    if (!code && s)
        run_stream(s);
    return leave(code ? code : s ? sticky : INVALID_HANDLE);
}

int cuStreamWaitEvent(void *handle, void *event_handle, unsigned int flags) {
    int code = enter("cuStreamWaitEvent", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    event *e = find_object(event_handle, EVENT);
    if (!code && (!s || !e || flags))
        code = flags ? INVALID_VALUE : INVALID_HANDLE;
    if (!code)
        issue_wait(s, e);
    return leave_later(code);
}

int cuEventCreate(void **out, unsigned int flags) {
    int code = enter("cuEventCreate", NEEDS_CONTEXT);
    if (!code && flags & ~3u)
        code = INVALID_VALUE;
    if (!code)
        *out = new_handle(EVENT, new_event(!(flags & NO_TIMES)));
    return leave(code);
}

int cuEventDestroy_v2(void *handle) {
    int code = enter("cuEventDestroy_v2", NEEDS_CONTEXT);
    if (!code && !find_object(handle, EVENT))
        code = INVALID_HANDLE;
    if (!code)
        end_handle(handle, EVENT);
    return leave(code);
}

int cuEventRecord(void *event_handle, void *handle) {
    int code = enter("cuEventRecord", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    event *e = find_object(event_handle, EVENT);
    if (!code && (!s || !e))
        code = INVALID_HANDLE;
    if (!code)
        issue_record(s, e);
    return leave_later(code);
}

int cuEventQuery(void *handle) {
    int code = enter("cuEventQuery", ON_HOST);
    event *e = find_object(handle, EVENT);
    if (!code) {
        run_some();
        code = !e ? INVALID_HANDLE : sticky ? sticky : query_event(e);
    }
    return leave(code);
}

int cuEventSynchronize(void *handle) {
    int code = enter("cuEventSynchronize", ON_HOST);
    event *e = find_object(handle, EVENT);
    if (!code && e)
        run_event(e);
    return leave(code ? code : e ? sticky : INVALID_HANDLE);
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    int code = enter("cuEventElapsedTime", NEEDS_CONTEXT);
    event *a = find_object(from, EVENT), *b = find_object(to, EVENT);
    return leave(code ? code : a && b ? milliseconds_between(milliseconds, a, b) : INVALID_HANDLE);
}

/* Memory. */

int cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    int code = enter("cuMemAlloc_v2", ON_HOST);
    return leave(code ? code : allocate_memory(address, nbytes, DEVICE_MEMORY));
}

int cuMemFree_v2(uint64_t address) {
    int code = enter("cuMemFree_v2", ON_HOST);
    if (!code)
        run_all();
    return leave(code ? code : free_memory(address, DEVICE_MEMORY));
}

int cuMemHostAlloc(void **out, size_t nbytes, unsigned int flags) {
    int code = enter("cuMemHostAlloc", ON_HOST);
    uint64_t address = 0;
    if (!code)
        code = flags & ~7u ? INVALID_VALUE : allocate_memory(&address, nbytes, PINNED_MEMORY);
    *out = (void *)address;
    return leave(code);
}

int cuMemFreeHost(void *address) {
    int code = enter("cuMemFreeHost", ON_HOST);
    if (!code)
        run_all();
    return leave(code ? code : free_memory((uintptr_t)address, PINNED_MEMORY));
}

int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned int flags) {
    int code = enter("cuMemHostRegister_v2", ON_HOST);
    uintptr_t from = (uintptr_t)memory;
    note("register %zu flags %u", nbytes, flags);
    if (!code && !attribute_values[ATTRIBUTE_REGISTER])
        code = NOT_SUPPORTED;
    if (!code && !nbytes)
        code = INVALID_VALUE;
    if (!code && ((max_registration && nbytes > max_registration) ||
                  (max_registered && bytes_of(REGISTERED_MEMORY) + nbytes > max_registered)))
        code = OUT_OF_MEMORY;
    if (!code && overlaps_memory(from, from + nbytes))
        code = ALREADY_REGISTERED;
    if (!code)
        add_memory(from, from + nbytes, REGISTERED_MEMORY);
    return leave_later(code);
}

/* Waits for no copy: one that runs later is a fault. */
int cuMemHostUnregister(void *memory) {
    int code = enter("cuMemHostUnregister", ON_HOST);
    note("unregister");
    return leave(code ? code : remove_memory((uintptr_t)memory, REGISTERED_MEMORY) ? SUCCESS : NOT_REGISTERED);
}

/* Copies. Each side must lie in one allocation or one registration. The driver also takes memory of the host that it does
 * not know, but copies it while the caller waits: a problem here. */
static int check_copy(uint64_t target, uint64_t source, size_t nbytes) {
    if (nbytes && find_memory(target, nbytes) && find_memory(source, nbytes))
        return SUCCESS;
    problem("a copy of %zu bytes from %#llx to %#llx: %s", nbytes, (unsigned long long)source, (unsigned long long)target,
            !nbytes                       ? "no bytes"
            : find_memory(target, nbytes) ? "the source is not in one piece of memory that the driver knows"
                                          : "the target is not in one piece of memory that the driver knows");
    return INVALID_VALUE;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void *handle) {
    int code = enter("cuMemcpyAsync", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    note("copy %zu stream %#zx", nbytes, (size_t)handle);
    if (!code)
        code = s ? check_copy(target, source, nbytes) : INVALID_HANDLE;
    if (!code) {
        counts[COUNT_COPIES]++;
        issue_copies(s, &(copy_piece){target, source, nbytes}, 1);
    }
    return leave_later(code);
}

int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t nbytes) {
    int code = enter("cuMemcpyDtoH_v2", ON_HOST);
    if (!code && !find_memory(source, nbytes))
        code = INVALID_VALUE;
    if (!code) {
        run_stream(find_object(NULL, STREAM));
        memmove(target, (void *)source, nbytes);
    }
    return leave(code ? code : sticky);
}

/* Returns when the source has been read. If that is no memory of the driver's, its bytes arrive on the default stream. */
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t nbytes) {
    int code = enter("cuMemcpyHtoD_v2", ON_HOST);
    stream *s = find_object(NULL, STREAM);
    uint64_t staged;
    if (!code && !find_memory(target, nbytes))
        code = INVALID_VALUE;
    if (!code)
        run_stream(s);
    if (!code && find_memory((uintptr_t)source, nbytes))
        memmove((void *)target, source, nbytes);
    else if (!code && !(code = allocate_memory(&staged, nbytes, STAGED_MEMORY))) {
        memcpy((void *)staged, source, nbytes);
        issue_copies(s, &(copy_piece){target, staged, nbytes}, 1);
    }
    return leave_later(code ? code : sticky);
}

int cuMemsetD8Async(uint64_t target, unsigned char value, size_t nbytes, void *handle) {
    int code = enter("cuMemsetD8Async", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    if (!code)
        code = !s ? INVALID_HANDLE : find_memory(target, nbytes) ? SUCCESS : INVALID_VALUE;
    if (!code)
        issue_fill(s, target, value, nbytes);
    return leave_later(code);
}

static int check_batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, attributes *attrs, size_t *first,
                       size_t num_attrs, size_t *failed, stream *s) {
    location none = {0, 0};
    *failed = SIZE_MAX;
    if (!count || !num_attrs || num_attrs > count || first[0] != 0 || !s)
        return INVALID_VALUE;
    for (size_t i = 0; i < num_attrs; i++)
        if (attrs[i].source_order < ORDER_STREAM || attrs[i].source_order > ORDER_ANY || attrs[i].flags & ~PREFER_OVERLAP ||
            memcmp(&attrs[i].source, &none, sizeof none) || memcmp(&attrs[i].target, &none, sizeof none) ||
            (i && (first[i] <= first[i - 1] || first[i] >= count)))
            return INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if ((int)i == fail_copy || check_copy(targets[i], sources[i], sizes[i]))
            return *failed = i, INVALID_VALUE;
    return SUCCESS;
}

static int batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, attributes *attrs, size_t *first,
                 size_t num_attrs, size_t *failed, void *handle) {
    int code = enter("cuMemcpyBatchAsync", NEEDS_CONTEXT);
    note("batch %zu stream %#zx order %d flags %u", count, (size_t)handle, attrs->source_order, attrs->flags);
    *failed = SIZE_MAX;
    if (!code)
        code = check_batch(targets, sources, sizes, count, attrs, first, num_attrs, failed,
                           (uintptr_t)handle < 2 ? NULL : find_object(handle, STREAM));
    if (!code) {
        copy_piece *pieces = malloc(count * sizeof *pieces);
        for (size_t i = 0; i < count; i++)
            pieces[i] = (copy_piece){targets[i], sources[i], sizes[i]};
        issue_copies(find_object(handle, STREAM), pieces, count);
        free(pieces);
        counts[COUNT_BATCHES]++, counts[COUNT_COPIES] += count;
    }
    return leave_later(code);
}

/* The function of CUDA 13.0 has the same name and one argument fewer. */
static int batch_v13000(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, attributes *attrs, size_t *first,
                        size_t num_attrs, void *handle) {
    size_t failed;
    return batch(targets, sources, sizes, count, attrs, first, num_attrs, &failed, handle);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    int code = enter("cuGetProcAddress_v2", ANY_TIME);
    *function = NULL;
    if (status)
        *status = 1;
    if (!code && (version > driver_version || flags))
        code = INVALID_VALUE;
    if (!code && strcmp(symbol, "cuMemcpyBatchAsync") == 0 && version >= 12080) {
        *function = version >= 13000 ? (void *)batch_v13000 : (void *)batch;
        if (status)
            *status = 0;
    }
    return leave(code);
}

/* Kernels. */

int cuModuleLoadData(void **out, const void *image) {
    int code = enter("cuModuleLoadData", ON_HOST);
    module *m = code ? NULL : load_module(image, &code);
    if (!code)
        *out = new_handle(MODULE, m);
    return leave(code);
}

int cuModuleUnload(void *handle) {
    int code = enter("cuModuleUnload", ON_HOST);
    module *m = find_object(handle, MODULE);
    if (!code && !m)
        code = INVALID_HANDLE;
    if (!code) {
        run_all();
        unload_module(m);
        end_handle(handle, MODULE);
    }
    return leave(code);
}

int cuModuleGetFunction(void **out, void *handle, const char *name) {
    int code = enter("cuModuleGetFunction", NEEDS_CONTEXT);
    module *m = find_object(handle, MODULE);
    const kernel *k = m ? find_kernel(m, name) : NULL;
    if (!code)
        code = !m ? INVALID_HANDLE : !k ? NOT_FOUND : SUCCESS;
    if (!code)
        *out = new_handle(FUNCTION, (void *)k);
    return leave(code);
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void *handle, void **parameters, void **extra) {
    int code = enter("cuLaunchKernel", NEEDS_CONTEXT);
    stream *s = find_object(handle, STREAM);
    launch l = {.kernel = find_object(function, FUNCTION), .blocks = grid_x, .threads = block_x};
    if (!code && (!s || !l.kernel))
        code = INVALID_HANDLE;
    /* More dimensions and shared memory are not emulated. */
    if (!code && (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_y != 1 || block_z != 1 || shared_bytes || extra ||
                  !parameters || block_x > max_threads(l.kernel)))
        code = INVALID_VALUE;
    if (!code)
        code = read_parameters(&l, parameters);
    if (!code) {
        counts[COUNT_LAUNCHES]++;
        issue_launch(s, &l);
    }
    return leave_later(code);
}

int cuGetErrorName(int code, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
        {UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {SUCCESS, "CUDA_SUCCESS"},
    };
    *text = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code)
            *text = names[i].name;
    return *text ? SUCCESS : INVALID_VALUE;
}
