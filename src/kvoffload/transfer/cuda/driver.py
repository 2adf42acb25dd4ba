"""Functions of the CUDA driver that torch does not offer, called with ctypes: batched copies, registered host memory,
device memory of our own, the capture mode of threads, and the NUMA node of a device.

Every call releases the interpreter's lock, so that the engine's thread runs while the driver works. Errors of these
calls are returned, not kept: unlike those of the CUDA runtime, they do not show up again at the engine's next call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.transfer.cuda.device import Addresses

LIBRARY = "libcuda.so.1"

MAX_COPIES_PER_CALL = 1024
"""A batch of more copies is submitted in several calls. Drivers are reported to crash on batches of 50,000 copies."""

BATCH_VERSION = 12080
"""The CUDA version whose cuMemcpyBatchAsync is called. That of 13.0 has the same name and one argument fewer."""

SYSFS_DEVICES = Path("/sys/bus/pci/devices")

_SUCCESS = 0
_REGISTER_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
_ORDER_STREAM = 1
_PREFER_OVERLAP = 1
_LEGACY_STREAMS = (0, 1)
"""Handles of the default stream, on which the driver refuses batches."""
_NO_COPY = ctypes.c_size_t(-1).value
"""What the driver reports if an error does not belong to one copy of a batch."""

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuStreamCreate": (_POINTER, ctypes.c_uint),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _POINTER, _INT, ctypes.c_uint64, _POINTER),
}
_Batch = ctypes.CFUNCTYPE(_INT, *[_POINTER] * 3, _SIZE, *[_POINTER] * 2, _SIZE, *[_POINTER] * 2)
"""targets, sources, sizes, count; attributes, first copy of each, number of attributes; failed copy, stream"""


class _Location(ctypes.Structure):
    """CUmemLocation. All zero is no location; CUDA ignores it for memory that it has allocated or registered."""

    _fields_ = [("type", _INT), ("id", _INT)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the same for all copies of a batch."""

    _fields_ = [
        ("source_order", _INT),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. ``code`` is the driver's number of the error."""

    def __init__(self, what: str, name: str, code: int) -> None:
        super().__init__(f"{what} failed: {name} ({code})")
        self.code = code


class Driver:
    """The CUDA driver, for the device with number ``device`` among those that this process sees.

    Holds the device's primary context, which torch uses too, until ``close``. A thread calls ``enter_thread`` before
    anything else; the thread that makes the object needs that only if it has not used the device yet. Calls raise
    DriverError.
    """

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"the CUDA driver {library} cannot be loaded: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, _INT
        self._call("cuInit", 0)
        number = _INT()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._number = number.value
        context = _POINTER()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._number)
        self._context = context.value
        self._is_closed = False
        self._batch = self._find_batch()

    @property
    def copies_in_batches(self) -> bool:
        """Whether the driver has cuMemcpyBatchAsync (CUDA 12.8 and later)."""
        return self._batch is not None

    def enter_thread(self) -> None:
        """Makes the device's context current in the calling thread, and lets the thread call the driver while another
        thread captures a CUDA graph."""
        self._call("cuCtxSetCurrent", self._context)
        mode = _INT(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def new_stream(self) -> int:
        """Returns the handle of a new stream, which does not wait for the default stream."""
        stream = _POINTER()
        self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """Ends a stream from ``new_stream``, whose work has ended."""
        self._call("cuStreamDestroy_v2", stream)

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Enqueues copies of ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]``, in any order.

        The stream must not be the default stream. No copy may span two registrations of host memory.
        """
        if stream in _LEGACY_STREAMS:
            raise ValueError("copies cannot be issued on the default stream")
        arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in (targets, sources, sizes)]
        if len({each.shape for each in arrays}) > 1 or arrays[0].ndim != 1:
            raise ValueError(f"targets, sources and sizes have the shapes {[each.shape for each in arrays]}")
        if self._batch is None:
            for target, source, size in zip(*(each.tolist() for each in arrays), strict=True):
                self._call("cuMemcpyAsync", target, source, size, stream)
            return
        for first in range(0, len(arrays[0]), MAX_COPIES_PER_CALL):
            self._copy_batch(stream, *(each[first : first + MAX_COPIES_PER_CALL] for each in arrays))

    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, which torch knows nothing of."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Frees memory from ``allocate``. Waits until the device is idle."""
        self._call("cuMemFree_v2", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory, which devices then copy to and from directly. Takes about 0.1 s per GB."""
        self._call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Undoes ``register`` of the memory that begins at ``address``. Waits for no copy that still runs."""
        self._call("cuMemHostUnregister", address)

    def numa_node(self, sysfs: Path = SYSFS_DEVICES) -> int | None:
        """Returns the NUMA node to which the device is attached, or None if the machine does not say."""
        name = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", name, len(name), self._number)
        try:
            node = int((sysfs / name.value.decode().lower() / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def close(self) -> None:
        """Gives the device's context back, which lives on if torch uses it. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._call("cuDevicePrimaryCtxRelease_v2", self._number)

    def _find_batch(self) -> Any:
        """Returns cuMemcpyBatchAsync with the arguments of CUDA 12.8, or None if the driver is older."""
        if not hasattr(self._library, "cuGetProcAddress_v2"):
            return None
        address, status = _POINTER(), _INT()
        code = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_VERSION, 0, ctypes.byref(status)
        )
        return _Batch(address.value) if code == _SUCCESS and address.value else None

    def _copy_batch(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        attributes = _Attributes(source_order=_ORDER_STREAM, flags=_PREFER_OVERLAP)
        first, failed = _SIZE(0), _SIZE(_NO_COPY)
        code = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code != _SUCCESS:
            what, at = f"cuMemcpyBatchAsync of {len(sizes)} copies", failed.value
            if at < len(sizes):
                what += f" at copy {at} ({sizes[at]} bytes from {sources[at]:#x} to {targets[at]:#x})"
            raise DriverError(what, self._name(code), code)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise RuntimeError(f"the CUDA driver has no function {name}: update the driver to CUDA 12 or later")
        code = function(*arguments)
        if code != _SUCCESS:
            raise DriverError(name, self._name(code), code)

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) != _SUCCESS or text.value is None:
            return "unknown error"
        return text.value.decode()
