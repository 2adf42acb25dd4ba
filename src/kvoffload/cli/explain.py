"""``kvoffload explain``: says why requests missed, from running servers or logs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import click

from kvoffload.abc import MissReason
from kvoffload.cli.terminal import console_of, json_option, say, table_of
from kvoffload.observe.records import (
    RECORD_RING_SIZE,
    Period,
    ReasonSummary,
    RequestRecord,
    by_reason,
    in_tier,
    over_time,
)
from kvoffload.observe.server import (
    Reading,
    RecordsError,
    RunningServer,
    ancestors,
    paused_in,
    read_log,
    read_records,
    running_servers,
)
from kvoffload.printable import printable
from kvoffload.units import age, counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TIMEOUT_S = 10.0
BAR_CELLS = 10
REASON_COLUMNS = 3
DEVICE_STYLE, HOST_STYLE = "dodger_blue2", "green4"

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


HELPS_SHARE = 0.05
"""A setting that concerns a smaller share of the requests is not said to help most."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A reason in words, which follow "missed because", and its remedy."""

    because: str
    fix: str
    setting: bool = False
    """Whether a setting of kvoffload fixes it."""


_by_setting = partial(Advice, setting=True)
ADVICE = {
    MissReason.NEVER_STORED: Advice(
        "the block was never stored",
        "The text is new, or was evicted long ago. Only identical beginnings of prompts are found: put dates and names "
        "at the end.",
    ),
    MissReason.NOT_ADMITTED: _by_setting(
        "the block had not been requested often enough to be stored",
        "Lower store_threshold, or remove it. If it is not set, the policy kept other blocks instead: raise "
        "host_bytes.",
    ),
    MissReason.FORGOTTEN: _by_setting(
        "the reuse filter had forgotten earlier requests for the block",
        "Remove store_threshold, or raise host_bytes: the filter remembers more blocks with a larger pool.",
    ),
    MissReason.EVICTED: _by_setting("the block had been evicted", "Raise host_bytes, or try another policy."),
    MissReason.BEING_WRITTEN: Advice(
        "the block was still being written", "Nothing to do: the same text was requested again within moments."
    ),
    MissReason.NO_ROOM: _by_setting(
        "every block of the pool was in use when the block should have been stored",
        "Raise host_bytes, or run fewer requests at a time.",
    ),
    MissReason.OVER_QUOTA: _by_setting(
        "the block was not stored: its tenant had used up its quota, and all of the tenant's blocks were in use",
        "Raise the tenant's quota, or run fewer of its requests at a time.",
    ),
    MissReason.LEFT_UNSTORED: _by_setting(
        "the block was not stored: it left the device with more blocks than can be stored in one step",
        "Let a step compute fewer tokens (max_num_batched_tokens), or set host_contents to inclusive.",
    ),
    MissReason.RESET: Advice(
        "the cache had been reset",
        "Reset less often: new weights, and resets with reset_external=true, empty the cache.",
    ),
    MissReason.COPY_FAILED: Advice("the copy of the block had failed", "See the warnings in the server's log."),
    MissReason.CORRUPT: Advice(
        "the block in a lower tier failed verification",
        "Its medium is failing, or another program writes to it: see the log for the tier. For a directory, run "
        "kvoffload disk verify.",
    ),
    MissReason.READ_FAILED: Advice(
        "the block could not be read from a lower tier", "See the warnings in the server's log."
    ),
    MissReason.NOT_IN_TIME: _by_setting(
        "the block was not read from a lower tier in time",
        "Raise load_deadline_ms or host_bytes, or the tenant's quota of host, or find out what else uses the medium.",
    ),
    MissReason.NOT_ANSWERED: _by_setting(
        "a lower tier did not say in time whether it has the block",
        "Raise lookup_deadline_ms, or find out what slows down the store or the way to it.",
    ),
    MissReason.FASTER_TO_COMPUTE: Advice(
        "computing it was faster than loading it from a lower tier",
        "Nothing to do, unless a faster medium is an option; load_only_if_faster=false loads it anyway.",
    ),
    MissReason.TOO_LARGE: _by_setting(
        "a window or the states need more blocks than may come from lower tiers at once, half of the host pool",
        "Raise host_bytes.",
    ),
    MissReason.NO_STATE: Advice(
        "the model's recurrent layers had no state there",
        "Nothing to do: states are kept at the ends of prompts and outputs, and where prompts were found to part.",
    ),
    MissReason.NOT_LOOKED_UP: Advice(
        "nothing may be loaded for the request",
        "Nothing to do: its client asked for that (load: false), or the answer needs the whole prompt computed, as "
        "prompt_logprobs, echo with logprobs and embeddings per token do.",
    ),
    MissReason.ADAPTER_UNKNOWN: _by_setting(
        "the bytes of the request's LoRA adapter were not known in time, or had changed",
        "See the warnings in the server's log. If there are none, raise load_deadline_ms, or load adapters before "
        "their first requests. Adapters outside of local directories are known once vLLM has loaded them.",
    ),
}

