"""Eviction policies for the host memory of vLLM's own offloading connector.

In ``kv_connector_extra_config`` of vLLM's OffloadingConnector::

    "eviction_policy": "AutoCachePolicy", "cache_policy_module_path": "kvoffload.vllm.cache_policy"
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from math import inf
from operator import mod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvoffload.abc import Access, ConfigError, Eviction, IntegrityError, Keys, OffloadKey, Slots
from kvoffload.cache.keys import key_group_idx, seem_of_several_groups
from kvoffload.cache.policies import make_policy
from kvoffload.cache.table import BlockTable
from kvoffload.native import describe
from kvoffload.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

if _reason := versions.why_too_old():
    raise ConfigError(_reason)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Use:
    """What is known of one request. vLLM's context of the request holds it, and so ends it."""

    life: object
    """Of the policy when the request began; see ``PolicyAdapter``."""
    chain: Keys = ()
    """The keys of the request, head first, as far as vLLM knew them when ``chain`` was made."""
    num_keys: int = -1
    """How many keys vLLM knew then."""
    held: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The slots of those blocks that the request has found or stored. Some may be of others by now."""
    planned_to: float = -1
    """For the blocks that end at this token or before it, ``due`` and ``refused`` have been decided."""
    due: list[OffloadKey] = field(default_factory=list)
    """New blocks that the policy admits, tail first."""
    refused: set[OffloadKey] = field(default_factory=set)
    """New blocks that the policy does not admit. Once there are any, it admits none after them."""


class _Aside:
    """The blocks that vLLM holds although the policy has refused them. They leave first."""

    def __init__(self, capacity: int) -> None:
        self._slots: dict[int, None] = {}
        """The oldest first."""
        self._has = np.zeros(capacity, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns, per slot, whether its block is aside."""
        return self._has[slots]

    def add(self, slots: Slots) -> None:
        self._has[slots] = True
        self._slots.update(dict.fromkeys(slots.tolist()))

    def remove(self, slots: Slots) -> None:
        self._has[slots] = False
        for slot in slots.tolist():
            del self._slots[slot]

    def take_idle(self, n: int, busy: npt.NDArray[np.bool_]) -> Slots:
        """Removes and returns up to ``n`` slots that are not ``busy``, the oldest first."""
        slots = np.fromiter(self._slots, np.int64, len(self._slots))
        taken = slots[~busy[slots]][:n]
        self.remove(taken)
        return taken


def _chain(ends: Mapping[OffloadKey, int], held: Container[OffloadKey]) -> list[OffloadKey]:
    """Returns the keys of a request in the order in which their chunks end, those of all KV cache groups together.
    ``ends``: the token at which the chunk of each key ends. Of parts of chunks only those that are ``held`` count."""
    chain = sorted(ends, key=ends.__getitem__)
    if any(map(mod, ends.values(), repeat(next(iter(ends.values()))))):
        # Chunks of several sizes, or parts of chunks for which vLLM has looked. The first key of a group is whole.
        sizes: dict[int, int] = {}
        whole = {key for key, end in ends.items() if end % sizes.setdefault(key_group_idx(key), end) == 0}
        chain = [key for key in chain if key in whole or key in held]
    return chain


def _starts_over(method: Callable[..., Result]) -> Callable[..., Result | None]:
    """After an exception in ``method``, lets plain LRU go on with the chunks that vLLM knows, and calls it again. Makes
    it return None if that fails too: then vLLM's scheduler goes on without a use, or without room for a store."""

    @functools.wraps(method)
    def wrapper(self: PolicyAdapter, *args: Any) -> Result | None:
        for _ in range(2):
            try:
                return method(self, *args)
            except Exception:
                if not self._has_failed:
                    logger.exception(
                        "%s failed: from now on LRU evicts from vLLM's host memory; please report this",
                        type(self).__name__,
                    )
                self._has_failed = True
                self._start_over()
        return None

    return wrapper


