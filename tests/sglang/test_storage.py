"""The storage backend of HiCache, driven by SGLang's own controller and its threads, over SGLang's own host pools."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvoffload.abc import ByteArray, MissReason, OffloadKey, Slots, Tier
from kvoffload.sglang import KVOffloadStorage, engine, storage
from kvoffload.sglang import metrics as server_metrics
from kvoffload.sglang.fingerprint import fingerprint_parts
from kvoffload.sglang.metrics import ServerMetrics
from kvoffload.sglang.pools import HostPages
from kvoffload.tiering.bridge import BridgeSettings, build_bridge
from kvoffload.tiers.config import TierConfig, TierContext
from tests.sglang import parts
from tests.sglang.parts import Rank, extra_config, fill, mamba_pool, mha_pool, mla_pool, page
from tests.sim.memory_tier import MemoryTier, StoredBlock

torch = parts.torch
PoolTransfer = parts.storage_interface.PoolTransfer
TRAILING = parts.storage_interface.PoolHitPolicy.TRAILING_PAGES
HANGING = {"kind": "tests.sglang.test_storage:HangingConfig"}

Start = Callable[..., Rank]


@pytest.fixture(autouse=True)
def small_staging_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BridgeSettings", partial(BridgeSettings, staging_bytes=4 << 20))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts a rank with a disk tier, or with the options given."""
    ranks: list[Rank] = []

    def started(
        pools: Mapping[str, Any] | Any = None, *, rank: Mapping[str, Any] | None = None, **options: Any
    ) -> Rank:
        if "tier" not in options and "tiers" not in options:
            options["tier"] = {"kind": "disk", "dir": str(tmp_path / "disk"), "bytes": "16MiB"}
        if pools is None:
            pools = mha_pool()
        made = Rank(pools if isinstance(pools, Mapping) else {"kv": pools}, extra_config(**options), **(rank or {}))
        ranks.append(made)
        return made

    yield started
    for each in ranks:
        each.close()


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "shared_dir", "dir": str(tmp_path / "shared"), "bytes": "32MiB"}


def tokens(num_pages: int, seed: int = 0, page_size: int = 4) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_pages * page_size)


def stored(rank: Rank, num_pages: int = 6, seed: int = 0, prefix: Sequence[str] = ()) -> tuple[list[int], list[bytes]]:
    """Stores a chain of random pages. Returns its tokens and the bytes of its pages."""
    pool = rank.pools["kv"]
    chain = tokens(num_pages, seed, pool.page_size)
    indices = pool.alloc(len(chain))
    fill(pool, seed + 1)
    want = pages_at(pool, indices)
    assert rank.store(chain, indices, prefix) == len(chain)
    pool.free(indices)
    fill(pool, seed + 1000)
    return chain, want


def pages_at(pool: Any, indices: Any) -> list[bytes]:
    return [page(pool, first) for first in indices[:: pool.page_size].tolist()]


def loaded(rank: Rank, chain: Sequence[int]) -> list[bytes]:
    """Returns the pages of ``chain`` that SGLang would give to a request."""
    pool = rank.pools["kv"]
    operation = rank.load(chain)
    if not operation.completed_tokens:
        return []
    found = pages_at(pool, operation.host_indices[: operation.completed_tokens])
    pool.free(operation.host_indices)
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settled(rank: Rank) -> Rank:
    """Returns ``rank`` once everything that it has stored is in its tiers."""
    wait_until(lambda: rank.storage._transfers.bridge.is_idle)
    return rank


POOLS: dict[str, Callable[[], Any]] = {
    "page_first": lambda: mha_pool("page_first"),
    "page_first_direct": lambda: mha_pool("page_first_direct"),
    "page_head": lambda: mha_pool("page_head"),
    "layer_first": lambda: mha_pool("layer_first"),
    "mla": mla_pool,
    "odd": lambda: mha_pool(page_size=1, heads=3, dim=7),
}


