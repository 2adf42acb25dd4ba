"""The commands ``kvoffload disk``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvoffload.cli.terminal import console_of, json_option, print_json, progress_bar, say, table_of
from kvoffload.printable import printable
from kvoffload.tiers.disk import offline
from kvoffload.tiers.disk.offline import Cleared, FolderReport, InspectError, PartReport, Verification
from kvoffload.tiers.identity import MAX_DESCRIPTION, describe, describe_difference, is_same_model
from kvoffload.tiers.shared_dir.seats import SeatState
from kvoffload.units import age, counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_DIGITS = 12
"""Digits of a fingerprint in the table."""
PROGRESS_S = 10.0
"""Time between two lines about the progress of a long command whose errors go to no terminal."""
MAX_BAD_SHOWN = 20

DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.group(short_help="Inspect, verify or clear the directory of a tier.")
def disk() -> None:
    """Inspect, verify or clear the directory of a disk tier or of a shared directory tier."""


@disk.command(short_help="Show the contents of DIR, and every fault.")
@DIRECTORY
@json_option()
def inspect(directory: Path, as_json: bool) -> None:
    """Show the contents of DIR: fingerprints, blocks, bytes and age, and every fault. In a shared directory, also
    its writers.

    Works beside running servers, and changes nothing. Exit status 2: DIR is not the directory of a tier.
    """
    with _errors("inspect"):
        parts = offline.inspect(directory)
    if as_json:
        print_json({"directory": str(directory), "parts": list(map(dataclasses.asdict, parts))})
    else:
        _show(console_of(), directory, parts)


@disk.command()
@DIRECTORY
@json_option()
def verify(directory: Path, as_json: bool) -> None:
    """Read every block in DIR and check its checksum.

    Works beside a running server, and changes nothing; a block that the server replaces meanwhile is not bad. Exit
    status 0: no block is bad; 1: a block or an index is bad, and a server would compute the blocks again; 2:
    DIR is not the directory of a tier.
    """
    with _errors("verify"):
        result = _verify(directory)
    if as_json:
        print_json({"directory": str(directory), **dataclasses.asdict(result)})
    else:
        _show_verification(console_of(), result)
    sys.exit(1 if result.bad or result.lost else 0)


@disk.command()
@DIRECTORY
@click.option("--fingerprint", metavar="FP", help="Only the blocks of this fingerprint; its first digits are enough.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option()
def clear(directory: Path, fingerprint: str | None, yes: bool, as_json: bool) -> None:
    """Remove the blocks in DIR. Files that are not kvoffload's are left.

    Refuses while a server uses DIR. Exit status 1: nothing was removed; 2: DIR is not the directory of a tier, or it is
    in use.
    """
    with _errors("clear"):
        parts = offline.inspect(directory)
        for part in parts:
            if part.in_use:
                raise InspectError(f"{directory / part.path} is in use by {_user(part)}; stop that server first")
        folders = [folder for part in parts for folder in part.folders]
        if fingerprint is not None:
            fingerprint = _complete_fingerprint(fingerprint, folders)
        chosen = [folder for folder in folders if fingerprint in (None, folder.fingerprint)]
        if not yes and chosen:
            size = format_bytes(sum(folder.allocated_bytes for folder in chosen))
            blocks = counted(sum(folder.num_blocks for folder in chosen), "block")
            click.confirm(f"Remove {blocks} ({size}) from {directory}?", abort=True, err=True)
        result = offline.clear(directory, fingerprint)
    if as_json:
        print_json({"directory": str(directory), **dataclasses.asdict(result)})
    else:
        _show_cleared(console_of(), directory, result)


# Commands.


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Ends the program with one line and exit status 2 if there is an InspectError."""
    try:
        yield
    except InspectError as error:
        say(f"disk {command}", printable(str(error)), "bold red")
        sys.exit(2)


def _verify(directory: Path) -> Verification:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with progress_bar(*columns) as bar:
        task, said = bar.add_task("", total=None), time.monotonic()

        def advance(nbytes: int) -> None:
            nonlocal said
            bar.advance(task, nbytes)
            now, work = time.monotonic(), bar.tasks[0]
            if bar.disable and now - said >= PROGRESS_S:
                said = now
                say(
                    "disk verify",
                    f"{format_bytes(int(work.completed))} of {format_bytes(int(work.total or 0))} read",
                    "",
                )

        return offline.verify(directory, lambda nbytes: bar.update(task, total=nbytes), advance)


def _complete_fingerprint(digits: str, folders: Sequence[FolderReport]) -> str:
    matches = sorted({folder.fingerprint for folder in folders if folder.fingerprint.startswith(digits.lower())})
    if len(matches) != 1:
        present = ", ".join(sorted({folder.fingerprint for folder in folders})) or "none"
        raise InspectError(
            f"--fingerprint {digits}: {'several fingerprints begin' if matches else 'no fingerprint begins'} with "
            f"these digits. Fingerprints in the directory: {present}"
        )
    return matches[0]


# Output.


