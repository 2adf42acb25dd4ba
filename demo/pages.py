"""What the two reports say: on the page, and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from demo.plots import ttft_plot
from demo.protocol import RequestResult, Source
from demo.report import LOGPROB_TOLERANCE, Report
from demo.shared_report import (
    SharedReport,
    StoreResult,
    hit_tokens,
    speedup_of,
    tokens_asked,
)
from demo.view import BAD, Cell, Page, Section, Table, yes_no
from kvoffload.printable import printable

NAMES = {Source.RECOMPUTE: "recomputed", Source.DEVICE: "device hit", Source.HOST: "host hit", Source.DISK: "disk hit"}
SHARED_NAMES = NAMES | {Source.RECOMPUTE: "computed", Source.DISK: "from the store"}
ANSWERS_SHOWN = 3
NO_VALUE = "–"  # noqa: RUF001


def milliseconds(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:,.{int(value < 10)}f} ms"


def multiple(value: float | None) -> str:
    """Returns text such as "11.6×"."""  # noqa: RUF002
    return NO_VALUE if value is None else f"{value:.1f}×"  # noqa: RUF001


def percentage(part: int, whole: int) -> str:
    return NO_VALUE if not whole else f"{100 * part / whole:.0f}%"


# One server.


def page(report: Report) -> Page:
    info, hits, asked = report.offload.info, report.hit_tokens, report.tokens_asked
    saved_s = report.baseline.summary.wall_s - report.offload.summary.wall_s
    worst = max(report.versus_offload.max_logprob_diff, report.versus_restart.max_logprob_diff)
    panels = {
        "without kvoffload": report.baseline,
        "with kvoffload": report.offload,
        "after a restart: each conversation's last question again": report.restart,
    }
    ttft = Section(
        "Time to first token",
        [
            "Each mark is a request. When a document returns, the device cache has evicted it. Without kvoffload it is "
            "computed again; with kvoffload its blocks are loaded from host memory or, after a restart, from disk."
        ],
        [
            ttft_plot(
                {title: [[(r.index, r) for r in act.requests]] for title, act in panels.items()},
                NAMES,
                "request",
                "Time to first token by request: without kvoffload, with it, and after a restart",
            )
        ],
        [_ttft_table(report), _facts_table(report)],
    )
    answers = [_answers(title, answers, report) for title, answers in report.pairs[:ANSWERS_SHOWN]]
    what = Section(
        "What was answered",
        [
            f"The same questions to {report.model} in each act. In the last one, the control, blocks were changed "
            "after they had been verified: one bit per number was cleared, its sign."
        ],
        tables=answers,
    )
    return Page(
        title=f"demo: first token {multiple(report.speedups[Source.HOST])} faster",
        heading="The same conversations, with and without kvoffload",
        lead=f"{len(report.offload.requests)} requests about documents that do not all fit in the device cache, on "
        f"vLLM {info.vllm_version} and {info.device}: without kvoffload and with it. Then the server is restarted, "
        "and each conversation's last question is asked again, and once more with bytes corrupted on purpose.",
        sections=[what, ttft] if answers else [ttft],
        end=f"{report.made_at}. Model: {report.model}; seed {report.seed}. report.json, next to this page, has all "
        "numbers.",
        headline="Outputs are identical with kvoffload and after a restart, and the corruption was detected.",
        verdict="Every token is the same without kvoffload, with it, and after the restart; logprobs differ by at most "
        f"{worst:.1e} (allowed: {LOGPROB_TOLERANCE:.0e}). Corrupted bytes change "
        f"{len(report.versus_control.different)} of {len(report.restart.control)} outputs, so a wrong block would "
        "have been noticed.",
        failures=report.failures,
        remarks=report.warnings,
        cards=[
            (multiple(report.speedups[Source.HOST]), "faster first token from host memory than recomputed"),
            (multiple(report.speedups[Source.DISK]), "faster first token from disk after a restart than recomputed"),
            (percentage(hits["host"], asked), "of all prompt tokens came from host memory"),
            (f"{saved_s:.1f} s", f"of {report.baseline.summary.wall_s:.1f} s saved over the whole run"),
        ],
    )


def _answers(title: str, answers: Sequence[tuple[str, RequestResult]], report: Report) -> Table:
    """Returns a table of answers. Those that are not the first one are bad."""
    longest = max(len(request.output_tokens) for request in report.baseline.requests)
    right = answers[0][1].output_tokens
    rows: list[Sequence[Cell | str]] = []
    for name, request in answers:
        text = printable(" ".join(request.answer.split()))
        cut = "..." if text and len(request.output_tokens) == longest else ""
        rows.append([name, Cell(text + cut or "(no text)", "" if request.output_tokens == right else BAD)])
    return Table(title, [], rows, is_prose=True)


def _ttft_table(report: Report) -> Table:
    rows: list[Sequence[Cell | str]] = [
        [
            Cell(NAMES[source], source),
            str(q.count),
            milliseconds(q.p50),
            milliseconds(q.p95),
            "" if source is Source.RECOMPUTE else multiple(report.speedups[source]),
        ]
        for source, q in report.ttft_ms.items()
    ]
    return Table("By source", ["prompt", "requests", "p50", "p95", "faster"], rows)


def _facts_table(report: Report) -> Table:
    hits, again = report.hit_tokens, len(report.restart.requests)
    found = sum(request.host_tokens for request in report.restart.requests)
    same, corrupted = again - len(report.versus_restart.different), len(report.versus_control.different)
    rows: list[tuple[str, Cell | str]] = [
        ("prompt tokens", f"{report.tokens_asked:,}; after the restart {report.restart_tokens_asked:,}"),
        ("hit tokens, device", f"{hits['device']:,} ({percentage(hits['device'], report.tokens_asked)})"),
        ("hit tokens, host", f"{hits['host']:,} ({percentage(hits['host'], report.tokens_asked)})"),
        ("hit tokens, disk", f"{hits['disk']:,} ({percentage(hits['disk'], report.restart_tokens_asked)})"),
        ("outputs identical", yes_no(not report.versus_offload.different)),
        ("identical after the restart", yes_no(not report.versus_restart.different, f"{same} of {again}")),
        ("corruption detected", yes_no(bool(corrupted), f"{corrupted} of {again} outputs changed")),
    ]
    if found:
        # A document that was read for one user is there for others.
        rows.insert(4, ("read for another user", f"{percentage(found, report.restart_tokens_asked)}"))
    if not report.restart.summary.direct_io:
        rows.append(("disk reads bypass the page cache", "no: the times of disk hits may be those of memory"))
    if report.replay is not None:
        detail = ", ".join(
            f"{tier} {report.replay.replayed[tier]:,} hit tokens (measured {measured:,})"
            for tier, measured in report.replay.measured.items()
        )
        rows.append(("replay of the trace agrees", yes_no(report.replay.agrees, detail)))
    cells: list[Sequence[Cell | str]] = [[name, said if isinstance(said, Cell) else Cell(said)] for name, said in rows]
    return Table("In numbers", [], cells, is_prose=True)


# Two servers on each store.


def shared_page(report: SharedReport) -> Page:
    served = [
        requests for store in report.results for requests in (store.first, store.shared, store.computed, store.back)
    ]
    worst = max((report.compare(requests).max_logprob_diff for requests in served), default=0.0)
    sections = []
    if report.results:
        panels = {
            store.name: [list(enumerate(store.computed)), list(enumerate(store.shared))] for store in report.results
        }
        description = "Time to first token of each prompt at the second server: computed, and from the store"
        sections.append(
            Section(
                "Time to first token",
                [
                    "Each mark is a request to the second server, about a prompt that the first has seen before. Each "
                    "prompt was asked twice in a row: loaded from the store, and computed in full, with loading and "
                    "the device cache off for this request. The table has the medians, and their ratio."
                ],
                [ttft_plot(panels, SHARED_NAMES, "prompt", description)],
                [_stores_table(report)],
                '"Found", "back": share of the tokens, at the second server, and at the first one of prompts that the '
                'second had seen first. "Control": '
                'whether outputs change if loads are corrupted after they were verified. "Changed": whether checksums '
                "have found that bytes of the store itself had been changed; their prompts were computed again.",
            )
        )
    return Page(
        title="demo: two servers, one cache",
        heading="Two servers, one cache",
        lead="The second vLLM server is asked what the first has answered already. It finds the KV cache of these "
        f"prompts in a store that both use. vLLM {report.info.vllm_version} on {report.info.device}, two processes "
        "per store.",
        sections=sections,
        end=f"{report.made_at}. Model: {report.model}; seed {report.seed}; load of the machine before the demo: "
        f"{report.load_average:.1f}. shared.json, next to this page, has all numbers.",
        headline="Outputs of both servers are identical, and both controls were detected.",
        verdict="Every token of both servers is the same as without kvoffload; logprobs differ by at most "
        f"{worst:.1e} (allowed: {LOGPROB_TOLERANCE:.0e}). Loads that were corrupted on purpose change the outputs, so "
        "a wrong block would have been noticed. When the stored values themselves were changed, checksums found them, "
        "and the prompts were computed again.",
        failures=report.failures or ([] if report.results else ["No store could run here."]),
        remarks=[f"{store.name} was skipped: {store.reason}" for store in report.skipped],
        cards=[card for store in report.results for card in _cards(report, store)],
    )


def _cards(report: SharedReport, store: StoreResult) -> list[tuple[str, str]]:
    found = percentage(hit_tokens(store.shared), tokens_asked(store.shared))
    return [
        (multiple(speedup_of(report.ttft_ms(store))), f"faster first token from {store.title} than recomputed"),
        (found, f"of the second server's prompt tokens came from {store.title}"),
    ]


def _stores_table(report: SharedReport) -> Table:
    rows: list[Sequence[Cell | str]] = []
    for store in report.results:
        ttft = report.ttft_ms(store)
        rows.append(
            [
                store.name,
                yes_no(report.identical(store)),
                *(percentage(hit_tokens(found), tokens_asked(found)) for found in (store.shared, store.back)),
                milliseconds(ttft["recompute"]),
                milliseconds(ttft["shared"]),
                multiple(speedup_of(ttft)),
                yes_no(report.control_detected(store)),
                yes_no(store.bad_blocks > 0),
            ]
        )
    columns = ["store", "identical", "found", "back", "computed", "shared", "faster", "control", "changed"]
    return Table("The second server, asked what the first has answered", columns, rows)
