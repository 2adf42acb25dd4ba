"""The tables of the comparison: text for the terminal, Markdown for the documentation, JSON for the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Result, compare, percentile

REFERENCE = "recompute"
MIB = 1 << 20
NONE = "-"

Table = tuple[str, list[str], list[list[str]]]
"""A title, the heads of the columns and the rows."""


def tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables of all systems that gave figures. The first column is the system."""
    reference = next((result for result in results if result.name == REFERENCE), None)
    measured = [result for result in results if result.times]
    sizes = sorted({size for result in measured for size in result.times})
    found = [_times(size, measured, reference) for size in sizes]
    found += [_mixed(measured), _space(measured, reference), _outputs(measured, reference)]
    return [table for table in found if table[2]]


def _times(size: int, results: Sequence[Result], reference: Result | None) -> Table:
    heads = ["system", "first p50", "first p95", "again p50", "again p95", "tokens found again"]
    rows = []
    for result in results:
        times = result.times.get(size)
        if times is not None and times.first and times.again:
            rows.append([result.title, *_pair(times.first), *_pair(times.again), f"{times.found:.0%}"])
    if reference is not None and reference.device and size == min(reference.times):
        rows.append(["device hit (the floor)", NONE, NONE, *_pair(reference.device), NONE])
    return f"Milliseconds to the first token, prompts of {size:,} tokens", heads, rows


def _pair(seconds: Sequence[float]) -> list[str]:
    return [f"{1e3 * percentile(seconds, percent):,.0f}" for percent in (50, 95)]


def _mixed(results: Sequence[Result]) -> Table:
    heads = ["system", "prompt tokens/s", "output tokens/s", "CPU seconds", "TTFT p50", "TTFT p95"]
    rows = []
    for result in results:
        if (mixed := result.mixed) is not None:
            rates = [f"{tokens / mixed.wall_s:,.0f}" for tokens in (mixed.prompt_tokens, mixed.output_tokens)]
            rows.append([result.title, *rates, f"{mixed.cpu_s:,.0f}", *_pair(mixed.ttft)])
    return "Mixed load: conversations in turns with shared prefixes; TTFT in milliseconds", heads, rows


def _space(results: Sequence[Result], reference: Result | None) -> Table:
    heads = ["system", "memory at start", "memory with the blocks", "blocks", "on disk", "blocks written"]
    rows = []
    for result in results:
        if result.name == REFERENCE or reference is None or not result.memory_end:
            continue
        memory = [
            f"{(mine - theirs) / MIB:,.0f}"
            for mine, theirs in (
                (result.memory_start, reference.memory_start),
                (result.memory_end, reference.memory_end),
            )
        ]
        disk = [NONE, NONE]
        if result.disk_bytes is not None:
            disk = [f"{size / MIB:,.0f}" for size in (result.disk_bytes, result.disk_held_bytes)]
        rows.append([result.title, *memory, f"{result.held_bytes / MIB:,.0f}", *disk])
    return "MiB of memory beyond recompute's, and of disk", heads, rows


def _outputs(results: Sequence[Result], reference: Result | None) -> Table:
    heads = ["system", "answers", "identical", "ties", "different"]
    rows = []
    for result in results:
        if result is reference or reference is None:
            continue
        parts = [name for name in result.answers if name in reference.answers]
        same = [compare(result.answers[name], reference.answers[name]) for name in parts]
        counts = [sum(s.identical for s in same), sum(s.ties for s in same), sum(s.different for s in same)]
        rows.append([result.title, str(sum(counts)), *map(str, counts)])
    return "Answers compared with recompute's", heads, rows


def problems(results: Sequence[Result]) -> list[str]:
    """Returns what could not be started or went wrong, each with the system's own message."""
    found = [f"{result.title} {result.problem}" for result in results if result.problem]
    return found + [f"{result.title} {result.disk_problem}" for result in results if result.disk_problem]


def markdown(results: Sequence[Result], facts: dict[str, str]) -> str:
    """Returns the tables as a section for the documentation."""
    parts = ["; ".join(f"{name}: {value}" for name, value in facts.items()) + "."]
    for title, heads, rows in tables(results):
        lines = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]]
        parts.append(f"**{title}**\n\n" + "\n".join(lines))
    if found := problems(results):
        parts.append("What could not be started or failed:\n\n" + "\n".join(f"- {line}" for line in found))
    return "\n\n".join(parts) + "\n"


def text(results: Sequence[Result]) -> str:
    """Returns the tables for a terminal."""
    parts = []
    for title, heads, rows in tables(results):
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
        lines = [
            f"  {row[0]:<{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
            for row in [heads, *rows]
        ]
        parts.append("\n".join([title, *lines]))
    parts += [f"  {line}" for line in problems(results)]
    return "\n\n".join(parts)


def publish(results: Sequence[Result], facts: dict[str, str], out: Path) -> None:
    """Writes ``peers.json`` and ``peers.md`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"facts": facts, "systems": []}
    for result in results:
        entry = asdict(result)
        del entry["answers"]
        figures["systems"].append(entry)
    (out / "peers.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (out / "peers.md").write_text(markdown(results, facts), encoding="utf-8")
