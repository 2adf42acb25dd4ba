"""The plan of the acts: returning documents miss on the device, prompts fit, the disk outlives its act."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import run
from demo.process import DemoError


@pytest.mark.parametrize("sizes", [run.USUAL, run.CHATS], ids=["random", "chats"])
def test_a_document_is_evicted_before_it_returns(sizes: run.Sizes) -> None:
    """Whoever asks about it."""
    last: dict[int, int] = {}
    for at, (conversation, turn) in enumerate(run.plan_visits(sizes)):
        document = conversation % sizes.documents
        if turn != sizes.turns and document in last:
            between = {c % sizes.documents for c, _ in run.plan_visits(sizes)[last[document] + 1 : at]} - {document}
            assert len(between) * sizes.document_blocks[0] > sizes.device_blocks
        last[document] = at


def test_the_disk_outlives_the_act(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    plans = run.act_plans(2 << 30, tmp_path, trace)
    options = [(plan.connector or {}).get("kv_connector_extra_config", {}) for plan in plans]
    assert [plan.is_restart for plan in plans] == [False, False, True]
    assert options[2] == {"host_bytes": "2GiB", "disk_dir": str(tmp_path), "disk_bytes": "2GiB"}
    assert options[1] == options[2] | {"record_trace": str(trace)}, "only the second act is recorded"


def test_a_full_disk_is_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="choose a directory on another disk"), run.disk_directory(tmp_path, 1 << 60):
        pass
    with run.disk_directory(tmp_path, 1) as directory:
        (directory / "slab").write_bytes(b"x")
        assert directory.parent == tmp_path
    assert not directory.exists()
