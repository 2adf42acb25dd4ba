/* Compares the emulator's declarations with NVIDIA's cuda.h. Compiled with -Werror=incompatible-pointer-types: the
 * functions take and return what those of driver.c and calls.c do. */

#include <cuda.h>
#include <cudaTypedefs.h>
#include "emulator.h"

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(sizeof(location), sizeof(CUmemLocation));
SAME(sizeof(attributes), sizeof(CUmemcpyAttributes));
SAME(offsetof(attributes, source_order), offsetof(CUmemcpyAttributes, srcAccessOrder));
SAME(offsetof(attributes, source), offsetof(CUmemcpyAttributes, srcLocHint));
SAME(offsetof(attributes, target), offsetof(CUmemcpyAttributes, dstLocHint));
SAME(offsetof(attributes, flags), offsetof(CUmemcpyAttributes, flags));
SAME(ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(ORDER_ANY, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
SAME(PREFER_OVERLAP, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
SAME(PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(NO_TIMES, CU_EVENT_DISABLE_TIMING);
SAME(RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(ATTRIBUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(ATTRIBUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(ATTRIBUTE_HOST_POINTERS, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(ATTRIBUTE_REGISTER, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(16, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(20, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
SAME(41, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(NO_BINARY, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(INVALID_PTX, CUDA_ERROR_INVALID_PTX);
SAME(UNSUPPORTED_PTX_VERSION, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(NOT_READY, CUDA_ERROR_NOT_READY);
SAME(ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(sizeof(CUdevice), sizeof(int));
SAME(sizeof(CUdeviceptr), 8);
SAME(sizeof(CUresult), sizeof(int));

CUresult batch(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream);
PFN_cuMemcpyBatchAsync_v12080 batch_of_12_8 = batch;
CUresult (*init)(unsigned int) = cuInit;
CUresult (*version)(int *) = cuDriverGetVersion;
CUresult (*get_device)(CUdevice *, int) = cuDeviceGet;
CUresult (*get_attribute)(int *, CUdevice_attribute, CUdevice) = cuDeviceGetAttribute;
CUresult (*bus_id)(char *, int, CUdevice) = cuDeviceGetPCIBusId;
CUresult (*retain)(CUcontext *, CUdevice) = cuDevicePrimaryCtxRetain;
CUresult (*release)(CUdevice) = cuDevicePrimaryCtxRelease;
CUresult (*get_current)(CUcontext *) = cuCtxGetCurrent;
CUresult (*set_current)(CUcontext) = cuCtxSetCurrent;
CUresult (*synchronize)(void) = cuCtxSynchronize;
CUresult (*exchange)(CUstreamCaptureMode *) = cuThreadExchangeStreamCaptureMode;
CUresult (*create_stream)(CUstream *, unsigned int) = cuStreamCreate;
CUresult (*destroy_stream)(CUstream) = cuStreamDestroy;
CUresult (*synchronize_stream)(CUstream) = cuStreamSynchronize;
CUresult (*wait_event)(CUstream, CUevent, unsigned int) = cuStreamWaitEvent;
CUresult (*create_event)(CUevent *, unsigned int) = cuEventCreate;
CUresult (*destroy_event)(CUevent) = cuEventDestroy;
CUresult (*record_event)(CUevent, CUstream) = cuEventRecord;
CUresult (*query)(CUevent) = cuEventQuery;
CUresult (*elapsed)(float *, CUevent, CUevent) = cuEventElapsedTime;
CUresult (*allocate)(CUdeviceptr *, size_t) = cuMemAlloc;
CUresult (*release_memory)(CUdeviceptr) = cuMemFree;
CUresult (*allocate_host)(void **, size_t, unsigned int) = cuMemHostAlloc;
CUresult (*release_host)(void *) = cuMemFreeHost;
CUresult (*host_register)(void *, size_t, unsigned int) = cuMemHostRegister;
CUresult (*host_unregister)(void *) = cuMemHostUnregister;
CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = cuMemcpyAsync;
CUresult (*copy_to_host)(void *, CUdeviceptr, size_t) = cuMemcpyDtoH;
CUresult (*copy_to_device)(CUdeviceptr, const void *, size_t) = cuMemcpyHtoD;
CUresult (*fill)(CUdeviceptr, unsigned char, size_t, CUstream) = cuMemsetD8Async;
CUresult (*load)(CUmodule *, const void *) = cuModuleLoadData;
CUresult (*unload)(CUmodule) = cuModuleUnload;
CUresult (*function)(CUfunction *, CUmodule, const char *) = cuModuleGetFunction;
CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **,
                          void **) = cuLaunchKernel;
CUresult (*address)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = cuGetProcAddress;
CUresult (*error_name)(CUresult, const char **) = cuGetErrorName;

#define STRING(name) #name
#define IS_NAMED(name, symbol) _Static_assert(__builtin_strcmp(STRING(name), symbol) == 0, symbol)
IS_NAMED(cuMemHostRegister, "cuMemHostRegister_v2");
IS_NAMED(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
IS_NAMED(cuMemAlloc, "cuMemAlloc_v2");
IS_NAMED(cuMemFree, "cuMemFree_v2");
IS_NAMED(cuMemcpyDtoH, "cuMemcpyDtoH_v2");
IS_NAMED(cuMemcpyHtoD, "cuMemcpyHtoD_v2");
IS_NAMED(cuStreamCreate, "cuStreamCreate");
IS_NAMED(cuStreamDestroy, "cuStreamDestroy_v2");
IS_NAMED(cuStreamWaitEvent, "cuStreamWaitEvent");
IS_NAMED(cuEventDestroy, "cuEventDestroy_v2");
IS_NAMED(cuGetProcAddress, "cuGetProcAddress_v2");
IS_NAMED(cuMemcpyAsync, "cuMemcpyAsync");
