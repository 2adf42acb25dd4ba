"""The option ``tiers`` in vLLM's flag: a disk and a tier of a stranger, in several orders, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_at_rest, differences

pytestmark = pytest.mark.vllm

OWN = "own_tiers:FolderConfig"
FEW_BYTES = "2MiB"
"""Room on the disk for a part of the blocks."""


def with_tiers(*tiers: dict[str, Any]) -> dict[str, Any]:
    """Returns options with which requests wait for blocks of ``tiers``, however slow this machine is. Host memory does
    not repeat the device; the tiers get every block."""
    patient = {"load_deadline_ms": 1000 * DEADLINE_S, "load_only_if_faster": False}
    return POOL | patient | {"tiers": list(tiers)}


def disk(directory: Path, nbytes: str = "32MiB") -> dict[str, Any]:
    return {"kind": "disk", "dir": str(directory / "disk"), "bytes": nbytes}


def own(directory: Path) -> dict[str, Any]:
    (directory / "own").mkdir(exist_ok=True)
    return {"kind": OWN, "path": str(directory / "own")}


def hits(run: Run, tier: str) -> int:
    return int(run["metrics"].get(f"tier_hit_tokens:{tier}", 0))


def check_answers(run: Run, expected: list[Any]) -> None:
    for answers in run["outputs"]:
        assert differences(answers, expected) == []
    assert_at_rest(run.result)


def test_a_server_answers_from_the_tiers_that_its_flag_names(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """The disk is too small for all blocks: what it lacks after a restart comes from the tier of a stranger. A third
    tier has no medium, and is left out. The control: bytes of the stranger that are changed are misses."""
    tiers = with_tiers({"kind": OWN, "path": "broken"}, disk(tmp_path, FEW_BYTES), own(tmp_path))
    first = run("rounds", rounds=1, close=True, connector=tiers)
    check_answers(first, expected)
    assert (hits(first, "disk"), hits(first, "folder-2")) == (0, 0)
    assert 0 < first["metrics"]["tier_blocks:disk"] < first["metrics"]["tier_blocks:folder-2"]
    said = "tiers[0].kind='own_tiers:FolderConfig': THERE IS NO FOLDER TIER: the medium is broken; the server continues"
    assert said in first.log

    second = run("rounds", rounds=1, close=True, connector=tiers)
    check_answers(second, expected)
    assert hits(second, "disk") > 0
    assert hits(second, "folder-2") > 0

    for file in (tmp_path / "own").glob("*/*"):
        raw = bytearray(file.read_bytes())
        raw[100] ^= 0x80
        file.write_bytes(raw)
    control = run("rounds", rounds=1, connector=with_tiers(own(tmp_path)))
    check_answers(control, expected)
    assert hits(control, "folder") == 0
    assert control["metrics"]["tier_bad_blocks:folder"] > 0


def test_a_wrong_entry_ends_the_start(run: Runner, tmp_path: Path) -> None:
    child, result = run.start("rounds", connector=with_tiers(disk(tmp_path), {"kind": OWN, "path": "/no/such"}))
    assert child.wait(DEADLINE_S) != 0
    said = "ConfigError: tiers[1].path='/no/such': is not a directory; make it first"
    assert said in result.with_suffix(".log").read_text()
    assert not (tmp_path / "disk").exists()
