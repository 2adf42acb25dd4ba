"""The model engine finds no wrong byte in the real connector, and finds each bug planted in it."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.base import PrepareStoreOutput, ScheduledStep
from kvoffload.testing.engine import Leak, ModelEngine, Scenario, WrongBytes, run_seed
from kvoffload.worker import StepMeta

SEEDS = 100_000 if os.environ.get("KVOFFLOAD_SOAK") else 2_000
CHUNKS = 20


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules(chunk: int) -> None:
    hits = 0
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        hits += run_seed(seed).hits
    assert hits > 0, "nothing was ever loaded, so nothing was tested"


def many_resets(seed: int) -> Scenario:
    """New weights every few steps while long prompts are computed in small pieces."""
    return Scenario(
        seed=seed,
        block_size=1 + seed % 4,
        num_device_blocks=300,
        num_host_blocks=100,
        max_tokens_per_step=5,
        prefix_caching=False,
        num_documents=1,
        document_tokens=56,
        max_new_tokens=18,
        num_requests=20,
        reset_chance=0.25,
        copy_chance=1.0,
    )


@pytest.mark.parametrize("seed", range(60))
def test_new_weights_again_and_again(seed: int) -> None:
    ModelEngine(many_resets(seed)).run()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    factor=st.integers(1, 5),
    host_blocks=st.integers(1, 40),
    chunk=st.integers(1, 40),
    caching=st.booleans(),
    is_async=st.booleans(),
    policy=st.sampled_from(("lru", "arc")),
    failures=st.sampled_from((0.0, 0.3, 1.0)),
    aborts=st.sampled_from((0.0, 0.2)),
    resets=st.sampled_from((0.0, 0.1)),
)
def test_any_scenario(
    seed: int,
    factor: int,
    host_blocks: int,
    chunk: int,
    caching: bool,
    is_async: bool,
    policy: str,
    failures: float,
    aborts: float,
    resets: float,
) -> None:
    scenario = Scenario(
        seed=seed,
        block_size_factor=factor,
        num_host_blocks=host_blocks,
        max_tokens_per_step=chunk,
        prefix_caching=caching,
        async_scheduling=is_async,
        policy=policy,
        copy_failure_rate=failures,
        abort_chance=aborts,
        reset_chance=resets,
    )
    ModelEngine(scenario).run()


def fence_off(engine: ModelEngine) -> None:
    build = engine.scheduler.build_connector_meta

    def without_fences(step: ScheduledStep) -> StepMeta:
        meta = build(step)
        return dataclasses.replace(meta, fences=[])

    engine.scheduler.build_connector_meta = without_fences  # type: ignore[method-assign]


def ready_too_early(engine: ModelEngine) -> None:
    manager = engine.scheduler.manager
    prepare = manager.prepare_store

    def ready_at_once(keys, req_context=None) -> PrepareStoreOutput | None:
        output = prepare(keys, req_context)
        if output is not None:
            manager.complete_store(output.keys_to_store, req_context)
        return output

    manager.prepare_store = ready_at_once  # type: ignore[method-assign]


def loaded_too_early(engine: ModelEngine) -> None:
    worker, start = engine.worker, engine.worker.start_loads

    def report_at_once(meta: StepMeta) -> None:
        start(meta)
        for job_id in meta.loads:
            worker.transfer.wait_any(0)
            job = worker._jobs.get(job_id)
            if job is not None:
                worker._finished.loaded.add(job.spec.req_id)
                worker._jobs.pop(job_id)
                worker._report.done[job_id] = 1

    worker.start_loads = report_at_once  # type: ignore[method-assign]


def unpinned_while_loading(engine: ModelEngine) -> None:
    manager = engine.scheduler.manager
    prepare, complete = manager.prepare_load, manager.complete_load

    def let_go(keys, req_context=None):
        spec = prepare(keys, req_context)
        complete(keys, req_context)
        return spec

    manager.prepare_load = let_go  # type: ignore[method-assign]
    manager.complete_load = lambda keys, req_context=None: None  # type: ignore[method-assign]


def stores_what_is_not_computed(engine: ModelEngine) -> None:
    due = engine.scheduler._due
    ahead = engine.scenario.block_size

    def too_much(state, num_computed):
        return due(state, num_computed + ahead)

    engine.scheduler._due = too_much  # type: ignore[method-assign]


def one_block_off(engine: ModelEngine) -> None:
    submit = engine.transfer.submit

    def shifted(job_id, spec, is_store) -> None:
        if not is_store and len(spec.host.slots) > 1:
            rolled = dataclasses.replace(spec.host, slots=spec.host.slots[::-1].copy())
            spec = dataclasses.replace(spec, host=rolled)
        submit(job_id, spec, is_store)

    engine.transfer.submit = shifted  # type: ignore[method-assign]


def reset_keeps_stores_going(engine: ModelEngine) -> None:
    scheduler, reset = engine.scheduler, engine.scheduler.reset

    def forgetful() -> None:
        reset()
        for state in scheduler._states.values():
            state.may_store = True

    scheduler.reset = forgetful  # type: ignore[method-assign]


def preemption_forgets_new_blocks(engine: ModelEngine) -> None:
    scheduler, build = engine.scheduler, engine.scheduler.build_connector_meta

    def forgetful(step: ScheduledStep) -> StepMeta:
        meta = build(step)
        for req_id in step.preempted:
            if req_id in scheduler._states:
                scheduler._states[req_id].has_kv = False
        return meta

    scheduler.build_connector_meta = forgetful  # type: ignore[method-assign]


def store_retried_after_its_fence(engine: ModelEngine) -> None:
    worker, begin = engine.worker, engine.worker.begin_step

    def begin_and_forget(meta: StepMeta) -> None:
        begin(meta)
        for job_id in meta.fences:
            if job_id in worker._jobs:
                worker._jobs[job_id].tries_left = 1

    worker.begin_step = begin_and_forget  # type: ignore[method-assign]


def failed_load_called_good(engine: ModelEngine) -> None:
    worker, finished = engine.worker, engine.worker.get_finished

    def never_failed(meta: StepMeta):
        result = finished(meta)
        result.failed_blocks.clear()
        return result

    worker.get_finished = never_failed  # type: ignore[method-assign]


def caught(bug: Callable[[ModelEngine], None], scenario: Callable[[int], Scenario]) -> bool:
    for seed in range(2_000):
        try:
            ModelEngine(scenario(seed), bug).run()
        except WrongBytes as error:
            print(f"{bug.__name__}: {error}")
            return True
        except Leak:
            continue
    return False


@pytest.mark.parametrize(
    "bug",
    [
        fence_off,
        ready_too_early,
        loaded_too_early,
        unpinned_while_loading,
        stores_what_is_not_computed,
        one_block_off,
        reset_keeps_stores_going,
        store_retried_after_its_fence,
        failed_load_called_good,
    ],
    ids=lambda bug: bug.__name__,
)
def test_planted_bug_is_caught(bug: Callable[[ModelEngine], None]) -> None:
    assert caught(bug, Scenario.random), f"{bug.__name__} went unnoticed in 2,000 schedules"


def test_planted_bug_of_resets_is_caught() -> None:
    assert caught(preemption_forgets_new_blocks, many_resets)


def test_leaked_pin_is_caught() -> None:
    def never_unpins(engine: ModelEngine) -> None:
        engine.scheduler.manager.complete_load = lambda keys, ctx=None: None  # type: ignore[method-assign]

    def first_leak() -> None:
        for seed in range(200):
            run_seed(seed, never_unpins)

    with pytest.raises(Leak):
        first_leak()


def test_one_seed_replays_a_run() -> None:
    first, again = run_seed(7), run_seed(7)
    assert (first.steps, first.hits, first.outputs) == (again.steps, again.hits, again.outputs)
