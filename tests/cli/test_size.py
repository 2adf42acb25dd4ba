"""``kvoffload size``: its output, and the options that it refuses."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from benchmarks.synthetic import generate  # noqa: E402
from kvoffload.cli.replay import replay  # noqa: E402
from kvoffload.cli.size import size  # noqa: E402
from kvoffload.lab.readers import read_trace  # noqa: E402
from kvoffload.lab.writer import write_trace  # noqa: E402
from tests.lab.traces import LLAMA  # noqa: E402


def run(*arguments: str) -> Any:
    return testing.CliRunner().invoke(size, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(generate("chat", 200), path)
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_the_answer_is_sentences_and_a_table(chat: str, config: str) -> None:
    result = run(chat, "--model", config, "--ram", "4GiB,8GiB", "--disk", "none,32GiB")
    assert result.exit_code == 0, result.output
    assert "of prompt tokens" in result.stdout
    assert "A cache that never evicts would serve" in result.stdout
    rows = [line for line in result.stdout.splitlines() if " GiB " in line and "%" in line and "ms" in line]
    assert len(rows) == 4
    assert sum(row.startswith("*") for row in rows) == 1
    assert result.stderr == ""


@pytest.mark.parametrize("disk", ["none", "8GiB"])
def test_parts_add_up_and_text_and_page_have_the_same(chat: str, tmp_path: Path, disk: str) -> None:
    """For some prompts of the trace, more than the smallest RAM is on the device."""
    page = tmp_path / "size.html"
    arguments = ["--policy", "arc", "--device", "5GiB", "--ram", "1GiB,6GiB,7GiB", "--disk", disk, "--html", str(page)]
    shown = run(chat, *arguments, "--jobs", "1").stdout
    sentence = re.search(r"serves? ([\d.]+)% of prompt tokens \(([^)]*)\)", " ".join(shown.split()))
    assert sentence is not None
    places = ["the device", "RAM", *([] if disk == "none" else ["disk"])]
    assert re.findall(r"% from ([a-zA-Z ]+)", sentence[2]) == places
    assert sum(Decimal(part) for part in re.findall(r"([\d.]+)%", sentence[2])) == Decimal(sentence[1])
    assert "The device's own cache has 5 GiB." in " ".join(shown.split())
    assert "-0.0" not in shown
    lines = [line for line in shown.splitlines() if " ms " in line and "%" in line]
    rows = [[Decimal(part) for part in re.findall(r"([\d.]+)%", line)] for line in lines]
    assert len(rows) == 3
    for served, *parts in rows:
        assert sum(parts) == served
        assert len(parts) == len(places)
    html = page.read_text()
    table = [
        [Decimal(each) for each in re.findall(r">([\d.]+)%<", row)] for row in re.findall(r"<tr.*?</tr>", html, re.S)
    ]
    assert [row for row in table if row] == rows
    assert "The device&#39;s own cache has 5 GiB." in html
    assert len(re.findall(r"<th>from ", html)) == len(places)
    assert html.count("<svg") == 1
    assert '<tr class="chosen">' in html
    other = re.sub(r"http://(www\.w3\.org|purl\.org|creativecommons\.org)/", "", html)
    assert "://" not in other, "a page needs no other file"


def test_speeds_and_target(chat: str) -> None:
    slow = json.loads(run(chat, "--ram", "16GiB", "--prefill-speed", "100", "--json").stdout)["settings"][0]
    fast = json.loads(run(chat, "--ram", "16GiB", "--prefill-speed", "1e6", "--json").stdout)["settings"][0]
    assert slow["ttft_p95_s"] > 100 * fast["ttft_p95_s"]
    met = json.loads(run(chat, "--ram", "16GiB", "--ttft-p95", "1e6", "--prefill-speed", "1e4", "--json").stdout)
    assert met["chosen"] is not None
    assert "is the cheapest setting tried" in met["answer"]
    missed = run(chat, "--ram", "16GiB", "--ttft-p95", "0.001", "--prefill-speed", "1e4", "--json")
    assert json.loads(missed.stdout)["chosen"] is None


def test_the_prefill_speed_is_not_guessed_for_a_target(chat: str, tmp_path: Path) -> None:
    refused = run(chat, "--ram", "16GiB", "--ttft-p95", "100")
    assert refused.exit_code == 2
    assert "give --prefill-speed" in refused.output
    assert "(a guess: give" in " ".join(run(chat, "--ram", "16GiB").output.split())

    trace = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [{"kvoffload_trace": 1, "started": 0.0, "block_tokens": 16}]
    lines += [
        {"timestamp": i, "input_length": 160, "output_length": 0, "hash_ids": list(range(10 * i, 10 * i + 10))}
        | ({"prefill_tokens": 160, "prefill_ms": 4000} if i % 2 else {})
        for i in range(20)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    converted = tmp_path / "converted.jsonl"
    write_trace(read_trace(trace), converted)
    for path in (trace, converted):
        slow = run(str(path), "--ram", "1GiB", "--ttft-p95", "100", "--json")
        assert slow.exit_code == 0, slow.output
        # 160 tokens at 40 tokens/s, and nothing is found.
        assert json.loads(slow.stdout)["settings"][0]["ttft_p50_s"] == pytest.approx(4.0, rel=0.01)
        assert "measured by the recorded server" in " ".join(run(str(path), "--ram", "1GiB").output.split())
    given = run(str(trace), "--ram", "1GiB", "--prefill-speed", "400", "--json")
    assert json.loads(given.stdout)["settings"][0]["ttft_p50_s"] == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ram", "much"], "--ram='much': not an amount of memory; write"),
        (["--ram", "8GiB,"], "--ram='8GiB,': an entry is empty"),
        (["--ram", "1KiB"], "--ram='1 KiB': too small for one block of 32 MiB"),
        (["--ram", "none"], "--ram='none': not an amount of memory"),
        (["--policy", "mru"], "--policy='mru': no policy has this name"),
        (["--prefill-speed", "0"], "--prefill-speed=0: must be more than 0"),
        (["--disk-speed", "nan"], "--disk-speed=nan: must be more than 0"),
        (["--ttft-p95", "-1"], "--ttft-p95=-1: must be more than 0"),
        (["--ram-price", "-1"], "--ram-price=-1: must be"),
        (["--kv-dtype", "fp8"], "--kv-dtype='fp8' without --model: give"),
        (["--kv-dtype", "fp7"], "--kv-dtype='fp7': unknown; use one of float32"),
        (["--model", "nowhere.json"], "--model='nowhere.json': No such file"),
        (["--html", "/nowhere/page.html"], "--html='/nowhere/page.html': cannot be written"),
    ],
)
def test_an_invalid_option_is_named_as_typed_in_one_line(chat: str, arguments: list[str], message: str) -> None:
    result = run(chat, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvoffload size: {message}")
    assert result.stderr.count("\n") == 1


def test_invalid_lines(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace = tmp_path / "trace.jsonl"
    trace.write_text(good + "nonsense\n" + good)
    refused = run(str(trace))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"1 of 3 lines cannot be used: {trace}:2: not JSON" in refused.stderr
    page = tmp_path / "size.html"
    result = run(str(trace), "--html", str(page), "--skip-bad-lines")
    assert result.exit_code == 0, result.output
    assert "skipped 1 line" in result.stderr
    assert f"1 line of the trace was invalid and skipped; the first: {trace}:2: " in " ".join(page.read_text().split())
    assert f"{trace}:2" in result.stderr.replace("\n", "")
    trace.write_text("")
    assert run(str(trace)).exit_code == 2


@pytest.mark.parametrize("command", [size, replay])
def test_what_others_wrote_does_not_control_the_terminal(tmp_path: Path, command: Any) -> None:
    title = "\x1b]0;OWNED\x07"
    good = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    (tmp_path / "header.csv").write_text(f"{title},obj_id\n1,2\n")
    (tmp_path / f"{title.replace('/', '')}.jsonl").write_text(good * 200 + title)
    for trace in tmp_path.iterdir():
        result = testing.CliRunner().invoke(command, [str(trace)])
        assert "OWNED" in result.output
        assert "\x1b" not in result.output
        assert "\x07" not in result.output
