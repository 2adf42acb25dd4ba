"""Several KV cache groups in the scheduler half: windows, agreement, null blocks, partial blocks, draft layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import ConfigError, KVGroup, OffloadingManager, OffloadKey, ReqContext, ScheduledStep
from kvoffload.cache.keys import key_block_hash, key_group_idx, make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector import request as request_module
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.connector.group_rig import GroupRig
from tests.connector.rig import TOKENS, FakeRequest, SpyManager, make_half, prompt

FULL, WINDOW = 0, 1


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"sliding_window": 0}, "must be at least 1"),
        ({"attention_chunk": -1}, "must be at least 1"),
        ({"block_size_factor": 0}, "must be at least 1"),
        ({"sliding_window": 8, "attention_chunk": 8}, "not several"),
        ({"block_size_factor": 2, "lookahead": -1}, "lookahead=-1: must be from 0 to 8, the tokens of one block"),
        ({"block_size_factor": 2, "lookahead": 9}, "lookahead=9: must be from 0 to 8, the tokens of one block"),
        ({"state": True, "lookahead": 1}, "lookahead=1: must be 0 for a group with a state"),
    ],
)
def test_an_invalid_group_is_refused(sizes: dict[str, int], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        KVGroup(4, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "needed"),
    # For a request that goes on at token 20: blocks of tokens 20 - (window - 1) to 20.
    [(2, {4}), (5, {4}), (6, {3, 4}), (9, {3, 4}), (10, {2, 3, 4}), (21, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})],
)
def test_a_window_needs_its_last_blocks_and_no_others(window: int, needed: set[int]) -> None:
    for ordinal in range(5):
        rig = GroupRig([KVGroup(4), KVGroup(4, sliding_window=window)])
        asked = rig.request(22)
        rig.compute(asked)
        rig.drop(asked, WINDOW, ordinal)
        assert (rig.hit(rig.request(22)) == 20) is (ordinal not in needed), ordinal


@pytest.mark.parametrize(("end", "needed"), [(18, set()), (26, {4, 5}), (34, set())])
def test_a_chunk_needs_the_blocks_in_it(end: int, needed: set[int]) -> None:
    """Chunks of 16 tokens: a request that goes on at 24 needs the blocks of tokens 16 to 24; one that goes on at 16 or
    32 needs none."""
    for ordinal in range(end // 4):
        rig = GroupRig([KVGroup(4), KVGroup(4, attention_chunk=16)])
        asked = rig.request(end)
        rig.compute(asked)
        rig.drop(asked, WINDOW, ordinal)
        assert (rig.hit(rig.request(end)) == end // 4 * 4) is (ordinal not in needed), ordinal


DRAFTING = {"following": lambda request, position, n: repr(request.tokens[position : position + n]).encode()}


def counts(rig: GroupRig) -> dict[int, int]:
    return {g: len(hashes) for g, hashes in rig.stored().items()}


def test_a_block_is_stored_when_the_token_after_it_is_sampled() -> None:
    rig = GroupRig([KVGroup(4, lookahead=1)], options=DRAFTING)
    request = rig.request(8)
    rig.compute(request)
    assert counts(rig) == {0: 1}
    request.tokens.append(50)
    rig.done(rig.give(request, 1, ([],), new=False))
    assert counts(rig) == {0: 2}
    again = rig.request(8)
    again.tokens += [50, 51]
    assert rig.hit(again) == 8


def test_the_last_block_of_a_request_that_ends_is_stored() -> None:
    rig = GroupRig([KVGroup(4, lookahead=1)], options=DRAFTING)
    request = rig.request(8)
    rig.compute(request)
    request.tokens.append(50)
    rig.half.request_finished(request)
    rig.done(rig.half.build_connector_meta(ScheduledStep({})))
    assert counts(rig) == {0: 2}


def test_with_a_lookahead_of_two_a_block_is_stored_when_the_step_after_it_is_computed() -> None:
    """The step that computes its last position does not know both tokens after it. The next one computes it again."""
    rig = GroupRig([KVGroup(4, lookahead=2)], options=DRAFTING)
    request = rig.request(10)
    rig.hit(request, 0)
    tables = rig.tables(10)
    rig.allocate(request, tables)
    rig.done(rig.give(request, 8, tables, new=True))
    assert counts(rig) == {0: 1}
    rig.done(rig.give(request, 1, ([],), new=False))
    assert counts(rig) == {0: 2}


@pytest.mark.parametrize("lookahead", [1, 2])
def test_the_last_block_within_the_limit_of_a_request_is_stored(lookahead: int) -> None:
    rig = GroupRig([KVGroup(4, lookahead=lookahead)], options=DRAFTING)
    rig.compute(rig.request(20, max_tokens=8))
    assert counts(rig) == {0: 2}


def test_a_block_loses_its_name_when_the_token_after_it_is_replaced() -> None:
    """No hash covers that token yet."""
    rig = GroupRig([KVGroup(4, lookahead=1)], options=DRAFTING)
    request = rig.request(8)
    rig.compute(request)
    request.tokens.append(50)
    rig.done(rig.give(request, 1, rig.tables(1), new=False))
    assert counts(rig) == {0: 2}
    request.tokens[8:] = [60, 61, 62, 63, 64]
    request.num_computed_tokens = 8
    rig.done(rig.give(request, 5, rig.tables(4), new=False))
    assert counts(rig) == {0: 4}, "the second block once more, and the third"
    for token, found in ((50, 8), (60, 8), (70, 4)):
        other = rig.request(8)
        other.tokens += [token, 1]
        assert rig.hit(other) == found


def test_a_lookahead_without_a_description_of_the_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="following=None: the KV of a group with a lookahead depends on"):
        GroupRig([KVGroup(4), KVGroup(4, lookahead=1)])


def test_groups_lose_their_tails_together() -> None:
    rig = GroupRig([KVGroup(4), KVGroup(4, sliding_window=9)], num_host_blocks=20)
    rig.compute(rig.request(40))
    rig.compute(rig.request(16, first=1000))
    assert rig.hit(rig.request(41)) == 24
    assert {g: len(hashes) for g, hashes in rig.stored().items()} == {FULL: 10, WINDOW: 10}


def test_the_head_of_a_chain_longer_than_the_pool_is_kept_in_all_groups() -> None:
    rig = GroupRig([KVGroup(4), KVGroup(4, sliding_window=9)], num_host_blocks=9)
    rig.compute(rig.request(40))
    assert rig.hit(rig.request(41)) == 16


def test_a_very_long_hit_on_the_device_is_stored_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_BLOCKS_PER_STEP", 4)
    rig = GroupRig([KVGroup(4), KVGroup(2)])
    request = rig.request(41)
    rig.hit(request, 40)
    tables = rig.tables(41)
    rig.allocate(request, tables)
    request.num_computed_tokens = 40
    sizes: list[Any] = []
    for _ in range(7):
        meta = rig.give(request, 1 if not sizes else 0, tables if not sizes else ([], []), new=not sizes)
        sizes.append([spec.device.group_sizes for spec in meta.stores.values()])
        rig.done(meta)
    assert sizes == [[(4, 4)], [(4, 4)], [(2, 4)], [(0, 4)], [(0, 4)], [], []]
    assert rig.hit(rig.request(41)) == 40


def test_a_hand_over_that_needs_no_block_ends() -> None:
    """A request that goes on where a chunk begins needs none, and no tier is shared."""
    rig = GroupRig([KVGroup(4, attention_chunk=8)])
    request = rig.request(18)
    request.kv_transfer_params = {"do_remote_decode": True}
    rig.compute(request)
    assert rig.half.request_finished(request) == (True, None)


@pytest.mark.parametrize(("computed", "is_fenced"), [(5, True), (6, False)])
def test_blocks_that_are_computed_again_are_read_before(computed: int, is_fenced: bool) -> None:
    """Token 5 is in a stored block of the second group only. Control: no stored block has token 6."""
    rig = GroupRig([KVGroup(4), KVGroup(2, sliding_window=5)])
    request = rig.request(7)
    rig.admit(request)
    stores = rig.step(request, 7).stores
    request.num_computed_tokens = computed
    assert rig.step(request, 1).fences == (list(stores) if is_fenced else [])


# Events.


def test_stored_blocks_are_described() -> None:
    rig = GroupRig([KVGroup(4), KVGroup(2, sliding_window=5)], options={"enable_events": True})
    request = rig.request(9)
    rig.compute(request)
    (event,) = rig.half.take_events()
    assert event.blocks is not None
    described = {
        (key_group_idx(key), block.start, block.end)
        for key, block in zip(event.keys, event.blocks, strict=True)
        if block
    }
    assert described == {(0, 0, 4), (0, 4, 8), (1, 0, 2), (1, 2, 4), (1, 4, 6), (1, 6, 8)}
    for key, block in zip(event.keys, event.blocks, strict=True):
        assert block is not None
        assert block.request is request
        assert block.block_hash == key_block_hash(key) == request.block_hashes[block.end - 1]
        assert block.parent_hash == (request.block_hashes[block.start - 1] if block.start else None)
    assert list(rig.half.take_events()) == []


class SlowTier(LRUOffloadingManager):
    """A lower tier never answers whether it holds blocks of the first group that host memory lacks."""

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        hits = super().lookup(keys, req_context)
        may_wait = req_context is not None and req_context.may_wait
        return None if may_wait and hits != len(keys) and key_group_idx(keys[0]) == 0 else hits


@pytest.mark.parametrize(("num_of_other", "hit"), [(3, 12), (9, None)])
def test_a_request_waits_for_no_answer_about_blocks_that_another_group_lacks(
    num_of_other: int, hit: int | None
) -> None:
    manager = SlowTier(HostBackend(TOKENS, 100))
    groups = [KVGroup(TOKENS), KVGroup(TOKENS)]
    half = make_half(manager, groups=groups, hash_block_size=TOKENS)
    request = FakeRequest("r", list(range(41)))
    for g, n in enumerate((5, num_of_other)):
        output = manager.prepare_store([make_offload_key(h, g) for h in request.block_hashes[:n]])
        assert output is not None
        manager.complete_store(output.store_spec)
    assert half.get_num_new_matched_tokens(request, 0)[0] == hit


# How block hashes become keys.


def scheduler(manager: OffloadingManager, **options: Any) -> OffloadingConnectorScheduler:
    return make_half(manager, groups=[KVGroup(TOKENS)], **options)


def test_a_blocks_key_has_the_hash_of_its_last_hash_block() -> None:
    manager = SpyManager(4)
    request = FakeRequest("r", prompt(20), hash_tokens=2)
    half = make_half(manager, groups=[KVGroup(TOKENS, 2)], hash_block_size=2)
    half.get_num_new_matched_tokens(request, 0)
    hashes = request.block_hashes
    assert manager.lookups == [[make_offload_key(hashes[3], 0), make_offload_key(hashes[7], 0)]]


@pytest.mark.parametrize("hash_block_size", [3, 8])
def test_block_sizes_that_do_not_divide_are_refused(hash_block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"hash_block_size={hash_block_size}: must divide the 4 tokens"):
        scheduler(SpyManager(4), hash_block_size=hash_block_size)


def test_keys_at_boundaries() -> None:
    layout = KeyLayout([KVGroup(16), KVGroup(8, state=True)], None)
    keys = [b"%d" % (8 * i + 8) for i in range(10)]
    assert list(layout.boundary_keys(1, keys, 0, 64)) == [b"16", b"32", b"48", b"64"]
    assert list(layout.boundary_keys(1, keys, 32, 64)) == [b"48", b"64"]
    assert list(layout.boundary_keys(1, keys, 64, 64)) == []