BEHIND_ENGINE = {
    MissReason.NEVER_STORED: "The text is new, or was evicted long ago. Only identical beginnings of prompts are "
    "found: put dates and names at the end. vLLM stores outputs only with offload_prompt_only=false.",
    MissReason.NOT_ADMITTED: "Lower store_threshold of the tier, or remove it. If it is not set, the policy kept other "
    "blocks instead: raise the bytes of the tier.",
    MissReason.FORGOTTEN: "Remove store_threshold of the tier.",
    MissReason.EVICTED: "Raise the bytes of the tier, or cpu_bytes_to_use.",
    MissReason.NO_ROOM: "The tier is slower than what is stored comes: use a faster medium.",
    MissReason.RESET: "Reset less often: after sleep, new weights and reset_external=true this process finds nothing "
    "that was stored before. A restart finds it again.",
    MissReason.NOT_IN_TIME: "Raise load_deadline_ms of the entry in secondary_tiers, or find out what else uses the "
    "medium.",
    MissReason.NOT_ANSWERED: "Raise lookup_deadline_ms of the entry in secondary_tiers, or find out what slows the "
    "store down, or the way to it.",
    MissReason.TOO_LARGE: "Nothing to do: a window or the states are larger than kvoffload's staging memory.",
}
"""Other remedies where kvoffload is below an engine's own host memory."""


def fix(reason: MissReason, records: Sequence[RequestRecord]) -> str:
    """Returns the remedy for ``reason`` in ``records``."""
    is_behind = any(record.engine is not None for record in records if record.reason is reason)
    return BEHIND_ENGINE.get(reason, ADVICE[reason].fix) if is_behind else ADVICE[reason].fix


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch("([0-9]{1,6})([smhd])", value)
    if match is None or not int(match[1]):
        raise click.BadParameter(f"{value!r}: give a whole number with the unit s, m, h or d, such as 90s or 15m")
    return int(match[1]) * UNITS[match[2]]


@dataclass(slots=True)
class Findings:
    """Records ordered by time and without duplicates, their servers, and warnings about skipped input."""

    records: list[RequestRecord]
    malformed: int
    warnings: list[str]
    totals: dict[str, float]
    """The metrics of all servers together that are about tenants."""
    now: float
    """The time from which ``--last`` counts back: for a log, that of its last record."""
    by_server: Sequence[tuple[RunningServer, Reading]] = ()

    @property
    def servers(self) -> list[RunningServer]:
        return [server for server, _ in self.by_server]


