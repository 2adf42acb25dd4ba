"""A CUDA device, with torch's streams and events, the driver's memory and batched copies, and kernels of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from kvoffload.abc import ByteArray, PageGroup
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.driver import LIBRARY, Driver, DriverError
from kvoffload.transfer.cuda.kernels import BlockCopier, copiers

logger = logging.getLogger(__name__)

INDEX_BYTES = 8 << 20


class TorchDevice(Device):
    """The CUDA device that holds the views of ``groups``, torch tensors of bytes.

    Made on the engine's thread before the cache is in use, because kernels are compiled and tried on its pages. The
    pool is registered with another ``Driver``, because this one ends with ``close``.

    Device memory comes from the driver. Torch's may belong to a pool of the engine, which loses its contents when the
    engine sleeps, and work on other streams may still use it. The streams come from the driver too: torch hands out the
    same 32 again and again, so one of its own could be a stream on which the engine works or captures a CUDA graph.
    """

    def __init__(self, groups: Sequence[PageGroup], library: str = LIBRARY) -> None:
        self._device: torch.device = next(view for group in groups for view in group.views).device
        self._driver = Driver(self._device.index or 0, library)
        self._memory: dict[int, int] = {}
        """Sizes of allocations by address."""
        self._streams: list[int] = []
        self._host: list[torch.Tensor] = []
        """Tensors that own pinned memory."""
        self._index = self._index_used = 0
        self._numbers: ByteArray = np.empty(0, np.uint8)
        self._copiers = copiers(groups, self.allocate, self._tensor_at)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._driver.enter_thread()

    def new_stream(self) -> Stream:
        self._streams.append(self._driver.new_stream())
        return torch.cuda.ExternalStream(self._streams[-1], self._device)

    def engine_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new_event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def seconds_between(self, start: Event, end: Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def allocate(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self._memory[address] = nbytes
        return address

    def allocate_host(self, nbytes: int) -> ByteArray:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._host.append(memory)
        array: ByteArray = memory.numpy()
        return array

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._driver.copy(stream.cuda_stream, targets, sources, sizes)

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        with torch.cuda.stream(stream):
            self._move(stream, group, blocks, staging, to_staging=True)

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        with torch.cuda.stream(stream):
            self._move(stream, group, blocks, staging, to_staging=False)

    def close(self) -> None:
        try:
            while self._memory:
                self._driver.free(self._memory.popitem()[0])
            while self._streams:
                self._driver.destroy_stream(self._streams.pop())
            self._driver.close()
        except DriverError:
            # A device that has failed frees nothing any more.
            logger.exception("kvoffload: memory of the device could not be freed")
        self._host.clear()

    def _move(self, stream: Stream, group: int, blocks: Numbers, staging: int, to_staging: bool) -> None:
        copier, nbytes = self._copier(group), 8 * len(blocks)
        # Far more block numbers than are in flight.
        if not self._index:
            self._index, self._numbers = self.allocate(INDEX_BYTES), self.allocate_host(INDEX_BYTES)
        at = self._index_used if self._index_used + nbytes <= INDEX_BYTES else 0
        self._index_used = at + nbytes
        self._numbers[at : at + nbytes] = np.ascontiguousarray(blocks, np.int64).view(np.uint8)
        piece = (self._index + at, int(self._numbers.ctypes.data) + at, nbytes)
        self.copy(stream, *(np.array([each]) for each in piece))
        copier.copy(self._index + at, len(blocks), staging, to_staging)

    def _copier(self, group: int) -> BlockCopier:
        copier = self._copiers[group]
        if copier is None:
            raise ValueError(f"group {group} has no pages on this rank")
        return copier

    def _tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        if not any(start <= address and address + nbytes <= start + size for start, size in self._memory.items()):
            raise ValueError(f"{nbytes} bytes at {address:#x} are not in memory that this device has allocated")
        return tensor_of(address, nbytes, self._device)


class _Memory:
    """Device memory for ``torch.as_tensor``, which takes it as it is, without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_of(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns memory of ``device`` as a tensor of bytes, which does not own it."""
    return torch.as_tensor(_Memory(address, nbytes), device=device)
