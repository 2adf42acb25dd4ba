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
    """Returns options with which requests wait for blocks of ``tiers``, however slow this machine is."""
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
    """The disk is too small for all blocks. What it lacks after a restart comes from the other tier, which has no
    budget; its second server finds all in that tier alone."""
    both = with_tiers(disk(tmp_path, FEW_BYTES), own(tmp_path))
    first = run("rounds", rounds=1, close=True, connector=both)
    check_answers(first, expected)
    assert (hits(first, "disk"), hits(first, "folder")) == (0, 0)
    assert 0 < first["metrics"]["tier_blocks:disk"] < first["metrics"]["tier_blocks:folder"]

    second = run("rounds", rounds=1, close=True, connector=both)
    check_answers(second, expected)
    assert hits(second, "disk") > 0
    assert hits(second, "folder") > 0

    alone = run("rounds", rounds=1, connector=with_tiers(own(tmp_path)))
    check_answers(alone, expected)
    assert hits(alone, "folder") >= hits(second, "disk") + hits(second, "folder")


def test_the_control_bytes_of_a_stranger_that_are_changed_are_misses(
    run: Runner, expected: list[Any], tmp_path: Path
) -> None:
    connector = with_tiers(own(tmp_path))
    check_answers(run("rounds", rounds=1, close=True, connector=connector), expected)
    for file in (tmp_path / "own").glob("*/*"):
        raw = bytearray(file.read_bytes())
        raw[100] ^= 0x80
        file.write_bytes(raw)
    result = run("rounds", rounds=1, connector=connector)
    check_answers(result, expected)
    assert hits(result, "folder") == 0
    assert result["metrics"]["tier_bad_blocks:folder"] > 0


def test_a_tier_whose_medium_fails_at_start_is_left_out(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    result = run("rounds", rounds=1, connector=with_tiers({"kind": OWN, "path": "broken"}, disk(tmp_path)))
    check_answers(result, expected)
    said = "tiers[0].kind='own_tiers:FolderConfig': THERE IS NO FOLDER TIER: the medium is broken; the server continues"
    assert said in result.log
    assert result["metrics"]["tier_blocks:disk"] > 0


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"kind": OWN, "path": "/no/such"},
            "ConfigError: tiers[1].path='/no/such': is not a directory; make it first",
        ),
        (
            {"kind": OWN, "pth": "/no/such"},
            "ConfigError: tiers[1].pth='/no/such': unknown key of a tier of kind folder; did you mean path? Known: "
            "kind, path, store_threshold",
        ),
    ],
)
def test_a_wrong_entry_ends_the_start(run: Runner, tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    child, result = run.start("rounds", connector=with_tiers(disk(tmp_path), entry))
    assert child.wait(DEADLINE_S) != 0
    assert said in result.with_suffix(".log").read_text()
    assert not (tmp_path / "disk").exists()
