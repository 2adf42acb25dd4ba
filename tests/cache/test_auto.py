"""The self-tuning policy: its rules, its memory, its choices, and all of it compared with its reference model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import LookupState, MissReason, OffloadKey
from kvoffload.cache.keys import key_block_hash, key_hashes, make_offload_key, seem_of_several_groups
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import tournament
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.tournament import RULES, PlainShadows, Rule, Tournament
from kvoffload.cache.slots import HostBackend
from kvoffload.native.reference import TICKS_PER_S
from kvoffload.native.structures import GhostTable
from kvoffload.testing.conformance import PolicyConformance
from tests.cache.reference_auto import TEXTBOOK, Fixed, ReferenceShadows

BY_NAME = {rule.name: rule for rule in RULES}


def make_auto(num_blocks: int) -> PolicyOffloadingManager:
    return PolicyOffloadingManager(HostBackend(16, num_blocks), AutoPolicy(num_blocks), enable_events=True)


class TestPolicyConformance(PolicyConformance):
    def make_policy(self, capacity: int) -> AutoPolicy:
        return AutoPolicy(capacity)


# Several groups.


def state_hits(is_named_by_its_block: bool) -> int:
    """Serves prompts, some of which recur, that each leave a state behind their last block. Returns how many found
    all their blocks and the state."""
    manager, rng, hits = make_auto(120), random.Random(5), 0
    for turn in range(1500):
        prompt = rng.randrange(16) if rng.random() < 0.5 else 1000 + turn
        chain = [key(100 * prompt + n) for n in range(8)]
        name = key_block_hash(chain[-1]) if is_named_by_its_block else b"another name %d" % prompt
        state = [make_offload_key(name, 1)]
        is_hit = manager.lookup([*chain, *state]) == 9
        hits += is_hit
        # A state is used where a request continues from it, and only there.
        manager.touch([*chain, *state] if is_hit else chain)
        stored = []
        # An engine names states apart from blocks.
        for keys in (chain, state):
            output = manager.prepare_store(keys)
            if output is not None:
                manager.complete_store(output.store_spec)
                stored += output.keys_to_store
                if output.refused_keys:
                    break
        manager.end_chain([*chain, *state], stored)
    manager.check_integrity()
    return hits


def test_a_state_has_the_fate_of_the_block_that_ends_there() -> None:
    assert state_hits(True) > 2 * state_hits(False)


def test_a_group_alone_has_hashes_of_whole_keys() -> None:
    keys = [key(1), key(2)]
    of_another = make_offload_key(key_block_hash(keys[0]), 7)
    assert not seem_of_several_groups(keys)
    assert not seem_of_several_groups([])
    assert seem_of_several_groups([of_another])
    assert seem_of_several_groups([*keys, of_another, *keys[:1]])
    of_names = key_hashes([*keys, of_another], of_names=True)
    assert of_names.tolist() == key_hashes([*keys, *keys[:1]]).tolist()


# Chains, as engines request them.


def chains(rng: random.Random, num_prompts: int, num_requests: int) -> list[list[int]]:
    """Returns requests for prompts that share prefixes, some of which recur."""
    prompts: list[list[int]] = []
    for i in range(num_prompts):
        shared = rng.choice(prompts) if prompts and rng.random() < 0.5 else []
        own = [1000 * (i + 1) + n for n in range(rng.randint(1, 9))]
        prompts.append(shared[: rng.randint(0, len(shared))] + own)
    return [prompts[min(rng.randrange(num_prompts), rng.randrange(num_prompts))] for _ in range(num_requests)]


def key(name: int) -> OffloadKey:
    return make_offload_key(name.to_bytes(16, "little"), 0)


def serve(manager: PolicyOffloadingManager, names: Sequence[int]) -> int:
    """Serves a request at once. Returns how many leading blocks were cached."""
    keys = [key(name) for name in names]
    manager.touch(keys)
    found = manager.lookup(keys)
    assert found is not None
    output = manager.prepare_store(keys[: manager.num_blocks])
    stored = [] if output is None else output.keys_to_store
    manager.end_chain(keys, stored)
    manager.complete_store(stored)
    return found


def with_rule(num_blocks: int, rule: Rule, must_store: bool = False) -> PolicyOffloadingManager:
    policy = AutoPolicy(num_blocks, Fixed(num_blocks, rule))
    return PolicyOffloadingManager(HostBackend(16, num_blocks), policy, enable_events=True, must_store=must_store)


@pytest.mark.parametrize("rule", TEXTBOOK, ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(4))
def test_a_shadow_is_the_plain_algorithm(rule: Rule, seed: int) -> None:
    rng = random.Random(seed)
    host, device = rng.randint(4, 30), rng.choice((0, 1, 5, 30))
    shadows, plain = PlainShadows(host, device, (rule,)), ReferenceShadows(host, device, (rule,))
    for clock, chain in enumerate(chains(rng, 12, 150)):
        num, found = shadows.access(np.array(chain, dtype=np.uint64), 2**64 - 1, 100 * clock)
        assert (num, list(found)) == (len(chain), plain.access(chain))
        assert sorted(shadows.held(0)) == sorted(plain.once[0] + plain.again[0])
        assert shadows.known() == plain.off_device + plain.on_device


def run(rule_or_auto: Rule | None, requests: list[list[int]], num_blocks: int) -> tuple[int, PolicyOffloadingManager]:
    manager = make_auto(num_blocks) if rule_or_auto is None else with_rule(num_blocks, rule_or_auto)
    return sum(serve(manager, chain) for chain in requests), manager


def loops(num_chains: int, times: int) -> list[list[int]]:
    """Returns the same chains in turn. LRU finds nothing if they do not all fit."""
    return [[100 * i + n for n in range(4)] for _ in range(times) for i in range(num_chains)]


def scans(rng: random.Random, times: int) -> list[list[int]]:
    """Returns few chains that recur often, between many that come once."""
    return [
        [100 * rng.randrange(5) + n for n in range(4)]
        if rng.random() < 0.3
        else [10_000 + 100 * i + n for n in range(4)]
        for i in range(times)
    ]


def drifts(rng: random.Random, times: int) -> list[list[int]]:
    """Returns chains that recur for a short time."""
    return [[100 * (i // 4 - rng.randrange(5)) + 10**6 + n for n in range(4)] for i in range(times)]


@pytest.mark.parametrize(
    ("requests", "best", "worst"),
    [
        (loops(20, 40), "2q", "lru"),
        (scans(random.Random(1), 700), "2q", "lru"),
        (drifts(random.Random(2), 800), "lru", "2q"),
    ],
    ids=["loop", "scan", "drift"],
)
def test_it_finds_about_as_much_as_the_best_rule(requests: list[list[int]], best: str, worst: str) -> None:
    found = {name: run(rule, requests, 40)[0] for name, rule in BY_NAME.items()}
    tuned, _ = run(None, requests, 40)
    assert found[best] > 1.2 * found[worst], "otherwise the choice of the rule does not matter"
    assert tuned > 0.85 * found[best]
    assert tuned > 1.1 * found[worst]


def test_it_changes_its_rule_as_requests_change_and_reports_it() -> None:
    manager = make_auto(40)
    rules = []
    for requests in (scans(random.Random(1), 700), drifts(random.Random(3), 1500), scans(random.Random(2), 700)):
        for chain in requests:
            serve(manager, chain)
        state = manager.policy.state()
        assert state["scores"][state["rule"]] >= max(state["scores"].values()) / tournament.MARGIN
        rules.append(state["rule"])
    assert rules[0] == rules[2] != rules[1]


def test_a_refused_block_is_not_written_and_the_record_says_why() -> None:
    manager = with_rule(10, BY_NAME["2q"])
    for i in range(6):
        serve(manager, [100 * i, 100 * i + 1])
        serve(manager, [100 * i, 100 * i + 1])
    new = list(range(5000, 5008))
    serve(manager, new)
    assert (manager.lookup([key(name) for name in new]) or 0) < 8
    assert manager.explain_miss(key(5007)).reason is MissReason.NOT_ADMITTED
    serve(manager, new)
    assert manager.lookup([key(name) for name in new]) == 8, "at second sight it is stored"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_chain_loses_its_tail_before_its_head(rule: Rule) -> None:
    manager = with_rule(12, rule)
    chain = list(range(100, 106))
    for _ in range(2):
        serve(manager, chain)
    keys, left = [key(name) for name in chain], []
    for i in range(40):
        for _ in range(2):
            serve(manager, [1000 + i])
        found = int((manager.lookup_each(keys) == LookupState.HIT).sum())
        assert manager.lookup(keys) == found, "there is a hole in the chain"
        left.append(found)
    assert left == sorted(left, reverse=True)


def test_a_reset_forgets_ghosts_and_scores() -> None:
    manager = make_auto(10)
    for chain in loops(8, 20):
        serve(manager, chain)
    assert max(manager.policy.state()["scores"].values()) > 0
    manager.reset()
    assert max(manager.policy.state()["scores"].values()) == 0
    assert manager.policy.state()["rule"] == RULES[tournament.FIRST].name


# Samples and scores.


def test_the_sample_is_the_same_in_every_process_and_about_as_large_as_it_should_be() -> None:
    capacity = 100_000
    sampled = key_hashes([key(name) for name in range(100_000)]) < np.uint64(2**64 // 16)
    assert 5800 < np.count_nonzero(sampled) < 6700
    assert np.flatnonzero(sampled)[:3].tolist() == [13, 45, 49]
    assert Tournament(capacity).shadows.host == tournament.SHADOW_BLOCKS
    behind = Tournament(capacity, capacity // 4).shadows
    assert (behind.host, behind.device) == (
        round(0.8 * tournament.SHADOW_BLOCKS),
        round(0.2 * tournament.SHADOW_BLOCKS),
    )


def test_a_ghost_has_the_class_of_its_last_gap_until_it_is_removed() -> None:
    table = GhostTable(100)
    hashes = key_hashes([key(name) for name in range(4)])
    table.add(hashes[:3], np.arange(3))
    table.use(hashes[1:], 5 * TICKS_PER_S)
    assert table.classes(hashes).tolist() == [0, 2, 2, 0]
    assert table.stamps(hashes).tolist() == [0, 5 * TICKS_PER_S, 5 * TICKS_PER_S, -1]
    assert table.take(hashes[1:2]).tolist() == [2]
    assert table.stamps(hashes[:2]).tolist() == [0, -1]
    assert table.classes(hashes).tolist() == [0, 0, 2, 0]
    table.add(hashes, np.arange(4))
    assert table.classes(hashes).tolist() == [0, 0, 2, 0], "what is added again keeps its class"
    table.add(hashes, np.arange(4), np.array([1, 0, 6, 3]))
    assert table.classes(hashes).tolist() == [1, 0, 6, 3]
    assert table.stamps(hashes).tolist() == [0, 1, 2, 3]
