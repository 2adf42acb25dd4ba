"""Invented answers of two servers on a store, as they would report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from demo.protocol import EngineInfo, RequestResult, classify
from demo.shared_report import SharedReport, StoreResult

PROMPT_TOKENS = 2000
FOUND = 1920
DOCUMENTS = range(6)


def answer(document: int, found: int = 0) -> RequestResult:
    """Returns the answer to the question about ``document``, with ``found`` of its tokens from the store."""
    return RequestResult(
        index=document,
        document=document,
        follow_up=False,
        prompt_tokens=PROMPT_TOKENS,
        device_tokens=0,
        host_tokens=0,
        disk_tokens=found,
        source=classify(PROMPT_TOKENS, 0, 0, found),
        reason=None,
        ttft_ms=70.0 if found else 700.0 + document,
        total_ms=150.0 if found else 800.0 + document,
        output_tokens=[document, 7, 9],
        logprobs=[-1.0, -2.0, -1.5],
    )


def answers(found: int = 0) -> list[RequestResult]:
    return [answer(document, found) for document in DOCUMENTS]


def wrong(requests: Sequence[RequestResult], document: int = 2) -> list[RequestResult]:
    """Returns the answers with other tokens for one document."""
    return [replace(r, output_tokens=[1, 2, 3]) if r.document == document else r for r in requests]


def make_store(name: str = "shared_dir") -> StoreResult:
    return StoreResult(
        name=name,
        title="a store",
        first=answers(),
        shared=answers(FOUND),
        computed=answers(),
        back=answers(FOUND),
        control=wrong(answers(FOUND)),
        corrupted=answers(),
        bad_blocks=15,
    )


@pytest.fixture
def report() -> SharedReport:
    return SharedReport(
        model="made up",
        seed=0,
        made_at="now",
        load_average=0.1,
        info=EngineInfo("0.0.0", "CPU, 2 cores", 20.0),
        baseline={document: answer(document) for document in DOCUMENTS},
        stores=[make_store("shared_dir"), make_store("mooncake")],
    )
