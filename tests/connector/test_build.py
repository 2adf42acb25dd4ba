"""build_scheduler: what it wires together, what it writes to the log, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload import OffloadConfig, OffloadingConnectorScheduler, build_scheduler
from kvoffload.abc import ConfigError, KVGroup, LookupState, MissReason, OffloadKey, ReqContext
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.parts import Parts
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager
from kvoffload.tiers.disk import config as disk_config
from tests.connector.rig import FakeBlocks, FakeRequest, engine_of, prompt

TOKENS, SLOT, BLOCKS = 16, 4096, 8
MIB = 1 << 20
GROUPS = [KVGroup(TOKENS)]


def pool(num_blocks: int = BLOCKS) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((num_blocks, SLOT), dtype=np.uint8)


def config(**options: Any) -> OffloadConfig:
    host_bytes = options.pop("host_bytes", MIB)
    return dataclasses.replace(OffloadConfig.from_mapping({"host_bytes": MIB, **options}), host_bytes=host_bytes)


def with_disk(directory: Path, **options: Any) -> OffloadConfig:
    return config(disk_dir=str(directory), disk_bytes=64 * MIB, **options)


class Builder:
    """Builds scheduler halves, and shuts them down when the test ends."""

    def __init__(self) -> None:
        self.built: list[OffloadingConnectorScheduler] = []

    def __call__(self, made: OffloadConfig, **changes: Any) -> OffloadingConnectorScheduler:
        arguments: dict[str, Any] = {"groups": GROUPS, "pools": [pool()], "fingerprint": "ab" * 32, **changes}
        self.built.append(build_scheduler(made, engine_of(arguments), **arguments))
        return self.built[-1]

    def close(self) -> None:
        for half in self.built:
            half.shutdown()


@pytest.fixture
def make() -> Iterator[Builder]:
    builder = Builder()
    yield builder
    builder.close()


def host_of(half: OffloadingConnectorScheduler) -> PolicyOffloadingManager:
    host = half.manager.host if isinstance(half.manager, TieredOffloadingManager) else half.manager
    assert isinstance(host, PolicyOffloadingManager)
    return host


# What is built.


def test_a_threshold_filters_what_is_stored(make: Builder) -> None:
    """Samples count as their request, if the engine says which these are."""
    keys = [b"k" * 36]
    for options, samples, is_stored in [({}, ["r"], True), ({"store_threshold": 2}, ["0_r", "1_r"], False)]:
        manager = make(config(**options), parent_request=lambda req_id: req_id.split("_")[-1]).manager
        for req_id in samples:
            manager.lookup(keys, ReqContext(req_id))
        output = manager.prepare_store(keys)
        assert output is not None
        assert bool(output.keys_to_store) == is_stored
    assert manager.explain_miss(keys[0]).reason is MissReason.NOT_ADMITTED


# The pools.


def test_the_log_says_what_the_pools_hold(make: Builder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make(config(), device_blocks=4)
    assert f"kvoffload: host pool of 32 KiB = {BLOCKS * TOKENS} tokens, 2.7x the device cache; " in caplog.text
    assert f"kvoffload: model fingerprint {'ab' * 32}" in caplog.messages
    make(config(), pools=[pool(), pool()], engine=1, engines=2)
    wanted = f"kvoffload: host pool of 64 KiB on 2 ranks, one of 2 engines' shares, = {BLOCKS * TOKENS} tokens"
    assert wanted in caplog.text
    hybrid = [KVGroup(TOKENS), KVGroup(TOKENS, state=True), KVGroup(TOKENS, state=True)]
    make(config(), groups=hybrid, device_blocks=4)
    wanted = f"kvoffload: host pool of 32 KiB = {BLOCKS * TOKENS} tokens, 2.7x the device cache; "
    assert wanted + f"each position with states takes the place of {2 * TOKENS} of them; " in caplog.text
    make(config(), pools=[pool()], num_workers=2)
    assert f"kvoffload: host pool of 32 KiB in 1 pool for 2 ranks = {BLOCKS * TOKENS} tokens; " in caplog.text
    make(config(), pools=[pool(), pool()], num_workers=4)
    assert f"kvoffload: host pool of 64 KiB in 2 pools for 4 ranks = {BLOCKS * TOKENS} tokens; " in caplog.text


def test_host_memory_repeats_the_device_only_where_it_must(
    make: Builder, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    keeping: dict[str, Any] = {"device_blocks": 5, "keeps_blocks": True}
    exclusive = config(host_contents="exclusive")
    for each in (config(), exclusive, with_disk(tmp_path / "unset"), with_disk(tmp_path, host_contents="exclusive")):
        half = make(each, **keeping)
        assert half.stores.leaving is not None
        shadows = host_of(half).policy._tournament.shadows  # type: ignore[attr-defined]
        assert (shadows.host, shadows.device) == (BLOCKS, 4)
        text = f"kvoffload: host pool of 32 KiB = {BLOCKS * TOKENS} tokens beyond the device's {4 * TOKENS}"
        assert f"{text}; exclusive contents" in caplog.messages
        caplog.clear()
    half = make(config(host_contents="inclusive"), **keeping)
    assert half.stores.leaving is None
    assert not host_of(half).is_behind_device
    text = f"kvoffload: host pool of 32 KiB = {BLOCKS * TOKENS} tokens, 2.0x the device cache; inclusive contents"
    assert text in caplog.messages
    for change, why in (
        ({"keeps_blocks": False}, "keeps_blocks"),
        ({"device_blocks": None}, "device_blocks"),
        ({"adapter_of": nothing}, "adapters"),
        ({"groups": [KVGroup(TOKENS, sliding_window=64)]}, "full attention"),
        ({"groups": [KVGroup(TOKENS), KVGroup(TOKENS, state=True)]}, "full attention"),
        ({"groups": [KVGroup(TOKENS, lookahead=1)], "following": nothing}, "drafter"),
        ({"parts": Parts((2,))}, "in parts"),
    ):
        caplog.clear()
        assert make(config(), **{**keeping, **change}).stores.leaving is None
        (said,) = (text for text in caplog.messages if "host pool of" in text)
        assert re.search(f"; inclusive contents, because .*{why}", said)
        with pytest.raises(ConfigError, match=f"host_contents='exclusive': .*{why}"):
            make(exclusive, **{**keeping, **change})
    factor = {**keeping, "groups": [KVGroup(TOKENS, 4)]}
    assert make(config(block_size=4 * TOKENS), **factor).stores.leaving is None
    with pytest.raises(ConfigError, match=r"host_contents='exclusive': .*block_size, "):
        make(config(host_contents="exclusive", block_size=4 * TOKENS), **factor)


def test_a_store_counts_when_all_ranks_of_a_pool_have_reported_it(make: Builder) -> None:
    half = make(config(), pools=[pool()], num_workers=3)
    assert half.jobs.num_workers == 3


@pytest.mark.parametrize("other", [{"boot_id": "another"}, {"node": 1}])
def test_each_node_has_the_budget_for_its_own_pools(
    make: Builder, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    with contextlib.closing(HostPool(BLOCKS, SLOT)) as real:
        here = real.handle()
        there = dataclasses.replace(here, **other)
        half = make(config(host_bytes=2 * BLOCKS * SLOT), pools=[here, here, there, there])
        assert half.manager.most_blocks() == BLOCKS
        text = f"kvoffload: host pool of 128 KiB on 4 ranks of 2 nodes = {BLOCKS * TOKENS} tokens; "
        assert text in caplog.text
        for pools in ([here, here, there], [here, there, there]):
            with pytest.raises(ConfigError, match=r"host_bytes=32768 .* take 64 KiB; make .* 2\) slots"):
                make(config(host_bytes=BLOCKS * SLOT), pools=pools)


def test_tenants_have_shares_of_the_budget_of_a_node(make: Builder) -> None:
    with contextlib.closing(HostPool(BLOCKS, SLOT)) as real:
        pools = [real.handle(), real.handle(node=1)]
        made = config(host_bytes=2 * BLOCKS * SLOT, tenants={"a": {"guaranteed": {"host": 2 * BLOCKS * SLOT}}})
        assert make(made, pools=[pools[0], pools[0]]).manager.most_blocks() == BLOCKS
        with pytest.raises(ConfigError, match="64 KiB of host are guaranteed, and its budget has room for 32 KiB"):
            make(made, pools=pools)


def test_tiers_refuse_a_pool_on_another_machine(make: Builder, tmp_path: Path) -> None:
    with contextlib.closing(HostPool(BLOCKS, SLOT)) as real:
        pools = [real.handle(), dataclasses.replace(real.handle(), boot_id="another")]
        with pytest.raises(ConfigError, match=r"on another node .* remove these tiers"):
            make(with_disk(tmp_path / "disk"), pools=pools)
        assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fingerprint": None}, "fingerprint=None: must be 64 hex digits"),
        ({"fingerprint": "me/model"}, "fingerprint='me/model': must be 64 hex digits"),
        ({"engines": 0}, "engines=0: must be a whole number, at least 1"),
        ({"engines": 2, "engine": 2}, "engine=2: must be a whole number from 0 to 1"),
        ({"engine": "x"}, "engine='x': must be"),
        ({"hash_block_size": -4}, "hash_block_size=-4: must be"),
        ({"device_blocks": "7"}, "device_blocks='7': must be"),
        ({"num_workers": 0}, "num_workers=0: must be a whole number, at least 1"),
        ({"pools": [pool(8), pool(8)], "num_workers": 3}, "num_workers=3: must be 2, the number of pools"),
        ({"groups": [16]}, "groups=.*KVGroup"),
        ({"pools": [pool(8).tolist()]}, "pools has a list: pass HostPool.data"),
        ({"pools": [pool(8).ravel()]}, "pools has a ndarray: pass"),
        ({"pools": [pool(8)[:0]]}, "pools has a ndarray: pass"),
        ({"pools": pool(8)}, "pools must be a list"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_opened(
    make: Builder, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    threads = threading.active_count()
    disk = {"disk_dir": str(tmp_path / "disk"), "disk_bytes": 32 << 20}
    with pytest.raises(ConfigError, match=said):
        make(config(**disk), **arguments)
    assert not (tmp_path / "disk").exists()
    assert threading.active_count() <= threads


def nothing(*_: object) -> None:
    return None


WRONG_SPECS: dict[str, list[Any]] = {
    "groups": [None, 5, KVGroup(TOKENS), (group for group in GROUPS), {}, [], [None]],
    "hash_block_size": [0, "4", 4.0, True, float("nan"), 3, 2 * TOKENS],
    "parts": [5, "x", [1], Parts((1, 1)), Parts(())],
    "following": [5, "x"],
    "num_workers": [0, "1", 1.5, True],
    "share_loads": [None, "no", 5, []],
    "enable_events": [None, "no", 5],
    "device_blocks": [0, -1, 2.5, False],
    "keeps_blocks": [None, "no", 5],
    "is_beside_others": [None, "no", 5],
    "next_free": [5, "x"],
    "engine": [None, 1, -1, 0.5, True, False],
    "engines": [None, 0, "1", True],
    "parent_request": [None, 5, "x"],
    "engine_options": [5, "x", {}],
    "drops_tokens": [5, "x", {}],
    "adapter_of": [5, "x", {}],
    "trace_headers": [5, "x", {}],
    "identity": [None, 5, "x", [("a", "b")], {"a": 5}, {5: "a"}],
}


@pytest.mark.parametrize("name", WRONG_SPECS)
def test_a_wrong_field_of_the_engine_is_refused_by_its_name(name: str) -> None:
    spec = EngineSpec(GROUPS)
    for wrong in WRONG_SPECS[name]:
        with pytest.raises(ConfigError, match=name):
            EngineSpec(**{"groups": GROUPS, name: wrong})
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(spec, **{name: wrong})


def test_every_field_of_the_engine_is_checked() -> None:
    assert set(WRONG_SPECS) == {each.name for each in dataclasses.fields(EngineSpec) if each.init}
    fields: dict[str, Any] = {"parts": Parts((2,)), "identity": {"dtype": "bfloat16"}, "parent_request": str}
    fields |= dict.fromkeys(
        ("following", "next_free", "engine_options", "drops_tokens", "adapter_of", "trace_headers"), nothing
    )
    EngineSpec(tuple(GROUPS), **fields)


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (2, 1), (1, 2)])
def test_pools_never_exceed_host_bytes(make: Builder, ranks: int, engines: int) -> None:
    fitting = config(host_bytes=BLOCKS * SLOT * ranks * engines)
    make(fitting, pools=[pool()] * ranks, engines=engines)
    with pytest.raises(ConfigError) as caught:
        make(dataclasses.replace(fitting, host_bytes=fitting.host_bytes - 1), pools=[pool()] * ranks, engines=engines)
    assert str(caught.value).startswith(f"host_bytes={fitting.host_bytes - 1} ")
    assert f"config.num_blocks(block_bytes, {ranks * engines})" in str(caught.value)


def test_groups_have_the_block_size_of_the_configuration(make: Builder) -> None:
    make(config(block_size_factor=4), groups=[KVGroup(TOKENS, 4)])
    make(config(block_size=64), groups=[KVGroup(TOKENS, 4)])
    for options, factor in [({"block_size_factor": 4}, 1), ({"block_size": 32}, 4), ({}, 2)]:
        with pytest.raises(ConfigError, match=rf"KVGroup\(block_size_factor={factor}\): .*config.factor\({TOKENS}\)"):
            make(config(**options), groups=[KVGroup(TOKENS, factor)])


# The disk tier.


class RefusingPolicy(LRUPolicy):
    """Refuses all blocks for which it would have to evict others."""

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> Any:
        return np.zeros(len(keys), dtype=np.bool_)


def test_the_policy_may_refuse_blocks_unless_a_disk_is_below(make: Builder, tmp_path: Path) -> None:
    """A host in front of a disk must store what it is given."""

    def stores_beyond_its_size(made: OffloadConfig) -> bool:
        manager = make(made).manager
        keys = [bytes([i]) * 36 for i in range(BLOCKS + 1)]
        for key in keys:
            output = manager.prepare_store([key])
            assert output is not None
            manager.complete_store(output.store_spec)
        assert output is not None
        return len(output.keys_to_store) == 1

    policy = f"{__name__}:{RefusingPolicy.__name__}"
    assert stores_beyond_its_size(with_disk(tmp_path / "disk", policy=policy))
    assert not stores_beyond_its_size(config(policy=policy))


def fail_to_open(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_at_the_start_leaves_the_host(
    make: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_config, "open_disk_tier", fail_to_open)
    half = make(with_disk(tmp_path))
    (message,) = caplog.messages
    assert f"disk_dir={str(tmp_path)!r}: THERE IS NO DISK TIER: Input/output error; " in message
    keys = [b"k" * 36]
    output = half.manager.prepare_store(keys)
    assert output is not None
    half.manager.complete_store(output.store_spec)
    assert half.manager.lookup_each(keys).tolist() == [LookupState.HIT]


def test_a_directory_that_another_server_uses_is_refused(make: Builder, tmp_path: Path) -> None:
    """And nothing is left of the attempt: the first server's end frees the directory, no thread is left."""
    trace = {"record_trace": str(tmp_path / "trace.jsonl")}
    first = make(with_disk(tmp_path / "disk"))
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="in use by process"):
        make(with_disk(tmp_path / "disk", **trace))
    deadline = time.monotonic() + 30
    while threading.active_count() > threads:  # the thread that has tried to open the directory ends by itself
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.shutdown()
    assert isinstance(make(with_disk(tmp_path / "disk", **trace)).manager, TieredOffloadingManager)


