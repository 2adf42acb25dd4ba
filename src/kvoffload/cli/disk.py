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
from kvoffload.tiers.disk.offline import FolderReport, InspectError, PartReport
from kvoffload.tiers.identity import describe
from kvoffload.units import age, counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_DIGITS = 12
"""Digits of a fingerprint in the table."""
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
    its servers.

    Works beside running servers, and changes nothing. Exit status 2: DIR is not the directory of a tier.
    """
    with _errors("inspect"):
        _show(directory, offline.inspect(directory), as_json)


@disk.command()
@DIRECTORY
@json_option()
def verify(directory: Path, as_json: bool) -> None:
    """Read every block in DIR and check its checksum.

    Works beside a running server, and changes nothing; a block that the server replaces meanwhile is not bad. Exit
    status 0: no block is bad; 1: a block or an index is bad, and a server would compute the blocks again; 2:
    DIR is not the directory of a tier.
    """
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with _errors("verify"), progress_bar(*columns) as bar:
        task = bar.add_task("", total=None)
        parts = offline.inspect(directory, lambda done, total: bar.update(task, completed=done, total=total))
    _show(directory, parts, as_json)
    folders = _folders(parts)
    if not as_json:
        _show_verification(console_of(), folders)
    sys.exit(any(folder.bad or folder.is_lost for folder in folders))


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
        folders = _folders(parts)
        if fingerprint is not None:
            fingerprint = _complete_fingerprint(fingerprint, folders)
        chosen = [folder for folder in folders if fingerprint in (None, folder.fingerprint)]
        if not yes and chosen:
            click.confirm(f"Remove {_amount(chosen)} from {directory}?", abort=True, err=True)
        result = offline.clear(directory, fingerprint)
    if as_json:
        print_json({"directory": str(directory), **dataclasses.asdict(result)})
        return
    console = console_of()
    removed = f"{directory}: removed {counted(result.num_files, 'file')}, {format_bytes(result.nbytes)} freed."
    console.print(removed, style="bold")
    for name in result.left:
        console.print(printable(f"! not kvoffload's, and left: {name}"), style="yellow")


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Ends the program with one line and exit status 2 if there is an InspectError."""
    try:
        yield
    except InspectError as error:
        say(f"disk {command}", printable(str(error)), "bold red")
        sys.exit(2)


def _folders(parts: Sequence[PartReport]) -> list[FolderReport]:
    return [folder for part in parts for folder in part.folders]


def _complete_fingerprint(digits: str, folders: Sequence[FolderReport]) -> str:
    present = sorted({folder.fingerprint for folder in folders})
    matches = [each for each in present if each.startswith(digits.lower())]
    if len(matches) != 1:
        raise InspectError(
            f"--fingerprint {digits}: {'several fingerprints begin' if matches else 'no fingerprint begins'} with "
            f"these digits. Fingerprints in the directory: {', '.join(present) or 'none'}"
        )
    return matches[0]


# Output.


def _show(directory: Path, parts: Sequence[PartReport], as_json: bool) -> None:
    if as_json:
        print_json({"directory": str(directory), "parts": list(map(dataclasses.asdict, parts))})
        return
    console, folders = console_of(), _folders(parts)
    users = [_user(part) + (f" ({part.path})" if part.path else "") for part in parts if part.in_use]
    use = f"In use by {', '.join(users)}." if users else "No server uses it."
    console.print(f"{directory}: {_amount(folders)}. {printable(use)}\n", style="bold")
    console.print(_table(parts))
    for fingerprint, identity in {each.fingerprint: each.identity for each in folders if each.identity}.items():
        console.print(f"\n{fingerprint[:SHOWN_DIGITS]}: {describe(identity)}")
    if any(folder.transient for folder in folders):
        note = "transient: stored after a reset or a change of weights; the next server removes these blocks."
        console.print(f"\n{note}", style="dim")
    console.print()
    reports: list[PartReport | FolderReport] = [*parts, *folders]
    problems = [f"! {report.path or '.'}: {finding}" for report in reports for finding in report.findings]
    for problem in problems:
        console.print(printable(problem), style="yellow")
    if not problems:
        console.print("Nothing is wrong.", style="green4")


def _amount(folders: Sequence[FolderReport]) -> str:
    size = format_bytes(sum(folder.allocated_bytes for folder in folders))
    return f"{counted(sum(folder.num_blocks for folder in folders), 'block')} ({size})"


def _user(part: PartReport) -> str:
    who = "a server" if part.pid is None else f"process {part.pid}"
    return f"{who} on {part.host}" if part.host else who


def _table(parts: Sequence[PartReport]) -> Table:
    """Returns a row per fingerprint and, in a shared directory, per server without blocks."""
    table = table_of("fingerprint", "blocks", "on disk", "oldest", "newest", wrap=True)
    table.add_column("")
    now = time.time()
    for part in parts:
        server = printable(f"{part.host} {part.state}".strip())
        if server and not part.folders:
            table.add_row(f"{part.path}/", "0", "", "", "", server)
        for folder in part.folders:
            notes = [server, "transient" if folder.transient else "", "see below" if folder.findings else ""]
            table.add_row(
                (f"{part.path}/" if part.path else "") + folder.fingerprint[:SHOWN_DIGITS],
                f"{folder.num_blocks:,}",
                format_bytes(folder.allocated_bytes),
                "" if folder.oldest is None else age(now - folder.oldest),
                "" if folder.newest is None else age(now - folder.newest),
                ", ".join(filter(None, notes)),
            )
    return table


def _show_verification(console: Console, folders: Sequence[FolderReport]) -> None:
    num_changed = sum(folder.num_changed for folder in folders)
    changed = f"; {counted(num_changed, 'block')} changed meanwhile" if num_changed else ""
    checked = f"{counted(sum(folder.num_verified for folder in folders), 'block')} read{changed}"
    bad = [(folder.path, block) for folder in folders for block in folder.bad]
    if not bad:
        is_lost = any(folder.is_lost for folder in folders)
        console.print(
            f"No {'other ' if is_lost else ''}block is bad: {checked}.", style="none" if is_lost else "green4"
        )
        return
    console.print(f"{counted(len(bad), 'block')} bad: {checked}.", style="bold red")
    for path, block in bad[:MAX_BAD_SHOWN]:
        console.print(f"{path}, slot {block.slot}: {block.problem}; key {block.key}", soft_wrap=True)
    if len(bad) > MAX_BAD_SHOWN:
        console.print(f"and {len(bad) - MAX_BAD_SHOWN:,} more; --json lists all", style="dim")
