"""Sizing with tenants' shares, hints and retention of a trace: compared with replays, and what it does without room."""

from __future__ import annotations

import json
import math
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
from kvoffload.lab.trace import Trace
from tests.lab.test_contract import write

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
