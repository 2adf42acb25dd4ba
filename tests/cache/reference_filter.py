"""A reference model of the reuse filter, which forgets no request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.abc import IntegrityError, LookupState, Need, Offer, OffloadKey, PrepareStoreOutput, ReqContext, States
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.reference import ReferenceLRUManager, ReferenceManager, unique


class ReferenceFilter(ReferenceManager):
    """Stores a key once enough requests have looked it up or touched it.

    It remembers forever which request has used which key. A real filter must not.
    """

    def __init__(self, num_blocks: int, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        super().__init__(num_blocks)
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
        return super().lookup(keys, req_context)

    def lookup_each(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, need: Need = Need.ALL
    ) -> States:
        self.count(keys, req_context)
        return super().lookup_each(keys, req_context, need)

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        self.count(keys if chain is None else chain, req_context)
        super().touch(keys, req_context, chain)

    def is_admitted(self, key: OffloadKey) -> bool:
        return self.state(key) is not LookupState.MISS or self.counts.get(key, 0) >= self.store_threshold

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        return super().prepare_store([key for key in keys if self.is_admitted(key)], req_context, offer)

    def check_integrity(self) -> None:
        super().check_integrity()
        if len(self.counts) > self.max_tracker_size:
            raise IntegrityError(f"{len(self.counts)} keys tracked of {self.max_tracker_size}")


class FilteredLRUManager(ReferenceFilter, ReferenceLRUManager):
    """Evicts the least recently used block."""


class FilteredARCManager(ReferenceFilter, ReferenceARCManager):
    """Evicts as ARC does."""
