"""A CUDA device, with torch's streams, events and memory, the driver's batched copies, and kernels of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvoffload.abc import ByteArray, PageGroup
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.driver import LIBRARY, Driver
from kvoffload.transfer.cuda.kernels import BlockCopier, copiers

ALIGNMENT = 256


class TorchDevice(Device):
    """The CUDA device that holds the views of ``groups``, torch tensors of bytes.

    Made on the engine's thread before the cache is in use, because kernels are compiled and tried on its pages.
    ``driver`` may also be used to register host memory, also after ``close``.
    """

    def __init__(self, groups: Sequence[PageGroup], library: str = LIBRARY) -> None:
        self._device: torch.device = next(view for group in groups for view in group.views).device
        self.driver = Driver(self._device.index or 0, library)
        self._memory: dict[int, torch.Tensor] = {}
        self._host: list[torch.Tensor] = []
        """Tensors that own what was allocated."""
        self._copiers = copiers(groups, self._tensor_at)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self.driver.enter_thread()

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

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
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Torch may hand out memory that work on the current stream still uses; other streams do not wait for that.
        torch.cuda.current_stream(self._device).synchronize()
        address = int(memory.data_ptr())
        if address % ALIGNMENT:
            raise RuntimeError(f"torch allocated device memory at {address:#x}, which is not a multiple of {ALIGNMENT}")
        self._memory[address] = memory
        return address

    def allocate_host(self, nbytes: int) -> ByteArray:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._host.append(memory)
        array: ByteArray = memory.numpy()
        return array

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self.driver.copy(stream.cuda_stream, targets, sources, sizes)

    def gather(self, stream: Stream, group: int, index: int, num_blocks: int, staging: int) -> None:
        with torch.cuda.stream(stream):
            self._copier(group).copy(index, num_blocks, staging, to_staging=True)

    def scatter(self, stream: Stream, group: int, index: int, num_blocks: int, staging: int) -> None:
        with torch.cuda.stream(stream):
            self._copier(group).copy(index, num_blocks, staging, to_staging=False)

    def close(self) -> None:
        self._memory.clear()
        self._host.clear()

    def _copier(self, group: int) -> BlockCopier:
        copier = self._copiers[group]
        if copier is None:
            raise ValueError(f"group {group} has no pages on this rank")
        return copier

    def _tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns allocated device memory as a tensor of bytes."""
        for start, memory in self._memory.items():
            if start <= address and address + nbytes <= start + memory.numel():
                return memory[address - start : address - start + nbytes]
        raise ValueError(f"{nbytes} bytes at {address:#x} are not in memory that this device has allocated")