@click.command()
@click.argument("logs", metavar="[LOG]...", nargs=-1, type=click.File("rb"))
@click.option("--pid", type=int, help="Only the server with this process, or whose API server it is.")
@click.option(
    "--every",
    "every_s",
    metavar="DURATION",
    callback=_seconds,
    help="Length of a period, such as 1m.  [default: chosen for about twelve periods]",
)
@click.option(
    "--last",
    "last_s",
    metavar="DURATION",
    callback=_seconds,
    help="Only the latest requests, such as those of the last 15m.",
)
@click.option("--tenant", metavar="NAME", help='Only requests of one configured tenant, or of "other".')
@json_option()
@click.option("--records", "as_records", is_flag=True, help="Print one record per line as JSON, to save them.")
def explain(
    logs: tuple[BinaryIO, ...],
    pid: int | None,
    every_s: int | None,
    last_s: int | None,
    tenant: str | None,
    as_json: bool,
    as_records: bool,
) -> None:
    """Show why requests missed, by reason and over time.

    Reads records from the servers that run on this machine, or from LOGs ("-" for stdin): logs of a server with
    VLLM_LOGGING_LEVEL=DEBUG, or the output of --records or --json. Exit status 2: there is no server, or no record in
    the logs.
    """
    if as_json and as_records:
        raise click.UsageError("--json and --records cannot be combined.")
    if logs and pid is not None:
        raise click.UsageError("--pid is for running servers: leave out --pid or the logs.")
    try:
        found = _from_logs(logs) if logs else find_on_servers(pid)
        chosen = [
            record
            for record in found.records
            if (last_s is None or record.time >= found.now - last_s) and tenant in (None, record.tenant)
        ]
        periods = over_time(chosen, every_s)
    except RecordsError as error:
        say("explain", str(error), "bold red")
        sys.exit(2)
    except ValueError as error:
        raise click.UsageError(f"--every is too short: {error}; raise it, or give --last.") from error
    for warning in found.warnings:
        say("explain", warning, "yellow")
    if as_records:
        for record in chosen:
            click.echo(json.dumps(record.to_dict()))
    elif as_json:
        click.echo(_to_json(found, chosen, periods))
    else:
        _show(console_of(), found, chosen, periods)


# Reading.


def find_on_servers(pid: int | None) -> Findings:
    """Returns the records of the servers on this machine, or of one of them. Raises RecordsError if there is none."""
    servers = running_servers()
    if not servers:
        raise RecordsError(
            "no server with kvoffload was found on this machine, in this network namespace. For a server in a "
            "container, run the same command there: `docker exec CONTAINER kvoffload ...`. `kvoffload explain LOG` "
            "reads a log."
        )
    chosen = [server for server in servers if pid in (None, server.pid, *ancestors(server.pid))]
    if not chosen:
        raise RecordsError(f"no server with kvoffload has the process id {pid}. Found {_listed(servers)}.")
    answered, warnings = [], []
    for server in chosen:
        try:
            reading = read_records(server, TIMEOUT_S, of_any_user=pid is not None)
            answered.append((server, reading))
            warnings += [f"{server}: {each} are paused; its log says why" for each in paused_in(reading.totals.items())]
        except RecordsError as error:
            warnings.append(str(error))
    if not answered:
        raise RecordsError("\n".join(warnings))
    found = _findings([reading for _, reading in answered], warnings, time.time())
    found.by_server = answered
    return found


def _from_logs(logs: Sequence[BinaryIO]) -> Findings:
    readings = [read_log(log, log.name) for log in logs]
    without = ", ".join(log.name for log, reading in zip(logs, readings, strict=True) if not reading.records)
    found = _findings(readings, [f"{without}: contains no records"] if without else [], None)
    if not found.records:
        raise RecordsError(
            "\n".join(found.warnings) + ". vLLM logs records if it is started with VLLM_LOGGING_LEVEL=DEBUG. A running "
            "server needs no log: `kvoffload explain`."
        )
    return found


