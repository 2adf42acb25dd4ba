"""Hybrid models in the model engine: no wrong byte, no hit that is lost, and each planted bug of states is found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvoffload.abc import BoundaryState, KVGroup, ScheduledStep, TransferSpec
from kvoffload.connector.layout import NULL_BLOCK
from kvoffload.connector.messages import StepMeta
from tests.connector.test_engine_model import (
    Bug,
    caught,
    exact_ends,
    kind_of,
    many_resets,
    same_kv,
    silent_updates,
    sleeps,
)
from tests.scale import scaled
from tests.sim.content import EngineRequest
from tests.sim.engine import BrokenPromise, ModelEngine, Scenario, WrongBytes
from tests.sim.planted import wrap

SEEDS = scaled(40)
CHUNKS = 2
PLANTED_SEEDS = 400
LookUp: TypeAlias = Callable[..., tuple[int | None, bool]]


pytestmark = pytest.mark.usefixtures("quiet")


def hybrid(seed: int, make: Callable[[int], Scenario] = Scenario.random) -> Scenario:
    """A random scenario with state groups."""
    scenario = make(seed)
    has_states = any(group.state for group in scenario.groups)
    return scenario if has_states else scenario.with_states(Random(seed))


def many_scratch_blocks(seed: int) -> Scenario:
    """Prompts that are computed several boundaries at a time, so that scratch blocks move."""
    return dataclasses.replace(
        hybrid(seed), num_scratch_blocks=2, num_device_blocks=1000, max_tokens_per_step=24, prefix_caching=False
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_hybrid_schedules(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk, SEEDS, CHUNKS):
        engine = ModelEngine(hybrid(seed), no_hit_is_lost)
        engine.run()
        for group, blocks in zip(engine.groups, engine.loaded_blocks, strict=True):
            seen[kind_of(group)] += blocks
        seen["asynchronous"] += engine.hits if engine.scenario.async_scheduling else 0
        seen["scratch blocks"] += engine.hits if engine.scenario.num_scratch_blocks else 0
        seen["several ranks"] += engine.hits if len(engine.ranks) > 1 else 0
        seen["only states"] += engine.hits if all(group.state for group in engine.groups) else 0
    never = [
        what
        for what in ("state", "full", "window", "asynchronous", "scratch blocks", "several ranks")
        if not seen[what]
    ]
    assert not never, f"nothing was loaded for: {never}"


def test_two_long_requests_do_not_preempt_each_other_for_ever() -> None:
    """With asynchronous steps, each found the other one in flight when it lacked blocks, and gave way itself."""
    ModelEngine(hybrid(2000070)).run()


@pytest.mark.parametrize(
    "make", [sleeps, silent_updates, same_kv, exact_ends, many_resets], ids=lambda make: make.__name__
)
def test_hybrid_schedules_of_other_tests(make: Callable[[int], Scenario]) -> None:
    hits = 0
    for seed in range(scaled(10)):
        engine = ModelEngine(hybrid(seed, make))
        engine.run()
        hits += engine.hits
    assert hits > 0


class LostHit(AssertionError):
    """A request was offered less than the host holds for it."""


def no_hit_is_lost(engine: ModelEngine) -> None:
    """What the host holds for a request is offered: up to the last position where every group has what it needs."""
    scheduler = engine.scheduler

    def look_up_and_compare(look_up: LookUp, request: Any, computed: int) -> tuple[int | None, bool]:
        answer = look_up(request, computed)
        state = scheduler.requests.get(request.request_id)
        if answer[0] is not None and state is not None and state.may_load and not scheduler.off:
            best = most_ready(engine, request, computed)
            # Less than ``align`` tokens behind what the device holds are not worth a load.
            if computed + answer[0] < best and best - computed >= scheduler.layout.align:
                raise LostHit(f"{request.request_id} is offered {computed} + {answer[0]} tokens, not {best}")
        return answer

    wrap(scheduler, "get_num_new_matched_tokens", look_up_and_compare)


def most_ready(engine: ModelEngine, request: EngineRequest, computed: int) -> int:
    layout, state = engine.scheduler.layout, engine.scheduler.requests[request.request_id]
    is_ready = engine.policy_manager.block_status
    keys = state.blocks.keys
    # A hit ends where every group has a name for what precedes it, also if a group needs nothing of that.
    named = min(len(each) * size for each, size in zip(keys, layout.block_tokens, strict=True))
    most = min(state.options.max_tokens, request.num_tokens - 1, named)
    for end in range(most // layout.align * layout.align, computed, -layout.align):
        # Few states are kept, so they are asked for first.
        needed = (
            keys[g][i]
            for g in (*layout.states, *layout.windows, *layout.full)
            for i in layout.needed_blocks(g, computed, end)
        )
        if all((status := is_ready(key)) is not None and status.is_ready for key in needed):
            return end
    return computed


def test_lost_hit_is_noticed() -> None:
    """The comparison finds a connector that offers a block less than it has."""

    def offers_less(engine: ModelEngine) -> None:
        align = engine.scheduler.layout.align

        def less(look_up: LookUp, *asked: Any) -> tuple[int | None, bool]:
            tokens, _ = look_up(*asked)
            return (tokens, False) if not tokens else (tokens - align, tokens > align)

        wrap(engine.scheduler, "get_num_new_matched_tokens", less)
        no_hit_is_lost(engine)

    assert caught(offers_less, hybrid, by=LostHit, seeds=PLANTED_SEEDS)


# What is computed again.


def conversations(seed: int) -> Scenario:
    """Conversations on a device that keeps nothing of them, with a host that keeps everything."""
    rng = Random(seed)
    groups = [KVGroup(4), KVGroup(rng.choice((2, 4, 8)), state=True)]
    if rng.random() < 0.4:
        groups.append(KVGroup(2, sliding_window=rng.choice((3, 9))))
    if rng.random() < 0.4:
        groups.append(KVGroup(4, state=True))
    return Scenario(
        seed=seed,
        groups=tuple(groups),
        num_scratch_blocks=rng.choice((0, 2)),
        num_device_blocks=400,
        num_host_blocks=2000,
        max_tokens_per_step=rng.choice((5, 16, 64)),
        prefix_caching=False,
        async_scheduling=seed % 2 == 1,
        num_requests=4,
        num_documents=4,
        copy_chance=1.0,
    )


@pytest.mark.parametrize("seed", range(scaled(10)))
def test_a_turn_computes_at_most_one_block_again(seed: int) -> None:
    engine, turns = ModelEngine(conversations(seed)), 4
    align = engine.scheduler.layout.align
    for computed_again in turns_of(engine, turns):
        # The last sampled token has no KV. If its step is not reported before the request ends, the state at the token
        # before it is not offered.
        assert max(computed_again) <= align + engine.scenario.async_scheduling, computed_again
    assert engine.hits > 0


def turns_of(engine: ModelEngine, turns: int) -> Iterator[list[int]]:
    """Lets every request go on with a question, again and again. Yields, per turn and request, how many tokens it
    computes of those that the one before it has computed or sampled."""
    found: dict[str, int] = {}

    def look_up_and_note(look_up: LookUp, request: Any, computed: int) -> tuple[int | None, bool]:
        answer = look_up(request, computed)
        if answer[0] is not None:
            found.setdefault(request.request_id, computed + answer[0])
        return answer

    wrap(engine.scheduler, "get_num_new_matched_tokens", look_up_and_note)
    engine.run()
    before, rng = dict(engine.outputs), Random(engine.scenario.seed)
    for turn in range(turns):
        engine.outputs.clear()
        questions = {
            f"{name}.{turn}": tokens + [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
            for name, tokens in before.items()
        }
        lengths = {name: len(tokens) for name, tokens in zip(questions, before.values(), strict=True)}
        engine.ask(
            [
                EngineRequest(name, tokens, rng.randint(1, 12), engine.cache.hash_block_size, engine.version)
                for name, tokens in questions.items()
            ]
        )
        engine.run()
        before = dict(engine.outputs)
        yield [length - found[name] for name, length in lengths.items() if name in found]


def troubled(seed: int) -> Scenario:
    """Conversations with little memory, failing copies, aborts and resets, on several ranks."""
    rng = Random(-1 - seed)
    return dataclasses.replace(
        conversations(seed),
        num_device_blocks=rng.choice((120, 200, 400)),
        num_host_blocks=rng.choice((20, 60, 200)),
        prefix_caching=rng.random() < 0.6,
        max_running=rng.randint(1, 4),
        num_requests=6,
        policy=rng.choice(("lru", "arc", "auto")),
        copy_chance=rng.choice((0.1, 0.4, 1.0)),
        copy_failure_rate=rng.choice((0.0, 0.0, 0.15)),
        abort_chance=rng.choice((0.0, 0.0, 0.02)),
        reset_chance=rng.choice((0.0, 0.0, 0.02)),
    ).with_ranks(rng)


def test_conversations_in_trouble() -> None:
    hits = 0
    for seed in range(scaled(16)):
        engine = ModelEngine(troubled(seed), no_hit_is_lost)
        for _ in turns_of(engine, 3):
            pass
        hits += engine.hits
    assert hits > 0


def test_states_that_are_not_kept_are_computed_again() -> None:
    """Without its offers, the engine computes everything again."""
    engine = ModelEngine(conversations(0), lambda engine: change_steps(engine, lambda step: {}))
    assert min(map(max, turns_of(engine, 2))) > 2 * engine.scheduler.layout.align


# Planted bugs.


def change_steps(engine: ModelEngine, states_of) -> None:  # type: ignore[no-untyped-def]
    """Lets the connector see the boundary states that ``states_of`` returns for a step."""

    def build_from_changed(build: Callable[[ScheduledStep], StepMeta], step: ScheduledStep) -> StepMeta:
        return build(dataclasses.replace(step, boundary_states=states_of(step)))

    wrap(engine.scheduler, "build_connector_meta", build_from_changed)


def state_taken_by_position(engine: ModelEngine) -> None:
    """From a table to which everything is appended that the engine reports."""
    tables: dict[str, tuple[list[int], ...]] = {}

    def by_position(step: ScheduledStep) -> dict[str, list[BoundaryState]]:
        for req_id, new in step.block_ids.items():
            if req_id in step.replaced:
                tables[req_id] = tuple(map(list, new))
            else:
                for table, blocks in zip(tables[req_id], new, strict=True):
                    table += blocks
        found: dict[str, list[BoundaryState]] = {}
        for req_id, n in step.num_scheduled_tokens.items():
            request = engine.scheduler.requests[req_id].request
            start, end = request.num_computed_tokens, min(request.num_computed_tokens + n, request.num_tokens)
            for g, group in enumerate(engine.groups):
                size = group.device_block_size
                for i in range(start // size, end // size) if group.state else ():
                    if tables[req_id][g][i] != NULL_BLOCK:
                        found.setdefault(req_id, []).append(BoundaryState(g, tables[req_id][g][i], (i + 1) * size))
        return found

    change_steps(engine, by_position)


def state_named_after_the_boundary_before(engine: ModelEngine) -> None:
    align = engine.scheduler.layout.align

    def shifted(step: ScheduledStep) -> dict[str, list[BoundaryState]]:
        return {
            req_id: [
                state._replace(num_tokens=state.num_tokens - align) for state in states if state.num_tokens > align
            ]
            for req_id, states in step.boundary_states.items()
        }

    change_steps(engine, shifted)


def state_of_another_boundary_loaded(engine: ModelEngine) -> None:
    """If the host has the state of the boundary before, that one is loaded."""
    layout = engine.scheduler.layout

    def start_from_before(start, state, blocks, num_tokens):  # type: ignore[no-untyped-def]
        end, keys, status = state.filled.computed + num_tokens, state.blocks.keys, engine.policy_manager.block_status
        own = [keys[g][:] for g in layout.states]
        for g in layout.states:
            last, step = end // layout.block_tokens[g] - 1, layout.align // layout.block_tokens[g]
            if last >= step and (before := status(keys[g][last - step])) is not None and before.is_ready:
                keys[g][last] = keys[g][last - step]
        try:
            return start(state, blocks, num_tokens)
        finally:
            for g, mine in zip(layout.states, own, strict=True):
                keys[g][:] = mine

    wrap(engine.scheduler.loads, "start", start_from_before)


def load_without_its_state(engine: ModelEngine) -> None:
    """The job that the workers get leaves the state out."""

    def build_without(build: Callable[[ScheduledStep], StepMeta], step: ScheduledStep) -> StepMeta:
        meta = build(step)
        meta.loads = {job_id: without_states(engine, spec) for job_id, spec in meta.loads.items()}
        return meta

    wrap(engine.scheduler, "build_connector_meta", build_without)


def without_states(engine: ModelEngine, spec: TransferSpec) -> TransferSpec:
    factors = [group.block_size_factor for group in engine.groups]
    firsts, sizes = spec.device.block_indices, spec.device.group_sizes
    num_slots = [
        -(-(first + size) // factor) - first // factor if size else 0
        for first, size, factor in zip(firsts, sizes, factors, strict=True)
    ]
    has_kv = np.array([not group.state for group in engine.groups])
    host = dataclasses.replace(spec.host, slots=spec.host.slots[np.repeat(has_kv, num_slots)])
    device = dataclasses.replace(
        spec.device,
        block_ids=spec.device.block_ids[np.repeat(has_kv, sizes)],
        group_sizes=tuple(size if kept else 0 for size, kept in zip(sizes, has_kv, strict=True)),
    )
    return dataclasses.replace(spec, host=host, device=device)


def hit_without_its_state(engine: ModelEngine) -> None:
    """The search asks for KV only."""
    layout = engine.scheduler.layout

    def look_up_kv(look_up: LookUp, *asked: Any) -> tuple[int | None, bool]:
        states, layout.states = layout.states, ()
        try:
            return look_up(*asked)
        finally:
            layout.states = states

    wrap(engine.scheduler, "get_num_new_matched_tokens", look_up_kv)


def states_offered_a_step_later(engine: ModelEngine) -> None:
    """Their device blocks may have been freed by then."""
    held: list[dict[str, list[BoundaryState]]] = [{}, {}]

    def late(step: ScheduledStep) -> dict[str, list[BoundaryState]]:
        held.append(dict(step.boundary_states))  # type: ignore[arg-type]
        return {req_id: states for req_id, states in held.pop(0).items() if req_id in engine.scheduler.requests}

    change_steps(engine, late)


def states_offered_a_step_early(engine: ModelEngine) -> None:
    """The running state counts as the one of the next boundary, one step before it gets there."""

    def early(step: ScheduledStep) -> dict[str, list[BoundaryState]]:
        found: dict[str, list[BoundaryState]] = {}
        for req_id, n in step.num_scheduled_tokens.items():
            request = engine.scheduler.requests[req_id].request
            assert isinstance(request, EngineRequest)
            end = min(request.num_computed_tokens + n + 1, request.num_tokens)
            for g, group in enumerate(engine.groups):
                i, rest = divmod(end, group.device_block_size)
                if group.state and not rest and 0 < i <= len(request.blocks[g]):
                    found.setdefault(req_id, []).append(BoundaryState(g, request.blocks[g][i - 1], end))
        return found

    change_steps(engine, early)


def states_stored_before_their_step(engine: ModelEngine) -> None:
    """The copies begin before the forward pass that completes the states."""

    def fenced(call: Callable[[StepMeta], None], meta: StepMeta) -> None:
        """As if another's need of their device blocks fenced them: then they are copied when the step begins."""
        early = [
            job_id
            for job_id, spec in meta.stores.items()
            if any(size and group.state for size, group in zip(spec.device.group_sizes, engine.groups, strict=True))
        ]
        call(dataclasses.replace(meta, fences=[*meta.fences, *early], fenced_blocks=None))

    for rank in engine.ranks:
        wrap(rank.worker, "begin_step", fenced)
        wrap(rank.worker, "end_step", fenced)


@pytest.mark.parametrize(
    ("bug", "scenario", "by"),
    [
        (state_named_after_the_boundary_before, hybrid, WrongBytes),
        (state_of_another_boundary_loaded, hybrid, WrongBytes),
        (load_without_its_state, hybrid, WrongBytes),
        (states_offered_a_step_later, hybrid, WrongBytes),
        (states_offered_a_step_early, hybrid, WrongBytes),
        (states_stored_before_their_step, hybrid, WrongBytes),
        (state_taken_by_position, many_scratch_blocks, WrongBytes),
        # A load names all blocks that the engine allocated, so the state is missing before it could be read.
        (hit_without_its_state, hybrid, BrokenPromise),
    ],
    ids=lambda value: value.__name__,
)
def test_planted_bug_of_states_is_caught(
    bug: Bug, scenario: Callable[[int], Scenario], by: type[AssertionError]
) -> None:
    assert caught(bug, scenario, by, PLANTED_SEEDS), f"{bug.__name__} went unnoticed in {PLANTED_SEEDS} schedules"
