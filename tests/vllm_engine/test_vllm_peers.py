"""``make peers`` in real vLLM: kvoffload and its control, through the path that every system takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import main

pytestmark = pytest.mark.vllm


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kvoffload_notices_flipped_bits_and_the_control_does_not(tmp_path: Path) -> None:
    main(["faults", "--quick", "--only", "kvoffload", "--only", "kvoffload-tier", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["problems"] == []
    outcomes = {
        name: [cells[fault][0]["outcome"] for fault in ("no fault", "byte flips")]
        for name, cells in found["systems"].items()
    }
    assert outcomes == {
        "kvoffload-tier": ["right answer from the cache", "miss"],
        "kvoffload": ["right answer from the cache", "miss"],
        "control": ["right answer from the cache", "wrong answer"],
    }