def _findings(readings: Sequence[Reading], warnings: list[str], now: float | None) -> Findings:
    malformed = sum(reading.malformed for reading in readings)
    if malformed:
        faults = [fault for reading in readings for fault in reading.faults]
        more = f"\n  and {malformed - len(faults):,} more" if malformed > len(faults) else ""
        listed = "\n  ".join(faults) + more
        warnings = [f"skipped {counted(malformed, 'malformed record')}\n  {listed}", *warnings]
    # A record may be in several logs, and has more fields when its request has ended.
    records = list({record: record for reading in readings for record in reading.records}.values())
    records.sort(key=lambda record: record.time)
    if now is None:
        now = records[-1].time if records else 0.0
    totals: dict[str, float] = {}
    for name, total in (each for reading in readings for each in reading.totals.items()):
        totals[name] = totals.get(name, 0.0) + total
    return Findings(records, malformed, warnings, totals, now)


# As JSON.


def _to_json(found: Findings, chosen: Sequence[RequestRecord], periods: Sequence[Period]) -> str:
    report = {
        "servers": [{"pid": server.pid, "name": server.name} for server in found.servers],
        "malformed": found.malformed,
        "warnings": found.warnings,
        "total": None if not chosen else dataclasses.asdict(_total(found, chosen)),
        "reasons": [
            {
                **dataclasses.asdict(each),
                "share": each.requests / len(chosen),
                "fix": None if each.reason is None else fix(each.reason, chosen),
            }
            for each in by_reason(chosen)
        ],
        "periods": [dataclasses.asdict(period) for period in periods],
    }
    # One record per line, so that this command can read its own output.
    lines = ",\n".join(json.dumps(record.to_dict()) for record in chosen)
    return json.dumps(report, indent=2).removesuffix("\n}") + f',\n  "records": [\n{lines}\n]\n}}'


def _total(found: Findings, records: Sequence[RequestRecord]) -> Period:
    return Period.of(records, records[0].time, max(found.now - records[0].time, 0.0))


# As text.


def _show(console: Console, found: Findings, chosen: Sequence[RequestRecord], periods: Sequence[Period]) -> None:
    source = _listed(found.servers) if found.servers else "the logs"
    if not chosen:
        when = f"; the latest was {age(found.now - found.records[-1].time)} ago" if found.records else " yet"
        console.print(f"No request to explain from {source}{when}.")
        return
    if len(found.by_server) > 1:
        for server, reading in found.by_server:
            records = set(reading.records)
            mine = [record for record in chosen if record in records]
            asked = sum(each.tokens_asked for each in mine)
            hits = asked - sum(each.tokens_missing for each in mine)
            share = f", {_share(hits, asked)} of {_count(asked)} prompt tokens found" if asked else ""
            console.print(f"{server.describe()}: {counted(len(mine), 'request')}{share}", soft_wrap=True)
        console.print("\nAll of them together:")
    reasons = by_reason(chosen)
    text = _sentences(_total(found, chosen), reasons, bool(found.servers), chosen) + _on_device(chosen)
    console.print(text, style="bold")
    if any(each.reason is not None for each in reasons):
        console.print("\nWhy requests missed", style="bold")
        console.print(_reason_table(reasons, chosen))
    bars = ("█", "▒", "·") if console.encoding.startswith("utf") else ("#", "+", ".")
    console.print("\nPrompt tokens over time", style="bold")
    has_host = any(record.engine is None for record in chosen)
    below = "in host memory or below" if has_host else "in tiers"
    console.print(f"{bars[0]} {_above(chosen)}  {bars[1]} {below}  {bars[2]} missing")
    console.print(_time_table(periods, bars, has_host))
    if found.servers:
        one = " Select one with --pid." if len(found.servers) > 1 else ""
        note = f"\nFrom {source}.{one} A server keeps its latest {RECORD_RING_SIZE:,} requests; a log keeps all."
        console.print(note, style="dim")


def _above(records: Sequence[RequestRecord]) -> str:
    """Returns where the tokens are that count as found on the device."""
    engines = dict.fromkeys(printable(record.engine) for record in records if record.engine is not None)
    return "on the device" + "".join(f" or in {engine}'s host memory" for engine in engines)


