"""The comparison in one table: figures of which less is better, and who has the least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.measure import HOST_BYTES, Result, median

REFERENCE = "recompute"
OURS = "kvoffload"
MIB = 1 << 20
WRITTEN_SHARE = 0.95
"""A system that has fewer of its blocks' bytes on disk has not written all of them."""
EQUAL = 0.02
"""Figures that differ by a smaller share than this are both the best."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of all systems that have it, by their names. Less is better."""

    head: str
    figures: dict[str, float]
    digits: int = 2

    def text(self, name: str) -> str:
        return f"{self.figures[name]:,.{self.digits}f}"

    def is_best(self, name: str) -> bool:
        least = min(self.figures.values())
        return self.figures[name] <= least + EQUAL * abs(least)


def columns(results: Sequence[Result]) -> list[Column]:
    """Returns what is compared: times by those of a device hit or of recompute, MiB, and bytes per byte of blocks."""
    reference = next((result for result in results if result.name == REFERENCE), None)
    others = [result for result in results if result.name != REFERENCE and result.times]
    if reference is None or not others:
        return []

    def column(head: str, figure: Callable[[Result], float | None], digits: int = 2) -> Column:
        found = ((result.name, figure(result)) for result in others)
        return Column(head, {name: value for name, value in found if value is not None}, digits)

    def again(size: int) -> Column:
        floor = reference.times[size].device
        return column(f"again, {size:,} tokens", lambda r: _by(r.times[size].again, floor) if size in r.times else None)

    def first(size: int) -> Column:
        least = reference.times[size].first
        return column(
            f"first sight, {size:,} tokens", lambda r: _by(r.times[size].first, least) if size in r.times else None
        )

    wall_s, used_s = ([m.wall_s for m in reference.mixed], [m.cpu_s for m in reference.mixed])
    sizes = sorted(reference.times)
    made = [*map(again, sizes), *map(first, sizes)]
    made.append(column("mixed load", lambda r: _by([m.wall_s for m in r.mixed], wall_s)))
    made.append(column("CPU time", lambda r: _by([m.cpu_s for m in r.mixed], used_s)))
    made.append(
        column("MiB beside the pool", lambda r: beside_pool(r, reference) / MIB if r.memory_end else None, digits=0)
    )
    made.append(column("disk", disk_share))
    return [each for each in made if each.figures]


def shortfalls(results: Sequence[Result]) -> list[str]:
    """Returns in which columns kvoffload is not the best, and who is."""
    titles = {result.name: result.title for result in results}
    found = []
    for column in columns(results):
        if OURS in column.figures and not column.is_best(OURS):
            name = min(column.figures, key=column.figures.__getitem__)
            found.append(f"{column.head}: {column.text(OURS)}; {titles[name]}: {column.text(name)}")
    return found


def pool_bytes(result: Result, reference: Result) -> int:
    """Returns the resident bytes that hold blocks, or could: the whole budget, or the blocks.

    It is the budget where that is resident at start, and the blocks where memory becomes resident with them.
    """
    at_start = result.memory_start - reference.memory_start
    return HOST_BYTES if at_start > HOST_BYTES / 2 else result.held_bytes


def beside_pool(result: Result, reference: Result) -> int:
    """Returns the bytes of memory that a system takes beside what holds its blocks."""
    return result.memory_end - reference.memory_end - pool_bytes(result, reference)


def disk_share(result: Result) -> float | None:
    """Returns the bytes on disk per byte of blocks; None if not all blocks have been written."""
    if result.disk_bytes is None or result.disk_bytes < WRITTEN_SHARE * result.disk_held_bytes:
        return None
    return result.disk_bytes / result.disk_held_bytes if result.disk_held_bytes else None


def _by(mine: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Returns the ratio of the medians; None without a figure to divide by."""
    return median(mine) / median(theirs) if mine and any(theirs) else None
