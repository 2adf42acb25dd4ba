"""Catalog: keys are looked up once when a transfer begins, and slots name its blocks until it has ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import BlockNotPinnedError, LookupState, OffloadKey, Slots
from kvoffload.cache.blocks import BlockCache
from kvoffload.tiers.catalog import RESTORED_AT_ONCE, Catalog
from tests.tiers.disk.rig import key


def keys(*names: int) -> list[OffloadKey]:
    return [key(name) for name in names]


def host_slots(n: int) -> Slots:
    return 100 + np.arange(n)


def make(num_blocks: int = 32) -> Catalog:
    return Catalog(num_blocks, 4096, "lru")


def write(catalog: Catalog, *names: int) -> list[OffloadKey]:
    """Writes that succeed. Returns the keys that were taken on."""
    taken, _, slots = catalog.begin_writes(keys(*names), host_slots(len(names)), catalog.num_available)
    catalog.end_writes(slots, np.ones(len(slots), dtype=np.bool_))
    catalog.blocks.check_integrity()
    return taken


def test_blocks_of_the_medium_are_restored_in_small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call for all would hold the interpreter while another thread needs it."""
    shares: list[int] = []
    restore = BlockCache.restore

    def counting(self: BlockCache, keys: Sequence[OffloadKey], slots: Slots) -> None:
        shares.append(len(keys))
        restore(self, keys, slots)

    monkeypatch.setattr(BlockCache, "restore", counting)
    count = 2 * RESTORED_AT_ONCE + 3
    catalog = Catalog(count, 4096, "lru", grows=True)
    assert len(catalog.restore(keys(*range(count)), np.arange(count))) == 0
    catalog.blocks.check_integrity()
    assert shares == [RESTORED_AT_ONCE, RESTORED_AT_ONCE, 3]
    catalog.begin_writes([key(count), key(count + 1)], host_slots(2), 2)
    assert present(catalog, count)[0] == 2, "the oldest are evicted first"


def present(catalog: Catalog, most: int = 40) -> list[int]:
    return np.flatnonzero(catalog.contains(keys(*range(most))) == LookupState.HIT).tolist()


def test_a_block_that_is_being_read_is_not_read_twice() -> None:
    catalog = make()
    write(catalog, 1, 2)
    first, _, slots = catalog.begin_reads(keys(1), host_slots(1))
    second, hosts, others = catalog.begin_reads(keys(1, 2, 2), host_slots(3))
    assert (first, second, hosts.tolist()) == (keys(1), keys(2), [102])
    catalog.end_reads(first, slots, np.array([True]))
    catalog.end_reads(second, others, np.array([True]))
    assert catalog.begin_reads(keys(1), host_slots(1))[0] == keys(1)
    catalog.blocks.check_integrity()


@pytest.mark.parametrize(("ends", "left"), [(True, [0, 1, 4, 5]), (False, [2, 3, 4, 5])])
def test_a_chain_whose_request_has_ended_loses_its_tail_first(ends: bool, left: list[int]) -> None:
    """Although it was written in pieces. Control: it has not ended."""
    catalog = make(4)
    for name in range(4):
        write(catalog, name)
    if ends:
        catalog.touch(keys(0, 1, 2, 3), stored=keys(0, 1, 2, 3))
    write(catalog, 4)
    write(catalog, 5)
    assert present(catalog) == left


def test_present_blocks_are_evicted_for_others_only_if_nothing_else_is_left() -> None:
    catalog = make(4)
    write(catalog, 0, 1, 2, 3)
    names, _, slots = catalog.begin_writes(keys(0, 1, 2, 3, 4, 5), host_slots(6), 2)
    assert names == keys(4, 5)
    catalog.end_writes(slots, np.array([True, True]))
    assert present(catalog) == [0, 1, 4, 5]
    assert catalog.num_evicted == 2


@pytest.mark.parametrize("how", ["drop", "reset"])
def test_a_block_dropped_in_transfer_keeps_its_slot_until_the_transfer_ends(how: str) -> None:
    catalog = make(4)
    write(catalog, 0, 1)
    read, _, read_slots = catalog.begin_reads(keys(0), host_slots(1))
    _, _, write_slots = catalog.begin_writes(keys(2), host_slots(1), 1)
    if how == "drop":
        assert sorted(catalog.drop(keys(0, 1, 2, 9)).tolist()) == [0, 1, 2]
    else:
        catalog.blocks.reset()
    assert present(catalog) == []
    assert (catalog.num_blocks, catalog.num_free) == (2, 2)
    assert write(catalog, 0, 2) == [], "keys are free when their transfers have ended"
    assert catalog.end_reads(read, read_slots, np.array([True])).tolist() == read_slots.tolist()
    assert catalog.end_writes(write_slots, np.array([True])).tolist() == write_slots.tolist()
    assert (catalog.num_blocks, catalog.num_free) == (0, 4)
    assert write(catalog, 0, 2) == keys(0, 2)
    assert present(catalog) == [0, 2]


def test_failed_transfers_leave_no_block() -> None:
    catalog = make()
    write(catalog, 0, 1)
    names, _, slots = catalog.begin_reads(keys(0, 1), host_slots(2))
    assert catalog.end_reads(names, slots, np.array([True, False])).tolist() == []
    with pytest.raises(BlockNotPinnedError):
        catalog.end_reads(names[:1], slots[:1], np.array([True]))
    _, _, slots = catalog.begin_writes(keys(2, 3), host_slots(2), 2)
    assert catalog.end_writes(slots, np.array([False, True])).tolist() == []
    assert present(catalog) == [0, 3]
    catalog.blocks.check_integrity()


def test_slots_exist_when_they_were_added() -> None:
    catalog = Catalog(8, 4096, "lru", grows=True)
    assert (catalog.num_available, catalog.num_blocks) == (0, 0)
    catalog.restore(keys(7, 8), np.array([3, 1]))
    catalog.add_free(np.array([0, 2]))
    assert (catalog.num_available, catalog.num_blocks) == (4, 2)
    assert present(catalog) == [7, 8]
    assert write(catalog, 0, 1, 2) == keys(0, 1, 2)
    assert present(catalog) == [0, 1, 2, 8], "7 was the oldest"
    catalog.blocks.check_integrity()