@pytest.mark.parametrize("kind", POOLS)
def test_pages_are_found_again_after_a_restart(kind: str, start: Start) -> None:
    first = start(POOLS[kind]())
    chain, want = stored(first, 20)
    assert loaded(first, chain) == want
    settled(first).close()
    assert loaded(start(POOLS[kind]()), chain) == want


def test_pages_that_have_no_addresses_are_copied(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any, indices: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(parts.mha.MHATokenToKVPoolHost, "get_page_buffer_meta", none)
    rank = start()
    chain, want = stored(rank)
    assert loaded(rank, chain) == want


def test_pages_of_kv_may_be_divided_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "block_bytes_of", lambda pools: 1500)
    rank = start(mha_pool("layer_first"))
    chain, want = stored(rank)
    assert loaded(rank, chain) == want


def test_an_address_outside_the_pool_is_refused() -> None:
    pages = HostPages("kv", mha_pool())
    with pytest.raises(ValueError, match="outside the buffers of the pool"):
        pages.views(torch.arange(10**6, 10**6 + 4))


def test_a_call_with_many_pages_is_divided(start: Start) -> None:
    rank = start(mha_pool(pages=700))
    chain, want = stored(rank, 300)
    assert loaded(rank, chain) == want


@pytest.mark.parametrize("is_in_the_fingerprint", [True, False])
def test_ranks_do_not_read_what_others_have_stored(
    is_in_the_fingerprint: bool, start: Start, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_in_the_fingerprint:
        # A planted bug: then a rank loads the heads of another.
        monkeypatch.setattr(storage, "fingerprint_parts", lambda *given: {**fingerprint_parts(*given), "tensor": None})
    writer, reader = (start(tier=shared, rank={"tp_rank": i, "tp_size": 2}) for i in range(2))
    chain, _ = stored(writer)
    settled(writer)
    deadline = time.monotonic() + (0.5 if is_in_the_fingerprint else 30)
    while not (found := loaded(reader, chain)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (found == []) == is_in_the_fingerprint


def test_ranks_with_the_same_kv_share_it(start: Start, shared: Any) -> None:
    writer, reader = (start(mla_pool(), tier=shared, rank=mla_rank(i)) for i in range(2))
    assert writer.controller.backup_skip is False
    assert reader.controller.backup_skip is True
    chain, want = stored(writer)
    settled(writer)
    wait_until(lambda: loaded(reader, chain) == want)
    # A server with another number of ranks.
    other = start(mla_pool(), tier=shared, rank={"tp_size": 1, "is_mla": True})
    wait_until(lambda: loaded(other, chain) == want)


def mla_rank(index: int) -> dict[str, Any]:
    return {"tp_rank": index, "tp_size": 2, "is_mla": True}


# States.


def states(pool: Any, keys: Sequence[str], indices: Any) -> Any:
    return PoolTransfer(name="mamba", host_indices=indices, keys=list(keys), hit_policy=TRAILING)


def wanted_state() -> Any:
    return PoolTransfer(name="mamba", keys=["__placeholder__"], hit_policy=TRAILING)


def test_a_prefix_ends_at_a_state(start: Start) -> None:
    pools = {"kv": mha_pool(), "mamba": mamba_pool()}
    rank = start(pools)
    kv, mamba = pools["kv"], pools["mamba"]
    chain = tokens(10)
    hashes = parts.page_hashes(chain, None, 4)
    fill(kv, 1)
    fill(mamba, 2)
    want_kv, want_states = [], {}
    for first, last in ((0, 4), (4, 7), (7, 10)):
        indices = kv.alloc(4 * (last - first))
        want_kv += pages_at(kv, indices)
        sidecars = []
        if last != 10:
            state = mamba.alloc(1)
            want_states[last] = page(mamba, int(state[0]))
            sidecars = [states(mamba, hashes[last - 1 : last], state)]
        span = chain[4 * first : 4 * last]
        assert rank.store(span, indices, hashes[:first], sidecars) == len(span)
    settled(rank).close()
    kv, mamba = mha_pool(), mamba_pool()
    again = start({"kv": kv, "mamba": mamba})
    operation = again.load(chain, sidecars=[wanted_state()])
    assert operation.pool_storage_result.restorable_prefix_pages == [4, 7]
    assert operation.completed_tokens == 28
    assert pages_at(kv, operation.host_indices) == want_kv[:7]
    assert operation.pool_hits["mamba"] == 1
    assert page(mamba, int(operation.pool_transfers[0].host_indices[0])) == want_states[7]
    # Without states all KV is found.
    assert again.hits(chain).storage_hit_count == 40


@pytest.mark.parametrize("is_in_the_keys", [True, False])
def test_ranks_that_share_kv_have_states_of_their_own(
    is_in_the_keys: bool, start: Start, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_in_the_keys:
        # A planted bug: then the last rank finds the state of the first.
        monkeypatch.setattr(storage, "rank_of", lambda *_: "all")
    chain, want, ranks = tokens(4), list[bytes](), list[Rank]()
    hashes = parts.page_hashes(chain, None, 4)
    for i in range(2):
        pools = {"kv": mla_pool(), "mamba": mamba_pool()}
        ranks.append(start(pools, tier=shared, rank=mla_rank(i)))
        if i:
            # It knows what the first rank has stored.
            wait_until(lambda: loaded(ranks[-1], chain) != [])
        fill(pools["kv"], 1)
        fill(pools["mamba"], 10 + i)
        state = pools["mamba"].alloc(1)
        want.append(page(pools["mamba"], int(state[0])))
        sidecars = [states(pools["mamba"], hashes[-1:], state)]
        assert ranks[i].store(chain, pools["kv"].alloc(16), (), sidecars) == 16
        wait_until(lambda: loaded(ranks[-1], chain) != [])
    found = []
    for rank in ranks:
        operation = rank.load(chain, sidecars=[wanted_state()])
        assert operation.pool_hits["mamba"] == 1
        found.append(page(rank.pools["mamba"], int(operation.pool_transfers[0].host_indices[0])))
    assert (found == want) == is_in_the_keys


def test_pages_of_an_indexer_go_with_those_of_the_kv(start: Start) -> None:
    def made() -> dict[str, Any]:
        kv = mla_pool()
        return {"kv": kv, "indexer": parts.indexer_pool(kv)}

    pools, chain = made(), tokens(10)
    rank = start(pools)
    for pool in pools.values():
        fill(pool, 1)
    indices = pools["kv"].alloc(40)
    want = {name: pages_at(pool, indices) for name, pool in pools.items()}
    sidecar = PoolTransfer(name="indexer", indices_from_pool="kv")
    assert rank.store(chain, indices, (), [sidecar]) == 40
    settled(rank).close()
    pools = made()
    again = start(pools)
    operation = again.load(chain, sidecars=[PoolTransfer(name="indexer", indices_from_pool="kv")])
    assert operation.completed_tokens == 40
    assert {name: pages_at(pool, operation.host_indices) for name, pool in pools.items()} == want


def test_kv_is_not_kept_behind_a_page_that_another_pool_lacks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = mla_pool()
    rank, chain = start({"kv": kv, "indexer": parts.indexer_pool(kv)}), tokens(10)
    put = rank.storage._transfers.bridge.put

    def four_pages(keys: Any, pages: Any, chain: Any) -> list[bool]:
        monkeypatch.undo()
        taken: list[bool] = put(keys[:4], pages[:4], chain[:4])
        return taken + [False] * 6

    # The first call is that of the indexer.
    monkeypatch.setattr(rank.storage._transfers.bridge, "put", four_pages)
    rank.store(chain, kv.alloc(40), (), [PoolTransfer(name="indexer", indices_from_pool="kv")])
    settled(rank).close()
    kv = mla_pool()
    assert start({"kv": kv, "indexer": parts.indexer_pool(kv)}).hits(chain).storage_hit_count == 20


# Chains.


def test_nothing_is_kept_behind_a_hole(start: Start) -> None:
    rank, chain = start(), tokens(8)
    hashes = parts.page_hashes(chain, None, 4)
    indices = rank.pools["kv"].alloc(16)
    rank.store(chain[16:], indices, hashes[:4])
    settled(rank).close()
    again = start()
    assert again.hits(chain[16:], hashes[:4]).storage_hit_count == 0
    assert again.store(chain[:16], indices) == 16
    assert again.store(chain[16:], indices, hashes[:4]) == 16
    settled(again).close()
    assert start().hits(chain).storage_hit_count == 32


def test_nothing_is_stored_if_sglang_does_not_say_what_comes_before(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rank = start()
    indices = rank.pools["kv"].alloc(16)
    for seed in range(3):
        assert rank.store(tokens(4, seed), indices, None) == 0
    said = [each.getMessage() for each in caplog.records if "hicache_storage_pass_prefix_keys" in each.getMessage()]
    assert len(said) == 1


# Weights.


def test_a_flush_forgets_everything_until_the_next_start(start: Start) -> None:
    rank = start()
    chain, want = stored(rank)
    settled(rank).flush()
    assert rank.hits(chain).storage_hit_count == 0
    _, later = stored(rank, seed=7)
    assert loaded(rank, tokens(6, 7)) == later
    settled(rank).close()
    again = start()
    assert loaded(again, chain) == want
    # It may have been computed with other weights.
    assert loaded(again, tokens(6, 7)) == []


@pytest.mark.parametrize("flushed", ["attached", "detached", ""])
def test_a_backend_that_is_attached_again_knows_of_a_flush(flushed: str, start: Start) -> None:
    pool = mha_pool()
    rank = start(pool)
    chain, want = stored(rank)
    settled(rank)
    if flushed == "attached":
        rank.flush()
        assert rank.hits(chain).storage_hit_count == 0
    rank.close()
    if flushed == "detached":
        pool.clear()
    # The weights may be others than those in the files, from which the fingerprint is.
    again = start(pool)
    assert loaded(again, chain) == ([] if flushed else want)
    again.close()
    assert loaded(start(mha_pool()), chain) == want


def test_a_backend_that_a_running_server_attaches_needs_a_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "arguments", lambda: {"hicache_storage_backend": None, "weight_version": "default"})
    options = extra_config(tier=DISK, model_fingerprint=None)
    with pytest.raises(ValueError, match="started without --hicache-storage-backend"):
        KVOffloadStorage(parts.storage_config(extra_config=options), {})
    # The pages are then of the version that clients have set, not of the one that the server began with.
    monkeypatch.setattr(engine, "weights", lambda: ("/model", "2"))
    made = KVOffloadStorage(parts.storage_config(extra_config=extra_config(tier=DISK)), {})
    assert made._transfers._weights == ("/model", "default")


@pytest.mark.parametrize("cause", ["other weights", "clear"])
def test_other_weights_and_clear_forget_everything(cause: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start()
    chain, want = stored(rank)
    assert loaded(rank, chain) == want
    if cause == "clear":
        assert rank.controller.clear_storage_backend()
    else:
        monkeypatch.setattr(engine, "weights", lambda: ("/model", "2"))
    assert rank.hits(chain).storage_hit_count == 0


# Faults.


def flip_bytes(folder: Path) -> None:
    """Flips a byte per 64 KiB in the slabs of a disk tier, or in the files of HiCacheFile."""
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size >= 4096 and "index" not in file.name:
            data = bytearray(file.read_bytes())
            for at in range(100, len(data), 4096):
                data[at] ^= 0xFF
            file.write_bytes(data)


def test_flipped_bytes_are_a_miss(start: Start, tmp_path: Path) -> None:
    first = start()
    chain, _ = stored(first)
    settled(first).close()
    flip_bytes(tmp_path)
    again = start()
    assert loaded(again, chain) == []
    assert again.storage.explain(parts.page_hashes(chain, None, 4)[0]).reason == MissReason.CORRUPT
    # What is computed again is stored again.
    _, want = stored(again)
    assert loaded(again, chain) == want


def test_the_control_hicache_file_returns_flipped_bytes(tmp_path: Path) -> None:
    config = parts.storage_config(extra_config={})
    control = parts.storage_interface.HiCacheFile(config, str(tmp_path))
    value = torch.arange(8192, dtype=torch.uint8)
    assert control.set("a" * 64, value)
    flip_bytes(tmp_path)
    assert not torch.equal(control.get("a" * 64, torch.zeros_like(value)), value)


def test_a_read_that_hangs_ends_at_the_deadline(start: Start) -> None:
    first = start(tier=HANGING)
    chain, _ = stored(first)
    settled(first).close()
    again = start(tier=HANGING, load_deadline_ms=50)
    began = time.monotonic()
    assert again.hits(chain).storage_hit_count == 24
    assert loaded(again, chain) == []
    assert time.monotonic() - began < 20
    assert all(thread.is_alive() for thread in again.threads)


@pytest.mark.parametrize("method", ["get", "put", "exists", "reset"])
def test_a_bug_in_the_bridge_never_ends_a_thread(
    method: str, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = start()
    chain, _ = stored(rank)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rank.storage._transfers.bridge, method, fail)
    indices = rank.pools["kv"].alloc(24)
    for _ in range(3):
        rank.store(tokens(6, 5), indices)
        rank.load(chain)
        rank.controller.clear_storage_backend()
    rank.flush()
    rank.load(chain)
    assert all(thread.is_alive() for thread in rank.threads)
    said = [each for each in caplog.records if each.name.startswith("kvoffload") and each.levelno >= logging.WARNING]
    assert 1 <= len(said) <= 5
    monkeypatch.undo()


def test_arguments_that_do_not_fit_are_a_miss(start: Start) -> None:
    backend = start().storage
    indices = torch.arange(8)
    info = parts.storage_interface.HiCacheStorageExtraInfo(prefix_keys=[])
    assert backend.batch_set_v1(["a"], indices, info) == [False]
    assert backend.batch_get_v1(["a", "b"], torch.arange(10**6, 10**6 + 8)) == [False, False]
    assert backend.batch_set_v1(["a", "b"], torch.arange(10**6, 10**6 + 8), info) == [False, False]
    unknown = PoolTransfer(name="swa", keys=["a"], host_indices=indices)
    assert backend.batch_get_v2([unknown]) == {"swa": [False]}
    assert backend.batch_set_v2([unknown], info) == {"swa": [False]}
    assert backend.batch_exists_v2(["a"], [unknown]).kv_hit_pages == 0
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], torch.arange(0)) == []


def test_close_gives_the_memory_back(start: Start) -> None:
    before = set(threading.enumerate())
    rank = start()
    chain, _ = stored(rank)
    rank.load(chain)
    backend = rank.storage
    rank.close()
    assert backend.batch_exists(parts.page_hashes(chain, None, 4)) == 0
    assert backend.batch_get_v1(["a"], torch.arange(4)) == [False]
    wait_until(lambda: not any(each.name.startswith("kvoffload") for each in set(threading.enumerate()) - before))


def test_the_metrics_of_the_tiers_are_among_those_of_the_server(start: Start) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    labels = {"tp_rank": "1", "pp_rank": "0", "dp_rank": "0", "tier": "disk"}

    def written() -> float:
        return prometheus.REGISTRY.get_sample_value("kvoffload:tier_write_blocks_total", labels) or 0.0

    for _ in range(2):
        rank, before = start(rank={"tp_rank": 1, "tp_size": 2}), written()
        stored(rank, 6, seed=int(before))
        settled(rank).storage.get_stats()
        assert written() == before + 6
        assert prometheus.REGISTRY.get_sample_value("kvoffload:tier_used_bytes", labels) > 0
        rank.close()


def test_several_threads_may_ask_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric is registered once, even if its registration takes a while."""
    prometheus = pytest.importorskip("prometheus_client")
    made: list[str] = []

    counter: Any = prometheus.Counter

    class SlowCounter(counter):  # type: ignore[misc]
        def __init__(self, name: str, *arguments: Any, **named: Any) -> None:
            made.extend([name] * ("_labelvalues" not in named))
            threading.Event().wait(0.05)
            super().__init__(name, *arguments, **named)

    monkeypatch.setattr(prometheus, "Counter", SlowCounter)
    rank = ServerMetrics({"of": "threads"})
    monkeypatch.setattr(server_metrics, "PREFIX", "kvoffload_threads_")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: rank.add({"tier_write_blocks:disk": 1.0}), range(4)))
    assert len(made) == 1
    labels = {"of": "threads", "tier": "disk"}
    assert prometheus.REGISTRY.get_sample_value("kvoffload_threads_tier_write_blocks_total", labels) == 4


def test_ranks_that_do_not_write_take_no_share_of_the_budget(
    start: Start, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[int, int]] = []

    def spy(*given: Any) -> Any:
        opened.append((given[-1].engine, given[-1].engines))
        return build_bridge(*given)

    monkeypatch.setattr(storage, "build_bridge", spy)
    reader = start(mla_pool(), tier=shared, rank=mla_rank(1))
    start({"kv": mla_pool(), "mamba": mamba_pool()}, tier=shared, rank=mla_rank(1))
    start(rank={"tp_rank": 1, "tp_size": 2})
    assert opened == [(0, 1), (1, 2), (1, 2)]
    info = parts.storage_interface.HiCacheStorageExtraInfo(prefix_keys=[])
    assert reader.storage.batch_set_v1(["a" * 64], torch.arange(4), info) == [False]


def test_sglang_gets_the_speed_of_transfers(start: Start) -> None:
    rank = start()
    rank.storage._transfers.is_measured = True
    chain, _ = stored(rank)
    loaded(rank, chain)
    metrics = rank.storage.get_stats()
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([6], [6])
    assert metrics.prefetch_bandwidth[0] > 0
    assert rank.storage.get_stats().prefetch_pgs == []


# Wrong settings.

DISK = {"kind": "disk", "dir": "/nonexistent/kvoffload", "bytes": "1GiB"}


@pytest.mark.parametrize(
    ("options", "rank", "message"),
    [
        ({"interface_v1": 0}, {}, "interface_v1=0"),
        ({"tier": None}, {}, "tier is not set"),
        ({"tier": {"kind": "dsk"}}, {}, "tier.kind='dsk'"),
        ({"tyer": 1}, {}, r"tyer=\*\*\*: unknown option; did you mean tier"),
        ({"model_fingerprint": None}, {}, "model_fingerprint is not set"),
        ({}, {"tp_size": 2, "is_mla": True}, "shared_dir"),
        ({"policy": "no"}, {}, "policy"),
    ],
)
def test_a_wrong_setting_ends_the_start(options: dict[str, Any], rank: dict[str, Any], message: str) -> None:
    given = {"tier": DISK, **options}
    with pytest.raises(ValueError, match=message):
        Rank({"kv": mha_pool()}, extra_config(**given), **rank)


def test_a_pool_without_memory_ends_the_start() -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    with pytest.raises(ValueError, match="host pool kv of class LogicalHostPool"):
        Rank({"kv": LogicalHostPool(64, 4)}, extra_config(tier=DISK))


def test_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "arguments", lambda: {"enable_lora": True})
    with pytest.raises(ValueError, match="--enable-lora"):
        KVOffloadStorage(parts.storage_config(extra_config=extra_config(tier=DISK)), {})


# A tier that never ends a read, as an entry of a configuration.


class HangingTier(MemoryTier):
    """Writes at once, and never ends a read: nobody steps its executor. Its blocks outlive it."""

    kept: ClassVar[OrderedDict[OffloadKey, StoredBlock]] = OrderedDict()

    def __init__(self, pools: Sequence[ByteArray], num_blocks: int) -> None:
        super().__init__(pools, num_blocks)
        self.blocks = self.kept

    def reset(self) -> None:
        pass

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = super().write(keys, slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in taken:
                self.write_block(key, slot, self.blocks[key])
        return taken


@dataclass(frozen=True, kw_only=True)
class HangingConfig(TierConfig):
    kind = "hanging"

    def open(self, context: TierContext) -> Tier:
        return HangingTier(context.pools, 1000)
