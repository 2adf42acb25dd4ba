"""A scheduler half over a real LRU manager, and the little that an engine and its workers do for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

from kvoffload.abc import (
    BlockHash,
    KVGroup,
    Offer,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.cache.keys import hash_blocks, make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.adapters import DROPPED, Adapter, AdapterNeed
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.clock import Clock

TOKENS = 4
"""Tokens per device block."""


REMOTE_DECODE = {"do_remote_decode": True}


class SpyManager(LRUOffloadingManager):
    """A real manager that remembers its calls. ``unknown``: a lower tier has not answered yet."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(HostBackend(TOKENS, num_blocks), enable_events=True)
        self.lookups: list[list[OffloadKey]] = []
        self.touches: list[list[OffloadKey]] = []
        self.reorders: list[tuple[list[OffloadKey], list[OffloadKey]]] = []
        self.asked_stores: list[list[OffloadKey]] = []
        self.unknown = False
        self.has_news = False
        """Whether lookups may find more now."""

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self.lookups.append(list(keys))
        return None if self.unknown else super().lookup(keys, req_context)

    def poll(self, timeout_s: float = 0.0) -> bool:
        return self.has_news

    def touch(self, keys: Any, req_context: Any = None, chain: Any = None, found: Any = None) -> None:
        self.touches.append(list(keys))
        super().touch(keys, req_context, chain, found)

    def end_chain(self, keys: Any, stored: Any, req_context: Any = None, chain: Any = None, found: Any = None) -> None:
        self.reorders.append((list(keys), list(stored)))
        super().end_chain(keys, stored, req_context, chain, found)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        if offer is not Offer.BEHIND_REFUSED:
            self.asked_stores.append(list(keys))
        return super().prepare_store(keys, req_context, offer)


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    tokens: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    hash_tokens: int = TOKENS
    _hashed: tuple[list[int], list[BlockHash]] = field(default=([], []), repr=False)
    """The tokens that were hashed last, and their hashes: each key asks for them again."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[BlockHash]:
        if self._hashed[0] != self.tokens:
            self._hashed = list(self.tokens), hash_blocks(self.tokens, self.hash_tokens)
        return self._hashed[1]


class LoadedAdapters:
    """A watch over adapters that are a number each. Digests of those that are not loaded take as many calls of
    ``answers`` as ``delay`` says."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.delay = 0
        self.slow_checks: list[Future[bool]] | None = None
        """Checks, if they do not end by themselves."""
        self._seen: dict[int, bytes] = {}
        self._asked: dict[int, bytes] = {}

    def changes(self) -> Mapping[int, bytes]:
        dropped = dict.fromkeys(self._seen.keys() - self.loaded.keys(), DROPPED)
        new = dict(self.loaded.items() - self._seen.items())
        self._seen = dict(self.loaded)
        return dropped | new

    def ask(self, question: int, adapter: Adapter) -> None:
        self._asked[question] = self.loaded.get(adapter.number, adapter.handle)

    def answers(self, wait_s: float = 0.0) -> Mapping[int, bytes]:
        if self.delay:
            self.delay -= 1
            return {}
        asked, self._asked = self._asked, {}
        return asked

    def digest(self, number: int) -> bytes:
        return self._seen.get(number, DROPPED)

    def check(self, need: AdapterNeed) -> Future[bool]:
        result: Future[bool] = Future()
        if self.slow_checks is None:
            result.set_result(self.loaded.get(need.adapter) in need.digests)
        else:
            self.slow_checks.append(result)
        return result


def engine_of(options: dict[str, Any]) -> EngineSpec:
    """Takes what describes an engine out of ``options``."""
    names = [each.name for each in fields(EngineSpec) if each.init]
    return EngineSpec(**{name: options.pop(name) for name in names if name in options})


def make_half(manager: OffloadingManager, **options: Any) -> OffloadingConnectorScheduler:
    """Returns the scheduler half with these fields of an EngineSpec, and other arguments."""
    return OffloadingConnectorScheduler(manager, engine_of(options), **options)


@dataclass
class FakeBlocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


