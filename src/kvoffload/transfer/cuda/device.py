"""The contract of a device: the streams, events, memory and copies that CudaTransfer needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.calls import DriverCalls

Stream: TypeAlias = Any
"""A queue of work on the device. Work on one stream runs in order, work on different streams in any order."""
Event: TypeAlias = Any
"""A point in a stream. It may be recorded again, which forgets the former point."""
Addresses: TypeAlias = npt.NDArray[np.int64]
"""Virtual addresses or numbers of bytes, one-dimensional."""


class Device(ABC):
    """One device, with the pages of the page groups for which it was made. Addresses are virtual addresses.

    ``copy``, ``gather``, ``scatter``, ``record`` and ``wait`` enqueue work and return; they may be called on the
    engine's thread and on threads that have called ``enter_thread``. Memory and events live until ``close``,
    so that serving allocates nothing. Any method may raise an error of the driver; the device is not used after that.
    """

    @abstractmethod
    def enter_thread(self) -> None:
        """Prepares the calling thread, once, before it uses the device."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Returns a new stream, which runs beside the engine's."""

    @abstractmethod
    def engine_stream(self) -> Stream:
        """Returns the stream on which the engine issues its work. Called on the engine's thread."""

    @abstractmethod
    def new_event(self) -> Event:
        """Returns a new event, which counts as done until it is recorded."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Makes ``event`` the end of the work that has been issued on ``stream`` so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Makes work issued on ``stream`` after this call wait for ``event`` as recorded now. The calling thread does
        not wait."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Returns whether the device has reached ``event``."""

    @abstractmethod
    def seconds_between(self, start: Event, end: Event) -> float:
        """Returns the time between two events that the device has reached."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, a multiple of 256."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> ByteArray:
        """Returns new host memory, shape (nbytes,), that the device copies to and from without blocking a thread."""

    @abstractmethod
    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Enqueues copies of ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]``: all from the device to the host,
        or all from the host to the device. Host memory must be registered or come from ``allocate_host``. The copies
        may run in any order. The arrays may be changed after the call."""

    def can_gather(self, group: int) -> bool:
        """Returns whether ``gather`` and ``scatter`` work for a group. If not, its blocks are copied run by run."""
        return True

    @abstractmethod
    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        """Enqueues copies of device blocks of a group into consecutive rows at ``staging``, a multiple of 16, one block
        per row: its pages where a slot has them, which fill the row. ``blocks`` are the numbers of the device blocks,
        which may be changed after the call."""

    @abstractmethod
    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        """Enqueues the copies of ``gather`` in the other direction. The block numbers are distinct."""

    def native_calls(self) -> DriverCalls | None:
        """Returns what the native loop of copies calls. Streams and events are handles of the driver then. None: copies
        are issued by calls of this class, in Python."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Frees memory, streams and events. Called when no work is in progress."""
