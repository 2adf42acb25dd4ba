"""KVOffloadStorage: the tiers of kvoffload as the storage backend of SGLang's HiCache."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from kvoffload.abc import ConfigError, KVGroup, LookupState, Miss, OffloadKey
from kvoffload.config import DoorConfig
from kvoffload.fingerprints import fingerprint
from kvoffload.sglang import engine
from kvoffload.sglang.fingerprint import describe_parts, fingerprint_parts
from kvoffload.sglang.metrics import ServerMetrics
from kvoffload.sglang.pools import KV, HostPages, block_bytes_of, rank_of
from kvoffload.tiers.bridge import TierBridge, build_bridge
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
"""Keys of the extra configuration that are SGLang's."""
LOAD_DEADLINE_MS = 5000.0
"""Default of ``load_deadline_ms``. SGLang asks for up to 128 pages at once, and its own prefetch policy decides how
long requests wait for them."""
PAGES_PER_CALL = 128
"""Pages that are handed to the bridge at once. SGLang calls v2 methods with all pages of an operation."""
MAX_SAMPLES = 1024
"""Measured transfers that are kept until SGLang asks for them."""
HIT = int(LookupState.HIT)
NO_CHAIN = (
    "SGLang's %s does not say which pages come before those that it stores, so nothing is stored; add "
    f'"hicache_storage_pass_prefix_keys": true to {EXTRA_CONFIG} and start again'
)

Method = TypeVar("Method", bound=Callable[..., Any])


