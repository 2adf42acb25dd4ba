"""``kvoffload usage``: what each tenant's requests asked for, found, stored and had retained."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvoffload.cli.explain import find_on_servers
from kvoffload.cli.terminal import console_of, json_option, print_json, say, table_of
from kvoffload.observe.records import RECORD_RING_SIZE
from kvoffload.observe.server import RecordsError
from kvoffload.observe.usage import Usage, bill_of, by_tenant, total_of
from kvoffload.printable import printable
from kvoffload.units import compact, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

GIB_HOUR = (1 << 30) * 3600
"""Byte-seconds."""


@click.command()
@click.option("--pid", type=int, help="Only the server with this process, or whose API server it is.")
@click.option("--tenant", metavar="NAME", help='Only one configured tenant, or "other".')
@json_option()
def usage(pid: int | None, tenant: str | None, as_json: bool) -> None:
    """Show the tokens that each tenant asked for, found, stored and had retained.

    Reads the records of the servers that run on this machine, and what the blocks of tenants took of their tiers.
    Exit status 2: there is no server.
    """
    try:
        found = find_on_servers(pid)
    except RecordsError as error:
        say("usage", str(error), "bold red")
        sys.exit(2)
    for warning in found.warnings:
        say("usage", warning, "yellow")
    records = [record for record in found.records if tenant in (None, record.tenant)]
    bill = {name: tiers for name, tiers in bill_of(found.totals).items() if tenant in (None, name)}
    tenants, total = by_tenant(records, bill), total_of(records, bill)
    if as_json:
        report = {"tenants": list(map(dataclasses.asdict, tenants)), "total": dataclasses.asdict(total)}
        print_json(report)
        return
    _show(tenants, total)


def _show(tenants: Sequence[Usage], total: Usage) -> None:
    console = console_of()
    rows = list(tenants) if len(tenants) == 1 else [*tenants, total]
    console.print(_found_table(rows, total))
    console.print("Prompt tokens. Saved: how long the engine would have computed what was loaded.\n", style="dim")
    console.print(_stored_table(rows, total))
    console.print(f"Tokens. A server keeps its latest {RECORD_RING_SIZE:,} requests.", style="dim")
    if total.tiers:
        console.print()
        console.print(_tiers_table([(each, tier) for each in rows for tier in each.tiers], total))
        console.print("Since the server's start. Moved: from and to the device (host), or the tier.", style="dim")


def _found_table(rows: Sequence[Usage], total: Usage) -> Table:
    tiers = list(total.tier_tokens)
    table = table_of("tenant", "requests", "asked", "device", "host", *map(printable, tiers), "computed", "saved")
    for each in rows:
        found = [each.device_tokens, each.host_tokens, *(each.tier_tokens.get(tier, 0) for tier in tiers)]
        numbers = each.requests, each.tokens_asked, *found, each.tokens_computed
        _add(table, each, total, *map(compact, numbers), f"{each.saved_s:,.{int(each.saved_s < 100)}f} s")
    return table


def _stored_table(rows: Sequence[Usage], total: Usage) -> Table:
    table = table_of("tenant", "stored", "retained", "requests\nretained", "retentions\nrefused")
    for each in rows:
        numbers = each.stored_tokens, each.retained_tokens, each.retentions, each.retentions_refused
        _add(table, each, total, *map(compact, numbers))
    return table


def _tiers_table(rows: Sequence[tuple[Usage, str]], total: Usage) -> Table:
    table = table_of("tenant", "tier", "held,\nGiB hours", "retained,\nGiB hours", "moved")
    for each, tier in rows:
        used = each.tiers[tier]
        hours = (f"{amount / GIB_HOUR:,.2f}" for amount in (used.byte_seconds, used.retained_byte_seconds))
        _add(table, each, total, printable(tier), *hours, format_bytes(int(used.moved_bytes)))
    return table


def _add(table: Table, usage: Usage, total: Usage, *cells: str) -> None:
    name = "total" if usage is total else "-" if usage.tenant is None else printable(usage.tenant)
    table.add_row(name, *cells, style="bold" if usage is total else None)
