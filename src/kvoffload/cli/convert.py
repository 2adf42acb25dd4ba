"""``kvoffload convert``: writes a trace in kvoffload's own format."""

from __future__ import annotations

from pathlib import Path

import click

from kvoffload.cli.lab import TraceSource, errors, progress, requests_in, sources, trace_options
from kvoffload.cli.terminal import console_of, json_option, print_json
from kvoffload.lab.writer import check_free, write_trace
from kvoffload.units import counted, format_bytes


@click.command(short_help="Write a trace in kvoffload's own format.")
@trace_options("SOURCE")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option("Print the summary as JSON.")
def convert(source: TraceSource, out: Path, force: bool, as_json: bool) -> None:
    """Read a trace in any format and write it to OUT as JSON lines, like those that a server records: compressed if its
    name ends with .gz. A replay of OUT has the same results.

    Exit status 2: the trace cannot be read, OUT exists or cannot be written, or an option is invalid.
    """
    with errors("convert"):
        check_free(out.expanduser(), force)
        trace = requests_in("convert", source)
        with progress("writing") as on_progress:
            size = write_trace(trace, out, force=force, on_progress=on_progress)
    if as_json:
        summary = {
            "out": str(out),
            "bytes": size,
            "format": trace.info["format"],
            "requests": trace.num_requests,
            "skipped_lines": trace.num_problems,
            "sessions": trace.num_sessions,
            "tenants": trace.num_tenants,
            "accesses": trace.num_accesses,
            "distinct_blocks": trace.num_distinct,
            "block_tokens": trace.block_tokens,
        }
        print_json(summary)
        return
    console_of().print(
        f"{out}: {counted(trace.num_requests, 'request')}{sources(trace)}, "
        f"{counted(trace.num_distinct, 'distinct block')} of {counted(trace.block_tokens, 'token')}, "
        f"{format_bytes(size)}",
        soft_wrap=True,
    )
