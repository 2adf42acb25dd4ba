"""A scheduler half with several KV cache groups, and the little that an engine and its workers do for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoffload.abc import BlockHash, BoundaryState, KVGroup, ScheduledStep
from kvoffload.cache.keys import key_block_hash, key_group_idx, make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.messages import StepMeta, WorkerReport
from tests.connector.rig import FakeRequest, make_half

SIZE = 4
"""Tokens per block of all groups of HYBRID."""
FULL, STATE, OTHER = 0, 1, 2
HYBRID = (KVGroup(SIZE), KVGroup(SIZE, state=True), KVGroup(SIZE, state=True))


@dataclass
class Tables:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(map(list, self.ids))


@dataclass
class GroupRig:
    """A scheduler half with ``groups``, and an engine that frees what slides out of a window. Its block tables do not
    say where the states are."""

    groups: Sequence[KVGroup] = HYBRID
    num_host_blocks: int = 1000
    options: dict[str, Any] = field(default_factory=dict)
    manager: Any = None

    def __post_init__(self) -> None:
        self.manager = self.manager or LRUOffloadingManager(HostBackend(1, self.num_host_blocks), enable_events=True)
        self.half = make_half(self.manager, groups=self.groups, hash_block_size=1, **self.options)
        self.states = [g for g, group in enumerate(self.groups) if group.state]
        self.next_block = 1
        self.names = 0
        self.announced: dict[int, set[BlockHash]] = {g: set() for g in range(len(self.groups))}

    def request(self, num_tokens: int, first: int = 0, **params: Any) -> FakeRequest:
        self.names += 1
        tokens = list(range(first, first + num_tokens))
        return FakeRequest(f"r{self.names}", tokens, {"kvoffload": params} if params else None, hash_tokens=1)

    def new_blocks(self, n: int) -> list[int]:
        self.next_block += n
        return list(range(self.next_block - n, self.next_block))

    def tables(self, end: int, skip_at: int = 0) -> tuple[list[int], ...]:
        """New blocks for ``end`` tokens; null where the token at ``skip_at`` does not look."""
        tables = []
        for group in self.groups:
            ids = self.new_blocks(-(-end // group.device_block_size))
            null = group.skipped_tokens(skip_at) // group.device_block_size
            tables.append([0] * null + ids[null:])
        return tuple(tables)

    def hit(self, request: FakeRequest, computed: int = 0) -> int | None:
        return self.half.get_num_new_matched_tokens(request, computed)[0]

    def allocate(self, request: FakeRequest, tables: tuple[list[int], ...], external: int = 0) -> None:
        self.half.update_state_after_alloc(request, Tables(tables), external)

    def admit(self, request: FakeRequest, computed: int = 0) -> tuple[list[int], ...]:
        """The request gets blocks for all of its tokens and some more, and computes nothing yet."""
        self.hit(request, computed)
        tables = self.tables(request.num_tokens + 12)
        self.allocate(request, tables)
        request.num_computed_tokens = computed
        self.give(request, 0, tables, new=True)
        return tables

    def offer(self, *ends: int, groups: Iterable[int] | None = None) -> list[BoundaryState]:
        """States of all state groups at these positions, each in a device block that no block table has."""
        states = self.states if groups is None else list(groups)
        return [BoundaryState(g, self.new_blocks(1)[0], end) for end in ends for g in states]

    def step(self, request: FakeRequest, tokens: int, offered: Sequence[BoundaryState] = (), **more: Any) -> StepMeta:
        req_id = request.request_id
        step = ScheduledStep({req_id: tokens}, boundary_states={req_id: offered} if offered else {}, **more)
        meta = self.half.build_connector_meta(step)
        request.num_computed_tokens += tokens
        return meta

    def give(self, request: FakeRequest, tokens: int, tables: tuple[list[int], ...], new: bool) -> StepMeta:
        """A step in which the request is given device blocks: its whole table if they are ``new``, else more."""
        req_id = request.request_id
        return self.step(request, tokens, block_ids={req_id: tables}, replaced=frozenset({req_id} if new else ()))

    def done(self, meta: StepMeta, failed: bool = False) -> None:
        jobs = [*meta.loads, *meta.stores]
        self.half.update_connector_output(
            WorkerReport(done=dict.fromkeys(jobs, 1), failed=set(jobs) if failed else set())
        )

    def compute(self, request: FakeRequest, *ends: int) -> StepMeta:
        """Computes the request in one step that offers its states at ``ends``; the copies are done."""
        self.admit(request)
        meta = self.step(request, request.num_tokens, self.offer(*ends))
        self.done(meta)
        return meta

    def finish(self, request: FakeRequest) -> None:
        self.half.request_finished(request)
        self.done(self.half.build_connector_meta(ScheduledStep({})))

    def key(self, request: FakeRequest, g: int, end: int) -> bytes:
        return make_offload_key(request.block_hashes[end - 1], g)

    def held(self, request: FakeRequest, g: int) -> list[int]:
        """Where the blocks of group ``g`` end that can be loaded."""
        size = self.groups[g].block_tokens
        return [
            end for end in range(size, request.num_tokens + 1, size) if self.manager.lookup([self.key(request, g, end)])
        ]

    def stored(self) -> dict[int, set[BlockHash]]:
        """Per group, the hashes of the blocks that became loadable and have not left."""
        for event in self.manager.take_events():
            for key in event.keys:
                hashes = self.announced.setdefault(key_group_idx(key), set())
                (hashes.discard if event.removed else hashes.add)(key_block_hash(key))
        return self.announced

    def drop(self, request: FakeRequest, g: int, *ordinals: int) -> None:
        """Blocks vanish from the host as if they had been evicted."""
        self.manager.drop([self.key(request, g, (ordinal + 1) * self.groups[g].block_tokens) for ordinal in ordinals])
