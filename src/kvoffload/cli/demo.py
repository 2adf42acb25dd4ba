"""``kvoffload demo`` and ``kvoffload demo-shared``: run the demos on real vLLM."""

from __future__ import annotations

import json
import signal
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
    help="Directory for report.html, report.json and the engines' logs.",
)
@click.option("--text", type=DIRECTORY, help="Directory of text files to use instead of Python's standard library.")
@click.option("--model", type=DIRECTORY, help="Model directory to use instead of a small random model.")
@click.option("--json", "as_json", is_flag=True, help="Print only the content of report.json to stdout.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for weights, texts and lengths.")
def demo(out: Path, text: Path | None, model: Path | None, as_json: bool, seed: int) -> None:
    """Show what kvoffload saves and that outputs do not change.

    Runs the same conversations on real vLLM without kvoffload and with it, then their last questions in a restarted
    server that reads from disk, and, as a control, once more with bytes corrupted on purpose. Then runs vLLM's own
    offloading on two tiers, its fs tier and kvoffload's, before and after bytes on disk change. Exit status 0: outputs
    are identical with kvoffload, the restarted server read from disk, and the corruption was detected; 1: one of these
    checks failed; 2: the demo could not run.
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


@click.command("demo-shared")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Directory for shared.html, shared.json and the servers' logs.",
)
@click.option("--store", "stores", multiple=True, metavar="KIND", help="Only this store; may be given several times.")
@click.option("--faults", is_flag=True, help="Also kill, stall, fill and corrupt each store while a server uses it.")
@click.option("--json", "as_json", is_flag=True, help="Print only the content of shared.json to stdout.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for weights, texts and lengths.")
def demo_shared(out: Path, stores: tuple[str, ...], faults: bool, as_json: bool, seed: int) -> None:
    """Show that two servers can use one cache, and that outputs do not change.

    For each kind of store, runs two vLLM servers in two processes: the second serves prompts that the first has seen.
    As a control, loads and then the stored values are corrupted on purpose. Exit status 0:
    outputs are identical, the second server found what the first had computed, and the corruption was detected; 1: one
    of these checks failed; 2: the demo could not run. A store that cannot run here is skipped, with the line to run.
    """
    from rich.console import Console

    from kvoffload.demo.errors import DemoError
    from kvoffload.demo.shared.page import render_page
    from kvoffload.demo.shared.run import run_shared_demo
    from kvoffload.demo.shared.terminal import TerminalProgress, summary, verdict

    errors = Console(stderr=True)
    # The store's processes end with the demo, also if it is terminated.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with TerminalProgress(errors) as progress:
            report = run_shared_demo(out, seed, progress, faults, stores)
    except KeyboardInterrupt:
        sys.exit(130)
    except DemoError as error:
        errors.print(f"kvoffload demo-shared: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)
    content = json.dumps(report.to_dict(), indent=2) + "\n"
    (out / "shared.json").write_text(content, encoding="utf-8")
    (out / "shared.html").write_text(render_page(report), encoding="utf-8")
    failed = bool(report.failures) or not report.results
    if as_json:
        click.echo(content, nl=False)
    else:
        console = Console(highlight=False)
        console.print(summary(report))
        console.print(f"  {out / 'shared.html'}", style="dim", soft_wrap=True)
    if not as_json or failed:
        (errors if as_json else Console()).print(verdict(report), soft_wrap=True)
    sys.exit(1 if failed else 0)
