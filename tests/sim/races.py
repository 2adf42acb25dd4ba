"""Memory of a simulated device, which knows of each byte who last read and wrote it, and so finds races.

A **track** is a sequence of work that runs in order: the host is track 0, each stream is another one. Work has a number
on its track and a clock: of each track, the last number that has certainly ended before this work begins. Two accesses
to a byte, of which one is a write, race if neither is covered by the clock of the other. This depends on what was
issued, and hardly on when it ran: a race is found even if the bytes happened to be right.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray

MAX_TRACKS = 10
HOST = 0
"""The track of the host. All threads of the host count as one."""
POISON = 0xA5

Integers: TypeAlias = npt.NDArray[np.int64]
Clock: TypeAlias = npt.NDArray[np.int64]
"""The last number per track that has ended, shape (MAX_TRACKS,)."""


class DeviceFault(AssertionError):
    """The device was used against its contract: an address of nothing, memory that is not registered, and so on."""


class Race(DeviceFault):
    """Two accesses to the same byte that nothing orders."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Runs of bytes: ``sizes[i]`` of them at ``starts[i]``."""

    starts: Integers
    sizes: Integers

    @classmethod
    def of(cls, starts: Sequence[int] | Integers, size: int) -> Ranges:
        """Returns one run of ``size`` bytes at each of ``starts``."""
        firsts = np.array(starts, np.int64).ravel()
        return cls(firsts, np.full(len(firsts), size, np.int64))

    @classmethod
    def none(cls) -> Ranges:
        return cls.of([], 0)

    def __add__(self, other: Ranges) -> Ranges:
        return Ranges(np.concatenate((self.starts, other.starts)), np.concatenate((self.sizes, other.sizes)))

    def overlap(self) -> bool:
        """Returns whether two of the runs share a byte."""
        order = np.argsort(self.starts, kind="stable")
        return bool((self.starts[order][1:] < (self.starts + self.sizes)[order][:-1]).any())


@dataclass(frozen=True, slots=True)
class Access:
    """Who accesses memory: work ``number`` of a track, which ``clock`` orders behind other work."""

    track: int
    number: int
    clock: Clock
    what: str
    """The work in words."""


class Region:
    """A piece of memory. ``is_fresh``: its bytes mean nothing until they are written."""

    def __init__(self, name: str, data: ByteArray, is_device: bool, is_fresh: bool) -> None:
        self.name = name
        self.start = int(data.ctypes.data)
        self.data = data.reshape(-1)
        self.is_device = is_device
        self.is_fresh = is_fresh
        self.reads = np.zeros((MAX_TRACKS, len(self.data)), np.int32)
        """Number of the last read of each byte, per track."""
        self.writes = np.zeros(self.reads.shape, np.int32)

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class Memory:
    """All memory that a device can address. The first fault is kept.

    ``finds_races`` may be switched off, to see what is found by the bytes alone.
    """

    def __init__(self) -> None:
        self.finds_races = True
        self.fault: Exception | None = None
        """The first fault."""
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._names: dict[tuple[int, int], str] = {}
        """The work that has accessed memory, by track and number."""

    def add(self, name: str, data: ByteArray, *, is_device: bool, is_fresh: bool = False) -> Region:
        """Adds contiguous memory."""
        region = Region(name, data, is_device, is_fresh)
        at = bisect.bisect(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)
        return region

    def complain(self, fault: Exception) -> None:
        """Notes a fault, which need not be raised where it is found: that may be within a call of someone else."""
        if self.fault is None:
            self.fault = fault

    def check(self) -> None:
        """Raises the first fault, if there is one."""
        if self.fault is not None:
            raise self.fault

    def find(self, address: int, nbytes: int) -> tuple[Region, int] | None:
        """Returns the region that has these bytes and their offset in it, or None if there is no such region."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0 or address + nbytes > self._regions[at].end:
            return None
        return self._regions[at], address - self._regions[at].start

    def view(self, address: int, nbytes: int) -> ByteArray:
        """Returns the bytes at an address."""
        found = self.find(address, nbytes)
        if found is None:
            fault = DeviceFault(f"there are no {nbytes} bytes at {address:#x}")
            self.complain(fault)
            raise fault
        region, offset = found
        return region.data[offset : offset + nbytes]

    def access(self, who: Access, reads: Ranges, writes: Ranges) -> None:
        """Notes that ``who`` reads and writes these bytes, and complains if that races with an earlier access. Accesses
        must come in an order that the clocks allow."""
        if writes.overlap():
            self.complain(DeviceFault(f"{who.what} writes some bytes twice"))
        self._names[who.track, who.number] = who.what
        for ranges, is_write in ((reads, False), (writes, True)):
            for region, at in self._split(ranges, who.what):
                if self.finds_races:
                    self._compare(who, region, at, is_write)
                if not is_write and region.is_fresh and not region.writes[:, at].any(axis=0).all():
                    self.complain(DeviceFault(f"{who.what} reads bytes of {region.name} that were never written"))
                (region.writes if is_write else region.reads)[who.track, at] = who.number

    def _split(self, ranges: Ranges, what: str) -> list[tuple[Region, Integers]]:
        """Returns the offsets of all bytes, region by region."""
        if not len(ranges.starts):
            return []
        owners = np.searchsorted(np.array(self._starts, np.int64), ranges.starts, side="right") - 1
        parts = []
        for owner in np.unique(owners).tolist():
            region, here = self._regions[owner], owners == owner
            starts, sizes = ranges.starts[here] - region.start, ranges.sizes[here]
            if owner < 0 or (starts + sizes).max() > len(region.data):
                self.complain(DeviceFault(f"{what} accesses memory that does not exist"))
                continue
            parts.append((region, _spread(starts, sizes)))
        return parts

    def _compare(self, who: Access, region: Region, at: Integers, is_write: bool) -> None:
        others = (region.writes, region.reads) if is_write else (region.writes,)
        for table in others:
            last = table[:, at]
            unordered = last > who.clock[:, None]
            unordered[who.track] = False
            if unordered.any():
                track, byte = (int(each[0]) for each in np.nonzero(unordered))
                other = self._names.get((track, int(last[track, byte])), "the host")
                verbs = "writes" if is_write else "reads", "written" if table is region.writes else "read"
                place = f"byte {at[byte]} of {region.name}"
                self.complain(Race(f"{who.what} {verbs[0]} {place}, which {other} has {verbs[1]}: nothing orders them"))


def _spread(starts: Integers, sizes: Integers) -> Integers:
    """Returns the offsets of all bytes of these runs."""
    first = int(sizes[0])
    if (sizes == first).all():
        each: Integers = np.add.outer(starts, np.arange(first)).ravel()
        return each
    ends: Integers = np.cumsum(sizes)
    offsets: Integers = np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)
    return offsets