@dataclass
class Rig:
    """A scheduler half and the little that an engine and its workers do for it."""

    num_host_blocks: int = 16
    factor: int = 1
    num_workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    manager: Any = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.manager = self.manager or SpyManager(self.num_host_blocks)
        self.half = make_half(
            self.manager,
            groups=[KVGroup(TOKENS, self.factor)],
            num_workers=self.num_workers,
            load_deadline_ms=1000,
            clock=self.clock,
            **self.options,
        )
        self.next_block = 1

    def new_blocks(self, n: int) -> list[int]:
        ids = list(range(self.next_block, self.next_block + n))
        self.next_block += n
        return ids

    def look_up(self, request: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(request, computed)

    def allocate(self, request: FakeRequest, ids: list[int], external: int = 0) -> None:
        self.half.update_state_after_alloc(request, FakeBlocks(ids), external)

    def step(
        self,
        scheduled: Mapping[FakeRequest, int] | None = None,
        new: Mapping[str, list[int]] | None = None,
        more: Mapping[str, list[int]] | None = None,
        preempted: Sequence[str] = (),
    ) -> StepMeta:
        """``new`` and ``more``: whole block tables, and blocks that are added to one."""
        by_id = scheduled or {}
        ids = {req_id: (blocks,) for req_id, blocks in {**(new or {}), **(more or {})}.items()}
        meta = self.half.build_connector_meta(
            ScheduledStep({request.request_id: n for request, n in by_id.items()}, ids, frozenset(new or {}), preempted)
        )
        for request, n in by_id.items():
            request.num_computed_tokens += n
        return meta

    def report(self, *job_ids: int, failed: bool = False, times: int = 1) -> None:
        report = WorkerReport(dict.fromkeys(job_ids, times), set(job_ids) if failed else set())
        self.half.update_connector_output(report)

    def start(
        self, request: FakeRequest, ids: list[int] | None = None, computed: int = 0, num_tokens: int | None = None
    ) -> StepMeta:
        """Looks the request up, declines what is offered, and computes its tokens, by default all, in one step.
        ``computed``: tokens that the device has."""
        ids = self.new_blocks(-(-request.num_tokens // TOKENS)) if ids is None else ids
        self.look_up(request, computed)
        self.allocate(request, ids)
        request.num_computed_tokens = computed
        num_tokens = request.num_tokens - computed if num_tokens is None else num_tokens
        return self.step({request: num_tokens}, new={request.request_id: ids})

    def store(self, tokens: list[int], name: str = "writer") -> None:
        """Some request computes ``tokens``, its blocks are stored, and it is gone."""
        request = FakeRequest(name, tokens)
        meta = self.start(request)
        self.report(*meta.stores, times=self.num_workers)
        self.end(request)

    def end(self, request: FakeRequest) -> StepMeta:
        """The request ends. Returns the step after that."""
        self.half.request_finished(request)
        return self.step()

    def load(self, request: FakeRequest, computed: int = 0, ids: list[int] | None = None) -> StepMeta:
        """The request takes what it is offered; the step that starts its load."""
        tokens, is_async = self.look_up(request, computed)
        assert tokens, "nothing to load"
        assert is_async
        ids = self.new_blocks(-(-(computed + tokens) // TOKENS)) if ids is None else ids
        self.allocate(request, ids, tokens)
        request.num_computed_tokens = computed + tokens
        return self.step()

    def keys(self, tokens: list[int]) -> list[OffloadKey]:
        hashes = hash_blocks(tokens, TOKENS)[self.factor - 1 :: self.factor]
        return [make_offload_key(h, 0) for h in hashes]

    def status(self, tokens: list[int]) -> list[int | None]:
        """Readers of each block; -1 being written, None absent."""
        found = [self.manager.block_status(key) for key in self.keys(tokens)]
        return [status and status.ref_cnt for status in found]


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def rig_with(tokens: list[int], **options: Any) -> Rig:
    """Returns a rig that has stored the blocks of ``tokens``. ``options`` are those of Rig."""
    rig = Rig(**options)
    rig.store(tokens)
    return rig


def offered(num_tokens: int = 9, **options: Any) -> tuple[Rig, FakeRequest]:
    """Returns a rig that has stored ``prompt(8)``, and a request of ``num_tokens`` that was offered these blocks."""
    rig, request = rig_with(prompt(8), **options), FakeRequest("r", prompt(num_tokens))
    assert rig.look_up(request) == (8, True)
    return rig, request


def only(jobs: Mapping[int, TransferSpec]) -> tuple[int, TransferSpec]:
    ((job_id, spec),) = jobs.items()
    return job_id, spec


def device_ids(spec: TransferSpec) -> list[int]:
    return list(spec.device.block_ids.tolist())


def start_together(rig: Rig, *requests: FakeRequest) -> StepMeta:
    """Requests that are computed in one step, the first with device blocks 10, 11, ..., the second 20, ..."""
    tables = {}
    for i, request in enumerate(requests):
        tables[request.request_id] = [10 * (i + 1) + j for j in range(-(-request.num_tokens // TOKENS))]
        rig.look_up(request)
        rig.allocate(request, tables[request.request_id])
    return rig.step({request: request.num_tokens for request in requests}, new=tables)


def in_flight() -> tuple[Rig, int, FakeRequest]:
    """A store of device blocks 1 and 2 that no worker has reported yet."""
    rig = Rig()
    rig.store(prompt(8, start=50), "for others to load")
    request = FakeRequest("w", prompt(8))
    job, _ = only(rig.start(request, [1, 2]).stores)
    return rig, job, request


def held(tokens: int = 8) -> tuple[Rig, int]:
    """A request for remote decode has finished; its store is in progress."""
    rig = Rig(num_workers=2)
    request = FakeRequest("p", prompt(tokens), REMOTE_DECODE)
    job, _ = only(rig.start(request, [1, 2]).stores)
    keep, params = rig.half.request_finished(request)
    assert keep is True
    assert params is None
    return rig, job
