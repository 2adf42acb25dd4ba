"""Servers with other numbers of tensor-parallel ranks share one tier where vLLM stores in its canonical layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from test_vllm_ranks import PARALLEL, TWO_RANKS
from test_vllm_tier_storm import OURS, offloading
from vllm_harness import TOLERANCE, Run, Runner, differences_beyond_ties

from kvoffload.testing.scale import SCALE

pytestmark = pytest.mark.vllm

PROMPTS = 4
BUDGET = 8 << 20
EXTENSIVE = pytest.mark.skipif(SCALE <= 1, reason="two more engines; set KVOFFLOAD_TEST_SCALE above 1")


def server(run: Runner, folder: Path, kind: str, ranks: int, is_canonical: bool = True) -> Run:
    folder.mkdir(mode=0o700, exist_ok=True)
    tier: dict[str, Any] = OURS | {"tier": {"kind": kind, "dir": str(folder), "bytes": BUDGET}}
    tier |= {"load_deadline_ms": 20_000, "lookup_deadline_ms": 5_000}
    config: dict[str, Any] = {"offloading": offloading(tier, canonical_layout=is_canonical), "prompts": PROMPTS}
    if ranks > 1:
        config |= {"environment": TWO_RANKS, "engine": PARALLEL["tensor"]}
    return run("tier_rounds", **config)


@pytest.fixture(scope="session")
def alone(run: Runner) -> list[Any]:
    """The answers without offloading."""
    return list(run.once("tier-ranks", "rounds", rounds=1, prompts=PROMPTS)["outputs"][0])


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("shared_dir", 1, 2),
        pytest.param("disk", 1, 2, marks=EXTENSIVE),
        pytest.param("shared_dir", 2, 1, marks=EXTENSIVE),
        pytest.param("disk", 2, 1, marks=EXTENSIVE),
    ],
)
def test_what_one_server_has_stored_another_finds(
    run: Runner, alone: list[Any], tmp_path: Path, kind: str, first: int, second: int
) -> None:
    stored = server(run, tmp_path / "tier", kind, first)
    found = server(run, tmp_path / "tier", kind, second)
    for result in stored, found:
        assert differences_beyond_ties(result["outputs"], alone, TOLERANCE) == []
    # Some of the prompts begin alike, so that the first server finds some tokens too.
    assert stored["cached"][0] == 0
    assert min(found["cached"]) > 0
    assert sum(found["cached"]) > sum(stored["cached"])


@EXTENSIVE
def test_without_the_canonical_layout_they_do_not(run: Runner, alone: list[Any], tmp_path: Path) -> None:
    """The control: a block's bytes are then others for each number of ranks."""
    for ranks in 1, 2:
        result = server(run, tmp_path / "tier", "disk", ranks, is_canonical=False)
        assert differences_beyond_ties(result["outputs"], alone, TOLERANCE) == []
        assert result["cached"][0] == 0
