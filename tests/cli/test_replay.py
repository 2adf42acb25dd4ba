"""``kvoffload replay`` on small traces, valid and invalid."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload import cli
from kvoffload.abc import Eviction
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cli.lab import DEFAULT_POLICY
from kvoffload.config import OffloadConfig
from kvoffload.lab.model import DEFAULT_MODEL

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")

BLOCK = 512


def line(when: int, blocks: list[int], **other: Any) -> str:
    return json.dumps(
        {"timestamp": when, "input_length": len(blocks) * BLOCK, "output_length": 10, "hash_ids": blocks, **other}
    )


CHAINS = [[1, 2, 3], [4, 5], [1, 2, 3, 6], [7, 8], [1, 2, 9], [4, 5, 10]] * 4


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text("".join(line(1000 * i, chain) + "\n" for i, chain in enumerate(CHAINS)))
    return path


def run(*args: object, width: int = 100) -> Any:
    return testing.CliRunner(env={"COLUMNS": str(width)}).invoke(
        cli.group(), ["replay", *map(str, args), "--jobs", "1"], prog_name="kvoffload"
    )


def test_the_default_policy_is_that_of_a_server(trace: Path) -> None:
    (field,) = [field for field in dataclasses.fields(OffloadConfig) if field.name == "policy"]
    (entry,) = json.loads(run(trace, "--capacity", 4, "--json").stdout)
    assert entry["policy"] == DEFAULT_POLICY == field.default


def test_one_entry_per_policy_and_capacity(trace: Path) -> None:
    done = run(trace, "--policy", "lru,arc", "--capacity", "20%,6,1GiB", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    entries = json.loads(done.stdout)
    gib = (1 << 30) // int(DEFAULT_MODEL.bytes_per_token * BLOCK)
    assert [(entry["policy"], entry["capacity_blocks"]) for entry in entries] == [
        (policy, blocks) for policy in ("lru", "arc") for blocks in (2, 6, gib)
    ]
    for entry in entries:
        assert 0 <= entry["saved_flops_pct"] <= entry["prefix_hit_tokens_pct"] <= 100
        assert 0 < entry["writes_per_access"] <= 1
    assert entries[2]["prefix_hit_tokens_pct"] > entries[0]["prefix_hit_tokens_pct"]


def test_tiers_and_filter(trace: Path) -> None:
    done = run(trace, "--capacity", 4, "--device", 6, "--disk", "100%", "--store-threshold", 2, "--json")
    (entry,) = json.loads(done.stdout)
    assert [tier["name"] for tier in entry["tiers"]] == ["device", "host", "disk"]
    assert [tier["capacity_blocks"] for tier in entry["tiers"]] == [6, 4, 10]
    assert min(entry["device_hit_tokens"], entry["disk_hit_tokens"]) > 0
    assert entry["misses"]["not_admitted"] > 0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([{}, {}], "2 requests in "),
        ([{"session": "a"}, {}], "2 requests of 1 session in "),
        ([{"session": "a", "tenant": "x"}, {"session": "b", "tenant": "x"}], "2 requests of 2 sessions, 1 tenant in "),
    ],
)
def test_sessions_and_tenants_are_shown(tmp_path: Path, names: list[dict[str, str]], words: str) -> None:
    path = tmp_path / "t.jsonl"
    lines: list[dict[str, object]] = [{"kvoffload_trace": 1, "started": 0, "block_tokens": 16}]
    lines += [{"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2], **each} for each in names]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert words in run(path, width=200).stdout
    (entry,) = json.loads(run(path, "--capacity", 2, "--json").stdout)
    known = {name: len({each[name[:-1]] for each in names if name[:-1] in each}) for name in ("sessions", "tenants")}
    assert {name: entry[name] for name in known if name in entry} == {n: count for n, count in known.items() if count}


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_mark_the_best(trace: Path, width: int) -> None:
    capacities = ",".join(map(str, range(1, 12)))
    done = run(trace, "--policy", "lru,arc,auto", "--capacity", capacities, width=width)
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "24 requests" in done.stdout
    rows = [text for text in done.stdout.splitlines() if text.startswith(("lru", "arc", "auto"))]
    numbers = [number for row in rows for number in re.findall(r"\d+\.\d+", row)]
    assert len(numbers) == 3 * 3 * 11
    assert sum(row.count("*") for row in rows) >= 3 * 11


def test_one_configuration_is_shown_in_detail(trace: Path) -> None:
    for device in ("640MiB", "10", "100%"):
        done = run(trace, "--device", device, "--capacity", "4", "--disk", 20)
        for words in ("device", "host", "disk", "never stored", "amplifi-", "TTFT p95"):
            assert words in done.stdout
        assert "Device cache: 640 MiB, 10 blocks, 100% of the distinct blocks" in done.stdout


@pytest.mark.parametrize("capacities", ["4", "2,4"])
def test_a_long_name_leaves_the_numbers_whole(trace: Path, capacities: str) -> None:
    done = run(
        trace,
        "--policy",
        f"lru,{__name__}:APolicyWithANameThatIsSoMuchLongerThanMostThatNoTerminalHasRoomForAllOfItInOneLine",
        "--capacity",
        capacities,
        width=80,
    )
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    (row,) = (text for text in done.stdout.splitlines()[:10] if text.startswith("lru"))
    assert len(re.findall(r"\d+\.\d+", row)) == (2 if "," in capacities else 5)


def test_a_page_with_all_plots(trace: Path, tmp_path: Path) -> None:
    """Without a curve of one point, and without more bars than anybody can read."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    done = run(trace, "--policy", "lru,arc", "--capacity", "2,4,8", "--html", page)
    assert done.exit_code == 0
    assert done.stdout.endswith(f"Page: {page}\n")
    text = page.read_text()
    assert not re.search(r'(?:src|href)="http', text)
    for words in ("small.jsonl", "arc", "never stored"):
        assert words in text
    done = run(trace, "--capacity", 4, "--html", page, "--json")
    assert json.loads(done.stdout)
    assert done.stderr.endswith(f"Page: {page}\n")
    for capacities, curves, bars in (("2,4,8", 2, 2), ("4", 0, 2), (",".join(map(str, range(1, 60))), 2, 0)):
        run(trace, "--capacity", capacities, "--html", page)
        assert page.read_text().count("<svg") == curves + bars
        assert ("Percent of all prompt tokens" in page.read_text()) is bool(curves)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "lri"], "--policy='lri': no policy has this name; write one of arc, auto, lru, or a class"),
        (["--policy", "lru,sieve"], "--policy='sieve': no policy has this name; write one of arc, auto, lru, or"),
        (["--policy", "lru,"], "--policy='lru,': an entry is empty"),
        (["--capacity", "much"], "--capacity='much': not a capacity; write"),
        (["--capacity", "1kB"], "--capacity='1kB': too small for one block"),
        (["--capacity", "1000%"], "--capacity='1000%': must be more than 0% and at most 100%"),
        (["--policy", f"{__name__}:Failing"], f"--policy='{__name__}:Failing': failed at request"),
        (["--policy", f"{__name__}:Greedy"], f"--policy='{__name__}:Greedy': failed at request"),
        (["--device", "200MiB"], "--device=3: the longest request needs 5 blocks of the device at once, so no engine"),
        (
            ["--host-contents", "exclusive"],
            "--host-contents='exclusive': the size of the device's own cache is not given; leave it out",
        ),
        (["--disk", "0"], "--disk='0': must be 1 to"),
        (["--store-threshold", "1"], "--store-threshold=1: must be 2 or more"),
        (["--model", "/no/such"], "--model='/no/such'"),
        (["--format", "csv"], "--format='csv': unknown; use one of"),
        (["--block-tokens", "0"], "--block-tokens=0: must be a whole number"),
        (["--prefill-speed", "0"], "--prefill-speed=0: must be more than 0"),
        (["--html", "/no/such/page.html"], "--html='/no/such/page.html': cannot be written"),
        (["--capacity", ",".join(map(str, range(1, 1003)))], "--policy and --capacity: 1,002 combinations"),
    ],
)
def test_an_invalid_option_is_named_as_typed_in_one_line(trace: Path, arguments: list[str], words: str) -> None:
    done = run(trace, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvoffload replay: {words}")
    assert done.stderr.count("\n") == 1


class APolicyWithANameThatIsSoMuchLongerThanMostThatNoTerminalHasRoomForAllOfItInOneLine(LRUPolicy):
    pass


class Failing(LRUPolicy):
    def evict(self, eviction: Eviction) -> Any:
        raise RuntimeError("a line\nand another")


class Greedy(LRUPolicy):
    def evict(self, eviction: Eviction) -> Any:
        return super().evict(eviction)[:-1]


class Dying(LRUPolicy):
    def evict(self, eviction: Eviction) -> Any:
        os._exit(1)


def test_the_death_of_a_process_is_reported_in_one_line(trace: Path) -> None:
    arguments = ["replay", str(trace), "--policy", f"{__name__}:Dying", "--capacity", "5,6", "--jobs", "2"]
    done = testing.CliRunner().invoke(cli.group(), arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--jobs=2: a process died" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_trace_without_any_block(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line(0, [], input_length=5))
    for command in ("replay", "size"):
        done = testing.CliRunner().invoke(cli.group(), [command, str(path)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert "no request has a block of 512 tokens" in done.stderr


def test_output_that_cannot_be_written(trace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from kvoffload.cli import main; main()", "replay", str(trace), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("kvoffload replay: cannot write the output: No space left on device")


def test_host_memory_that_does_not_repeat_the_device(trace: Path, tmp_path: Path) -> None:
    hits, page = {}, tmp_path / "page.html"
    for contents in ("inclusive", "exclusive"):
        arguments: list[object] = [trace, "--policy", "lru", "--capacity", 4, "--device", 6]
        if contents == "inclusive":
            arguments += ["--host-contents", contents]
        shown = run(*arguments, "--html", page)
        assert shown.exit_code == 0
        is_exclusive = contents == "exclusive"
        assert ("Host memory does not repeat what the device cache holds" in shown.stdout) is is_exclusive
        assert ("does not repeat what the device cache holds" in page.read_text()) is is_exclusive
        (entry,) = json.loads(run(*arguments, "--json").stdout)
        assert entry["host_contents"] == contents
        hits[contents] = entry["prefix_hit_tokens"]
        page.unlink()
    assert hits["inclusive"] < hits["exclusive"]
