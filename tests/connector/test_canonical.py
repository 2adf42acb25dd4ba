"""The canonical layout: what one engine stores, an engine with other numbers of ranks and stages loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvoffload.abc import ByteArray, DeviceSpec, KVGroup, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.connector.ranks import CanonicalRows, KVShare, LayerPages, PageRun, join, place
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.transfer.inline import InlineTransfer

LAYERS = 4
HEADS = 4
HEAD_BYTES = 96
BLOCKS = 5
SLOTS = 7
GROUPS = [KVGroup(16, 2)]


@dataclass(frozen=True)
class Parallelism:
    """``tensor`` ranks per stage, and ``stages``. ``halves``: keys of all heads lie before the values of all."""

    tensor: int = 1
    stages: int = 1
    halves: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages

    @property
    def heads(self) -> int:
        return max(1, HEADS // self.tensor)

    def first_head(self, rank: int) -> int:
        return rank % self.tensor * HEADS // self.tensor

    def layers(self, rank: int) -> range:
        stage = rank // self.tensor
        return range(stage * LAYERS // self.stages, (stage + 1) * LAYERS // self.stages)

    def runs(self, rank: int) -> tuple[PageRun, ...]:
        at, count = self.first_head(rank) * HEAD_BYTES, self.heads * HEAD_BYTES
        if not self.halves:
            return (PageRun(0, at, count),)
        half = count // 2
        return PageRun(0, at // 2, half), PageRun(half, HEADS * HEAD_BYTES // 2 + at // 2, half)

    def stores(self, rank: int) -> bool:
        """Of ranks with the same head, the first stores."""
        return rank % self.tensor == 0 or self.first_head(rank) != self.first_head(rank - 1)


def shares_of(parallelism: Parallelism) -> list[KVShare]:
    return [
        KVShare(
            1,
            (),
            canonical=(tuple(LayerPages(f"layer{i}", HEADS * HEAD_BYTES, "pages") for i in parallelism.layers(rank)),),
        )
        for rank in range(parallelism.ranks)
    ]


@dataclass
class Engine:
    """Ranks with device memory of their own, and one pool. ``whole``: the pages as one rank alone has them, shape
    (layers, blocks, bytes), None for zeros."""

    parallelism: Parallelism
    pool: ByteArray
    whole: ByteArray | None = None
    transfers: list[InlineTransfer] = field(default_factory=list)
    memory: list[list[ByteArray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.parallelism
        for rank in range(p.ranks):
            rows = join(shares_of(p), GROUPS, rank, p.tensor)
            assert isinstance(rows, CanonicalRows)
            views = [np.zeros((BLOCKS, p.heads * HEAD_BYTES), np.uint8) for _ in p.layers(rank)]
            if self.whole is not None:
                for view, layer in zip(views, p.layers(rank), strict=True):
                    for run in p.runs(rank):
                        part = self.whole[layer, :, run.canonical : run.canonical + run.nbytes]
                        view[:, run.local : run.local + run.nbytes] = part
            runs = [p.runs(rank) for _ in views]
            pages = [HEADS * HEAD_BYTES for _ in views]
            group = place(PageGroup(views, 2), runs, pages, rows.begins[0], rows.row_bytes[0])
            self.memory.append(views)
            self.transfers.append(InlineTransfer([group], self.pool))

    def copy(self, blocks: Sequence[int], slots: Sequence[int], is_store: bool) -> None:
        for rank, transfer in enumerate(self.transfers):
            if is_store and not self.parallelism.stores(rank):
                continue
            device = DeviceSpec(np.array(blocks), (len(blocks),), (0,))
            transfer.submit(rank, TransferSpec("r", LoadStoreSpec("CPU", np.array(slots)), device), is_store)
            assert [result.ok for result in transfer.poll(False)] == [True]

    def holds(self, whole: ByteArray, blocks: Sequence[int]) -> bool:
        """Whether every rank holds its bytes of ``whole`` in these blocks."""
        p = self.parallelism
        return all(
            np.array_equal(
                view[blocks, run.local : run.local + run.nbytes],
                whole[layer][blocks, run.canonical : run.canonical + run.nbytes],
            )
            for rank, views in enumerate(self.memory)
            for view, layer in zip(views, p.layers(rank), strict=True)
            for run in p.runs(rank)
        )


def new_pool() -> ByteArray:
    return np.full((SLOTS, padded_slot_bytes(2 * LAYERS * HEADS * HEAD_BYTES)), 255, np.uint8)


SHAPES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (8, 2)]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("writer", SHAPES)
@pytest.mark.parametrize("reader", SHAPES)
def test_any_engine_loads_what_any_other_has_stored(
    writer: tuple[int, int], reader: tuple[int, int], halves: bool
) -> None:
    whole = np.random.default_rng(0).integers(0, 255, (LAYERS, BLOCKS, HEADS * HEAD_BYTES), np.uint8)
    pool = new_pool()
    blocks = [4, 0, 2, 3]
    Engine(Parallelism(*writer, halves), pool, whole).copy(blocks, [5, 1], is_store=True)
    row = LAYERS * HEADS * HEAD_BYTES
    assert np.array_equal(pool[5, :row], whole[:, 4].ravel()), "the bytes are those of one rank alone"
    assert (pool[[0, 2, 3, 4, 6]] == 255).all()
    assert (pool[[1, 5], 2 * row :] == 255).all()
    engine = Engine(Parallelism(*reader, halves), pool)
    engine.copy(blocks, [5, 1], is_store=False)
    assert engine.holds(whole, blocks)
    assert not engine.holds(whole, [1]), "the control: this block was not loaded"


@pytest.mark.parametrize(
    "runs",
    [
        [PageRun(0, 0, 50)],
        [PageRun(0, 0, 60), PageRun(50, 60, 40)],
        [PageRun(0, 0, 50), PageRun(60, 60, 40)],
        [PageRun(0, 101, 100)],
        [PageRun(0, -1, 100)],
        [],
    ],
)
def test_runs_that_are_not_the_bytes_of_a_page_are_refused(runs: list[PageRun]) -> None:
    group = PageGroup([np.zeros((BLOCKS, 100), np.uint8)])
    assert place(group, [[PageRun(0, 100, 100)]], [200], 0, 200).offsets == (100,)
    with pytest.raises(ValueError, match="bytes"):
        place(group, [runs], [200], 0, 200)


def test_every_rank_hears_the_same_reason() -> None:
    def reason(shares: list[KVShare]) -> str:
        answers = {join(shares, GROUPS, rank, 2) for rank in range(len(shares))}
        (answer,) = answers
        assert isinstance(answer, str)
        return answer

    good = shares_of(Parallelism(2, 2))
    assert isinstance(join(good, GROUPS, 3, 2), CanonicalRows)
    said = KVShare(1, (), canonical="layers with states have none")
    assert reason([*good[:3], said]) == "layers with states have none"
    elsewhere = KVShare(1, (), node="other", canonical=good[3].canonical)
    assert "several nodes" in reason([*good[:3], elsewhere])
    assert "different layers" in reason([good[0], good[3], *good[2:]])
    assert "same name" in reason([*good[:2], *good[:2]])


def test_groups_whose_blocks_would_be_divided_have_none() -> None:
    small, large = (
        tuple(LayerPages(f"{name}{i}", size, "pages") for i in range(2))
        for name, size in (("small", 1 << 10), ("large", 1 << 16))
    )
    share = KVShare(1, (), canonical=(small, large))
    groups = [KVGroup(16), KVGroup(16)]
    answer = join([share], groups, 0, 1)
    assert isinstance(answer, str)
    assert "different sizes" in answer
    alike = KVShare(1, (), canonical=(large, (LayerPages("x", 1 << 17, ""),)))
    assert isinstance(join([alike], groups, 0, 1), CanonicalRows)
