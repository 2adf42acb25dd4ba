"""Ranks agree on who shares a pool with whom, and none waits for one that has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError, KVGroup, PageGroup
from kvoffload.connector.ranks import (
    CanonicalRows,
    Gather,
    KVShare,
    LayerPages,
    PageRun,
    Ranks,
    check_settings,
    count_pools,
    count_replicas,
    join,
    place,
)


class Group:
    """Ranks that exchange values, each on a thread of its own."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def gather(self, place: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            self._values[place] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather


def on_every_rank(tensor: int, pipeline: int, call: Callable[[Ranks], Any]) -> list[Any]:
    """Returns what ``call`` returns or raises on each rank of ``pipeline`` stages with ``tensor`` ranks each."""
    stages = [Group(tensor) for _ in range(pipeline)]
    columns = [Group(pipeline) for _ in range(tensor)]
    results: list[Any] = [None] * (tensor * pipeline)

    def run(index: int) -> None:
        stage, place = divmod(index, tensor)
        try:
            results[index] = call(Ranks(index, [stages[stage].gather(place), columns[place].gather(stage)]))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(tensor * pipeline)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3), (2, 2), (4, 2)])
def test_every_rank_gets_all_values_in_order(tensor: int, pipeline: int) -> None:
    results = on_every_rank(tensor, pipeline, lambda ranks: ranks.collect(lambda: ranks.index))
    assert results == [list(range(tensor * pipeline))] * (tensor * pipeline)


@pytest.mark.parametrize("failing", range(4))
def test_an_error_on_one_rank_ends_all(failing: int) -> None:
    class OwnError(Exception):
        pass

    def make(index: int) -> int:
        if index == failing:
            raise OwnError("there is no memory")
        return index

    results = on_every_rank(2, 2, lambda ranks: ranks.collect(lambda: make(ranks.index)))
    assert isinstance(results.pop(failing), OwnError)
    assert {(type(error), str(error)) for error in results} == {
        (ConfigError, f"rank {failing} cannot start: there is no memory")
    }


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    never = threading.Event()
    ranks = Ranks(0, [lambda value: [value] if never.wait() else []])
    with pytest.raises(ConfigError, match="some rank has not registered its KV cache within"):
        ranks.collect(lambda: 1, deadline_s=0.01)
    never.set()


def test_a_rank_that_fails_says_why_although_another_has_died() -> None:
    def gather(value: Any) -> list[Any]:
        raise RuntimeError("connection closed by peer")

    def make() -> int:
        raise ConfigError("too little memory")

    with pytest.raises(ConfigError, match="too little memory"):
        Ranks(0, [gather]).collect(make)


def test_a_connection_that_breaks_is_an_error() -> None:
    def gather(value: Any) -> list[Any]:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(ConfigError, match="connection closed by peer"):
        Ranks(0, [gather]).collect(lambda: 1)


def shares(*ranks: tuple[int, str]) -> list[KVShare]:
    return [KVShare(replicas, (LayerPages(layers, 1, ""),)) for replicas, layers in ranks]


def on_nodes(replicas: int, *nodes: str) -> list[KVShare]:
    return [KVShare(replicas, (LayerPages("all", 1, ""),), node=node) for node in nodes]


CASES: dict[str, tuple[list[KVShare], int]] = {
    "two nodes, all hold the same": (on_nodes(4, *"aabb"), 2),
    "one rank per node": (on_nodes(2, *"ab"), 1),
    "nodes with different numbers of ranks": (on_nodes(8, *"aabbbbbb"), 2),
    "a node whose ranks are apart": (on_nodes(4, *"abba"), 1),
    "all hold the same": (shares(*[(4, "all")] * 4), 4),
    "pairs hold the same": (shares(*[(2, "all")] * 4), 2),
    "one layer of one rank differs": (shares((4, "all"), (4, "all"), (4, "all"), (1, "all")), 1),
    "two stages of the same kind": (shares((2, "first"), (2, "first"), (2, "last"), (2, "last")), 2),
    "a stage with fewer heads": (shares((4, "first"), *[(4, "first")] * 3, *[(2, "last")] * 4), 2),
    "a stage in which ranks differ": (shares((2, "first"), (2, "first"), (1, "last"), (1, "last")), 1),
    "other pages on one rank": (shares((2, "float32"), (2, "bfloat16")), 1),
    "six ranks, four of them alike": (shares(*[(4, "all")] * 6), 2),
    "a rank alone": (shares((1, "all")), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_only_what_all_of_them_hold(case: str) -> None:
    ranks, expected = CASES[case]
    assert count_replicas(ranks) == expected


@pytest.mark.parametrize(
    ("nodes", "replicas", "expected"),
    [
        ("aaaa", 1, [4, 4, 4, 4]),
        ("aaaa", 2, [2, 2, 2, 2]),
        ("abbb", 1, [1, 3, 3, 3]),
        ("aabbbb", 2, [1, 1, 2, 2, 2, 2]),
    ],
)
def test_the_pools_of_a_node_are_those_of_its_ranks(nodes: str, replicas: int, expected: list[int]) -> None:
    ranks = on_nodes(replicas, *nodes)
    assert [count_pools(ranks, rank, replicas) for rank in range(len(ranks))] == expected


def test_a_setting_that_differs_between_nodes_is_named() -> None:
    same = KVShare(1, (), settings=(("host_bytes", 7), ("block_size_factor", [1])))
    check_settings([same, same])
    other = KVShare(1, (), settings=(("host_bytes", 7), ("block_size_factor", [2])))
    with pytest.raises(
        ConfigError, match=r"block_size_factor=\[2\] on rank 1, but \[1\] on rank 0: .*kv-transfer-config"
    ):
        check_settings([same, other])


# The canonical layout. The bytes are compared in the model engine.


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
    group = PageGroup([np.zeros((5, 100), np.uint8)])
    assert place(group, [[PageRun(0, 100, 100)]], [200], 0, 200).offsets == (100,)
    with pytest.raises(ValueError, match="bytes"):
        place(group, [runs], [200], 0, 200)


def test_every_rank_hears_the_same_reason() -> None:
    def reason(shares: list[KVShare]) -> str:
        answers = {join(shares, [KVGroup(16, 2)], rank, 2) for rank in range(len(shares))}
        (answer,) = answers
        assert isinstance(answer, str)
        return answer

    good = [KVShare(1, (), canonical=((LayerPages(f"layer{i // 2}", 384, "pages"),),)) for i in range(4)]
    assert isinstance(join(good, [KVGroup(16, 2)], 3, 2), CanonicalRows)
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