# The trace.


def test_a_trace_has_the_sizes_of_the_server(make: Builder, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    half = make(config(record_trace=str(path), policy="arc", store_threshold=3), device_blocks=5)
    half.shutdown()
    header = json.loads(path.read_text().splitlines()[0])
    wanted = {"device_blocks": 4, "pool_blocks": BLOCKS, "policy": "arc", "store_threshold": 3, "groups": 1}
    wanted |= {"host_contents": "inclusive"}
    assert {name: header[name] for name in wanted} == wanted
    assert header["block_tokens"] == TOKENS


def test_each_of_several_engines_has_a_trace_of_its_own(make: Builder, tmp_path: Path) -> None:
    make(config(record_trace=str(tmp_path / "trace.jsonl")), engine=1, engines=2).shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["trace-engine1.jsonl"]


def test_a_trace_has_the_session_and_the_tenant_of_a_request(make: Builder, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    half = make(config(record_trace=str(path)))
    for i, options in enumerate(({}, {"session": "s", "tenant": "t"}, {"session": "s", "tenant": "t"})):
        request = FakeRequest(f"r{i}", prompt(3 * TOKENS), kv_transfer_params={"kvoffload": options})
        half.get_num_new_matched_tokens(request, 0)
        half.update_state_after_alloc(request, FakeBlocks([1, 2, 3]), 0)
        half.request_finished(request)
    half.shutdown()
    first, *named = (json.loads(line) for line in path.read_text().splitlines()[1:])
    assert not first.keys() & {"session", "tenant"}
    assert named[0]["session"] == named[1]["session"]
    assert named[0]["tenant"] == named[1]["tenant"] != named[0]["session"]
