"""``kvoffload demo``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Where report.html, report.json and the engines' logs go.",
)
@click.option("--text", type=DIRECTORY, help="Your own text files, instead of Python's standard library.")
@click.option("--model", type=DIRECTORY, help="Your own model, instead of a small one with random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json, and nothing else, to stdout.")
@click.option("--seed", type=int, default=0, show_default=True, help="For weights, texts and lengths.")
def demo(out: Path, text: Path | None, model: Path | None, as_json: bool, seed: int) -> None:
    """Show what kvoffload saves, and that it changes no output.

    Runs the same conversations through real vLLM: without kvoffload, with it, in a server that was stopped and
    started again and answers from disk, and with bytes corrupted on purpose, as a control. Exit status 0: outputs
    are the same with kvoffload, the restarted server read from disk, and the control was caught; 1: one of these is
    not so; 2: the demo could not run.
    """
    from rich.console import Console

    from kvoffload.demo.errors import DemoError
    from kvoffload.demo.page import render_page
    from kvoffload.demo.run import run_demo
    from kvoffload.demo.terminal import TerminalProgress, summary, verdict

    errors = Console(stderr=True)
    try:
        with TerminalProgress(errors) as progress:
            report = run_demo(out, text, model, seed, progress)
    except KeyboardInterrupt:
        sys.exit(130)
    except DemoError as error:
        errors.print(f"kvoffload demo: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    content = json.dumps(report.to_dict(), indent=2) + "\n"
    (out / "report.json").write_text(content, encoding="utf-8")
    (out / "report.html").write_text(render_page(report), encoding="utf-8")
    if as_json:
        click.echo(content, nl=False)
    else:
        console = Console(highlight=False)
        console.print(summary(report))
        console.print(f"  {out / 'report.html'}", style="dim", soft_wrap=True)
    if not as_json or report.failures:
        (errors if as_json else Console()).print(verdict(report))
    sys.exit(1 if report.failures else 0)
