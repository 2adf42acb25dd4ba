"""Requests per second against the number of conversations, by vLLM's own multi-turn benchmark client.

Each system's server gets the same conversations. A client asks for the next turn of one conversation after the other,
so that the more of them are active, the more other conversations come between two turns of one. The device cache has
room for about four. All servers run, and one at a time is asked: the machine's speed changes within minutes, so the
systems are compared at one number of conversations before the next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.peers.place import Place
from benchmarks.peers.systems import StartError, System, environment
from demo.model import write_model, write_tokenizer
from demo.process import DemoError, start_program
from demo.servers import ServerProcess, VllmServer
from demo.text import load_documents
from kvoffload.lab.figures import BLUE, DARK, GREEN, INK, LIGHT, MUTED, PLOTTED, SOFT, STYLE, WIDTH, svg

CLIENT = Path(sys.executable).parents[1] / "multi-turn"
"""Where ``tools/vllm_client.py`` has put the client."""
BLOCK_SIZE = 128
DEVICE_BLOCKS = 64
MAX_TOKENS = 4096
NUM_CLIENTS = 2
CONVERSATIONS = (2, 8, 24)
"""Numbers of active conversations."""
MIN_REQUESTS, REQUESTS_PER_CONVERSATION = 32, 3
HOST_BYTES = 512 << 20
"""Room for about 16 conversations. On disk there is room for all."""
DISK_BYTES = 4 << 30
TEXT_CHARS = 400_000
POINT_DEADLINE_S = 600.0
STYLES = ((MUTED, ":"), (SOFT, "-"), (SOFT, "--"), (BLUE, "--"), (BLUE, "-"), (GREEN, "--"), (GREEN, "-"))
"""Colours and lines of the plot, in the order of the systems."""
MODEL_NAME = "small-random-llama"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
CORES = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
"""By itself vLLM leaves a connector's core free, and on two cores then uses fewer without a connector than with one."""
RATE = re.compile(r"requests_per_sec = ([\d.]+)")
ARGUMENTS = (
    *("--no-skip-tokenizer-init", "--served-model-name", MODEL_NAME, "--enable-prefix-caching"),
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
    *("--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(MAX_TOKENS), "--max-num-seqs", "8"),
)


def uniform(low: int, high: int) -> dict[str, Any]:
    return {"distribution": "uniform", "min": low, "max": high}


@dataclass(frozen=True)
class Workload:
    """Conversations, in tokens. ``common``: what all begin with; ``first``: what follows in one; then each turn has a
    question and an answer."""

    name: str
    turns: int
    common: int
    first: tuple[int, int]
    question: tuple[int, int]
    answer: tuple[int, int]

    def num_requests(self, active: int) -> int:
        return max(MIN_REQUESTS, REQUESTS_PER_CONVERSATION * active)

    def write(self, path: Path, active: int, text: Path) -> None:
        """Writes the client's description of enough conversations for a point."""
        conversations = max(active, math.ceil(self.num_requests(active) / self.turns)) + NUM_CLIENTS
        content = {
            "filetype": "generate_conversations",
            "num_conversations": conversations,
            "text_files": [str(text)],
            "print_stats": False,
            "prompt_input": {
                "num_turns": {"distribution": "constant", "value": 2 * self.turns},
                "common_prefix_num_tokens": {"distribution": "constant", "value": self.common},
                "prefix_num_tokens": uniform(*self.first),
                "num_tokens": uniform(*self.question),
            },
            "prompt_output": {"num_tokens": uniform(*self.answer)},
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


WORKLOADS = (
    Workload("chat", turns=6, common=64, first=(800, 1200), question=(120, 160), answer=(12, 24)),
    Workload("agents", turns=8, common=1024, first=(300, 500), question=(160, 240), answer=(8, 16)),
)


@dataclass(frozen=True)
class Point:
    """What the client measured with so many active conversations."""

    active: int
    requests_per_s: float
    ttft_ms: float
    """The median."""


@contextlib.contextmanager
def served(system: System, work: Path, model: Path) -> Iterator[VllmServer]:
    """A server with ``system``, and the services that it needs. Raises StartError or DemoError."""
    if (reason := system.missing()) is not None:
        raise StartError(reason)

    def start(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> ServerProcess:
        return start_program([system.python(), *command[1:]], log, variables)

    with contextlib.closing(Place(system, work, HOST_BYTES, DISK_BYTES)) as place:
        settings = place.begin()
        variables = {**environment(), **CORES, **settings.environment}
        with VllmServer(model, work / "server.log", settings.connector, ARGUMENTS, variables, start) as server:
            yield server


def measure(server: VllmServer, model: Path, workload: Workload, active: int, text: Path, work: Path) -> Point:
    """Runs the client once. Raises DemoError with the end of its output if it fails."""
    about, stats = work / f"{workload.name}-{active}.json", work / f"{workload.name}-{active}-requests.json"
    workload.write(about, active, text)
    command = [sys.executable, str(CLIENT / "benchmark_serving_multi_turn.py"), "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--url", f"http://127.0.0.1:{server.port}", "--seed", str(active)]
    command += ["--input-file", str(about), "--stats-json-output", str(stats), "--no-early-stop"]
    command += ["--num-clients", str(NUM_CLIENTS), "--max-active-conversations", str(active)]
    command += ["--max-num-requests", str(workload.num_requests(active))]
    variables = {**environment(), "PYTHONPATH": str(CLIENT / "packages")}
    done = subprocess.run(
        command, cwd=work, env=variables, capture_output=True, text=True, timeout=POINT_DEADLINE_S, check=False
    )
    about.with_suffix(".log").write_text(done.stdout + done.stderr)
    found = RATE.search(done.stdout)
    if done.returncode or found is None:
        raise DemoError("\n".join((done.stdout + done.stderr).splitlines()[-20:]))
    requests = json.loads(stats.read_text())
    return Point(active, float(found[1]), statistics.median(each["ttft_ms"] for each in requests))


def main(out: Path, systems: Sequence[System], quick: bool, head: str) -> None:
    """Writes ``multi-turn.json``, ``multi-turn.md`` and ``multi-turn.svg`` into ``out``."""
    if not CLIENT.exists():
        sys.exit(f"there is no {CLIENT}: make peers installs vLLM's client, or run tools/vllm_client.py")
    logs = out / "multi-turn"
    shutil.rmtree(logs, ignore_errors=True)
    numbers = CONVERSATIONS[:2] if quick else CONVERSATIONS
    texts = load_documents(None, len(numbers) * len(WORKLOADS), TEXT_CHARS, seed=0)
    results: dict[str, dict[str, list[Point]]] = {workload.name: {} for workload in WORKLOADS}
    messages: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model, seed=0)
        write_tokenizer(model, TEMPLATE)
        for w, workload in enumerate(WORKLOADS):
            points = results[workload.name]
            with contextlib.ExitStack() as stack:
                servers: dict[str, tuple[VllmServer, Path]] = {}
                for system in systems:
                    points[system.title] = []
                    work = logs / f"{workload.name}-{system.name}"
                    try:
                        servers[system.title] = stack.enter_context(served(system, work, model)), work
                    except (StartError, DemoError) as error:
                        messages[f"{workload.name}, {system.title}"] = str(error)
                for n, active in enumerate(numbers):
                    text = model / f"{workload.name}-{active}.txt"
                    text.write_text(texts[w * len(numbers) + n].text)
                    for title, (server, work) in list(servers.items()):
                        try:
                            points[title].append(measure(server, model, workload, active, text, work))
                        except (DemoError, subprocess.TimeoutExpired) as error:
                            messages[f"{workload.name}, {title}, {active} active"] = str(error)
                        else:
                            print(f"{workload.name}, {title}, {points[title][-1]}", file=sys.stderr, flush=True)
    publish(results, messages, out, head)


def publish(results: dict[str, dict[str, list[Point]]], messages: dict[str, str], out: Path, head: str) -> None:
    """Writes the points of each system, by workload and title, and what could not be measured."""
    content = {
        "head": head,
        "workloads": [asdict(workload) for workload in WORKLOADS],
        "points": {w: {s: [asdict(p) for p in points] for s, points in r.items()} for w, r in results.items()},
        "messages": messages,
    }
    (out / "multi-turn.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "multi-turn.svg").write_text(plot(results))
    lines = ["Requests per second, and the median time to the first token in ms.", f"{head}.", ""]
    for workload, by_system in results.items():
        numbers = sorted({point.active for points in by_system.values() for point in points})
        heads = [f"{workload}: active conversations", *map(str, numbers)]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for title, points in by_system.items():
            found = {point.active: f"{point.requests_per_s:.2f} ({point.ttft_ms:,.0f})" for point in points}
            cells = [title, *(found.get(number, "-") for number in numbers)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"- {name}: {message}" for name, message in messages.items()]
    text = "\n".join(lines).rstrip() + "\n"
    (out / "multi-turn.md").write_text(text)
    print(text)


def plot(results: dict[str, dict[str, list[Point]]]) -> str:
    """Returns an SVG with a panel per workload, in the colours that the reader prefers, light or dark."""
    titles = dict.fromkeys(title for by_system in results.values() for title in by_system)
    styles = dict(zip(titles, itertools.cycle(STYLES), strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        panels = figure.subplots(1, len(results), squeeze=False)[0]
        for ax, (workload, by_system) in zip(panels, results.items(), strict=True):
            ax.set_title(f"{workload}: requests per second")
            for title, points in by_system.items():
                colour, line = styles[title]
                xs, ys = [point.active for point in points], [point.requests_per_s for point in points]
                ax.plot(xs, ys, color=colour, linestyle=line, marker="o", markersize=4, linewidth=1.8, label=title)
            ax.set_xscale("log", base=2)
            numbers = sorted({point.active for points in by_system.values() for point in points})
            ax.set_xticks(numbers, [str(number) for number in numbers])
            ax.set_xlabel("active conversations", color=INK)
            ax.set_ylim(bottom=0)
        figure.legend(*panels[0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
        text = svg(figure, "Requests per second of each system by the number of active conversations")
    light, dark = (";".join(f"--{name}:{colours[name]}" for name in PLOTTED) for colours in (LIGHT, DARK))
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    return text.replace(">", f">{style}", 1)
