"""``kvoffload usage``: what each tenant's requests asked for, found, stored and had retained."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import click

from kvoffload.cli.explain import find_records
from kvoffload.cli.terminal import console_of, json_option, say, table_of
from kvoffload.observe.records import Usage, by_tenant
from kvoffload.observe.server import RecordsError
from kvoffload.printable import printable

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@click.argument("logs", metavar="[LOG]...", nargs=-1, type=click.File("rb"))
@click.option("--pid", type=int, help="Only the server with this process id.")
@click.option("--tenant", metavar="NAME", help='Only one configured tenant, or "other".')
@json_option()
def usage(logs: tuple[BinaryIO, ...], pid: int | None, tenant: str | None, as_json: bool) -> None:
    """Show the tokens that each tenant asked for, found, stored and had retained.

    Reads the same records as kvoffload explain: of the servers that run on this machine, or in LOGs ("-" for stdin).
    Exit status 2: there is no server, or no record in the logs.
    """
    if logs and pid is not None:
        raise click.UsageError("--pid is for running servers: leave out --pid or the logs.")
    try:
        found = find_records(logs, pid)
    except RecordsError as error:
        say("usage", str(error), "bold red")
        sys.exit(2)
    for warning in found.warnings:
        say("usage", warning, "yellow")
    records = [record for record in found.records if tenant in (None, record.tenant)]
    tenants, total = by_tenant(records), Usage.of(None, records)
    if as_json:
        report = {"tenants": list(map(dataclasses.asdict, tenants)), "total": dataclasses.asdict(total)}
        click.echo(json.dumps(report, indent=2))
        return
    console = console_of()
    console.print(_table(tenants, total))
    console.print("Prompt tokens, except those stored and retained, which are of blocks. A server keeps its latest")
    console.print("4,096 requests; a log keeps all.", style="dim")


def _table(tenants: Sequence[Usage], total: Usage) -> Table:
    tiers = list(total.tier_tokens)
    where = ["on the\ndevice", "in host\nmemory", *(f"in\n{printable(tier)}" for tier in tiers)]
    table = table_of("tenant", "requests", "asked", *where, "computed", "stored", "retained", "retentions\nrefused")
    rows = tenants if len(tenants) == 1 else [*tenants, total]
    for each in rows:
        name = "total" if each is total else "-" if each.tenant is None else printable(each.tenant)
        found = each.device_tokens, each.host_tokens, *(each.tier_tokens.get(tier, 0) for tier in tiers)
        amounts = (each.tokens_asked, *found, each.tokens_computed, each.stored_tokens, each.retained_tokens)
        table.add_row(
            name,
            f"{each.requests:,}",
            *(f"{amount:,}" for amount in amounts),
            f"{each.retentions_refused:,}",
            style="bold" if each is total else None,
        )
    return table