def _sentences(total: Period, reasons: Sequence[ReasonSummary], running: bool, records: Sequence[RequestRecord]) -> str:
    hits = total.device_tokens + total.host_tokens + total.disk_tokens
    below_host = "".join(
        f", {_share(tokens, total.tokens_asked)} {in_tier(tier)}" for tier, tokens in total.tier_tokens.items()
    )
    has_host = any(record.engine is None for record in records)
    text = (
        f"{counted(total.requests, 'request')} {'in the last' if running else 'within'} {age(total.length_s)} found "
        f"{_share(hits, total.tokens_asked)} of {_count(total.tokens_asked)} prompt tokens: "
        f"{_share(total.device_tokens, total.tokens_asked)} {_above(records)}"
        f"{', ' + _share(total.host_tokens, total.tokens_asked) + ' in host memory' if has_host else ''}{below_host}."
    )
    clauses: list[str] = []
    fixes: list[str] = []
    for each in reasons:
        if each.reason is None:
            continue
        advice = ADVICE[each.reason]
        since = "" if each.median_age_s is None else f" (median {age(each.median_age_s)} ago)"
        held = "".join(f", {count:,} {in_tier(tier)}" for tier, count in each.tiers.items())
        held = f" ({held.removeprefix(', ')})" if held else ""
        clauses.append(f"{each.requests:,} {'' if clauses else 'missed '}because {advice.because}{held}{since}")
        if advice.setting and each.requests >= total.requests * HELPS_SHARE:
            fixes.append(fix(each.reason, records))
    text += f" {', '.join(clauses)}." if clauses else " No request missed a block."
    if fixes:
        text += f" What would help most: {fixes[0][0].lower()}{fixes[0][1:]}"
    return text


def _on_device(records: Sequence[RequestRecord]) -> str:
    """Returns a sentence about requests for which the device held everything, or nothing if there is none."""
    held = [record for record in records if record.device_sufficed and record.engine is None]
    if not held:
        return ""
    return (
        f" For {counted(len(held), 'request')} the device cache held all {_count(sum(r.device_tokens for r in held))} "
        "tokens that could be found, so nothing had to be loaded."
    )


def _reason_table(reasons: Sequence[ReasonSummary], records: Sequence[RequestRecord]) -> Table:
    table = table_of("reason", "requests", "share", "tokens\nmissing", wrap=True)
    table.add_column("median\nage", justify="right", no_wrap=True)
    table.add_column("what to do", ratio=1)
    for each in reasons:
        table.add_row(
            "no miss" if each.reason is None else each.reason.replace("_", " "),
            f"{each.requests:,}",
            _share(each.requests, len(records)),
            _count(each.tokens_missing),
            "" if each.median_age_s is None else age(each.median_age_s),
            "" if each.reason is None else fix(each.reason, records),
        )
    return table


def _time_table(periods: Sequence[Period], bars: tuple[str, str, str], has_host: bool) -> Table:
    from rich.text import Text

    device, host, rest = bars
    tiers = list(dict.fromkeys(tier for period in periods for tier in period.tier_tokens))
    totals: Counter[MissReason] = Counter()
    for period in periods:
        totals.update(period.misses)
    reasons = [reason for reason, _ in totals.most_common()]
    shown, others = reasons[:REASON_COLUMNS], reasons[REASON_COLUMNS:]
    table = table_of("start", "requests", gap=0, wrap=True)
    table.add_column("", no_wrap=True)
    places = ["device", "host"] if has_host else ["engine"]
    names = [*(printable(tier) for tier in tiers), *shown, *(["other"] if others else [])]
    for title in (*places, *(name.replace("_", "\n") for name in names)):
        table.add_column(title, justify="right")
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
            *([_share(period.host_tokens, asked)] if has_host else []),
            *(_share(period.tier_tokens.get(tier, 0), asked) for tier in tiers),
            *(f"{count:,}" if count else "" for count in counts),
        )
    return table


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
