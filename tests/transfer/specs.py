"""Jobs for tests of transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import DeviceSpec, LoadStoreSpec, TransferSpec


def spec_of(slots: Sequence[int], *parts: tuple[Sequence[int], int]) -> TransferSpec:
    """Returns a job; a part is a group's device blocks and the index of the first of them."""
    ids = np.array([block for blocks, _ in parts for block in blocks], dtype=np.int64)
    device = DeviceSpec(ids, tuple(len(blocks) for blocks, _ in parts), tuple(first for _, first in parts))
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots, dtype=np.int64)), device)


def job(slots: Sequence[int], device_blocks: Sequence[int], first: int = 0) -> TransferSpec:
    """Returns a job for one group."""
    return spec_of(slots, (device_blocks, first))
