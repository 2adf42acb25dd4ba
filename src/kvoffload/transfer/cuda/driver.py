"""Functions of the CUDA driver, called with ctypes.

Calls release the interpreter's lock, so that the engine's thread runs while the driver works. Errors of these calls are
returned, not kept: unlike those of the CUDA runtime, they do not show up again at the engine's next call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"

BATCH_VERSION = 12080
"""The CUDA version whose cuMemcpyBatchAsync is called. That of 13.0 has the same name and one argument fewer."""

SYSFS_DEVICES = Path("/sys/bus/pci/devices")
MODULE_VERSION = Path("/sys/module/nvidia/version")

CAN_USE_HOST_POINTERS, CAN_REGISTER = 91, 99
"""Attributes of a device: it copies registered memory by the addresses of the host; host memory can be registered."""

NOT_READY = 600
"""The answer of the driver for an event that is not reached, among its errors."""

_SUCCESS = 0
_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2

_POINTER, _SIZE, _INT, _UINT, _ADDRESS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventElapsedTime": (_POINTER, _POINTER, _POINTER),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyDtoH_v2": (_POINTER, _ADDRESS, _SIZE),
    "cuMemcpyHtoD_v2": (_ADDRESS, _POINTER, _SIZE),
    "cuModuleLoadData": (_POINTER, ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _POINTER, _INT, _ADDRESS, _POINTER),
}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. ``code`` is the driver's number of the error."""

    def __init__(self, what: str, name: str, code: int) -> None:
        super().__init__(f"{what} failed: {name} ({code})")
        self.code = code


class Driver:
    """The CUDA driver, for the device with number ``device`` among those that this process sees.

    A thread calls ``enter_thread``, or ``use_context`` on the engine's thread, before it calls anything but
    ``attribute``, ``version`` and ``numa_node``. The first of these calls retains the device's primary context, which
    torch uses too, until ``close``: a process that never makes one creates no context on the device. Calls raise
    DriverError.
    """

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"the CUDA driver {library} cannot be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, _INT
                self._functions[name] = function
        self._call("cuInit", 0)
        number = _INT()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._number = number.value
        self._context: int | None = None
        self.batch_address = self._find_batch()
        """The address of cuMemcpyBatchAsync with the arguments of CUDA 12.8. 0: copies are issued one by one, because
        the driver is older, or ``stop_batches`` was called."""

    # The device.

    @property
    def version(self) -> str:
        """The version of CUDA that the driver has, such as "12.8", and that of its kernel module if that is known."""
        number = _INT()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        text = f"{number.value // 1000}.{number.value % 1000 // 10}"
        try:
            return f"{text} (driver {MODULE_VERSION.read_text().strip()})"
        except OSError:
            return text

    def attribute(self, which: int) -> int:
        value = _INT()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._number)
        return value.value

    @property
    def copies_registered_memory(self) -> bool:
        """Whether the device copies to and from registered host memory by the addresses of the host. It does not under
        WSL2, where such a copy ends the context."""
        return bool(self.attribute(CAN_REGISTER) and self.attribute(CAN_USE_HOST_POINTERS))

    def numa_node(self, sysfs: Path = SYSFS_DEVICES) -> int | None:
        """Returns the NUMA node to which the device is attached, or None if the machine does not say."""
        name = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", name, len(name), self._number)
        try:
            node = int((sysfs / name.value.decode().lower() / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # The context.

    def enter_thread(self) -> None:
        """Makes the device's context current in the calling thread, and lets the thread call the driver while another
        thread captures a CUDA graph."""
        self._retain()
        self._call("cuCtxSetCurrent", self._context)
        mode = _INT(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def use_context(self) -> None:
        """Makes the device's context current in the calling thread unless the thread has one."""
        self._retain()
        current = _POINTER()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value is None:
            self._call("cuCtxSetCurrent", self._context)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Makes the device's context current in the calling thread in the ``with`` statement, whichever it had."""
        self._retain()
        before = _POINTER()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        if before.value == self._context:
            yield
            return
        self._call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before)

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Gives the device's context back, which lives on if torch uses it. May be called twice."""
        if self._context is not None:
            self._context = None
            self._call("cuDevicePrimaryCtxRelease_v2", self._number)

    def _retain(self) -> None:
        if self._context is None:
            context = _POINTER()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._number)
            self._context = context.value

    # Streams and events. All are handles.

    def new_stream(self) -> int:
        """Returns a new stream, which does not wait for the default stream."""
        return self._new("cuStreamCreate", _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Ends a stream from ``new_stream``, whose work has ended."""
        self._call("cuStreamDestroy_v2", stream)

    def new_event(self) -> int:
        """Returns a new event with a time, which counts as reached until it is recorded."""
        return self._new("cuEventCreate", 0)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    # Memory.

    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, which torch knows nothing of."""
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Frees memory from ``allocate``. Waits until the device is idle."""
        self._call("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """Returns the address of new page-locked host memory, which every device can copy to and from."""
        return self._new("cuMemHostAlloc", nbytes, _PORTABLE)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory, which devices then copy to and from directly. Takes about 0.1 s per GB."""
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Undoes ``register`` of the memory that begins at ``address``. Waits for no copy that still runs."""
        self._call("cuMemHostUnregister", address)

    # Copies.

    @property
    def copies_in_batches(self) -> bool:
        return self.batch_address != 0

    def stop_batches(self) -> None:
        """Issues copies one by one from now on."""
        self.batch_address = 0

    def read(self, address: int, into: int, nbytes: int) -> None:
        """Copies device memory to host memory of any kind, and waits for that."""
        self._call("cuMemcpyDtoH_v2", into, address, nbytes)

    def write(self, address: int, source: int, nbytes: int) -> None:
        """Copies host memory of any kind to device memory, and waits for that."""
        self._call("cuMemcpyHtoD_v2", address, source, nbytes)
        # The call returns when the driver has read memory that is not page-locked, maybe before its bytes have arrived.
        self.synchronize()

    # Kernels.

    def load_module(self, code: bytes) -> int:
        """Compiles PTX for the device, and returns the module."""
        return self._new("cuModuleLoadData", code)

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return self._new("cuModuleGetFunction", module, name.encode())

    def address_of(self, name: str) -> int:
        """Returns the address of a function, for native code."""
        return int(ctypes.cast(self._function(name), _POINTER).value or 0)

    def _find_batch(self) -> int:
        find = self._functions.get("cuGetProcAddress_v2")
        if find is None:
            return 0
        address, status = _POINTER(), _INT()
        code = find(b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_VERSION, 0, ctypes.byref(status))
        return int(address.value or 0) if code == _SUCCESS else 0

    def _new(self, function: str, *arguments: Any) -> int:
        """Calls a function that returns a handle through its first argument."""
        handle = _POINTER()
        self._call(function, ctypes.byref(handle), *arguments)
        return int(handle.value or 0)

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            raise RuntimeError(f"the CUDA driver has no function {name}: update the driver to CUDA 12 or later")
        return self._functions[name]

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._function(name)(*arguments)
        if code != _SUCCESS:
            raise DriverError(name, self._name(code), code)

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._functions["cuGetErrorName"](code, ctypes.byref(text)) != _SUCCESS or text.value is None:
            return "unknown error"
        return text.value.decode()
