"""The contract of a device: the streams, events and memory that CudaTransfer needs, and the driver's functions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvoffload.abc import ByteArray
from kvoffload.transfer.cuda.calls import DriverCalls


class Device(ABC):
    """One device, with the pages of the page groups for which it was made.

    Addresses are virtual addresses; streams and events are the driver's handles. Memory and events live until
    ``close``, so that serving allocates nothing. Any method may raise an error of the driver; the device is not used
    after that.
    """

    @abstractmethod
    def enter_thread(self) -> None:
        """Prepares the calling thread, once, before it uses the device."""

    @abstractmethod
    def new_stream(self) -> int:
        """Returns a new stream, which runs beside the engine's. Work on one stream runs in order, work on different
        streams in any order."""

    @abstractmethod
    def engine_stream(self) -> int:
        """Returns the stream on which the engine issues its work. Called on the engine's thread."""

    @abstractmethod
    def new_event(self) -> int:
        """Returns a new event, which counts as done until it is recorded. It may be recorded again and again."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, a multiple of 256."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> ByteArray:
        """Returns new host memory, shape (nbytes,), that the device copies to and from without blocking a thread."""

    @abstractmethod
    def native_calls(self) -> DriverCalls:
        """Returns what the loop of copies calls, on the engine's thread and on threads that called ``enter_thread``."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory, streams and events. Called when no work is in progress."""
