"""Retention in vLLM: what a client has retained survives floods and restarts, and nothing outlives its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE
from vllm_harness import DEADLINE_S, Run, Runner

pytestmark = pytest.mark.vllm

BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 64 * 4
"""Two layers with keys and values of 64 floats per token."""
NUM_BLOCKS = 64
SESSIONS = 4


def options(**retain: int) -> dict[str, Any]:
    return {
        "host_bytes": NUM_BLOCKS * BLOCK_BYTES,
        "tenants": {"other": {"retain": {tier: n * BLOCK_BYTES for tier, n in retain.items()}}},
    }


def with_disk(directory: Path) -> dict[str, Any]:
    return options(disk=SESSIONS * 16) | {
        "disk_dir": str(directory),
        "disk_bytes": "6MiB",
        "load_deadline_ms": 1000 * DEADLINE_S,
        "load_only_if_faster": False,
    }


def check(result: Run, kept: int = 0) -> None:
    assert result["wrong"] == 0
    assert set(result["found"]) == {result["expected"] * BLOCK_SIZE}
    assert result["kept"] == kept


SIZES: dict[str, Any] = {"sessions": SESSIONS, "rounds": 3, "floods": 6}


@pytest.mark.parametrize("contents", ["exclusive", pytest.param("inclusive", marks=pytest.mark.soak)])
def test_retained_prefixes_survive_floods(run: Runner, contents: str) -> None:
    connector = options(host=SESSIONS * 8) | {"host_contents": contents}
    result = run("retained", connector=connector, seconds=3600, **SIZES)
    check(result)
    assert result["metrics"]["retentions:host"] == SESSIONS * 3 + 2
    answered = result["answered"]["kvoffload"]
    assert answered == {
        "device_tokens": 0,
        "host_tokens": 0,
        "tier_tokens": {},
        "saved_s": answered["saved_s"],
        "retained_tokens": result["expected"] * BLOCK_SIZE,
        "retained_in": "host",
    }


@pytest.mark.soak
def test_without_retention_nothing_survives(run: Runner) -> None:
    result = run("retained", connector=options(host=SESSIONS * 8), seconds=0, **SIZES)
    assert not any(result["found"])
    assert result["wrong"] == 0


@pytest.mark.soak
def test_what_is_retained_on_disk_survives_floods_and_restarts(run: Runner, tmp_path: Path) -> None:
    connector = with_disk(tmp_path / "disk")
    first = run("retained", connector=connector, seconds=3600, keeps=True, **SIZES | {"rounds": 1})
    check(first, kept=SESSIONS * first["expected"])
    second = run("retained", connector=connector, seconds=3600, ask_first=True, seed=8, **SIZES)
    assert second["before"] == first["found"]
    # No session of this process can end what another one has retained.
    check(second, kept=SESSIONS * first["expected"])
