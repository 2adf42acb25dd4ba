"""The tables of the comparison: text for the terminal, Markdown for the documentation, JSON for the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import HOST_BYTES, Result, compare, median, percentile
from benchmarks.peers.summary import MIB, REFERENCE, beside_pool, columns, shortfalls
from kvoffload.units import counted

NONE = "-"

Table = tuple[str, list[str], list[list[str]]]
"""A title, the heads of the columns and the rows."""


def tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables of all systems that gave figures, the summary first. The first column is the system."""
    reference = next((result for result in results if result.name == REFERENCE), None)
    measured = [result for result in results if result.times]
    sizes = sorted({size for result in measured for size in result.times})
    found = [_summary(measured)]
    found += [_times(size, measured, reference) for size in sizes]
    found += [_mixed(measured), _memory(measured, reference), _disk(measured), _outputs(measured, reference)]
    return [table for table in found if table[2]]


def _summary(results: Sequence[Result]) -> Table:
    found = columns(results)
    rows = []
    for result in results:
        cells = []
        for column in found:
            text = column.text(result.name) if result.name in column.figures else NONE
            cells.append(f"**{text}**" if text != NONE and column.is_best(result.name) else text)
        if any(cell != NONE for cell in cells):
            rows.append([result.title, *cells])
    title = "In short. Less is better in every column, and the best is bold"
    return title, ["system", *(column.head for column in found)], rows


def _times(size: int, results: Sequence[Result], reference: Result | None) -> Table:
    heads = ["system", "first sight p50", "p95", "again p50", "p95", "device hit p50", "tokens found again"]
    rows = []
    for result in results:
        times = result.times.get(size)
        if times is not None and times.first and times.again:
            hit = _p50(times.device) if times.device else NONE
            again = [NONE, NONE] if result.name == REFERENCE else _pair(times.again)
            rows.append([result.title, *_pair(times.first), *again, hit, f"{times.found:.0%}"])
    return f"Milliseconds to the first token, prompts of {size:,} tokens; in brackets the middle half", heads, rows


def _p50(seconds: Sequence[float]) -> str:
    low, middle, high = (f"{1e3 * percentile(seconds, percent):,.0f}" for percent in (25, 50, 75))
    return f"{middle} ({low} to {high})"


def _pair(seconds: Sequence[float]) -> list[str]:
    return [_p50(seconds), f"{1e3 * percentile(seconds, 95):,.0f}"]


def _range(values: Sequence[float]) -> str:
    """Returns the median, and the least and the most."""
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _mixed(results: Sequence[Result]) -> Table:
    heads = ["system", "prompt tokens/s", "output tokens/s", "CPU seconds per round", "TTFT p50", "TTFT p95"]
    rows = []
    for result in results:
        if result.mixed:
            prompt = _range([mixed.prompt_tokens / mixed.wall_s for mixed in result.mixed])
            output = _range([mixed.output_tokens / mixed.wall_s for mixed in result.mixed])
            cpu = _range([mixed.cpu_s for mixed in result.mixed])
            ttft = [each for mixed in result.mixed for each in mixed.ttft]
            rows.append([result.title, prompt, output, cpu, *_pair(ttft)])
    count = max((len(result.mixed) for result in results), default=0)
    title = f"Mixed load, {counted(count, 'round')}, in brackets the least and the most; TTFT in milliseconds"
    return title, heads, rows


def _memory(results: Sequence[Result], reference: Result | None) -> Table:
    heads = ["system", "budget", "at start", "with the blocks", "blocks", "beside the pool"]
    rows = []
    for result in results:
        if result.name == REFERENCE or reference is None or not result.memory_end:
            continue
        sizes = [
            HOST_BYTES,
            result.memory_start - reference.memory_start,
            result.memory_end - reference.memory_end,
            result.held_bytes,
            beside_pool(result, reference),
        ]
        rows.append([result.title, *(f"{size / MIB:,.0f}" for size in sizes)])
    return "MiB of resident memory beyond recompute's", heads, rows


def _disk(results: Sequence[Result]) -> Table:
    heads = ["system", "blocks", "on disk"]
    rows = [
        [result.title, *(f"{size / MIB:,.0f}" for size in (result.disk_held_bytes, result.disk_bytes))]
        for result in results
        if result.disk_bytes is not None
    ]
    return "MiB on disk after all prompts of the smallest size were stored and the system was stopped", heads, rows


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
    if found := shortfalls(results):
        parts.insert(2, "Where kvoffload is not the best:\n\n" + "\n".join(f"- {line}" for line in found))
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
    if found := shortfalls(results):
        parts.insert(1, "\n".join(["Where kvoffload is not the best", *(f"  {line}" for line in found)]))
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
