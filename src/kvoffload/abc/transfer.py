"""The contract of a transfer, which runs copy jobs and reports how each ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvoffload.abc.types import TransferSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pages of a device block are in its row, which is its part of a slot. Other ranks may fill the rest of
    the row."""

    offsets: tuple[int, ...]
    """Of the page in each view, in bytes."""
    row_bytes: int


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of one KV cache group on this rank.

    ``views`` has one entry per layer: bytes of shape (num_device_blocks, page_bytes), as a numpy array or, for a
    transfer that reads those, as a torch tensor. Rows may be strided; bytes within a row are contiguous. A rank without
    a layer of the group has no views. ``factor`` device blocks make an offloaded block. ``placement`` None: the pages
    of a device block follow one another in its row, and nothing else is there.
    """

    views: Sequence[Any]
    factor: int = 1
    placement: Placement | None = None

    @property
    def device_block_bytes(self) -> int:
        """Bytes of one device block on this rank."""
        return sum(view.shape[1] for view in self.views)

    @property
    def row_bytes(self) -> int:
        """Bytes of one device block in a slot."""
        return self.device_block_bytes if self.placement is None else self.placement.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of an offloaded block."""
        return self.factor * self.row_bytes

    @property
    def offsets(self) -> Sequence[int]:
        """Where the page of each view begins in a row."""
        if self.placement is not None:
            return self.placement.offsets
        return list(accumulate((view.shape[1] for view in self.views), initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a job. ``nbytes`` were copied in ``seconds``; the bytes of a job that is not ``ok`` are of no use."""

    job_id: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0


class Transfer(ABC):
    """Copies between the device blocks and the host slots of one rank.

    All methods are called on the engine's worker thread. None raises for a copy that fails: its job is reported with
    ``ok=False``. Jobs of one direction start in the order of ``submit``.
    """

    @abstractmethod
    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        """Queues a job. A store reads the contents of the device blocks after all device work issued so far."""

    @abstractmethod
    def poll(self, busy: bool) -> list[TransferResult]:
        """Returns the jobs that have ended since the last call. ``busy``: the engine computes tokens in this step, so
        an implementation that copies on this thread limits how much it copies now."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        """Makes device work that is issued after this call wait until these loads have filled, and these stores have
        read, their device blocks. Loads submitted after this call wait too. Ignores unknown and ended jobs.

        Only ``device_blocks`` matter, if they are given; an implementation may wait for more."""

    @abstractmethod
    def wait_any(self, timeout_s: float) -> None:
        """Sleeps until a job has ended, at most ``timeout_s``."""

    def before_forward(self) -> None:
        """Called before the engine issues a forward pass: loads that are submitted later need not wait for it."""

    def close(self) -> None:
        """Ends copies in progress and releases memory. May be called twice."""