def _never_raises(miss: Callable[..., Any]) -> Callable[[Method], Method]:
    """Makes a method return ``miss(*arguments)`` instead of raising: an exception would end a thread of SGLang for
    good. Each kind of exception is logged once per method."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: KVOffloadStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._log_once(
                    f"{method.__name__}:{type(error).__name__}",
                    "%s has failed (%s: %s) and was a miss; further failures of this kind are not logged",
                    method.__name__,
                    type(error).__name__,
                    error,
                    exc_info=True,
                )
                return miss(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def _none_of(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_pools(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KVOffloadStorage(HiCacheStorage):
    """A storage backend of HiCache, one per rank. SGLang makes it, registers its host pools and then calls it from
    threads of its own: the pages of a call are in the host pools that were registered.

    The constructor and the registration of host pools raise ConfigError, which ends the start of the server. No other
    method raises or waits longer than the deadlines: trouble of any kind is a miss, or a page that is not stored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """``storage_config.extra_config`` has the keys of DoorConfig beside SGLang's own. Raises ConfigError."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError(
                f"interface_v1={extra.get('interface_v1')!r} in {EXTRA_CONFIG}: without it SGLang does not say which "
                'pages come before those that it stores; write "interface_v1": 1'
            )
        options = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        self._options = DoorConfig.from_mapping({"load_deadline_ms": LOAD_DEADLINE_MS, **options})
        self._config = storage_config
        self._arguments = engine.arguments()
        self._refuse_unserved()
        self._pools: dict[str, HostPages] = {}
        self._chained: list[HostPages] = []
        """The pools without whose pages no page behind them can be used: that of the KV, then others."""
        self._bridge: TierBridge | None = None
        self._weights = engine.weights_at_start(self._arguments)
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        ranks = {
            "tp_rank": storage_config.tp_rank,
            "pp_rank": storage_config.pp_rank,
            "dp_rank": storage_config.dp_rank,
        }
        self._metrics = ServerMetrics({name: str(rank) for name, rank in ranks.items()})
        self._samples = {name: deque[tuple[int, float]](maxlen=MAX_SAMPLES) for name in ("prefetch", "backup")}

    # Start and end.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes in the host pool with the KV. Raises ConfigError if its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)
        self._chained = [self._pools[KV]]

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Takes in another host pool. Raises ConfigError if its pages cannot be stored."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Opens the tiers. Raises ConfigError for a wrong setting."""
        config, options, kv = self._config, self._options, self._pools[KV]
        block_bytes = block_bytes_of(list(self._pools.values()))
        for pool in self._pools.values():
            pool.divide(block_bytes)
        parts = fingerprint_parts(options, config, kv, block_bytes, self._arguments)
        index, count = engine.place_on_node(config, self._arguments, options.engines_per_node)
        if self._is_shared and not any(pool.is_of_rank for pool in self._pools.values()):
            # Of ranks with the same bytes one writes, and takes the budget of all.
            index, count = index // config.tp_size, max(1, count // config.tp_size)
        model = self._arguments.get("model_path") or config.model_name
        self._bridge = build_bridge(
            options.tier_entries,
            [KVGroup(kv.tokens)],
            block_bytes,
            fingerprint(parts),
            identity=describe_parts(parts, self._arguments, model),
            policy=options.policy,
            engine=index,
            engines=count,
            lookup_deadline_ms=options.lookup_deadline_ms,
            load_deadline_ms=options.load_deadline_ms,
        )
        logger.info(
            "kvoffload: storage of HiCache, rank %d of %d on this node: pages of %d tokens and %s in %s; model "
            "fingerprint %s",
            index,
            count,
            kv.tokens,
            ", ".join(f"{format_bytes(pool.nbytes)} ({pool.name})" for pool in self._pools.values()),
            ", ".join(self._bridge.names) or "no tier",
            fingerprint(parts),
        )

    @_never_raises(lambda: None)
    def close(self) -> None:
        """Closes the tiers and gives up all references to the host pools. SGLang calls it when it detaches."""
        with self._lock:
            bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.close()
        for pool in self._pools.values():
            pool.close()

    @_never_raises(lambda: False)
    def clear(self) -> bool:
        """Forgets all pages. The next process with the same weights finds those on disk again."""
        with self._lock:
            if self._bridge is not None:
                self._bridge.reset()
        return True

    # Pages of KV.

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._exists(self._pools[KV], keys))

    @_never_raises(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(self._pools[KV], keys, host_indices)

    @_never_raises(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._put(self._pools[KV], keys, host_indices, extra_info, self._chained)

    # Pages of several pools.

    @_never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        found = _leading(self._exists(self._pools[KV], keys))
        hits: dict[str, int] = {KV: found} if found else {}
        restorable = list(range(1, found + 1))
        for transfer in pool_transfers or ():
            if not restorable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            there = self._exists(self._pools[str(transfer.name)], keys[:found])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                ends = set(range(1, _leading(there) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                ends = {end for end in range(1, found + 1) if all(there[max(0, end - window) : end])}
            if ends:
                hits[transfer.name] = max(ends)
            restorable = [end for end in restorable if end in ends]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    @_never_raises(_none_of_pools)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._get(self._pools[str(transfer.name)], transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @_never_raises(_none_of_pools)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Stores pages of other pools than the KV's. SGLang calls this before it stores the KV of the same pages."""
        stored: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool, keys = self._pools[str(transfer.name)], transfer.keys or []
            chain = []
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                chain = [pool]
                if pool not in self._chained:
                    self._chained = [*self._chained, pool]
            stored[transfer.name] = self._put(pool, keys, transfer.host_indices, extra_info, chain)
        return stored

    # Single pages. SGLang does not call these with interface_v1.

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._exists(self._pools[KV], [key])[0]

    @_never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        kv, bridge = self._pools[KV], self._serving()
        if bridge is None:
            return [None] * len(keys)
        here = kv.is_complete(bridge.get(kv.keys(keys), kv.blocks_of(target_locations)))
        return [page if arrived else None for page, arrived in zip(target_locations, here, strict=True)]

    @_never_raises(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores nothing: this call does not say which pages come before ``keys``."""
        self._log_once("chain", NO_CHAIN, "set")
        return False

    # What others show.

    @_never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Returns the transfers since the last call, as SGLang's StorageMetrics. SGLang's scheduler calls this often
        where metrics are on, so the metrics of the tiers are brought up to date here too."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if self._bridge is not None:
            self._metrics.add(self._bridge.take_counts())
        metrics = StorageMetrics()
        for name, samples in self._samples.items():
            while samples:
                pages, gigabytes_per_second = samples.popleft()
                getattr(metrics, f"{name}_pgs").append(pages)
                getattr(metrics, f"{name}_bandwidth").append(gigabytes_per_second)
        return metrics

    def explain(self, page_hash: str, pool: str = KV) -> Miss | None:
        """Returns why a page cannot be loaded now, or None before the tiers are open."""
        bridge = self._bridge
        return None if bridge is None else bridge.explain(self._pools[pool].keys([page_hash])[0])

    # Inside.

    @property
    def _is_shared(self) -> bool:
        """Whether all tensor-parallel ranks have the same KV."""
        return bool(self._config.is_mla_model)

    def _refuse_unserved(self) -> None:
        """Raises ConfigError for a configuration in which the right pages could not be told from wrong ones, or not
        reach all ranks."""
        config = self._config
        if not hasattr(HiCacheStorage, "on_host_pools_registered"):
            raise ConfigError(
                "this version of SGLang does not say when its host pools are complete; use 0.5.23 or later"
            )
        if (
            self._arguments
            and not self._arguments.get("hicache_storage_backend")
            and not self._options.model_fingerprint
        ):
            raise ConfigError(
                "the server was started without --hicache-storage-backend, and SGLang does not say whether its weights "
                f'were updated since; start it with that, or add "model_fingerprint" to {EXTRA_CONFIG}'
            )
        if self._arguments.get("enable_lora"):
            raise ConfigError(
                "--enable-lora: SGLang's page hashes contain the name and path of an adapter, not its bytes, so pages "
                "of a replaced adapter would be found; run without adapters, or without --hicache-storage-backend"
            )
        if self._is_shared and config.tp_size > 1:
            for entry in self._options.tier_entries:
                if entry.config.kind == "disk":
                    raise ConfigError(
                        f"{entry.setting}: SGLang stores the KV of this model on one of its {config.tp_size} "
                        "tensor-parallel ranks, and the others cannot read a disk tier, which belongs to one rank; "
                        'write "kind": "shared_dir" with a directory of its own'
                    )

    def _register(self, name: str, host_pool: Any) -> None:
        config = self._config
        rank = rank_of(name, host_pool, self._is_shared, f"{config.tp_rank}/{config.tp_size}")
        self._pools[name] = pool = HostPages(name, host_pool, rank)
        if self._bridge is not None:
            pool.divide(self._bridge.block_bytes)

    def _serving(self) -> TierBridge | None:
        """Returns the bridge, None if there is none any more. Everything stored is forgotten first if the weights may
        have changed: SGLang then flushes its caches, or says that it has others."""
        with self._lock:
            bridge = self._bridge
            if bridge is not None:
                weights = engine.weights()
                if self._pools[KV].was_cleared() or weights != self._weights:
                    self._weights = weights
                    bridge.reset()
            return bridge

    def _exists(self, pool: HostPages, hashes: Sequence[str]) -> list[bool]:
        bridge = self._serving()
        if bridge is None or not hashes:
            return [False] * len(hashes)
        return pool.is_complete((bridge.exists(pool.keys(hashes)) == HIT).tolist())

    def _get(self, pool: HostPages, hashes: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def load(bridge: TierBridge, batch: Sequence[str], at: torch.Tensor) -> list[bool]:
            if pool.is_addressed:
                return bridge.get(pool.keys(batch), pool.views(at))
            pages = pool.empty(len(batch))
            blocks = bridge.get(pool.keys(batch), pool.blocks_of(pages))
            pool.fill(at, pages, pool.is_complete(blocks))
            return blocks

        return self._in_batches("prefetch", pool, hashes, indices, load)

    def _put(
        self,
        pool: HostPages,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
        chained: Sequence[HostPages],
    ) -> list[bool]:
        """Stores pages of ``pool``, one of the pools ``chained``: a page is of use only with those of all these pools
        from the head of the sequence on. Without ``chained`` each page is of use alone."""
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            self._log_once("chain", NO_CHAIN, "backup")
            return [False] * len(hashes)
        if self._is_shared and not pool.is_of_rank and not self._config.is_storage_writer:
            return [False] * len(hashes)
        chain = _merged(chained, before)

        def store(bridge: TierBridge, batch: Sequence[str], at: torch.Tensor) -> list[bool]:
            keys = pool.keys(batch)
            chain.extend(_merged(chained, batch) if chained else keys)
            return bridge.put(keys, pool.views(at) if pool.is_addressed else pool.copies(at), chain)

        return self._in_batches("backup", pool, hashes, indices, store)

    def _in_batches(
        self,
        name: str,
        pool: HostPages,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        transfer: Callable[[TierBridge, Sequence[str], torch.Tensor], list[bool]],
    ) -> list[bool]:
        """Transfers pages in batches, until one fails in part: pages behind it are of no use. ``transfer`` returns
        which blocks of a batch were transferred."""
        bridge = self._serving()
        if bridge is None or indices is None or not hashes or pool.num_pages(indices) != len(hashes):
            return [False] * len(hashes)
        done: list[bool] = []
        for first in range(0, len(hashes), PAGES_PER_CALL):
            batch = hashes[first : first + PAGES_PER_CALL]
            began = time.monotonic()
            at = indices[first * pool.tokens : (first + len(batch)) * pool.tokens]
            ok = pool.is_complete(transfer(bridge, batch, at))
            done += ok
            if not all(ok):
                break
            if self._config.enable_storage_metrics and pool.name == KV:
                seconds = max(time.monotonic() - began, 1e-9)
                self._samples[name].append((len(batch), len(batch) * pool.nbytes / seconds / (1 << 30)))
        return done + [False] * (len(hashes) - len(done))

    def _log_once(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("kvoffload: " + message, *values, exc_info=exc_info)


def _leading(there: Sequence[bool]) -> int:
    """Returns how many values at the beginning are True."""
    return next((i for i, each in enumerate(there) if not each), len(there))


def _merged(pools: Sequence[HostPages], hashes: Sequence[str]) -> list[OffloadKey]:
    """Returns the keys of the blocks of pages in all ``pools``, page by page."""
    columns = [(pool.parts, pool.keys(hashes)) for pool in pools]
    if len(columns) == 1:
        return columns[0][1]
    return [key for i in range(len(hashes)) for n, keys in columns for key in keys[i * n : (i + 1) * n]]
