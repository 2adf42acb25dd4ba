"""ForeignTable: an exact map, also where buckets are full, and safe to look up while it changes."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.tiers.shared_dir.table import ForeignTable


def digests(n: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(1, 1 << 63, n, dtype=np.uint64)


def test_many_digests_come_and_go_in_small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call for all would hold the interpreter while another thread needs it."""
    shares: list[int] = []
    find = ForeignTable._entries_of

    def counting(self: ForeignTable, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        shares.append(len(digests))
        return find(self, digests)

    monkeypatch.setattr(ForeignTable, "_entries_of", counting)
    table, chosen = ForeignTable(20_000), np.unique(digests(20_000))
    table.insert(chosen, np.arange(len(chosen)))
    table.remove(chosen, np.arange(len(chosen)))
    assert len(table) == 0
    assert max(shares) <= 4096


@pytest.mark.parametrize("mask", [(1 << 64) - 1, 0xFFFF_FFFF_FFFF_FF00], ids=["spread", "in few buckets"])
def test_a_table_is_a_map(mask: int) -> None:
    rng = np.random.default_rng(1)
    universe = np.unique(digests(6000) & np.uint64(mask))
    table, model = ForeignTable(5000), dict[int, int]()
    next_place = 0
    for _ in range(60):
        chosen = rng.choice(universe, rng.integers(0, 400))
        if rng.random() < 0.5:
            places = np.arange(next_place, next_place + len(chosen))
            next_place += len(chosen)
            table.insert(chosen, places)
            for digest in np.unique(chosen).tolist():
                if digest not in model:
                    model[digest] = int(places[chosen.tolist().index(digest)])
        else:
            chosen = np.unique(chosen)
            # Half of them name a place that the digest does not have.
            places = np.array([model.get(int(digest), -5) + int(rng.integers(0, 2)) * 10**9 for digest in chosen])
            table.remove(chosen, places)
            for digest, place in zip(chosen.tolist(), places.tolist(), strict=True):
                if model.get(digest) == place:
                    del model[digest]
        assert len(table) == len(model)
        assert table.find(universe).tolist() == [model.get(digest, -1) for digest in universe.tolist()]
    assert model


def test_a_lookup_beside_changes_finds_what_is_not_changed() -> None:
    kept, moving = digests(3000), digests(3000, seed=1)
    table = ForeignTable(6000)
    table.insert(kept, np.arange(3000))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            table.insert(moving, np.arange(10_000, 13_000))
            table.remove(moving, np.arange(10_000, 13_000))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            assert table.find(kept).tolist() == list(range(3000))
    finally:
        stop.set()
        thread.join()


def test_memory_per_block_is_bounded() -> None:
    for num_blocks in (1 << 16, (1 << 16) + 1, 100_000):
        table = ForeignTable(num_blocks)
        assert table.capacity >= num_blocks
        # Digest and checksum per slot come on top: 16 bytes.
        nbytes = sum(each.nbytes for each in vars(table).values() if isinstance(each, np.ndarray))
        assert nbytes / num_blocks + 16 <= 200