class PolicyAdapter(CachePolicy):
    """A policy of kvoffload behind the interface of vLLM's. The slot of a block is the number of vLLM's chunk.

    vLLM calls per key, our policies want batches. So ``get``, ``insert`` and the marks only note the key, and the other
    methods, which vLLM calls once per request or step, hand on what was noted (``_settle``).

    A request is one use of its chain: when it loads (from vLLM 0.33 on), else when it begins to store, else at its end.
    A policy may refuse new blocks, but vLLM stores all that it offers. A refused block is held aside: the policy does
    not know it.
    """

    policy: ClassVar[str]
    """The name of the policy in ``kvoffload.cache.policies``."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        # The scheduler looks up one key at a time: this costs no call of a Python function.
        self.__dict__["get"] = self._chunks.get
        self._policy = make_policy(self.policy, cache_capacity)
        self.clock: Callable[[], float] = time.monotonic
        self._has_failed = False
        self._reset()
        logger.info(
            "kvoffload's policy %s evicts from vLLM's host memory of %s chunks (%s)",
            self.policy,
            f"{cache_capacity:,}",
            describe(),
        )

    def _reset(self) -> None:
        self._table = BlockTable(self.cache_capacity)
        self._life = object()
        """A request that began in another life of the policy, before ``clear``, begins again."""
        self._entering: list[OffloadKey] = []
        """Inserted since ``_settle``, head first."""
        self._marks: dict[OffloadKey, bool] = {}
        """Whether a chunk has become evictable (True) or not evictable, since ``_settle``."""
        self._aside = _Aside(self.cache_capacity)
        self._storing: _Use | None = None
        """The request whose blocks vLLM is about to insert."""

    # Called per key.

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        self._chunks[key] = chunk
        self._entering.append(key)
        if chunk.ref_cnt == 0:
            self._marks[key] = True

    def mark_evictable(self, key: OffloadKey) -> None:
        self._marks[key] = True

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._marks[key] = False

    # Uses.

    @_starts_over
    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Only vLLM 0.33 and later call this, when a request loads."""
        self._use(keys, req_context)

    @_starts_over
    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        announced = list(keys)
        use = self._storing = self._use(announced, req_context)
        ends = req_context._offload_key_positions
        # The whole chain is decided at once. Of several groups, vLLM does not store every block.
        if use.planned_to < 0 and ends and not seem_of_several_groups(use.chain):
            absent = list(compress(use.chain, (self._find(use.chain) < 0).tolist()))
            self._plan(use, absent, len(announced))
            use.planned_to = ends[use.chain[-1]]
        new = [key for key in announced if ends.get(key, inf) > use.planned_to]
        if new:
            self._plan(use, new, len(announced))

    @_starts_over
    def on_request_finished(
        self,
        key_groups: Sequence[Keys],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        keys = [key for group in key_groups for key in group]
        if not keys:
            return
        use = self._use(keys, req_context)
        self._reorder(self._chain(use, keys, req_context), list(insertion_only_keys))

    @_starts_over
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        chain = list(dict.fromkeys(keys))
        use = req_context.get_state(_Use)
        if use is None or use.life is not self._life:
            self._use(chain, req_context)
        else:
            self._settle()
            self._reorder(chain, [])

    def _use(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> _Use:
        """Tells the policy once per request what the request uses. ``keys`` are those that vLLM names."""
        self._settle()
        use: _Use | None = req_context.get_state(_Use)
        if use is not None and use.life is self._life:
            return use
        use = _Use(self._life)
        req_context.set_state(use)
        use.chain = self._chain(use, list(keys), req_context)
        use.num_keys = len(req_context._offload_key_positions)
        self._set_full()
        found = self._find(use.chain)
        use.held, ready = self._table.used(found)
        self._policy.access(Access(use.chain, found, use.held, ready, self.clock()))
        if self._aside:
            self._take_back(use.chain)
        return use

    def _chain(self, use: _Use, keys: list[OffloadKey], req_context: ReqContext) -> Keys:
        """Returns the chain of a request as far as vLLM knows it by now; ``keys`` if it does not say where they end."""
        ends = req_context._offload_key_positions
        if not ends:
            return list(dict.fromkeys(keys))
        return use.chain if len(ends) == use.num_keys else _chain(ends, self._chunks)

    def _reorder(self, chain: Keys, new: list[OffloadKey]) -> None:
        slots, is_new = self._table.chain(self._find(chain), new)
        self._policy.reorder(slots, is_new)

    def _find(self, keys: Keys) -> Slots:
        """Returns one slot per key, -1 where the policy has no such block."""
        found = self._table.find(keys)
        if self._aside:
            found[(found >= 0) & self._aside.has(found)] = -1
        return found

    # Room.

    def _plan(self, use: _Use, keys: list[OffloadKey], step: int) -> None:
        """Decides which new blocks of a request, given head first, the policy takes. ``step`` blocks are stored at
        once."""
        # The end of a chain that is longer than the cache only passes through, a step at a time.
        room = max(0, self.cache_capacity - len(use.held) - step)
        fitting, too_many = keys[:room][::-1], keys[room:]
        use.refused.update(self._refused(use, fitting))
        use.refused.update(too_many)
        use.due = [key for key in fitting if key not in use.refused]

    def _refused(self, use: _Use, tail_first: list[OffloadKey]) -> list[OffloadKey]:
        """Returns which of the new blocks the policy does not admit."""
        refused: list[OffloadKey] = []
        shortage = len(tail_first) - (self.cache_capacity - len(self._chunks))
        if use.refused:
            refused = tail_first
        elif shortage > 0:
            self._set_full()
            admitted = self._policy.admit(tail_first, shortage)
            refused = [] if admitted is None else list(compress(tail_first, ~admitted))
        if refused:
            self._policy.refuse(refused)
        return refused

    def _set_full(self) -> None:
        """Tells the policy how many blocks it has room for: those aside take room as well."""
        self._policy.full = max(self.cache_capacity - len(self._aside), (self.cache_capacity + 1) // 2)

    def _take_back(self, chain: Keys) -> None:
        """Gives blocks aside that a request uses to the policy, if it admits them now."""
        found = self._table.find(chain[::-1])
        there = (found >= 0) & self._aside.has(found)
        tail_first = list(compress(chain[::-1], there.tolist()))
        if not tail_first:
            return
        slots = found[there]
        admitted = self._policy.admit(tail_first, len(tail_first))
        if admitted is not None:
            slots, tail_first = slots[admitted], list(compress(tail_first, admitted))
        self._aside.remove(slots)
        self._policy.insert(slots, tail_first)

    @_starts_over
    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        if n == 0:
            return []
        self._settle()
        table, use = self._table, self._storing
        present = table.find(list(protected))
        kept = table.idle(present[present >= 0])
        if n > table.num_evictable - len(kept):
            return None
        if use is not None:
            # No block leaves for the tail of its own chain, if others can.
            more = table.idle(np.concatenate((kept, use.held)))
            kept = more if n <= table.num_evictable - len(more) else kept
            if use.due and use.due[-1] in self._chunks:
                # Others have stored it.
                use.due = [key for key in use.due if key not in self._chunks]
            entering = use.due
        else:
            entering = [key for key in protected if key not in self._chunks]
        table.busy[kept] = True
        victims = present[:0]
        if self._aside:
            victims = self._aside.take_idle(n, table.busy)
        if len(victims) < n:
            self._set_full()
            eviction = Eviction(n - len(victims), table.busy, table.key_of, entering)
            chosen = self._policy.evict(eviction)
            victims = np.concatenate((victims, chosen)) if len(victims) else chosen
        table.busy[kept] = False
        self._policy.mark_evictable(kept)
        keys = table.evict(victims) if len(victims) == n else None
        if keys is None:
            raise IntegrityError(f"policy {self.policy} chose blocks that it may not evict")
        pop = self._chunks.pop
        return [(key, pop(key)) for key in keys]

    @_starts_over
    def remove(self, key: OffloadKey) -> None:
        try:
            self._settle()
        finally:
            # vLLM gives its memory to another chunk, whatever fails here.
            chunk = self._chunks.pop(key, None)
        if chunk is None:
            return
        slots = self._table.find([key])
        if self._aside.has(slots).any():
            self._aside.remove(slots)
        else:
            self._policy.remove(slots)
        self._table.remove(slots)

    def clear(self) -> None:
        self._chunks.clear()
        self._policy.clear()
        self._reset()

    # What was noted per key.

    def _settle(self) -> None:
        if self._entering:
            self._enter(self._entering[::-1])
            self._entering = []
        if self._marks:
            marks, self._marks = self._marks, {}
            self._mark(self._table.find(list(marks)), np.fromiter(marks.values(), np.bool_, len(marks)))

    def _enter(self, keys: list[OffloadKey]) -> None:
        """Hands new blocks, tail first, to the table and the policy."""
        chunks, use = self._chunks, self._storing
        slots = np.fromiter((chunks[key].chunk_id for key in keys), np.int64, len(keys))
        self._table.insert(keys, slots)
        if use is not None:
            self._storing = None
            # Those that are stored next are at the end, so promotions, which vLLM stores one by one, cost little each.
            if use.due[-len(keys) :] == keys:
                del use.due[-len(keys) :]
            elif use.due:
                use.due = [key for key in use.due if key not in chunks]
            if use.refused:
                is_aside = np.fromiter(map(use.refused.__contains__, keys), np.bool_, len(keys))
                self._aside.add(slots[is_aside])
                slots, keys = slots[~is_aside], list(compress(keys, (~is_aside).tolist()))
            use.held = np.concatenate((use.held, slots))
        self._policy.insert(slots, keys)

    def _mark(self, slots: Slots, evictable: npt.NDArray[np.bool_]) -> None:
        table = self._table
        # Any mark says that the chunk has been written.
        table.set_ready(slots)
        differs = table.busy[slots] == evictable
        if differs.any():
            table.unpin(slots[differs & evictable])
            table.pin(slots[differs & ~evictable])
        idle = slots[evictable]
        self._policy.mark_evictable(idle[~self._aside.has(idle)] if self._aside else idle)

    def _start_over(self) -> None:
        """Begins again with LRU and the chunks that vLLM holds."""
        self._policy = make_policy("lru", self.cache_capacity)
        self._reset()
        self._entering = list(self._chunks)
        self._marks = {key: chunk.ref_cnt == 0 for key, chunk in self._chunks.items() if chunk.ref_cnt >= 0}

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the policy holds exactly vLLM's chunks, and knows which of them are in use."""
        self._settle()
        table = self._table
        table.check_integrity()
        slots = table.slots()
        self._policy.check_integrity(slots[~self._aside.has(slots)])
        held = {key: (chunk.chunk_id, chunk.ref_cnt == 0) for key, chunk in self._chunks.items()}
        keys = table.key_of[slots].tolist()
        if held != dict(zip(keys, zip(slots.tolist(), (~table.busy[slots]).tolist(), strict=True), strict=True)):
            raise IntegrityError(f"{type(self).__name__} does not hold the chunks that vLLM holds")


class AutoCachePolicy(PolicyAdapter):
    """The self-tuning policy."""

    policy = "auto"


class LRUCachePolicy(PolicyAdapter):
    """Least recently used."""

    policy = "lru"


class ARCCachePolicy(PolicyAdapter):
    """Adaptive Replacement Cache, as in the paper."""

    policy = "arc"
