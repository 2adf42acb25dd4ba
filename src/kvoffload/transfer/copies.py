"""Turns the specs of transfers into the device blocks and slots to copy, which every transfer engine needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import PageGroup, Slots, TransferSpec

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The device blocks that several jobs copy, job by job and group by group.

    Row ``i`` copies ``device_blocks[i]`` of group ``groups[i]`` to or from part ``parts[i]`` of slot ``slots[i]``, for
    the job at position ``jobs[i]``. A part is one device block. The arrays have the same length.
    """

    jobs: Numbers
    groups: Numbers
    device_blocks: Numbers
    slots: Slots
    parts: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """What a job copies in one group: ``device_blocks[i]`` to or from part ``parts[i]`` of slot ``slots[i]``."""

    group: int
    device_blocks: Numbers
    slots: Slots
    parts: Numbers


def copy_rows(
    specs: Sequence[TransferSpec], factors: Sequence[int], num_blocks: Sequence[int], num_slots: int
) -> tuple[Rows, dict[int, str]]:
    """Returns the rows of all jobs, and what is wrong with each job that has none because it cannot be copied.

    Group ``g`` has ``num_blocks[g]`` device blocks on this rank, ``factors[g]`` of them per slot; with 0 its rows are
    left out, because the rank has no layer of it. The first device block of a job may lie inside its first slot.
    """
    num_groups = len(factors)
    errors = {
        j: f"the job is for {len(spec.device.group_sizes)} groups, but there are {num_groups}"
        for j, spec in enumerate(specs)
        if not len(spec.device.group_sizes) == len(spec.device.block_indices) == num_groups
    }
    jobs = np.array([j for j in range(len(specs)) if j not in errors], dtype=np.int64)
    kept = [specs[j] for j in jobs]
    sizes = np.array([spec.device.group_sizes for spec in kept], dtype=np.int64).reshape(-1, num_groups)
    factor = np.array(factors, dtype=np.int64)
    first = np.array([spec.device.block_indices for spec in kept], dtype=np.int64).reshape(-1, num_groups) % factor
    filled = np.where(sizes > 0, (first + sizes - 1) // factor + 1, 0)
    blocks_given = np.array([len(spec.device.block_ids) for spec in kept], dtype=np.int64)
    slots_given = np.array([len(spec.host.slots) for spec in kept], dtype=np.int64)
    fits = (sizes.sum(axis=1) == blocks_given) & (filled.sum(axis=1) == slots_given) & (sizes >= 0).all(axis=1)
    for k in np.flatnonzero(~fits):
        errors[int(jobs[k])] = (
            f"its groups have {sizes[k].tolist()} device blocks in {filled[k].tolist()} slots, but "
            f"{blocks_given[k]} device blocks and {slots_given[k]} slots are given"
        )
    if not fits.all():
        jobs, sizes, first, filled = jobs[fits], sizes[fits], first[fits], filled[fits]
        kept = [spec for spec, ok in zip(kept, fits, strict=True) if ok]
    if not kept:
        nothing = np.empty(0, dtype=np.int64)
        return Rows(nothing, nothing, nothing, nothing, nothing), errors
    # A segment is what one job copies in one group.
    segment = np.repeat(np.arange(sizes.size), sizes.ravel())
    before = np.cumsum(sizes) - sizes.ravel()
    place = first.ravel()[segment] + np.arange(len(segment)) - before[segment]
    group = segment % num_groups
    job = jobs[segment // num_groups]
    block = np.concatenate([spec.device.block_ids for spec in kept])
    slots_before = np.cumsum(filled) - filled.ravel()
    slot = np.concatenate([spec.host.slots for spec in kept])[slots_before[segment] + place // factor[group]]
    part = place % factor[group]
    num = np.array(num_blocks, dtype=np.int64)[group]
    good = num > 0
    bad_blocks, bad_slots = (block < 0) | (block >= num), (slot < 0) | (slot >= num_slots)
    outside = good & (bad_blocks | bad_slots)
    if outside.any():
        for i in np.flatnonzero(outside)[::-1]:
            name, end = ("device block", num[i]) if bad_blocks[i] else ("slot", num_slots)
            errors[int(job[i])] = f"a {name} of group {group[i]} is not in [0, {end})"
        good &= ~np.isin(job, list(errors))
    if not good.all():
        job, group, block, slot, part = job[good], group[good], block[good], slot[good], part[good]
    return Rows(job, group, block, slot, part), errors


def copy_lists(spec: TransferSpec, groups: Sequence[PageGroup], num_slots: int) -> list[CopyList]:
    """Returns the copies of one job, group by group; groups that copy nothing are left out. For one small job this is
    five times faster than ``copy_rows``.

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
