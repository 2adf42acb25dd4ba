"""The demo's output in the terminal: progress while it runs, tables at its end."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvoffload.demo.protocol import RequestResult, Source
from kvoffload.demo.shared.result import (
    WAIT_LIMIT_S,
    SharedReport,
    SkippedStore,
    hit_tokens,
    speedup,
    tokens_asked,
)
from kvoffload.demo.terminal import STYLES
from kvoffload.units import milliseconds, multiple, percentage

NAMES = {
    Source.RECOMPUTE: "computed",
    Source.DEVICE: "device hit",
    Source.HOST: "host hit",
    Source.DISK: "from the store",
}


class TerminalProgress:
    """A context manager that shows one progress bar per server or fault."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, title: str, requests: int) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(title, total=requests, now="[dim]starting vLLM[/]")
        if not self._console.is_terminal:
            # The bars appear at the end only.
            self._console.print(title.strip(), markup=False, highlight=False)

    def request(self, result: RequestResult) -> None:
        if self._task is None:
            return
        style, name = STYLES[result.source], NAMES[result.source]
        (task,) = (task for task in self._bars.tasks if task.id == self._task)
        self._bars.update(
            self._task,
            advance=1,
            # How long a fault lasts says how many requests there are.
            total=max(task.total or 0, task.completed + 1),
            now=f"[{style}]{name:<14}[/] {milliseconds(result.ttft_ms):>8}",
        )

    def skip(self, store: SkippedStore) -> None:
        self._console.print(
            f"{store.name} is skipped: {store.reason}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )


def summary(report: SharedReport) -> RenderableType:
    """Returns the tables at the end."""
    parts: list[RenderableType] = [Text(), _stores_table(report)]
    if report.faults:
        parts += [Text(), _faults_table(report)]
    return Group(*parts)


def verdict(report: SharedReport) -> Text:
    """Returns what was skipped, then one sentence per failure, or one that all checks passed."""
    text = Text("".join(f"{store.name} was skipped: {store.reason}\n" for store in report.skipped), style="yellow")
    if report.failures:
        return text.append("\n".join(report.failures), style="bold red")
    if not report.results:
        return text.append("No store could run here.", style="bold red")
    return text.append(
        "Outputs of both servers are identical, and both controls were detected.",
        style="bold green",
    )


def _stores_table(report: SharedReport) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="The second server, asked what the first has answered",
        title_justify="left",
        title_style="bold",
        padding=0,
    )
    table.add_column("store")
    for name in ("identical", "hit tokens", "recomputed", "shared", "faster", "control", "changed"):
        table.add_column(name, justify="right")
    for store in report.results:
        ttft = report.ttft_ms(store)
        found, asked = hit_tokens(store.shared), tokens_asked(store.shared)
        table.add_row(
            store.name,
            _yes_no(report.identical(store)),
            f"{found:,} ({percentage(found, asked)})",
            milliseconds(ttft["recompute"]),
            milliseconds(ttft["shared"]),
            multiple(speedup(ttft)),
            Text("detected", style="green") if report.control_detected(store) else Text("MISSED", style="bold red"),
            Text("found", style="green") if store.bad_blocks else Text("MISSED", style="bold red"),
        )
    for skipped in report.skipped:
        table.add_row(skipped.name, Text("skipped", style="yellow"), *[""] * 6)
    return table


def _faults_table(report: SharedReport) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"When the store fails: no wait of more than {WAIT_LIMIT_S:.0f} s for blocks, no restart; hits in tokens",
        title_justify="left",
        title_style="bold",
        padding=0,
    )
    table.add_column("fault")
    for name in ("requests", "waited", "slowest", "identical", "before", "during", "after", "again"):
        table.add_column(name, justify="right")
    last = ""
    for result in report.faults:
        row = report.fault_row(result)
        if row["store"] != last:
            table.add_row(Text(row["store"], style="bold"))
        hits = row["hit_tokens"]
        waited, slowest = (f"{row[name]:.1f} s" for name in ("longest_wait_s", "slowest_request_s"))
        again = row["recovered_s"]
        table.add_row(
            f"  {row['fault']}",
            str(row["requests"]),
            waited if row["longest_wait_s"] <= WAIT_LIMIT_S else Text(waited, style="bold red"),
            slowest if row["slowest_request_s"] <= report.stuck_s else Text(slowest, style="bold red"),
            _yes_no(row["identical"]),
            f"{hits['before']:,}",
            f"{hits['during']:,}",
            f"{hits['after']:,}",
            Text("NEVER", style="bold red") if again is None else f"{again:.0f} s",
        )
        last = row["store"]
    return table


def _yes_no(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("NO", style="bold red")
