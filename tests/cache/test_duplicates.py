"""Blocks that the device holds too: they leave host memory first, and no others because of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import Hints, MissReason, Offer, OffloadKey, ReqContext
from kvoffload.cache.duplicates import MAX_PASSED, Duplicates
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.table import BlockTable
from kvoffload.native.structures import GapLists
from kvoffload.testing.conformance import keys, letters


def make(num_blocks: int, policy: str = "lru", device_blocks: int = 8) -> PolicyOffloadingManager:
    return PolicyOffloadingManager(
        HostBackend(1, num_blocks), make_policy(policy, num_blocks), must_store=True, device_blocks=device_blocks
    )


def store(manager: PolicyOffloadingManager, names: str) -> str:
    """Stores blocks that have left the device. Returns what was evicted for them."""
    output = manager.prepare_store(keys(names))
    assert output is not None
    manager.complete_store(output.store_spec)
    manager.check_integrity()
    return letters(output.evicted_keys)


def test_what_the_device_holds_leaves_first_the_most_recent_head_first() -> None:
    manager = make(6)
    store(manager, "abcdef")
    manager.note_device(held=keys("de"))
    manager.note_device(held=keys("bc"))
    assert store(manager, "x") == "b"
    assert store(manager, "yz") == "cd"
    assert store(manager, "uv") == "ef"


def test_what_has_left_the_device_is_no_duplicate() -> None:
    manager = make(4)
    store(manager, "abcd")
    manager.note_device(held=keys("ab"))
    manager.note_device(left=keys("a"))
    assert store(manager, "x") == "b"
    assert store(manager, "y") == "d"


def test_a_block_that_hints_drop_and_the_device_holds_makes_room_once() -> None:
    manager, dropping = make(4), ReqContext("r", hints=Hints(drop=True))
    store(manager, "bcd")
    manager.touch(keys("a"), dropping)
    store(manager, "a")
    manager.end_chain(keys("a"), keys("a"), dropping)
    manager.note_device(held=keys("abcd"))
    assert store(manager, "xy") == "ab"


def test_what_is_known_of_a_block_moves_with_it_between_host_and_device() -> None:
    """However long it was in host memory, and whatever the policy has forgotten of others meanwhile."""
    manager = make(8, "auto", device_blocks=2)
    for _ in range(2):
        manager.touch(keys("ab"))
        manager.end_chain(keys("ab"), ())
    store_leaving(manager, "ab")
    assert num_again(manager) == 2, "uses that the device has served count"
    for n in range(200):
        other = [OffloadKey(b"%08d" % n)]
        manager.touch(other)
        manager.end_chain(other, ())
    manager.touch(keys("ab"))
    manager.end_chain(keys("ab"), ())
    manager.note_device(held=keys("ab"))
    assert num_again(manager) == 0, "the policy does not order what the device holds"
    manager.check_integrity()
    manager.note_device(left=keys("ab"))
    assert num_again(manager) == 2
    manager.check_integrity()


def test_a_block_that_leaves_the_device_is_refused_if_others_are_worth_more() -> None:
    """Blocks used once do not take the place of blocks used again, and cost no copy. A caller that must store what is
    computed may still refuse what leaves the device."""
    manager = make(8, "auto")
    for _ in range(2):
        manager.touch(keys("abcdefgh"))
        manager.end_chain(keys("abcdefgh"), ())
    store_leaving(manager, "abcdefgh")
    manager.touch(keys("uvwxyz"))
    manager.end_chain(keys("uvwxyz"), ())
    output = manager.prepare_store(keys("uvwxyz"), offer=Offer.LEAVING)
    assert output is not None
    assert letters(output.refused_keys) == "vwxyz"
    assert letters(output.evicted_keys) == "h"
    assert manager.explain_miss(keys("z")[0]).reason is MissReason.NOT_ADMITTED
    manager.complete_store(output.store_spec)
    stored = manager.prepare_store(keys("vwxyz"))
    assert stored is not None
    assert letters(stored.keys_to_store) == "vwxyz"


def store_leaving(manager: PolicyOffloadingManager, names: str) -> None:
    output = manager.prepare_store(keys(names), offer=Offer.LEAVING)
    assert output is not None
    manager.complete_store(output.store_spec)
    manager.check_integrity()


def num_again(manager: PolicyOffloadingManager) -> int:
    lists: GapLists = manager.policy._lists  # type: ignore[attr-defined]
    return lists.num_again


def test_no_tenant_loses_a_block_because_another_ones_is_on_the_device() -> None:
    table = BlockTable(4)
    table.insert(keys("abcd"), np.arange(4))
    table.set_ready(np.arange(4))
    duplicates = Duplicates(table, np.array([0, 0, 1, 1], dtype=np.int8))
    duplicates.add(np.array([0, 2]))
    assert duplicates.take(2, table.busy, 0).tolist() == [0]
    duplicates.discard(np.array([0]))
    assert duplicates.take(2, table.busy, 0).tolist() == []
    assert duplicates.take(2, table.busy, 1).tolist() == [2]


def test_a_search_passes_over_a_bounded_number_of_busy_blocks() -> None:
    n = MAX_PASSED + 10
    table = BlockTable(n)
    names: Sequence[OffloadKey] = [i.to_bytes(4, "big") for i in range(n)]
    table.insert(names, np.arange(n))
    table.set_ready(np.arange(n))
    duplicates = Duplicates(table, np.zeros(n, dtype=np.int8))
    duplicates.add(np.arange(n))
    table.pin(np.arange(1, n))
    assert duplicates.take(1, table.busy).tolist() == []
    table.unpin(np.arange(MAX_PASSED, n))
    assert duplicates.take(20, table.busy).tolist() == [*range(n - 1, MAX_PASSED - 1, -1), 0]
