"""A reference model of the reuse filter, which forgets nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from kvoffload.abc import (
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Miss,
    Need,
    Offer,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    States,
)
from tests.suites.reference import unique


class ReferenceFilter(OffloadingManager):
    """Lets a key into ``backing`` once enough requests have looked it up or touched it.

    It remembers forever which request has used which key. A real filter must not.
    """

    def __init__(self, backing: OffloadingManager, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        if store_threshold < 2:
            raise ValueError(f"store_threshold={store_threshold}: must be at least 2")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size={max_tracker_size}: must be at least 1")
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self.seen: set[tuple[str, OffloadKey]] = set()

    def count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        for key in unique(keys):
            if req_context is not None:
                if (req_context.req_id, key) in self.seen:
                    continue
                self.seen.add((req_context.req_id, key))
            self.counts[key] = self.counts.get(key, 0) + 1
            self.counts.move_to_end(key)
            if len(self.counts) > self.max_tracker_size:
                self.counts.popitem(last=False)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self.count(keys, req_context)
        return self.backing.lookup(keys, req_context)

    def lookup_each(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, need: Need = Need.ALL
    ) -> States:
        self.count(keys, req_context)
        return self.backing.lookup_each(keys, req_context, need)

    def explain_miss(self, key: OffloadKey) -> Miss:
        return self.backing.explain_miss(key)

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        self.count(keys if chain is None else chain, req_context)
        self.backing.touch(keys, req_context, chain)

    def end_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        self.backing.end_chain(keys, stored, req_context, chain)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        admitted = []
        for key in keys:
            present = self.backing.lookup_each([key])[0] != LookupState.MISS
            if present or self.counts.get(key, 0) >= self.store_threshold:
                admitted.append(key)
        return self.backing.prepare_store(admitted, req_context, offer)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        return self.backing.prepare_load(keys, req_context)

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        self.backing.complete_load(blocks, req_context)

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        self.backing.complete_store(blocks, req_context, success)

    def drop(self, keys: Sequence[OffloadKey], only_host: bool = False) -> None:
        self.backing.drop(keys, only_host)

    def take_counts(self) -> Mapping[str, float]:
        return self.backing.take_counts()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.backing.take_events()

    def reset(self, keep_shared: bool = False) -> bool:
        return self.backing.reset(keep_shared)

    def shutdown(self) -> None:
        self.backing.shutdown()

    def most_blocks(self, key: OffloadKey | None = None) -> int:
        return self.backing.most_blocks(key)

    @property
    def num_removed(self) -> int:
        return self.backing.num_removed

    def check_integrity(self) -> None:
        self.backing.check_integrity()
        if len(self.counts) > self.max_tracker_size:
            raise IntegrityError(f"{len(self.counts)} keys tracked of {self.max_tracker_size}")
