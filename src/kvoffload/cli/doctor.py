"""The command ``kvoffload doctor``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvoffload.cli.lab import errors
from kvoffload.cli.terminal import console_of, json_option, print_json, progress_bar
from kvoffload.doctor.examine import Effort, Progress, examine
from kvoffload.doctor.findings import CHECKS


@click.command()
@click.option(
    "--config",
    metavar="JSON-OR-FILE",
    help="The server's --kv-transfer-config, or only the kv_connector_extra_config in it, as JSON or in a file.",
)
@click.option("--model", metavar="CONFIG", help="The model's config.json or its directory, for the room for tokens.")
@click.option("--list", "as_list", is_flag=True, help="Print what is checked, and end.")
@json_option()
@click.pass_obj
def doctor(effort: Effort | None, config: str | None, model: str | None, as_list: bool, as_json: bool) -> None:
    """Check a configuration and this machine before a deployment.

    Checks the settings, memory and its limits, the version of the engine and each tier, and measures disks and stores
    for a few seconds. Prints each fault with its fix. Needs neither an engine nor a GPU. Run it as the server's user,
    in the server's container; it removes its files and values there.

    Exit status 0: nothing stops or damages the deployment, though there may be warnings; 1: at least one problem, such
    as a setting that kvoffload refuses; 2: an option is invalid, or a file cannot be read.
    """
    from kvoffload.doctor.report import show, to_dict

    if as_list:
        for id, meaning in CHECKS.items():
            click.echo(f"{id:24} {meaning}")
        return
    if config is None:
        raise click.UsageError("Missing option '--config'.")
    with errors("doctor"):
        # Checks clean up, also if the doctor is terminated.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with _progress() as on_progress:
                examination = examine(config, model, effort or Effort(), on_progress)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            signal.signal(signal.SIGTERM, before)
    if as_json:
        print_json(to_dict(examination))
    else:
        show(console_of(), examination)
    sys.exit(examination.exit_status)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows a bar on stderr if that is a terminal."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn

    columns = SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
    with progress_bar(*columns) as bar:
        task = bar.add_task("starts", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show
