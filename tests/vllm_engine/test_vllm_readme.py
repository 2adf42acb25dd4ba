"""The README's "See it work in five minutes", and "Try it" of docs/engines.md, tried literally: a fresh environment,
vLLM's server, its output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from vllm_harness import ENVIRONMENT

from demo.model import write_model, write_tokenizer
from demo.process import kill_session

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("KVOFFLOAD_DIST")
"""A folder in which ``make dist`` has put a wheel of this checkout, which is then installed."""
FROM_CHECKOUT = "pip install .\n"
STEP = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
END = "-- end of the step, status "
SETTLED = "until curl --silent --request POST localhost:8000/reset_prefix_cache | grep --quiet true; do sleep 0.1; done"
"""Waits for what a person does not notice: until the KV of the last answer is stored."""
INSIDE = ["unshare", "--user", "--map-root-user", "--net"]
"""A network of its own, where port 8000 is free and no other server is explained."""


def steps(text: str, heading: str) -> list[tuple[str, str]]:
    """Returns the commands under ``heading``, each with the output that is quoted below it, "" if none is."""
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return STEP.findall(section)


def shape(output: str) -> str:
    """Returns the words of ``output`` without what differs between two runs: numbers, names, where lines are broken,
    the number of periods and what was found in which."""
    periods = re.sub(r"^\d\d:\d\d.*$", "PERIOD", output, flags=re.MULTILINE)
    words = " ".join(periods.replace("─", " ").split())
    words = re.sub(r"PERIOD( PERIOD)*", "PERIODS", words)
    words = re.sub(r"process \d+ \(.*?\)", "PROCESS", words)
    return re.sub(r"\d[\d,.]*( ms| s| min|[kMG]\b)?", "N", words)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout as after ``git clone``: nothing in it was compiled."""
    for name in ("src", "README.md", "LICENSE", "pyproject.toml", "setup.py"):
        source, target = ROOT / name, tmp_path / "checkout" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(source, target)
    return tmp_path / "checkout"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell in a fresh environment that has vLLM and no kvoffload, on a machine without a network."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    packages = subprocess.run(
        [fresh / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(packages) / "vllm.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = fresh / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {fresh}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    return {
        **kept,
        **ENVIRONMENT,
        "PATH": f"{fresh}/bin:{os.environ['PATH']}",
        "COLUMNS": "100",
        "PYTHONIOENCODING": "utf-8",
        # Python compiles what is imported; pip would compile everything. For both options below pip takes 0 as given.
        "PIP_NO_COMPILE": "0",
        # Without an index pip cannot make a second environment to build in.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        # The native parts take longest, and are left out.
        "CC": "false",
        "KVOFFLOAD_NATIVE": "0",
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The small random model of the demo, with a tokenizer. Each byte of a text is a token."""
    directory = tmp_path / "model"
    write_model(directory, 1)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def shell(checkout: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A shell in ``checkout``, with the function that makes vLLM's CPU build start as vLLM does."""
    tried = subprocess.run([*INSIDE, "ip", "link", "set", "lo", "up"], capture_output=True)
    if tried.returncode:
        pytest.skip("needs the privilege to make a network namespace")
    ((without_gpu, _),) = steps((ROOT / "docs" / "serving.md").read_text(), "Without a GPU")
    (function,) = [line for line in without_gpu.splitlines() if line.startswith("vllm() ")]
    process = subprocess.Popen(
        [*INSIDE, "sh", "-c", "ip link set lo up && exec bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=checkout,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(f"{function}\n")
    try:
        yield process
    finally:
        kill_session(process)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.soak
def test_the_first_five_minutes(shell: subprocess.Popen[str], model: Path) -> None:
    tried = steps((ROOT / "README.md").read_text(), "See it work in five minutes")
    assert [command for command, _ in tried if command == FROM_CHECKOUT]
    if DIST is not None:
        (wheel,) = Path(DIST).resolve().glob("*.whl")
        tried = [(f"pip install {wheel}\n" if command == FROM_CHECKOUT else command, out) for command, out in tried]
    printed = try_all(shell, model, tried, "README.md")
    for output in (printed, tried[-1][1]):
        (found,) = re.findall(r"(\d+)% in\s+host memory", output)
        assert int(found) > 40, "half of both prompts, less the last block"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.soak
def test_the_offloading_of_the_engine(shell: subprocess.Popen[str], model: Path, tmp_path: Path) -> None:
    tried = [(FROM_CHECKOUT, ""), *steps((ROOT / "docs" / "engines.md").read_text(), "Try it")]
    cache = str(tmp_path / "cache")
    tried = [(command.replace("/tmp/kvoffload-cache", cache), quoted) for command, quoted in tried]
    printed = try_all(shell, model, tried, "docs/engines.md")
    assert re.search(r'kvoffload:tier_hit_tokens_total{.*tier="disk"} 1792', printed)


def try_all(shell: subprocess.Popen[str], model: Path, tried: Sequence[tuple[str, str]], page: str) -> str:
    """Runs all commands and compares what they print with what is quoted. Returns what the last one has printed."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    # The process group of a job is its own, as in a shell that somebody uses.
    shell.stdin.write(f"set -m\nMODEL={model}\n")
    for command, quoted in tried:
        waits = f"{SETTLED}\n" if "reset_prefix_cache" in command else ""
        shell.stdin.write(f"{waits}{command}echo '{END}'$?\n")
        shell.stdin.flush()
        lines: list[str] = []
        while not (line := shell.stdout.readline()).startswith(END):
            assert line, f"the shell has ended: {lines}"
            lines.append(line)
        printed = "".join(line for line in lines if not line.startswith("[1]"))
        assert line == f"{END}0\n", printed
        if quoted:
            assert shape(printed) == shape(quoted), f"{page}: quote this instead:\n{printed}"
    return printed


def test_another_output_has_another_shape() -> None:
    """The control."""
    (quoted,) = [
        output
        for command, output in steps((ROOT / "README.md").read_text(), "See it work in five minutes")
        if "kvoffload explain" in command
    ]
    assert shape(quoted.replace("1 missed", "2 missed")) == shape(quoted)
    assert shape(quoted.replace("missed because", "hit because")) != shape(quoted)
