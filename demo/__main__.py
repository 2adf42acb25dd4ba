"""Runs the demo on real vLLM: ``python -m demo``, or with two servers on each kind of shared store, ``--shared``."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import click
from rich.console import Console

from demo import forks, pages, smollm2
from demo.process import DemoError
from demo.report import Report
from demo.run import check_vllm, run_demo
from demo.shared_report import SharedReport
from demo.shared_run import run_shared_demo
from demo.view import TerminalProgress, render, terminal_table, verdict

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Directory for report.html and report.json (shared.html and shared.json), and the engines' logs.",
)
@click.option("--text", type=DIRECTORY, help="Directory of text files to use instead of Python's standard library.")
@click.option(
    "--model",
    metavar="NAME",
    help="smollm2, a small trained model (the default, if its packages are installed), random, or a model's directory.",
)
@click.option("--shared", is_flag=True, help="Run two servers on each kind of shared store.")
@click.option("--store", "stores", multiple=True, metavar="KIND", help="Only this store; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print only the report's JSON to stdout.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for weights, texts and lengths.")
def main(
    out: Path,
    text: Path | None,
    model: str | None,
    shared: bool,
    stores: tuple[str, ...],
    as_json: bool,
    seed: int,
) -> None:
    """Show what kvoffload saves and that outputs do not change.

    Runs the same conversations on real vLLM without kvoffload and with it, then their last questions in a restarted
    server that reads from disk, and, as a control, once more with bytes corrupted on purpose.

    With --shared: for each kind of store, runs two vLLM servers in two processes: the second serves prompts that the
    first has seen. As a control, loads and then the stored values are corrupted on purpose. A store that cannot run
    here is skipped, with the line to run. --store belongs to it, --text and --model do not.

    Exit status 0: outputs are identical with kvoffload, what was stored was found, and the corruption was detected; 1:
    one of these checks failed; 2: the demo could not run.
    """
    for option, given, belongs in (
        ("--text", text is not None, not shared),
        ("--model", model is not None, not shared),
        ("--store", bool(stores), shared),
    ):
        if given and not belongs:
            raise click.UsageError(f"{option} goes only {'with' if not shared else 'without'} --shared")
    errors = Console(stderr=True)
    # The engines and the stores' processes end with the demo, also if it is terminated.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    report: Report | SharedReport
    try:
        chosen = None
        if not shared:
            check_vllm()
            out.mkdir(parents=True, exist_ok=True)
            forks.prepare(out / "vllm.log")
            chosen = choose_model(model, errors)
        with TerminalProgress(errors) as progress:
            if shared:
                report = run_shared_demo(out, seed, progress, stores)
            else:
                report = run_demo(out, text, chosen, seed, progress)
    except KeyboardInterrupt:
        sys.exit(130)
    except DemoError as error:
        errors.print(f"demo: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)
    if isinstance(report, SharedReport):
        name, page = "shared", pages.shared_page(report)
    else:
        name, page = "report", pages.page(report)
    content = json.dumps(report.to_dict(), indent=2) + "\n"
    (out / f"{name}.json").write_text(content, encoding="utf-8")
    (out / f"{name}.html").write_text(render(page), encoding="utf-8")
    if as_json:
        click.echo(content, nl=False)
    else:
        console = Console(highlight=False)
        for table in page.tables:
            console.print()
            console.print(terminal_table(table))
        console.print(f"  {out / f'{name}.html'}", style="dim", soft_wrap=True)
    if not as_json or page.failures:
        (errors if as_json else Console()).print(verdict(page), soft_wrap=True)
    sys.exit(1 if page.failures else 0)


def choose_model(name: str | None, console: Console) -> Path | None:
    """Returns the directory of the model that ``--model`` names, None for a random one. Raises DemoError if there is
    none."""
    if name is None and not smollm2.is_installed():
        console.print(f"{smollm2.NAME} {smollm2.MISSING}. This run is with a random model.", style="yellow")
        return None
    if name == "random":
        return None
    if name not in (None, "smollm2"):
        return Path(name)
    console.print(f"Reading {smollm2.NAME}; the first time it is converted.", style="dim")
    return smollm2.smollm2_directory(smollm2.DIRECTORY)


if __name__ == "__main__":
    main(prog_name="demo")
