"""The run as a whole, with small programs in place of the servers and a folder of files in place of a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from demo import shared_run as run
from demo.__main__ import main
from demo.act import EngineProcess
from demo.model import CONFIG
from demo.stores import DirectoryStore, StoreMissingError

SERVER = """
import json, os, sys, time
from pathlib import Path
out = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
config = json.loads(sys.stdin.readline())
connector = config["connector"]
folder = None
if connector is not None:
    folder = Path(connector["kv_connector_extra_config"]["tiers"][0]["dir"])
bad, wrong, loaded = 0, False, False

def first_question(index, document, load):
    global bad, loaded
    prompt, found = config["documents"][document][1] + 121, 0
    if folder is not None:
        value = folder / f"slab-{document}"
        content = bytes([document]) * 2048
        if value.exists():
            if value.read_bytes() == content:
                found = prompt - 121 if load else 0
            else:
                bad += 1
        value.write_bytes(content)
    tokens = [1, 2] if wrong and found else [document, 7]
    loaded = loaded or bool(found)  # From then on the machine is less busy.
    return dict(index=index, document=document, follow_up=False, prompt_tokens=prompt, device_tokens=0, host_tokens=0,
        disk_tokens=found, source="disk" if found else "recompute", reason=None,
        ttft_ms=5.0 if found else 40.0 if loaded else 50.0, total_ms=60.0, output_tokens=tokens,
        logprobs=[-1.0, -2.0])

def corrupt_loads():
    global wrong
    wrong = CONTROL

def answer(do, **arguments):
    if do == "first_question":
        return first_question(**arguments)
    if do == "corrupt_loads":
        return corrupt_loads()
    if do == "end":
        return dict(wall_s=1.0, metrics={})
    return {"tier_bad_blocks:x": bad} if do == "metrics" else None

out.write(json.dumps(dict(vllm_version="0", device="none", start_s=0.0)) + "\\n")
for line in sys.stdin:
    out.write(json.dumps(answer(**json.loads(line))) + "\\n")
"""


class FolderStore(DirectoryStore):
    """Values are files of their own."""

    visible_s = 0.0


def missing(directory: Path, logs: Path) -> Any:
    raise StoreMissingError("run this line")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"shared_dir": lambda directory, logs: FolderStore(directory), "mooncake": missing}

    @contextmanager
    def model_directory(model: Path | None, seed: int) -> Iterator[Path]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        yield tmp_path

    for name, value in {
        "check_vllm": lambda: None,
        "model_directory": model_directory,
        "STORES": stores,
        "make_plan": partial(run.make_plan, shared=3, back=2),
        "STORE_BYTES": 1,
    }.items():
        monkeypatch.setattr(run, name, value)


def use_servers(monkeypatch: pytest.MonkeyPatch, control: bool = True) -> None:
    program = ("-c", SERVER.replace("CONTROL", str(control)))
    monkeypatch.setattr(run, "EngineProcess", partial(EngineProcess, program=program))


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_servers(monkeypatch)
    result = CliRunner().invoke(main, ["--shared", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "shared.json").read_text())
    assert report["failures"] == []
    shared = report["stores"]["shared_dir"]
    assert (shared["identical"], shared["control_detected"]) == (True, True)
    assert shared["ttft_ms"] == {"recompute": 40.0, "shared": 5.0}
    assert shared["hit_tokens"] == shared["tokens_asked"] - 3 * 121
    assert shared["hit_tokens_back"] > 0
    # Each prompt was loaded and computed by one server, in turn.
    asked = [(each["document"], each["index"]) for name in ("shared", "computed") for each in shared["requests"][name]]
    first = asked[0][1]
    assert sorted(asked) == [(number // 2, first + number) for number in range(6)]
    assert [each["source"] for each in shared["requests"]["computed"]] == ["recompute"] * 3
    assert shared["corrupted"] == {"bad_blocks": 3, "hit_tokens": 0}
    assert report["stores"]["mooncake"] == {"skipped": "run this line"}
    assert "mooncake was skipped: run this line" in result.output
    assert not list(tmp_path.glob("disk-*"))


def test_a_control_that_changes_nothing_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_servers(monkeypatch, control=False)
    result = CliRunner().invoke(main, ["--shared", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 1
    report = json.loads((tmp_path / "shared.json").read_text())
    assert report["stores"]["shared_dir"]["control_detected"] is False
    assert "the control was not detected" in report["failures"][0]


def test_servers_that_end_fail_the_run_but_leave_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ("-c", SERVER.replace('if do == "corrupt_loads":', "if do == do:\n        sys.exit(3)"))
    monkeypatch.setattr(run, "EngineProcess", partial(EngineProcess, program=program))
    result = CliRunner().invoke(main, ["--shared", "--out", str(tmp_path)])
    assert result.exit_code == 2  # Already the run without kvoffload has failed.
    assert "ended too early" in result.output
