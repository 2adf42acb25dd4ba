"""Two servers in two processes on one store, in ``make soak``: the second answers from what the first has computed.
``make test`` has two engines on one shared directory in test_vllm_serve.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_harness import DEADLINE_S, DEMO_MODEL, Runner, set_up_demo

from demo import forks
from demo.act import Progress
from demo.protocol import EngineInfo, RequestResult
from demo.run import Sizes, load, make_config, model_directory
from demo.shared_report import SharedReport, StoreResult, hit_tokens
from demo.shared_run import SharedDemo, make_plan, options
from demo.stores import STORES, MooncakeStore

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

PATIENT = {"load_deadline_ms": 1000 * DEADLINE_S, "lookup_deadline_ms": 1000 * DEADLINE_S, "load_only_if_faster": False}
"""Options with which requests wait for blocks, however slow this machine is."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Started:
    """The demo with short prompts, and the answers without kvoffload."""

    demo: SharedDemo
    info: EngineInfo
    baseline: dict[int, RequestResult]

    def report(self, result: StoreResult) -> SharedReport:
        return SharedReport("tiny", 7, "now", 0.0, self.info, self.baseline, [result])

    def share(self, name: str, directory: Path) -> StoreResult:
        """Runs two servers on a store. A store on a busy machine may refuse a write or answer too late, which must be
        a miss: if the second server has not found all, two others run on a new store, up to ``ATTEMPTS`` times."""
        for attempt in range(ATTEMPTS):
            with STORES[name](directory / f"store-{attempt}", directory) as store:
                result = self.demo.share(store)
            assert self.report(result).identical(result)
            if has_found_all(result):
                break
        return result


def has_found_all(result: StoreResult) -> bool:
    """Whether the second server has found most of each prompt in the store, twice, and the first something of the
    second's, and changed values."""
    asked = (*result.shared, *result.control)
    is_shared = all(request.disk_tokens > request.prompt_tokens // 2 for request in asked)
    return is_shared and hit_tokens(result.back) > 0 and result.bad_blocks > 0


@pytest.fixture(scope="module")
def started(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    out = tmp_path_factory.mktemp("shared")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        set_up_demo(patch)
        model = stack.enter_context(model_directory(None, 7, DEMO_MODEL))
        patch.setattr(forks, "start_engine", run.parent(os.environ).start_process)
        plan = make_plan(shared=5, back=1)
        # More blocks than device and host memory hold together.
        sizes = Sizes(documents=plan.documents, document_blocks=(8, 9), device_blocks=26)
        config = make_config(model, True, load(model, True, None, 7, sizes), 7, sizes)
        demo = SharedDemo(out, config, options(model, host_blocks=24) | PATIENT, plan, Progress())
        yield Started(demo, *demo.baseline())


@pytest.mark.parametrize("name", STORES)
def test_the_second_server_answers_from_what_the_first_has_computed(
    started: Started, name: str, tmp_path: Path
) -> None:
    """Answers are identical, loads that are corrupted after they were verified change them, and the checksums find
    stored values that were changed."""
    if name == "mooncake" and (reason := MooncakeStore.missing()) is not None:
        pytest.skip(f"Mooncake Store: {reason}")
    result = started.share(name, tmp_path)
    report = started.report(result)
    assert report.failures == []
    documents = started.demo.plan.shared
    assert hit_tokens(result.first) == 0
    assert [request.document for request in result.shared] == list(documents)
    assert has_found_all(result)
    assert [request.document for request in result.computed] == list(documents)
    for request in result.computed:
        assert request.device_tokens + request.host_tokens + request.disk_tokens == 0
    assert len(report.compare(result.control).different) > len(documents) // 2
    assert hit_tokens(result.corrupted) == 0
    assert report.to_dict()["stores"][name]["control_detected"] is True
