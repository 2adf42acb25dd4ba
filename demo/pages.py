"""What the two reports say: on the page, and as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from demo.plots import faults_plot, hits_plot, pool_plot, ttft_plot
from demo.protocol import RequestResult, Source
from demo.report import LOGPROB_TOLERANCE, JudgedTrial, Report, gbps, miss_reasons
from demo.shared_report import (
    LOAD_DEADLINE_S,
    WAIT_LIMIT_S,
    SharedReport,
    StoreResult,
    hit_tokens,
    speedup_of,
    tokens_asked,
)
from demo.view import BAD, GOOD, Cell, Page, Section, Table, limited, yes_no
from kvoffload.printable import printable
from kvoffload.units import gigabytes_per_second, milliseconds, multiple, percentage, speedup

NAMES = {Source.RECOMPUTE: "recomputed", Source.DEVICE: "device hit", Source.HOST: "host hit", Source.DISK: "disk hit"}
SHARED_NAMES = NAMES | {Source.RECOMPUTE: "computed", Source.DISK: "from the store"}
ANSWERS_SHOWN = 3
PAGE_CACHE = "no: the file system does not support it, so the times of disk hits may be those of memory"


# One server.


def tables(report: Report) -> list[Table]:
    """Returns the tables at the end of the run of one server."""
    shown = [*_answer_tables(report), _ttft_table(report), _facts_table(report)]
    return [*shown, _trials_table(report.trials), *_trial_answers(report)] if report.trials else shown


def page(report: Report) -> Page:
    info, ratios, hits, asked = report.offload.info, report.ratios, report.hit_tokens, report.tokens_asked
    saved_s = report.baseline.summary.wall_s - report.offload.summary.wall_s
    worst = max(report.versus_offload.max_logprob_diff, report.versus_restart.max_logprob_diff)
    sections = [
        Section(
            "Time to first token",
            [
                "Each mark is a request. When a document returns, the device cache has evicted it. Without kvoffload "
                "it is computed again; with kvoffload its blocks are loaded from host memory or, after a restart, from "
                "disk."
            ],
            [
                ttft_plot(
                    {
                        title: [[(r.index, r) for r in act.requests]]
                        for title, act in (
                            ("without kvoffload", report.baseline),
                            ("with kvoffload", report.offload),
                            ("after a restart: each conversation's last question again", report.restart),
                        )
                    },
                    NAMES,
                    "request",
                    "Time to first token by request: without kvoffload, with it, and after a restart",
                )
            ],
            [_ttft_table(report)],
            "Recomputing was measured without kvoffload, device and host hits with it, and disk hits after the "
            "restart. "
            + (
                "Disk reads bypassed the page cache (O_DIRECT)."
                if report.restart.summary.direct_io
                else "Disk reads did not bypass the page cache, so the times of disk hits may be those of memory."
            )
            + "".join(f" {warning}" for warning in report.warnings),
        ),
        Section("Where the prompts came from", [_where(report)], [hits_plot(report)]),
    ]
    if answers := _answer_tables(report):
        sections.insert(
            0,
            Section(
                "What was answered",
                [
                    f"The same questions to {report.model} in each act. In the last one, the control, blocks were "
                    "changed after they had been verified: one bit per number was cleared, its sign."
                ],
                tables=answers,
            ),
        )
    if report.trials:
        sections.append(
            Section(
                "Inside vLLM's own offloading",
                [
                    "A server with vLLM's OffloadingConnector stored prompts in two tiers below its host memory. Then "
                    "one server per tier was asked for them. Halfway a byte in every KiB of the files was changed, as "
                    "a bad disk would. An answer is wrong if it is not that of vLLM without any offloading."
                ],
                tables=[_trials_table(report.trials), *_trial_answers(report)],
            )
        )
    sections.append(
        Section(
            "Host pool",
            ["Blocks in use after each request. They never exceed the budget. The restart empties the pool."],
            [pool_plot(report)],
        )
    )
    return Page(
        title=f"demo: first token {speedup(ratios['recompute_to_host'])}",
        heading="The same conversations, with and without kvoffload",
        lead=f"{len(report.offload.requests)} requests about documents that do not all fit in the device cache, on "
        f"vLLM {info.vllm_version} and {info.device}: without kvoffload and with it. Then the server is restarted, "
        "and each conversation's last question is asked again, and once more with bytes corrupted on purpose.",
        sections=sections,
        end=f"{report.made_at}. Model: {report.model}; seed {report.seed}. report.json, next to this page, has all "
        "numbers.",
        headline="Outputs are identical with kvoffload and after a restart, and the corruption was detected.",
        verdict="Every token is the same without kvoffload, with it, and after the restart; logprobs differ by at most "
        f"{worst:.1e} (allowed: {LOGPROB_TOLERANCE:.0e}). Corrupted bytes change "
        f"{len(report.versus_control.different)} of {len(report.restart.control)} outputs, so a wrong block would "
        "have been noticed.",
        failures=report.failures,
        cards=[
            (multiple(ratios["recompute_to_host"]), "faster first token from host memory than recomputed"),
            (multiple(ratios["recompute_to_disk"]), "faster first token from disk after a restart than recomputed"),
            (percentage(hits["host"], asked), "of all prompt tokens came from host memory"),
            (f"{saved_s:.1f} s", f"of {report.baseline.summary.wall_s:.1f} s saved over the whole run"),
            (
                gigabytes_per_second(gbps(report.offload, "load")),
                f"host to device; {gigabytes_per_second(gbps(report.offload, 'store'))} device to host",
            ),
        ],
        details=_all_requests(report),
    )


def _where(report: Report) -> str:
    """Returns the sentences about the sources of the prompts."""
    hits = report.hit_tokens
    text = (
        f"Of {report.tokens_asked:,} prompt tokens with kvoffload, {hits['host']:,} came from host memory and "
        f"{hits['device']:,} from the device's own cache. After the restart, {hits['disk']:,} of "
        f"{report.restart_tokens_asked:,} came from disk{_again(report)}."
    )
    if reasons := miss_reasons(report.offload.requests):
        named = ", ".join(f"{reason.replace('_', ' ')} ({count})" for reason, count in reasons.items())
        text += f" When a request missed, its first missing block was {named}."
    if report.replay is not None:
        replayed, largest = report.replay.replayed, report.replay.largest_difference
        differs = f"no request differs by more than {largest:,}" if largest else "every request agrees"
        text += (
            f" A replay of the server's recorded trace found {replayed['device']:,} tokens on the device and "
            f"{replayed['host']:,} in host memory; {differs}."
        )
    return text


def _answer_tables(report: Report) -> list[Table]:
    """Returns what was answered to some questions in each act; nothing if answers are no text."""
    return [
        _answers(f"{name}: {asked.question}", asked, answers, report)
        for name, asked, answers in report.pairs[:ANSWERS_SHOWN]
    ]


def _trial_answers(report: Report) -> list[Table]:
    """Returns an answer of each tier inside vLLM after bytes have changed; nothing if answers are no text."""
    if not report.pairs:
        return []
    document = report.trials[0].trial.after[0].document
    asked = next(r for r in report.baseline.requests if r.document == document)
    answers = [(judged.trial.tier, judged.trial.after[0]) for judged in report.trials]
    title = f"{report.name_of(document)}: {asked.question}"
    return [_answers(title, asked, [("without offloading", asked), *answers], report)]


def _answers(title: str, asked: RequestResult, answers: Sequence[tuple[str, RequestResult]], report: Report) -> Table:
    """Returns a table of answers. Those that are not the answer of ``asked`` are bad."""
    longest = max(len(request.output_tokens) for request in report.baseline.requests)
    rows: list[Sequence[Cell | str]] = []
    for name, request in answers:
        text = printable(" ".join(request.answer.split()))
        cut = "..." if text and len(request.output_tokens) == longest else ""
        rows.append(
            [name, Cell(text + cut or "(no text)", "" if request.output_tokens == asked.output_tokens else BAD)]
        )
    return Table(title, [], rows, is_prose=True)


def _again(report: Report) -> str:
    """Returns what else was found after the restart: a document that was read for one user is there for others."""
    found = sum(request.host_tokens for request in report.restart.requests)
    share = percentage(found, report.restart_tokens_asked)
    return f"; {share} were in host memory by then, read for another user" if found else ""


def _ttft_table(report: Report) -> Table:
    return Table(
        "Time to first token",
        ["prompt", "requests", "p50", "p95", "vs. recompute"],
        [
            [
                Cell(NAMES[source], source),
                str(q.count),
                milliseconds(q.p50),
                milliseconds(q.p95),
                "" if source is Source.RECOMPUTE else speedup(report.ratios[f"recompute_to_{source}"]),
            ]
            for source, q in report.ttft_ms.items()
        ],
    )


def _facts_table(report: Report) -> Table:
    hits, asked, again = report.hit_tokens, report.tokens_asked, len(report.restart.requests)
    same, corrupted = again - len(report.versus_restart.different), len(report.versus_control.different)
    rows: list[tuple[str, Cell | str]] = [
        ("requests per act", str(len(report.offload.requests))),
        ("prompt tokens", f"{asked:,}"),
        ("hit tokens, device", f"{hits['device']:,} ({percentage(hits['device'], asked)})"),
        ("hit tokens, host", f"{hits['host']:,} ({percentage(hits['host'], asked)})"),
        (
            "hit tokens, disk",
            f"{hits['disk']:,} ({percentage(hits['disk'], report.restart_tokens_asked)} of the prompts after the "
            f"restart{_again(report)})",
        ),
        ("store, device to host", gigabytes_per_second(gbps(report.offload, "store"))),
        ("load, host to device", gigabytes_per_second(gbps(report.offload, "load"))),
        (
            "duration of the act",
            f"{report.offload.summary.wall_s:.1f} s; without kvoffload {report.baseline.summary.wall_s:.1f} s",
        ),
        (
            "outputs identical",
            yes_no(report.identical, f"largest logprob difference {report.versus_offload.max_logprob_diff:.1e}"),
        ),
        ("identical after the restart", yes_no(report.restart_identical, f"{same} of {again}")),
        ("disk reads bypass the page cache", "yes" if report.restart.summary.direct_io else PAGE_CACHE),
        (
            "corruption detected",
            yes_no(report.corruption_detected, f"{corrupted} of {len(report.restart.control)} outputs changed"),
        ),
    ]
    if report.replay is not None:
        replayed = report.replay.replayed
        detail = ", ".join(
            f"{tier} {replayed[tier]:,} hit tokens (measured {measured:,})"
            for tier, measured in report.replay.measured.items()
        )
        rows.append(("replay of the trace agrees", yes_no(report.replay.agrees, detail)))
    return Table("", [], rows)


def _trials_table(trials: Sequence[JudgedTrial]) -> Table:
    return Table(
        "vLLM's own offloading, after bytes on disk have changed",
        ["tier below host memory", "from disk before", "wrong answers after", "computed again"],
        [
            [
                judged.trial.tier,
                f"{judged.found} of {len(judged.trial.before)}",
                Cell(f"{judged.wrong} of {len(judged.trial.after)}", BAD if judged.wrong else GOOD),
                str(judged.computed),
            ]
            for judged in trials
        ],
    )


def _all_requests(report: Report) -> Table:
    again = {request.index: request for request in report.restart.requests}

    def output(different: Sequence[int], index: int) -> Cell:
        return Cell("output changed", BAD) if index in different else Cell("same output")

    rows: list[Sequence[Cell | str]] = []
    for before, r in zip(report.baseline.requests, report.offload.requests, strict=True):
        row: list[Cell | str] = [
            str(r.index),
            f"{r.document}{', follow-up' if r.follow_up else ''}",
            *map(str, (r.prompt_tokens, r.device_tokens, r.host_tokens)),
            Cell(NAMES[r.source], r.source),
            milliseconds(before.ttft_ms),
            milliseconds(r.ttft_ms),
        ]
        if (repeated := again.get(r.index)) is None:
            row += [""] * 4
        else:
            row += [
                str(repeated.disk_tokens),
                milliseconds(repeated.ttft_ms),
                output(report.versus_restart.different, r.index),
                output(report.versus_control.different, r.index),
            ]
        rows.append(row)
    columns = (
        "request,document,prompt,device,host,source,TTFT without,TTFT with,restart: disk,TTFT,output,corrupted bytes"
    )
    return Table("All requests", columns.split(","), rows)


# Two servers on each store.


def shared_tables(report: SharedReport) -> list[Table]:
    """Returns the tables at the end of the run of two servers."""
    shown = [_stores_table(report)]
    return [*shown, _faults_table(report)] if report.faults else shown


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
        sections += [
            Section(
                "Time to first token",
                [
                    "Each mark is a request to the second server, about a prompt that the first has seen before. Each "
                    "prompt was asked twice in a row: loaded from the store, and computed in full, with loading and "
                    "the device cache off for this request. The table has the medians, and their ratio."
                ],
                [ttft_plot(panels, SHARED_NAMES, "prompt", description)],
            ),
            Section(
                "What was found, and what was noticed",
                tables=[_stores_table(report), _back_table(report.results)],
                foot='"Control": outputs that change if loads are corrupted after they were verified. "Changed": '
                "whether checksums have found that bytes of the store itself had been changed; their prompts were "
                "computed again.",
            ),
        ]
    if report.faults:
        faults = dict.fromkeys((f"{result.store}, {result.fault}", result.how) for result in report.faults)
        sections.append(
            Section(
                "When the store fails",
                [
                    f"The same {len(report.faults[0].before)} prompts before, during and after each fault, hits in "
                    f"tokens; no server is restarted. A request may wait {LOAD_DEADLINE_S:.0f} s for blocks, after "
                    f"which it is computed; with the time of a step of the engine that is {WAIT_LIMIT_S:.0f} s at most."
                ],
                [faults_plot(report.faults)],
                [_faults_table(report)],
                " ".join(f"{where}: {how}." for where, how in faults),
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
        ttft, found = report.ttft_ms(store), hit_tokens(store.shared)
        rows.append(
            [
                store.name,
                yes_no(report.identical(store)),
                f"{found:,} ({percentage(found, tokens_asked(store.shared))})",
                milliseconds(ttft["recompute"]),
                milliseconds(ttft["shared"]),
                multiple(speedup_of(ttft)),
                Cell("detected", GOOD) if report.control_detected(store) else Cell("MISSED", BAD),
                Cell("found", GOOD) if store.bad_blocks else Cell("MISSED", BAD),
            ]
        )
    rows += [[skipped.name, "skipped", *[""] * 6] for skipped in report.skipped]
    columns = ["store", "identical", "hit tokens", "recomputed", "shared", "faster", "control", "changed"]
    return Table("The second server, asked what the first has answered", columns, rows)


def _back_table(stores: Sequence[StoreResult]) -> Table:
    return Table(
        "The first server, asked what the second has answered",
        ["store", "hit tokens", "of"],
        [[store.name, f"{hit_tokens(store.back):,}", f"{tokens_asked(store.back):,}"] for store in stores],
    )


def _faults_table(report: SharedReport) -> Table:
    rows: list[Sequence[Cell | str]] = []
    last = ""
    for result in report.faults:
        row = report.fault_row(result)
        if result.store != last:
            rows.append([result.store, *[""] * 8])
        last = result.store
        hits: Mapping[str, int] = row["hit_tokens"]
        again = row["recovered_s"]
        rows.append(
            [
                Cell(f"  {result.fault}", title=result.how),
                str(row["requests"]),
                limited(f"{row['longest_wait_s']:.1f} s", row["longest_wait_s"] <= WAIT_LIMIT_S),
                limited(f"{row['slowest_request_s']:.1f} s", row["slowest_request_s"] <= report.stuck_s),
                yes_no(row["identical"]),
                *(f"{hits[when]:,}" for when in ("before", "during", "after")),
                Cell("NEVER", BAD) if again is None else f"{again:.0f} s",
            ]
        )
    return Table(
        f"When the store fails: no wait of more than {WAIT_LIMIT_S:.0f} s for blocks, no restart; hits in tokens",
        ["fault", "requests", "waited", "slowest", "identical", "before", "during", "after", "again"],
        rows,
    )
