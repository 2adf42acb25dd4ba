"""Replays and sizing with tenants' shares, hints and retention of a trace, and what they cost the others."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.synthetic import generate
from kvoffload.abc import ConfigError
from kvoffload.cache.tenants import HOST, TenantConfig
from kvoffload.cli.replay import replay as replay_command
from kvoffload.cli.size import size as size_command
from kvoffload.config import HostContents
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import DISK, Contract, ReplayConfig, replay
from kvoffload.lab.sizing import Choices, Setting, Sizing, size
from kvoffload.lab.trace import Trace, TraceError
from kvoffload.observe.trace import name_hash

HEADER: dict[str, object] = {"kvoffload_trace": 1, "block_tokens": 16, "started": 0}


def write(path: Path, *, hashed: bool = False, drops: bool = False) -> Path:
    """Writes a trace of two tenants with sessions and one that floods."""
    rng, turns = random.Random(1), dict[str, int]()
    lines: list[dict[str, object]] = [dict(HEADER)]
    for i in range(1500):
        tenant = rng.choice(["search", "chat", "flood"])
        line: dict[str, object] = {"timestamp": 1000 * i, "output_length": 0}
        name: str | int = name_hash(tenant) if hashed else tenant
        if tenant == "flood":
            ids = [rng.getrandbits(60) for _ in range(12)]
        else:
            session = f"{tenant}{rng.randrange(20)}"
            turns[session] = turns.get(session, 3) + 1
            ids = [random.Random(f"{session} {k}").getrandbits(60) for k in range(min(turns[session], 20))]
            line |= {"session": session}
            if tenant == "search":
                line |= {"drop": True} if drops else {"retain_s": 300, "p_return": 0.5, "expect_return_s": 30}
        lines.append(line | {"input_length": 16 * len(ids), "hash_ids": ids, "tenant": name})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def found(trace: Trace, contract: Contract) -> dict[str, float]:
    result = replay(trace, ReplayConfig("lru", 300, contract=contract))
    return {tenant.name: tenant.found_pct for tenant in result.tenants}


@pytest.mark.parametrize("hashed", [False, True])
def test_shares_and_retention_move_hits_between_tenants(tmp_path: Path, hashed: bool) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", hashed=hashed))
    plain = found(trace, Contract(uses_hints=False))
    if hashed:
        plain = {name: plain[str(name_hash(name))] for name in ("search", "chat", "flood")}
    shares = found(trace, Contract((TenantConfig("search", {"host": 150}), TenantConfig("chat")), uses_hints=False))
    equal = found(trace, Contract((TenantConfig("search"), TenantConfig("chat"))))
    retained = found(trace, Contract((TenantConfig("search", retain={"host": 150}), TenantConfig("chat"))))
    assert shares["search"] > plain["search"]
    assert retained["search"] > equal["search"]
    assert retained["chat"] < plain["chat"]
    assert min(retained.values()) == 0, "the flood finds nothing"


@pytest.mark.soak
def test_what_a_disk_retains_is_found_there(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl"))
    on_disk = (TenantConfig("search", {}, {}, {"disk": 300}),)
    result = replay(trace, ReplayConfig("lru", 100, disk_blocks=600, contract=Contract(on_disk)))
    without = replay(trace, ReplayConfig("lru", 100, disk_blocks=600, contract=Contract(uses_hints=False)))
    assert result.tenants[0].found_pct > without.tenants[0].found_pct


def test_hints_are_used_unless_they_are_left_out(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", drops=True))
    with_hints, without = found(trace, Contract()), found(trace, Contract(uses_hints=False))
    assert with_hints["search"] < without["search"], "each request was the last one, which was not true"
    assert with_hints["chat"] > without["chat"]


@pytest.mark.parametrize("wrong", [{"retain_s": -1}, {"p_return": 2}, {"drop": 1}, {"expect_return_s": "soon"}])
def test_hints_that_nobody_can_have_sent_are_problems(tmp_path: Path, wrong: dict[str, object]) -> None:
    line = {"timestamp": 0, "input_length": 16, "output_length": 0, "hash_ids": [1]}
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(HEADER)}\n{json.dumps(line)}\n{json.dumps(line | wrong)}\n")
    try:
        assert read_trace(path, skip_bad_lines=True).num_problems == 1
    except TraceError:
        pytest.fail("one bad line hides the good ones")


# Sizing.

MIB, GIB = 1 << 20, 1 << 30
MODEL = ModelShape("model", bytes_per_token=GIB / 16, linear_flops_per_token=1e10, attention_flops_per_pair=0.0)
"""A block of 16 tokens takes 1 GiB."""
SPEEDS = Speeds(prefill_tokens_per_s=1000.0, host_bytes_per_s=100e9, disk_bytes_per_s=20e9)
RETAINED = Contract((TenantConfig("search", {HOST: 20 * GIB}, {}, {HOST: 20 * GIB}),), GIB)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("traces") / "t.jsonl")


@pytest.fixture(scope="module")
def trace(path: Path) -> Trace:
    """The search retains its blocks."""
    return read_trace(path).between(0.0, 0.08)


@pytest.fixture(scope="module")
def answer(trace: Trace) -> Sizing:
    return size(trace, MODEL, Choices(ram=[60 * GIB]), contract=RETAINED, speeds=SPEEDS, processes=1)


def tokens(setting: Setting, trace: Trace) -> list[float]:
    asked = int(trace.input_tokens.sum())
    return [pct / 100 * asked for pct in (setting.device_pct, setting.ram_pct, setting.disk_pct)]


@pytest.mark.parametrize(
    ("ram", "disk", "device", "contents"),
    [
        (60, 0, 0, HostContents.INCLUSIVE),
        (60, 120, 0, HostContents.INCLUSIVE),
        (60, 0, 16, HostContents.EXCLUSIVE),
        (128, 0, 16, HostContents.INCLUSIVE),
        (60, 120, 16, HostContents.INCLUSIVE),
        (60, 120, 16, HostContents.EXCLUSIVE),
    ],
)
@pytest.mark.parametrize("contract", [RETAINED, Contract()], ids=["tenants", "hints"])
def test_the_result_equals_a_replay(
    trace: Trace, ram: int, disk: int, device: int, contents: HostContents, contract: Contract
) -> None:
    choices = Choices("auto", [ram * GIB], [disk * GIB], device * GIB, contents)
    (setting,) = size(trace, MODEL, choices, contract=contract, speeds=SPEEDS, processes=1).settings
    config = ReplayConfig("auto", ram, device, disk, host_contents=contents, contract=contract)
    result = replay(trace, config, model=MODEL, speeds=SPEEDS)
    found = [result.device_hit_tokens, result.host_hit_tokens, result.disk_hit_tokens]
    assert tokens(setting, trace) == pytest.approx(found, abs=1e-6)
    assert setting.served_pct == result.prefix_hit_tokens_pct
    assert (setting.ttft_p50_s, setting.ttft_p95_s) == (result.ttft_p50_s, result.ttft_p95_s)


def test_retention_moves_hits_between_tenants(answer: Sizing, trace: Trace) -> None:
    assert answer.comparison is not None
    result, without = answer.comparison
    change = {
        after.name: after.tokens_found - before.tokens_found
        for after, before in zip(result.tenants, without.tenants, strict=True)
    }
    assert change["search"] > 0 > change["chat"]
    assert change["flood"] == 0
    assert answer.best.served_pct == result.prefix_hit_tokens_pct
    alone = size(trace, MODEL, Choices(ram=[60 * GIB]), speeds=SPEEDS).best
    assert alone.served_pct == without.prefix_hit_tokens_pct != answer.best.served_pct


def test_nothing_changes_without_a_contract(trace: Trace) -> None:
    choices = Choices(ram=[60 * GIB, 90 * GIB], disk=[0, 120 * GIB])
    plain = size(trace, MODEL, choices)
    assert plain.comparison is None
    assert "by_tenant" not in plain.to_dict()
    synthetic = generate("chat", 100)
    assert not synthetic.has_hints
    assert size(synthetic, MODEL, contract=Contract()).to_dict() == size(synthetic, MODEL).to_dict()
    hinted = size(trace, MODEL, choices, contract=Contract(), processes=1)
    assert hinted.comparison is not None
    assert (hinted.nothing, hinted.ceiling) == (plain.nothing, plain.ceiling)


@pytest.mark.parametrize(
    ("choices", "tenant", "message"),
    [
        (Choices(ram=[99 * GIB]), TenantConfig("a", {HOST: 100 * GIB}), "100 GiB of host are guaranteed"),
        (Choices(ram=[99 * GIB]), TenantConfig("a", {}, {}, {HOST: 50 * GIB}), "50 GiB of host may be retained"),
        (Choices(ram=[99 * GIB, 1 << 40]), TenantConfig("a", {HOST: 100 * GIB}), "100 GiB of host are guaranteed"),
        (Choices(disk=[99 * GIB]), TenantConfig("a", {DISK: 100 * GIB}), "100 GiB of disk are guaranteed"),
        (Choices(ram=[99 * GIB]), TenantConfig("a", {DISK: 100 * GIB}), "^disk=none: .* need 100 GiB of disk; give"),
        (Choices(), TenantConfig("a", {HOST: MIB}), "has no room for one block; write 1 GiB or more"),
    ],
)
def test_given_sizes_without_room_are_refused(
    trace: Trace, choices: Choices, tenant: TenantConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        size(trace, MODEL, choices, contract=Contract((tenant,)))


def run(command: Any, *arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


SHARES = json.dumps({"search": {"guaranteed": {"host": "200MiB"}, "retain": {"host": "200MiB"}}})


def test_both_commands_say_the_same(path: Path) -> None:
    given = "--policy", "lru", "--tenants", SHARES, "--jobs", "1", "--json"
    sized = json.loads(run(size_command, str(path), "--ram", "600MiB", *given))
    (replayed,) = json.loads(run(replay_command, str(path), "--capacity", "600MiB", *given))
    assert sized["by_tenant"] == replayed["by_tenant"]
    for entry in (sized, replayed):
        del entry["without_contract"]["seconds"]
    assert sized["without_contract"] == replayed["without_contract"]
    assert sized["chosen"]["served_pct"] == replayed["prefix_hit_tokens_pct"]
    assert sized["curve_policy"] == "lru"
    assert not math.isclose(sized["chosen"]["served_pct"], sized["without_contract"]["prefix_hit_tokens_pct"])


def test_what_the_contract_costs_the_others_is_shown(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "size.html"
    options = "--policy", "lru", "--ram", "600MiB", "--jobs", "1", "--device", "80MiB", "--html", str(page)
    shown = run(size_command, str(path), "--tenants", SHARES, *options)
    assert "What the contract brings and costs" in shown
    assert "Every setting was replayed with the tenants' shares and the hints." in " ".join(shown.split())
    assert "with LRU and without the tenants&#39; shares" in page.read_text()
    plain = run(size_command, str(path), "--no-hints", *options)
    assert "What the contract" not in plain
    assert "replayed" not in plain
    assert "tenants' shares" not in page.read_text()


@pytest.mark.parametrize("command", [size_command, replay_command])
def test_wrong_shares_are_not_called_wrong_json(path: Path, command: Any) -> None:
    wrong = json.dumps({"search": {"retain": {"host": "1TiB"}, "quota": {"host": "1TiB"}}})
    named = "tenants.search.retain.host=1099511627776 (1 TiB): more than half of its quota"
    for text, words in ((wrong, named), (wrong[:-1], "not JSON"), ("no-file", "cannot be read")):
        result = CliRunner().invoke(command, [str(path), "--tenants", text])
        assert result.exit_code == 2
        assert words in result.output