def _show(console: Console, directory: Path, parts: Sequence[PartReport]) -> None:
    folders = [folder for part in parts for folder in part.folders]
    size = format_bytes(sum(folder.allocated_bytes for folder in folders))
    blocks = counted(sum(folder.num_blocks for folder in folders), "block")
    fingerprints = counted(len({folder.fingerprint for folder in folders}), "fingerprint")
    console.print(f"{directory}: {blocks} of {fingerprints} in {size}. {printable(_use(parts))}", style="bold")
    if any(part.writer for part in parts):
        console.print()
        console.print(_writer_table(parts))
    if folders:
        console.print()
        console.print(_folder_table(parts))
    for line in _identities(folders):
        console.print(f"\n{line}")
    if any(folder.transient for folder in folders):
        note = "transient: stored after a reset or a change of weights; the next server removes these blocks."
        console.print(f"\n{note}", style="dim")
    problems = offline.findings(parts)
    console.print()
    if not problems:
        console.print("Nothing is wrong.", style="green4")
    for problem in problems:
        console.print(printable(f"! {problem}"), style="yellow")


def _use(parts: Sequence[PartReport]) -> str:
    users = [_user(part) + (f" ({part.path})" if part.path else "") for part in parts if part.in_use]
    return f"In use by {', '.join(users)}." if users else "No server uses it."


def _user(part: PartReport) -> str:
    if part.pid is None:
        return "a server"
    return f"process {part.pid}" + (f" on {part.writer.host}" if part.writer else "")


def _writer_table(parts: Sequence[PartReport]) -> Table:
    table = table_of("writer")
    table.add_column("server")
    table.add_column("state")
    for name in ("heartbeat", "blocks", "on disk", "budget"):
        table.add_column(name, justify="right")
    for part in parts:
        if part.writer is not None:
            writer = part.writer
            is_silent = writer.state == SeatState.SERVING and not part.in_use
            table.add_row(
                part.path,
                printable(f"{writer.host} {writer.pid}") if writer.host else "",
                "silent" if is_silent else printable(writer.state),
                f"{age(writer.age_s)} ago",
                f"{sum(folder.num_blocks for folder in part.folders):,}",
                format_bytes(sum(folder.allocated_bytes for folder in part.folders)),
                format_bytes(writer.capacity_bytes) if writer.capacity_bytes else "",
            )
    return table


def _folder_table(parts: Sequence[PartReport]) -> Table:
    table = table_of("fingerprint", "blocks", "slots", "on disk", "oldest", "newest", wrap=True)
    table.add_column("")
    now = time.time()
    for part in parts:
        for folder in part.folders:
            notes = ["transient"] if folder.transient else []
            table.add_row(
                (f"{part.path}/" if part.path else "") + folder.fingerprint[:SHOWN_DIGITS],
                f"{folder.num_blocks:,}",
                f"{folder.capacity_blocks:,}",
                format_bytes(folder.allocated_bytes),
                "" if folder.oldest is None else age(now - folder.oldest),
                "" if folder.newest is None else age(now - folder.newest),
                ", ".join([*notes, *(["see below"] if folder.findings else [])]),
            )
    return table


def _identities(folders: Sequence[FolderReport]) -> list[str]:
    """Returns a line per fingerprint with a known identity. For further fingerprints of a model, the line has the
    difference from the fingerprint that was written to last."""
    known = sorted(
        (folder for folder in folders if folder.identity), key=lambda folder: folder.newest or 0, reverse=True
    )
    shown: dict[str, FolderReport] = {}
    lines = []
    for folder in known:
        if folder.fingerprint in shown:
            continue
        like = next((each for each in shown.values() if is_same_model(each.identity, folder.identity)), None)
        said = describe(folder.identity)
        if like is not None:
            difference = printable(describe_difference(folder.identity, like.identity), MAX_DESCRIPTION)
            said = f"as {like.fingerprint[:SHOWN_DIGITS]}, but {difference}"
        shown[folder.fingerprint] = folder
        lines.append(f"{folder.fingerprint[:SHOWN_DIGITS]}: {said}")
    return lines


def _show_verification(console: Console, result: Verification) -> None:
    for problem in result.findings:
        console.print(printable(f"! {problem}"), style="yellow")
    changed = f"; {counted(result.num_changed, 'block')} changed meanwhile" if result.num_changed else ""
    checked = f"{counted(result.num_blocks, 'block')} read, {format_bytes(result.nbytes)}{changed}"
    if result.lost:
        lost = f"The blocks of {counted(len(result.lost), 'fingerprint')} are lost and could not be checked."
        console.print(lost, style="bold red")
    if not result.bad:
        style = "none" if result.lost else "bold green"
        console.print(f"No {'other ' if result.lost else ''}block is bad: {checked}.", style=style)
        return
    console.print(f"{counted(len(result.bad), 'block')} bad: {checked}.", style="bold red")
    for bad in result.bad[:MAX_BAD_SHOWN]:
        line = f"{bad.path}, slot {bad.slot}: {bad.problem}; key {bad.key}"
        console.print(line, soft_wrap=True)
    if len(result.bad) > MAX_BAD_SHOWN:
        console.print(f"and {len(result.bad) - MAX_BAD_SHOWN:,} more; --json lists all", style="dim")


def _show_cleared(console: Console, directory: Path, result: Cleared) -> None:
    freed = f"{directory}: removed {counted(result.num_files, 'file')}, {format_bytes(result.nbytes)} freed."
    console.print(freed, style="bold")
    for name in result.left:
        console.print(printable(f"! not kvoffload's, and left: {name}"), style="yellow")
