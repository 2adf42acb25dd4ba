"""The contract of a transfer, which runs copy jobs and reports how each ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.abc.types import (
    TransferSpec,
)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of one KV cache group on this rank.

    ``views`` has one entry a layer, bytes of shape (num_device_blocks, page_bytes): numpy arrays, or torch tensors for
    a transfer that reads those. Rows may be strided, bytes within a row are contiguous. A rank
    that holds no layer of the group has no views. ``factor`` device blocks make an offloaded block.
    """

    views: Sequence[Any]
    factor: int = 1

    @property
    def device_block_bytes(self) -> int:
        return sum(view.shape[1] for view in self.views)

    @property
    def block_bytes(self) -> int:
        return self.factor * self.device_block_bytes


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One ended job. ``nbytes`` were copied in ``seconds``; a job that is not ``ok`` copied nothing of use."""

    job_id: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0


class Transfer(ABC):
    """Copies between the device blocks and the host slots of one rank.

    Called from the engine's worker thread only. No method raises for a copy that failed: the job is
    reported with ``ok=False``. Jobs of one direction start in the order they were submitted.
    """

    @abstractmethod
    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        """Queues a job. A store reads what the device blocks hold after the work issued so far."""

    @abstractmethod
    def poll(self, busy: bool) -> list[TransferResult]:
        """Jobs that ended since the last call. ``busy``: the engine computes tokens in this step, so an
        implementation that copies on this thread bounds what it does now."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """On return, device work issued from now on sees these jobs done. Unknown or ended ones are
        ignored."""

    @abstractmethod
    def wait_any(self, timeout_s: float) -> None:
        """Gives the processor away until a job has ended, at most ``timeout_s``."""

    def before_forward(self) -> None:
        """The engine is about to issue a forward pass; loads submitted after it need not wait for that."""

    def close(self) -> None:
        """Ends what is under way and lets go of memory. May be called twice."""
