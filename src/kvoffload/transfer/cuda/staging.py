"""Block numbers for the kernels of chunks in flight, in pinned memory and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Device, Stream

_WORD = 8


class IndexRing:
    """A ring of ``size`` block numbers (int64), allocated once. What was put in first is released first."""

    def __init__(self, device: Device, size: int) -> None:
        self.nbytes = _WORD * size
        self._device = device
        self._size = size
        host = device.allocate_host(self.nbytes)
        self._host = host.view(np.int64)
        self._host_address = int(host.ctypes.data)
        self._device_address = device.allocate(self.nbytes)
        self._start = self._used = 0
        self._piece = np.empty((3, 1), dtype=np.int64)

    def put(self, arrays: Sequence[Numbers]) -> tuple[list[int], int] | None:
        """Writes block numbers one after another. Returns the address of each array on the device, and how much to
        release later; None if there is no room."""
        total = sum(map(len, arrays))
        at = (self._start + self._used) % self._size
        # The numbers of one chunk are one piece.
        skipped = self._size - at if at + total > self._size else 0
        if self._used + skipped + total > self._size:
            return None
        self._used += skipped + total
        at = (at + skipped) % self._size
        addresses = []
        for numbers in arrays:
            self._host[at : at + len(numbers)] = numbers
            addresses.append(self._device_address + _WORD * at)
            at += len(numbers)
        return addresses, skipped + total

    def copy(self, stream: Stream, address: int, total: int) -> None:
        """Enqueues the copy of ``total`` numbers to ``address`` on the device, where ``put`` has placed them."""
        source = self._host_address + address - self._device_address
        self._piece[:, 0] = address, source, _WORD * total
        self._device.copy(stream, *self._piece)

    def release(self, amount: int) -> None:
        self._start = (self._start + amount) % self._size
        self._used -= amount
        if self._used == 0:
            self._start = 0
