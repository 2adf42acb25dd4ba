"""The command ``kvoffload doctor``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvoffload.cli.lab import errors, positive
from kvoffload.cli.terminal import console_of, json_option, print_json, progress_bar
from kvoffload.doctor.examine import Effort, Progress, examine

EFFORT = Effort()


@click.command(short_help="Check a configuration and this machine before a deployment.")
@click.option(
    "--config",
    required=True,
    metavar="JSON-OR-FILE",
    help="What the server gets: its --kv-transfer-config, or only the kv_connector_extra_config in it.",
)
@click.option(
    "--model", metavar="DIR", help="The model's directory, its config.json, or its name in the Hugging Face cache."
)
@click.option(
    "--prefill-speed",
    "prefill_tokens_per_s",
    type=float,
    metavar="TOK/S",
    help="What the server computes for one request alone: says whether a hit pays.",
)
@json_option()
def doctor(config: str, model: str | None, prefill_tokens_per_s: float | None, as_json: bool) -> None:
    """Check, before a deployment, what a server with this configuration would find here.

    Checks the configuration, memory and its limits, each tier, the version of vLLM, the model and the clock; measures
    copies, disks and stores for a few seconds; and says what is wrong, with the fix. Needs neither vLLM nor a GPU.
    Run it as the server's user, in the server's container. Removes what it has made there.

    Exit status 0: nothing stops or damages the deployment, though there may be warnings; 1: something does, such as a
    setting that kvoffload refuses; 2: an option is invalid, or a file cannot be read.
    """
    from kvoffload.doctor.report import show, to_dict

    with errors("doctor"):
        if prefill_tokens_per_s is not None:
            positive("--prefill-speed", prefill_tokens_per_s, "tokens per second")
        # The checks remove what they have made, also if the doctor is terminated.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with _progress() as on_progress:
                examination = examine(config, model, prefill_tokens_per_s, EFFORT, on_progress)
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
