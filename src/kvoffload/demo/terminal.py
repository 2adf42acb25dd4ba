"""The demo's output in the terminal: progress while it runs, tables at its end."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvoffload.demo.protocol import EngineInfo, RequestResult, Source
from kvoffload.demo.report import Report, gbps
from kvoffload.demo.run import ActPlan
from kvoffload.units import gigabytes_per_second, milliseconds, percentage, speedup

STYLES = {Source.RECOMPUTE: "dark_orange3", Source.DEVICE: "dodger_blue2", Source.HOST: "green4", Source.DISK: "purple"}
PAGE_CACHE = "no: the file system does not support it, so the times of disk hits may be those of memory"
NAMES = {Source.RECOMPUTE: "recomputed", Source.DEVICE: "device hit", Source.HOST: "host hit", Source.DISK: "disk hit"}


class TerminalProgress:
    """A context manager that shows one progress bar per act."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("[bold]act {task.fields[number]}[/]  {task.description:<20}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
        )
        self._task = TaskID(0)

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def act(self, plan: ActPlan, requests: int) -> None:
        self._task = self._bars.add_task(plan.title, total=requests, number=plan.number, now="[dim]starting vLLM[/]")

    def ready(self, info: EngineInfo) -> None:
        self._bars.update(self._task, now=f"[dim]vLLM {info.vllm_version}, {info.device}[/]")

    def request(self, result: RequestResult) -> None:
        style, name = STYLES[result.source], NAMES[result.source]
        self._bars.update(self._task, advance=1, now=f"[{style}]{name:<10}[/] {milliseconds(result.ttft_ms):>8}")


def summary(report: Report) -> RenderableType:
    """Returns the tables at the end."""
    tables = [_ttft_table(report), _facts_table(report)]
    if report.trials:
        tables.append(_trials_table(report))
    return Group(*(each for table in tables for each in (Text(), table)))


def verdict(report: Report) -> Text:
    """Returns the warnings about timings, then one sentence per failure, or one that all checks passed."""
    text = Text("".join(f"{sentence}\n" for sentence in report.warnings), style="yellow")
    if report.failures:
        return text.append("\n".join(report.failures), style="bold red")
    return text.append(
        "Outputs are identical with kvoffload and after a restart, and the corruption was detected.",
        style="bold green",
    )


def _ttft_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Time to first token", title_justify="left", title_style="bold")
    table.add_column("prompt")
    for name in ("requests", "p50", "p95", "vs. recompute"):
        table.add_column(name, justify="right")
    for source, q in report.ttft_ms.items():
        table.add_row(
            Text(NAMES[source], style=STYLES[source]),
            str(q.count),
            milliseconds(q.p50),
            milliseconds(q.p95),
            "" if source is Source.RECOMPUTE else speedup(report.ratios[f"recompute_to_{source}"]),
        )
    return table


def _facts_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("what", style="dim")
    table.add_column("value")
    hits, asked = report.hit_tokens, report.tokens_asked
    corrupted = len(report.versus_control.different)
    table.add_row("requests per act", str(len(report.offload.requests)))
    table.add_row("prompt tokens", f"{asked:,}")
    table.add_row("hit tokens, device", f"{hits['device']:,} ({percentage(hits['device'], asked)})")
    table.add_row("hit tokens, host", f"{hits['host']:,} ({percentage(hits['host'], asked)})")
    disk, again = hits["disk"], report.restart_tokens_asked
    table.add_row("hit tokens, disk", f"{disk:,} ({percentage(disk, again)} of the prompts after the restart)")
    table.add_row("store, device to host", gigabytes_per_second(gbps(report.offload, "store")))
    table.add_row("load, host to device", gigabytes_per_second(gbps(report.offload, "load")))
    table.add_row(
        "duration of the act",
        f"{report.offload.summary.wall_s:.1f} s; without kvoffload {report.baseline.summary.wall_s:.1f} s",
    )
    table.add_row(
        "outputs identical",
        _yes_no(report.identical, f"largest logprob difference {report.versus_offload.max_logprob_diff:.1e}"),
    )
    same = len(report.restart.requests) - len(report.versus_restart.different)
    table.add_row(
        "identical after the restart",
        _yes_no(report.restart_identical, f"{same} of {len(report.restart.requests)}"),
    )
    table.add_row("disk reads bypass the page cache", "yes" if report.restart.summary.direct_io else PAGE_CACHE)
    table.add_row(
        "corruption detected",
        _yes_no(report.corruption_detected, f"{corrupted} of {len(report.restart.control)} outputs changed"),
    )
    if report.replay is not None:
        replayed = report.replay.replayed
        detail = ", ".join(
            f"{tier} {replayed[tier]:,} hit tokens (measured {measured:,})"
            for tier, measured in report.replay.measured.items()
        )
        table.add_row("replay of the trace agrees", _yes_no(report.replay.agrees, detail))
    return table


def _trials_table(report: Report) -> Table:
    title = "vLLM's own offloading, after bytes on disk have changed"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("tier below host memory")
    for name in ("from disk before", "wrong answers after", "computed again"):
        table.add_column(name, justify="right")
    for judged in report.trials:
        wrong = Text(f"{judged.wrong} of {len(judged.trial.after)}", style="bold red" if judged.wrong else "bold green")
        found = f"{judged.found} of {len(judged.trial.before)}"
        table.add_row(judged.trial.tier, found, wrong, str(judged.computed))
    return table


def _yes_no(value: bool, detail: str) -> Text:
    return Text.assemble(("yes", "bold green") if value else ("NO", "bold red"), f", {detail}")
