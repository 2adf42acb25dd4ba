"""Replays with tenants' shares, hints and retention of a trace, and what they cost the others."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvoffload.cache.tenants import TenantConfig
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import Contract, ReplayConfig, replay
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
