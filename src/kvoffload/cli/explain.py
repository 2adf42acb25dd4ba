"""``kvoffload explain``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import click

from kvoffload.abc import MissReason
from kvoffload.observe.records import RECORD_RING_SIZE, Period, ReasonSummary, RequestRecord, by_reason, over_time
from kvoffload.observe.server import Reading, RecordsError, RunningServer, read_log, read_records, running_servers
from kvoffload.units import age, counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TIMEOUT_S = 10.0
BAR_CELLS = 10
REASON_COLUMNS = 3
DEVICE_STYLE, HOST_STYLE = "dodger_blue2", "green4"

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Words:
    """A reason for people: "missed because ``because``", and what they can do."""

    because: str
    fix: str
    setting: bool = False
    """Whether it is a setting of kvoffload that fixes it."""


WORDS = {
    MissReason.NEVER_STORED: Words(
        "the block was never stored",
        "New text, or evicted very long ago. Only text that is the same from the prompt's first token on is found: "
        "put dates and names at the end.",
    ),
    MissReason.NOT_ADMITTED: Words(
        "the block had not been asked for often enough to be stored",
        "Lower store_threshold, or remove it. If it is not set, the policy kept other blocks instead: raise "
        "host_bytes.",
        True,
    ),
    MissReason.FORGOTTEN: Words(
        "the reuse filter had forgotten that the block was asked for before",
        "Remove store_threshold, or raise host_bytes: the filter remembers more blocks for a larger pool.",
        True,
    ),
    MissReason.EVICTED: Words("the block had been evicted", "Raise host_bytes, or try another policy.", True),
    MissReason.BEING_WRITTEN: Words(
        "the block was still being written", "Nothing: the same text came again within moments."
    ),
    MissReason.NO_ROOM: Words(
        "every block of the pool was in use when it was to be stored",
        "Raise host_bytes, or run fewer requests at a time.",
        True,
    ),
    MissReason.RESET: Words(
        "the cache had been reset", "Reset less often: new weights, sleep and /reset_prefix_cache do it."
    ),
    MissReason.COPY_FAILED: Words("the block's copy had failed", "A fault: see the warnings in the server's log."),
    MissReason.CORRUPT: Words(
        "the block on disk was not what had been written",
        "A failing device, or somebody else writes to disk_dir: see kvoffload disk verify.",
    ),
    MissReason.READ_FAILED: Words(
        "the disk could not read the block", "A fault: see the warnings in the server's log."
    ),
    MissReason.NOT_IN_TIME: Words(
        "the disk did not deliver the block in time",
        "Raise load_deadline_ms, or host_bytes; look at what else keeps the disk busy.",
        True,
    ),
    MissReason.FASTER_TO_COMPUTE: Words(
        "computing it was faster than loading it from disk", "Nothing, or a faster disk: load_only_if_faster decides."
    ),
    MissReason.TOO_LARGE: Words(
        "an attention window needs more blocks at once than half of the host pool, which is what may come from disk",
        "Raise host_bytes.",
        True,
    ),
}


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch("([0-9]{1,6})([smhd])", value)
    if match is None or not int(match[1]):
        raise click.BadParameter(f"{value!r}: write a whole number and s, m, h or d, such as 90s or 15m")
    return int(match[1]) * UNITS[match[2]]


@dataclass(slots=True)
class Findings:
    """What was read: records by time, none twice; and what went wrong on the way, in words."""

    records: list[RequestRecord]
    servers: list[RunningServer]
    malformed: int
    warnings: list[str]
    now: float
    """What ``--last`` counts back from: for a log, its last record."""


@click.command()
@click.argument("logs", metavar="[LOG]...", nargs=-1, type=click.File("rb"))
@click.option("--pid", type=int, help="Only the server with this process id.")
@click.option(
    "--every",
    "every_s",
    metavar="DURATION",
    callback=_seconds,
    help="Length of the periods over time, such as 1m.  [default: makes about twelve]",
)
@click.option(
    "--last", "last_s", metavar="DURATION", callback=_seconds, help="Only the latest requests, such as those of 15m."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything.")
@click.option("--records", "as_records", is_flag=True, help="Print the records, a line of JSON each, to save them.")
def explain(
    logs: tuple[BinaryIO, ...],
    pid: int | None,
    every_s: int | None,
    last_s: int | None,
    as_json: bool,
    as_records: bool,
) -> None:
    """Tell why requests missed, by reason and over time.

    Asks the servers that run on this machine. With LOGs ("-" for stdin) it reads the records in them instead:
    the log of a server with VLLM_LOGGING_LEVEL=DEBUG, or what --records or --json printed. Exit status 2: there
    is no server, or no record in the logs.
    """
    from rich.console import Console

    if as_json and as_records:
        raise click.UsageError("--json and --records exclude each other.")
    if logs and pid is not None:
        raise click.UsageError("--pid is for running servers: leave it out, or the logs.")
    errors = Console(stderr=True)
    try:
        found = _from_logs(logs) if logs else _from_servers(pid)
        chosen = [record for record in found.records if last_s is None or record.time >= found.now - last_s]
        periods = over_time(chosen, every_s)
    except RecordsError as error:
        errors.print(f"kvoffload explain: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except ValueError as error:
        raise click.UsageError(f"--every is too short: {error}; --last takes less time in view.") from error
    for warning in found.warnings:
        errors.print(f"kvoffload explain: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_records:
        for record in chosen:
            click.echo(_line(record))
    elif as_json:
        click.echo(_to_json(found, chosen, periods))
    else:
        _show(Console(highlight=False), found, chosen, periods)


# Reading.


def _from_servers(pid: int | None) -> Findings:
    servers = running_servers()
    if not servers:
        raise RecordsError(
            "no server with kvoffload runs here. One is seen on its own machine and in its own network namespace: "
            "for one in a container, `docker exec CONTAINER kvoffload explain`. To read a log: "
            "`kvoffload explain server.log`."
        )
    chosen = [server for server in servers if pid in (None, server.pid)]
    if not chosen:
        raise RecordsError(f"no server with kvoffload has the process id {pid}. There are {_listed(servers)}.")
    answered, readings, warnings = [], [], []
    for server in chosen:
        try:
            readings.append(read_records(server, TIMEOUT_S))
            answered.append(server)
        except RecordsError as error:
            warnings.append(str(error))
    if not answered:
        raise RecordsError("\n".join(warnings))
    return _findings(readings, answered, warnings, time.time())


def _from_logs(logs: Sequence[BinaryIO]) -> Findings:
    readings = [read_log(log, log.name) for log in logs]
    without = ", ".join(log.name for log, reading in zip(logs, readings, strict=True) if not reading.records)
    found = _findings(readings, [], [f"{without}: no record in it"] if without else [], None)
    if not found.records:
        raise RecordsError(
            "\n".join(found.warnings) + ". vLLM writes them into its log when it is started with "
            "VLLM_LOGGING_LEVEL=DEBUG. A running server needs no log: `kvoffload explain`."
        )
    return found


def _findings(
    readings: Sequence[Reading], servers: list[RunningServer], warnings: list[str], now: float | None
) -> Findings:
    malformed = sum(reading.malformed for reading in readings)
    if malformed:
        faults = [fault for reading in readings for fault in reading.faults]
        more = f"\n  and {malformed - len(faults):,} more" if malformed > len(faults) else ""
        told = "\n  ".join(faults) + more
        warnings = [f"malformed and left out: {counted(malformed, 'record')}\n  {told}", *warnings]
    # What was saved twice is one record.
    records = list(dict.fromkeys(record for reading in readings for record in reading.records))
    records.sort(key=lambda record: record.time)
    if now is None:
        now = records[-1].time if records else 0.0
    return Findings(records, servers, malformed, warnings, now)


# As JSON.


def _line(record: RequestRecord) -> str:
    return json.dumps(record.to_dict())


def _to_json(found: Findings, chosen: Sequence[RequestRecord], periods: Sequence[Period]) -> str:
    report = {
        "servers": [dataclasses.asdict(server) for server in found.servers],
        "malformed": found.malformed,
        "warnings": found.warnings,
        "total": None if not chosen else dataclasses.asdict(_total(found, chosen)),
        "reasons": [
            {
                **dataclasses.asdict(each),
                "share": each.requests / len(chosen),
                "fix": None if each.reason is None else WORDS[each.reason].fix,
            }
            for each in by_reason(chosen)
        ],
        "periods": [dataclasses.asdict(period) for period in periods],
    }
    # A record a line, as this command reads them.
    lines = ",\n".join(map(_line, chosen))
    return json.dumps(report, indent=2).removesuffix("\n}") + f',\n  "records": [\n{lines}\n]\n}}'


def _total(found: Findings, records: Sequence[RequestRecord]) -> Period:
    return Period.of(records, records[0].time, max(found.now - records[0].time, 0.0))


# For people.


def _show(console: Console, found: Findings, chosen: Sequence[RequestRecord], periods: Sequence[Period]) -> None:
    from rich.text import Text

    source = _listed(found.servers) if found.servers else "the logs"
    if not chosen:
        when = f"; the latest was {age(found.now - found.records[-1].time)} ago" if found.records else " yet"
        console.print(Text(f"No request to explain from {source}{when}."))
        return
    reasons = by_reason(chosen)
    console.print(Text(_sentences(_total(found, chosen), reasons, bool(found.servers)), style="bold"))
    console.print(Text("\nWhy requests missed", style="bold"))
    console.print(_reason_table(reasons, len(chosen)))
    bars = ("█", "▒", "·") if console.encoding.startswith("utf") else ("#", "+", ".")
    console.print(Text("\nPrompt tokens over time", style="bold"))
    console.print(Text("{} on the device  {} in host memory or on disk  {} missing".format(*bars)))
    console.print(_time_table(periods, bars))
    if found.servers:
        one = " --pid shows one of them." if len(found.servers) > 1 else ""
        note = f"\nFrom {source}.{one} A server keeps its latest {RECORD_RING_SIZE:,} requests; a log keeps all."
        console.print(Text(note, style="dim"))


def _sentences(total: Period, reasons: Sequence[ReasonSummary], running: bool) -> str:
    hits = total.device_tokens + total.host_tokens + total.disk_tokens
    on_disk = f", {_share(total.disk_tokens, total.tokens_asked)} on disk" if total.disk_tokens else ""
    text = (
        f"Of {counted(total.requests, 'request')} {'in the last' if running else 'within'} {age(total.length_s)}, "
        f"{_share(hits, total.tokens_asked)} of {_count(total.tokens_asked)} prompt tokens were found: "
        f"{_share(total.device_tokens, total.tokens_asked)} on the device, "
        f"{_share(total.host_tokens, total.tokens_asked)} in host memory{on_disk}."
    )
    clauses: list[str] = []
    fixes: list[str] = []
    for each in reasons:
        if each.reason is None:
            continue
        words = WORDS[each.reason]
        since = "" if each.median_age_s is None else f" (median {age(each.median_age_s)} ago)"
        clauses.append(f"{each.requests:,} {'' if clauses else 'missed '}because {words.because}{since}")
        if words.setting:
            fixes.append(words.fix)
    if clauses:
        text += f" {', '.join(clauses)}."
    if fixes:
        text += f" What would help most: {fixes[0][0].lower()}{fixes[0][1:]}"
    return text


def _reason_table(reasons: Sequence[ReasonSummary], requests: int) -> Table:
    table = _table(1)
    table.add_column("first missing block", no_wrap=True)
    table.add_column("requests", justify="right")
    table.add_column("", justify="right")
    table.add_column("tokens\nmissing", justify="right")
    table.add_column("median\nage", justify="right", no_wrap=True)
    table.add_column("what to do", ratio=1)
    for each in reasons:
        table.add_row(
            "none" if each.reason is None else each.reason.replace("_", " "),
            f"{each.requests:,}",
            _share(each.requests, requests),
            _count(each.tokens_missing),
            "" if each.median_age_s is None else age(each.median_age_s),
            "" if each.reason is None else WORDS[each.reason].fix,
        )
    return table


def _time_table(periods: Sequence[Period], bars: tuple[str, str, str]) -> Table:
    from rich.text import Text

    device, host, rest = bars
    table = _table(0)
    table.add_column("from", no_wrap=True)
    table.add_column("requests", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    disk = any(period.disk_tokens for period in periods)
    if disk:
        table.add_column("disk", justify="right")
    totals: dict[MissReason, int] = {}
    for period in periods:
        for reason, count in period.misses.items():
            totals[reason] = totals.get(reason, 0) + count
    shown = sorted(totals, key=lambda reason: -totals[reason])
    shown, others = shown[:REASON_COLUMNS], shown[REASON_COLUMNS:]
    for reason in shown:
        table.add_column(reason.replace("_", "\n"), justify="right")
    if others:
        table.add_column("other", justify="right")
    same_day = time.localtime(periods[0].start)[:3] == time.localtime(periods[-1].start)[:3]
    clock = ("" if same_day else "%m-%d ") + ("%H:%M" if periods[0].length_s % 60 == 0 else "%H:%M:%S")
    for period in periods:
        counts = [period.misses.get(reason, 0) for reason in shown]
        if others:
            counts.append(sum(period.misses.get(reason, 0) for reason in others))
        asked = period.tokens_asked
        to_device = round(BAR_CELLS * period.device_tokens / asked) if asked else 0
        below_device = period.host_tokens + period.disk_tokens
        to_host = round(BAR_CELLS * (period.device_tokens + below_device) / asked) if asked else 0
        bar = Text.assemble(
            (device * to_device, DEVICE_STYLE),
            (host * (to_host - to_device), HOST_STYLE),
            (rest * (BAR_CELLS - to_host if asked else 0), "dim"),
        )
        table.add_row(
            time.strftime(clock, time.localtime(period.start)),
            f"{period.requests:,}",
            bar,
            _share(period.device_tokens, asked),
            _share(period.host_tokens, asked),
            *([_share(period.disk_tokens, asked)] if disk else []),
            *(f"{count:,}" if count else "" for count in counts),
        )
    return table


def _table(gap: int) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)


def _listed(servers: Sequence[RunningServer]) -> str:
    return f"{counted(len(servers), 'server')}: {', '.join(map(str, servers))}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else ""


def _count(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * size:
            return f"{number / size:,.0f}{letter}"
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
