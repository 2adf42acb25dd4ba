"""Turns the spec of a transfer into the device blocks and slots to copy, where the KV cache is in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import PageGroup, Slots, TransferSpec

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """What a job copies in one group: ``device_blocks[i]`` to or from part ``parts[i]`` of slot ``slots[i]``."""

    group: int
    device_blocks: Numbers
    slots: Slots
    parts: Numbers


def copy_lists(spec: TransferSpec, groups: Sequence[PageGroup], num_slots: int) -> list[CopyList]:
    """Returns the copies of one job, group by group; groups that copy nothing are left out.

    A slot holds ``factor`` device blocks; the first device block of a group may lie inside its first slot.
    Raises ValueError if the two sides of the spec do not match, or if a block or slot does not exist.
    """
    device, slots = spec.device, spec.host.slots
    if not len(device.group_sizes) == len(device.block_indices) == len(groups):
        raise ValueError(f"the job is for {len(device.group_sizes)} groups, but there are {len(groups)}")
    if sum(device.group_sizes) != len(device.block_ids):
        raise ValueError(f"the groups have {device.group_sizes} device blocks, but {len(device.block_ids)} are given")
    lists = []
    at = slot_at = 0
    for g, (size, first, group) in enumerate(zip(device.group_sizes, device.block_indices, groups, strict=True)):
        if not size:
            continue
        place = first % group.factor
        num_group_slots = (place + size - 1) // group.factor + 1
        here = slots[slot_at : slot_at + num_group_slots]
        if len(here) != num_group_slots:
            raise ValueError(f"{size} device blocks from index {first} need more than {len(here)} slots")
        blocks = device.block_ids[at : at + size]
        at += size
        slot_at += num_group_slots
        if not group.views:
            continue
        for name, index, end in (("device block", blocks, group.views[0].shape[0]), ("slot", here, num_slots)):
            # As an unsigned number a negative one is larger than any end.
            if index.view(np.uint64).max() >= end:
                raise ValueError(f"a {name} of group {g} is not in [0, {end})")
        if group.factor == 1:
            lists.append(CopyList(g, blocks, here, np.zeros(size, dtype=np.int64)))
        else:
            places = np.arange(place, place + size)
            lists.append(CopyList(g, blocks, here[places // group.factor], places % group.factor))
    if slot_at != len(slots):
        raise ValueError(f"{len(slots)} slots are given, but the device blocks fill {slot_at}")
    return lists
