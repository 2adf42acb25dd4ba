"""Backends hand out slots that exist, once each."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.abc import ConfigError, IntegrityError
from kvoffload.cache.slots import HostBackend, SlotBackend


def test_slots_that_were_handed_out_do_not_change_afterwards() -> None:
    backend = HostBackend(16, 4)
    first = backend.allocate_blocks([b"a", b"b", b"c", b"d"])
    lease = backend.get_load_store_spec([b"c", b"a"], first[[2, 0]])
    backend.free(np.array([1, 2]))
    backend.allocate_blocks([b"x"])
    assert first.tolist() == [0, 1, 2, 3]
    assert (lease.medium(), lease.slots.tolist()) == ("CPU", [2, 0])
    with pytest.raises(IntegrityError):
        backend.free(np.array([1]))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_no_room_at_all_is_an_error_that_names_the_setting(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks}"):
        HostBackend(16, num_blocks)


def test_slots_of_a_growing_medium_exist_when_they_were_added() -> None:
    backend = SlotBackend(16, "DISK", 8, grows=True)
    assert (backend.num_blocks, backend.num_existing_blocks, backend.get_num_free_blocks()) == (8, 0, 0)
    with pytest.raises(IntegrityError):
        backend.allocate_blocks([b"a"])
    backend.add_allocated(np.array([1, 4]))
    backend.add_free(np.array([0, 2]))
    assert (backend.num_existing_blocks, backend.get_num_free_blocks()) == (4, 2)
    assert backend.allocate_blocks([b"a", b"b"]).tolist() == [0, 2]
    backend.free(np.array([4]))
    assert backend.get_num_free_blocks() == 1
    backend.check_integrity()
