"""The contract of a transfer engine: it runs copy jobs and tells which ended how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.base import Slots, TransferSpec


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


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """What a job copies in one group: device block i to or from part ``parts[i]`` of slot ``slots[i]``,
    in units of device blocks. All of equal length."""

    group: int
    device_blocks: npt.NDArray[np.int64]
    slots: Slots
    parts: npt.NDArray[np.int64]


def copy_lists(spec: TransferSpec, groups: Sequence[PageGroup], num_slots: int) -> list[CopyList]:
    """The copies of a job, group by group; groups that copy nothing are left out.

    A slot holds ``factor`` device blocks; the first device block of a group may lie inside its first slot.
    Raises ValueError if the two sides of the spec do not match, or if a block or slot does not exist.
    """
    device, slots = spec.device, spec.host.slots
    if not len(device.group_sizes) == len(device.block_indices) == len(groups):
        raise ValueError(f"a job for {len(device.group_sizes)} groups, where there are {len(groups)}")
    if sum(device.group_sizes) != len(device.block_ids):
        raise ValueError(f"groups of {device.group_sizes} device blocks, where there are {len(device.block_ids)}")
    lists = []
    at = slot_at = 0
    for g, (size, first, group) in enumerate(zip(device.group_sizes, device.block_indices, groups, strict=True)):
        if not size:
            continue
        place = first % group.factor + np.arange(size)
        num_group_slots = int(place[-1]) // group.factor + 1
        here = slots[slot_at : slot_at + num_group_slots]
        if len(here) != num_group_slots:
            raise ValueError(f"{size} device blocks from index {first} do not fill {len(here)} slots")
        blocks = device.block_ids[at : at + size]
        at += size
        slot_at += num_group_slots
        if not group.views:
            continue
        for name, index, end in (("device block", blocks, group.views[0].shape[0]), ("slot", here, num_slots)):
            if not (index.min() >= 0 and index.max() < end):
                raise ValueError(f"a {name} of group {g} is not in [0, {end})")
        lists.append(CopyList(g, blocks, here[place // group.factor], place % group.factor))
    if slot_at != len(slots):
        raise ValueError(f"{len(slots)} slots, of which the device blocks fill {slot_at}")
    return lists


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
