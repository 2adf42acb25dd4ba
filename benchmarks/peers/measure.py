"""Measures one system: what it answers, when, and what it takes for that."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.load import Load
from benchmarks.peers.processes import cpu_s, pss_bytes
from benchmarks.peers.systems import Answer, AskError, HangError, Running, StartError, System

HOST_BYTES = 2 << 30
DISK_BYTES = 4 << 30
SETTLE_S = 60.0
"""How long a system may take after the last answer to finish what it stores."""
IDLE_SHARE = 0.1
"""Processes that together use less of one core are idle."""
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less are a tie: rounding decides between them."""


@dataclass(slots=True)
class Times:
    """Seconds to the first token, by prompt: first seen, again, and when it is in the device's cache.

    ``found``: share of the tokens that were found the second time.
    """

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    found: float = 0.0


@dataclass(slots=True)
class Mixed:
    """One round of the mixed load: conversations in turns."""

    wall_s: float
    cpu_s: float
    prompt_tokens: int
    output_tokens: int
    ttft: list[float]


@dataclass(slots=True)
class Result:
    """What was measured of one system. ``problem``: the system's own message where it could not go on."""

    name: str
    title: str
    start_s: float = 0.0
    times: dict[int, Times] = field(default_factory=dict)
    mixed: list[Mixed] = field(default_factory=list)
    memory_start: int = 0
    memory_end: int = 0
    held_bytes: int = 0
    """Bytes of the blocks of the prompts that a system was asked to hold when ``memory_end`` was read."""
    disk_bytes: int | None = None
    disk_held_bytes: int = 0
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    problem: str | None = None
    disk_problem: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Same:
    """How answers compare with those of another system."""

    identical: int
    ties: int
    different: int


def compare(answers: Sequence[Answer], reference: Sequence[Answer], tie: float = TIE) -> Same:
    """Compares answers to the same prompts. Two that part at tokens of equal probability are a tie."""
    ties = different = 0
    for mine, theirs in zip(answers, reference, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if a != b), None)
        if place is None:
            continue
        if abs(mine.logprobs[place] - theirs.logprobs[place]) <= tie:
            ties += 1
        else:
            different += 1
    return Same(len(answers) - ties - different, ties, different)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """Returns the median, which is one of ``values``."""
    return percentile(values, 50)


def block_bytes(prompts: Sequence[Sequence[int]], bytes_per_token: int, block_size: int) -> int:
    """Returns the bytes of all whole blocks of ``prompts``, each distinct prefix counted once."""
    blocks = {tuple(p[: i + block_size]) for p in prompts for i in range(0, len(p) - block_size + 1, block_size)}
    return len(blocks) * block_size * bytes_per_token


def settle(running: Running, pause_s: float = 0.5, deadline_s: float = SETTLE_S) -> None:
    """Waits until the processes of a system have used next to no CPU for ``pause_s``: its background work is done."""
    deadline = time.monotonic() + deadline_s
    quiet_since = time.monotonic()
    before = cpu_s(running.processes())
    while (now := time.monotonic()) < deadline and now - quiet_since < pause_s:
        time.sleep(0.5)
        used = cpu_s(running.processes())
        if used - before > IDLE_SHARE * (time.monotonic() - now):
            quiet_since = time.monotonic()
        before = used


def measure(
    system: System, load: Load, work_dir: Path, model: Path, bytes_per_token: int, step: Callable[[str], None]
) -> Result:
    """Measures ``system``. A failure ends up in the result, never in an exception. ``step`` reports progress."""
    result = Result(system.name, system.title, versions=system.versions())
    _serve(system, load, work_dir / "memory", model, bytes_per_token, step, result)
    if result.problem is None and system.has_disk:
        step("with a disk")
        _fill_disk(system, load, work_dir / "disk", model, bytes_per_token, result)
    return result


def _serve(
    system: System,
    load: Load,
    work_dir: Path,
    model: Path,
    bytes_per_token: int,
    step: Callable[[str], None],
    result: Result,
) -> None:
    step("start")
    start = time.perf_counter()
    try:
        running = system.start(work_dir, model, HOST_BYTES)
    except StartError as error:
        result.problem = f"does not start: {error}"
        return
    result.start_s = time.perf_counter() - start
    try:
        # Compiles what is compiled at first use, and fills no table with what is asked later.
        warm = [[7 + i] * 1500 for i in range(2)]
        running.ask(warm * 2, load.answer_tokens)
        settle(running)
        result.memory_start = pss_bytes(running.processes())
        for size, prompts in load.prompts.items():
            times = result.times[size] = Times()
            step(f"{size:,} tokens, first")
            first = running.ask(prompts, load.answer_tokens)
            settle(running)
            step(f"{size:,} tokens, again")
            again = running.ask(prompts, load.answer_tokens)
            times.first, times.again = [a.ttft_s for a in first], [a.ttft_s for a in again]
            times.found = sum(a.cached or 0 for a in again) / sum(map(len, prompts))
            result.answers |= {f"{size} first": first, f"{size} again": again}
        settle(running)
        result.memory_end = pss_bytes(running.processes())
        asked = [prompt for prompts in load.prompts.values() for prompt in prompts]
        result.held_bytes = block_bytes(asked, bytes_per_token, system.chunk_tokens)
        step("device hits")
        for size, prompts in load.repeated.items():
            for prompt in prompts:
                answers = running.ask([prompt] * load.repeats, load.answer_tokens)
                result.times[size].device += [answer.ttft_s for answer in answers[1:]]
        for number, conversations in enumerate(load.rounds, 1):
            step(f"mixed load, round {number}")
            result.mixed.append(_converse(running, load, conversations, result))
        step("stop")
        running.stop()
    except (AskError, HangError) as error:
        result.problem = f"fails: {error}"
        running.kill()
    except BaseException:
        running.kill()
        raise


def _converse(running: Running, load: Load, conversations: list[list[list[int]]], result: Result) -> Mixed:
    before = cpu_s(running.processes())
    answers, wall_s = running.converse(conversations, load.slots, load.turn_tokens)
    settle(running)
    result.answers.setdefault("mixed", []).extend(answers)
    return Mixed(
        wall_s=wall_s,
        cpu_s=cpu_s(running.processes()) - before,
        prompt_tokens=sum(len(prompt) for turns in conversations for prompt in turns),
        output_tokens=sum(len(answer.tokens) for answer in answers),
        ttft=[answer.ttft_s for answer in answers],
    )


def _fill_disk(system: System, load: Load, work_dir: Path, model: Path, bytes_per_token: int, result: Result) -> None:
    """Starts the system with a disk and measures what the prompts of the smallest size take there."""
    prompts = load.prompts[min(load.prompts)]
    try:
        running = system.start(work_dir, model, HOST_BYTES, DISK_BYTES)
    except StartError as error:
        result.disk_problem = f"does not start with a disk: {error}"
        return
    try:
        running.ask(prompts, 1)
        settle(running, system.disk_pause_s)
        running.stop()
        result.disk_bytes, result.disk_held_bytes = (
            running.disk_bytes,
            block_bytes(prompts, bytes_per_token, system.chunk_tokens),
        )
    except (AskError, HangError) as error:
        result.disk_problem = f"fails with a disk: {error}"
        running.kill()
    except BaseException:
        running.kill()
        raise
    finally:
        shutil.rmtree(system.disk_dir(work_dir), ignore_errors=True)
