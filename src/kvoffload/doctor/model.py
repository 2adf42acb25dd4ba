"""What a model allows, and how many of its tokens fit in host memory and in each tier."""

from __future__ import annotations

from kvoffload.abc import ConfigError
from kvoffload.config import contents_of
from kvoffload.doctor.configuration import PlannedServer
from kvoffload.doctor.findings import Figure, Level, Report
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.lab.model import ModelShape
from kvoffload.units import format_bytes


def check(plan: PlannedServer, shape: ModelShape, report: Report) -> None:
    """Reports the room for tokens, the shares of tenants that have room for none, and contents that cannot be."""
    try:
        contents_of(plan.host_contents, shape.why_inclusive)
    except ConfigError as error:
        report.found("model.contents", Level.PROBLEM, error.wrong, error.fix)
    tokens = plan.block_tokens
    block = padded_slot_bytes(round(shape.bytes_per_token * tokens))
    if not block:
        return
    for tenant in plan.tenants:
        for kind, amounts in tenant.shares.items():
            for tier, amount in amounts.items():
                if amount < block:
                    setting = f"tenants.{tenant.name}.{kind}.{tier}"
                    text = f"{setting}={amount} ({format_bytes(amount)}): has no room for one block"
                    report.found("model.shares", Level.PROBLEM, text, f"write {format_bytes(block)} or more")
    if plan.host_bytes is None:
        return
    sizes = {"host memory": plan.host_bytes, **{tier.name: tier.config.capacity_bytes for tier in plan.tiers}}
    rooms = {name: size // block * tokens for name, size in sizes.items() if size is not None}
    text = f"{format_bytes(block)} per block of {tokens} tokens: room for "
    text += ", ".join([f"{room:,} tokens in {name}" for name, room in rooms.items()])
    figures: dict[str, Figure] = {
        "block_bytes": block,
        **{f"{name.replace(' ', '_').replace('-', '_')}_tokens": room for name, room in rooms.items()},
    }
    if rooms["host memory"]:
        report.found("model.room", Level.OK, ". ".join([text, *shape.notes]), figures=figures)
    else:
        fix = plan.set_host_bytes(1000 * block)
        report.found("model.room", Level.PROBLEM, f"{plan.host_setting} has no room for a block: {text}", fix, figures)
