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

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

PROMPTS = 4
BUDGET = 8 << 20
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
TWO: dict[str, Any] = {"environment": {BINDING: TWO_RANKS[BINDING]}, "engine": PARALLEL["tensor"]}
"""Other variables of vLLM count as other software."""


def server(run: Runner, folder: Path, ranks: int) -> Run:
    """Asks a server, one after the other, whose tier is the shared directory ``folder``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    tier: dict[str, Any] = OURS | {"tier": {"kind": "shared_dir", "dir": str(folder), "bytes": BUDGET}}
    tier |= {"load_deadline_ms": 20_000, "lookup_deadline_ms": 5_000}
    config: dict[str, Any] = {"offloading": offloading(tier, canonical_layout=True), "prompts": PROMPTS}
    return run("tier_rounds", **config, **(TWO if ranks > 1 else {}))


@pytest.fixture(scope="session")
def alone(run: Runner) -> list[Any]:
    """The answers without offloading."""
    return list(run.once("tier-ranks", "rounds", rounds=1, prompts=PROMPTS)["outputs"][0])


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_what_one_server_has_stored_another_finds(
    run: Runner, alone: list[Any], tmp_path: Path, first: int, second: int
) -> None:
    stored = server(run, tmp_path / "tier", first)
    found = server(run, tmp_path / "tier", second)
    for result in stored, found:
        assert differences_beyond_ties(result["outputs"], alone, TOLERANCE) == []
    # Some of the prompts begin alike, so that the first server finds some tokens too.
    assert stored["cached"][0] == 0
    assert min(found["cached"]) > 0
    assert sum(found["cached"]) > sum(stored["cached"])


def test_vllms_own_tier_shares_other_bytes(run: Runner, alone: list[Any], tmp_path: Path) -> None:
    """The control: without the canonical layout vLLM's fs tier gives the blocks of one rank to two."""
    config = {"offloading": offloading({"type": "fs", "root_dir": str(tmp_path / "fs")}), "prompts": PROMPTS}
    first, second = run("tier_rounds", **config), run("tier_rounds", **config, **TWO)
    assert differences_beyond_ties(first["outputs"], alone, TOLERANCE) == []
    assert len(differences_beyond_ties(second["outputs"], alone, TOLERANCE)) == PROMPTS
