"""KVOffloadStorage: the tiers of kvoffload as the storage backend of SGLang's HiCache."""

from __future__ import annotations

import contextlib
import functools
import logging
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

from kvoffload.abc import NOT_SET, ConfigError, KVGroup, Miss
from kvoffload.config import IntegrationConfig
from kvoffload.fingerprints import fingerprint
from kvoffload.sglang import engine
from kvoffload.sglang.fingerprint import describe_parts, fingerprint_parts
from kvoffload.sglang.metrics import ServerMetrics
from kvoffload.sglang.pools import KV, HostPages, block_bytes_of, rank_of
from kvoffload.sglang.transfers import PageTransfers
from kvoffload.tiering.bridge import BridgeSettings, build_bridge
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
"""Keys of the extra configuration that are SGLang's."""
LOAD_DEADLINE_MS = 5000.0
"""Default of ``load_deadline_ms``. SGLang asks for up to 128 pages at once, and its own prefetch policy decides how
long requests wait for them."""
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
        """``storage_config.extra_config`` has the keys of IntegrationConfig beside SGLang's own. Raises ConfigError."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError(
                fault=f"interface_v1={extra.get('interface_v1')!r} in {EXTRA_CONFIG}: without it SGLang "
                "does not say which pages come before those that it stores",
                fix='write "interface_v1": 1',
            )
        options = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        self._options = IntegrationConfig.from_mapping({"load_deadline_ms": LOAD_DEADLINE_MS, **options})
        self._config = storage_config
        self._arguments = engine.arguments()
        self._refuse_unserved()
        self._pools: dict[str, HostPages] = {}
        self._chained: list[HostPages] = []
        """The pools without whose pages no page behind them can be used: that of the KV, then others."""
        self._transfers = PageTransfers(self._pools, engine.weights_at_start(self._arguments))
        self._transfers.is_measured = bool(storage_config.enable_storage_metrics)
        self._logged: set[str] = set()
        ranks = {
            "tp_rank": storage_config.tp_rank,
            "pp_rank": storage_config.pp_rank,
            "dp_rank": storage_config.dp_rank,
        }
        self._metrics = ServerMetrics({name: str(rank) for name, rank in ranks.items()})

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
        bridge = self._transfers.bridge = build_bridge(
            options.tier_entries,
            [KVGroup(kv.tokens)],
            block_bytes,
            fingerprint(parts),
            BridgeSettings(
                identity=describe_parts(parts, self._arguments, model),
                policy=options.policy,
                engine=index,
                engines=count,
                lookup_deadline_ms=options.lookup_deadline_ms,
                load_deadline_ms=options.load_deadline_ms,
            ),
        )
        logger.info(
            "kvoffload: storage of HiCache, rank %d of %d on this node: pages of %d tokens and %s in %s; model "
            "fingerprint %s",
            index,
            count,
            kv.tokens,
            ", ".join(f"{format_bytes(pool.nbytes)} ({pool.name})" for pool in self._pools.values()),
            ", ".join(bridge.names) or "no tier",
            fingerprint(parts),
        )

    @_never_raises(lambda: None)
    def close(self) -> None:
        """Closes the tiers and gives up all references to the host pools. SGLang calls it when it detaches."""
        self._transfers.close()
        for pool in self._pools.values():
            pool.close()

    @_never_raises(lambda: False)
    def clear(self) -> bool:
        """Forgets all pages. The next process with the same weights finds those on disk again."""
        self._transfers.reset()
        return True

    # Pages of KV.

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._transfers.exists(self._pools[KV], keys))

    @_never_raises(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._transfers.get(self._pools[KV], keys, host_indices)

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
        found = _leading(self._transfers.exists(self._pools[KV], keys))
        hits: dict[str, int] = {KV: found} if found else {}
        restorable = list(range(1, found + 1))
        for transfer in pool_transfers or ():
            if not restorable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            there = self._transfers.exists(self._pools[str(transfer.name)], keys[:found])
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
            transfer.name: self._transfers.get(
                self._pools[str(transfer.name)], transfer.keys or [], transfer.host_indices
            )
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

    # SGLang requires these, and calls none of them with interface_v1: they do not say which pages come before others.

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    # What others show.

    @_never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Returns the transfers since the last call, as SGLang's StorageMetrics. SGLang's scheduler calls this often
        where metrics are on, so the metrics of the tiers are brought up to date here too."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if self._transfers.bridge is not None:
            self._metrics.add(self._transfers.bridge.take_counts())
        metrics = StorageMetrics()
        for name, samples in self._transfers.samples.items():
            # Another thread may take the last one.
            with contextlib.suppress(IndexError):
                while True:
                    pages, gigabytes_per_second = samples.popleft()
                    getattr(metrics, f"{name}_pgs").append(pages)
                    getattr(metrics, f"{name}_bandwidth").append(gigabytes_per_second)
        return metrics

    def explain(self, page_hash: str, pool: str = KV) -> Miss | None:
        """Returns why a page cannot be loaded now, or None before the tiers are open."""
        bridge = self._transfers.bridge
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
                fault="this version of SGLang does not say when its host pools are complete", fix="use 0.5.23 or later"
            )
        if (
            self._arguments
            and not self._arguments.get("hicache_storage_backend")
            and not self._options.model_fingerprint
        ):
            raise ConfigError(
                fault="the server was started without --hicache-storage-backend, and SGLang does not say "
                "whether its weights were updated since",
                fix=f'start it with that, or add "model_fingerprint" to {EXTRA_CONFIG}',
            )
        if self._arguments.get("enable_lora"):
            raise ConfigError(
                "--enable-lora",
                NOT_SET,
                "SGLang's page hashes contain the name and path of an adapter, not its bytes, so "
                "pages of a replaced adapter would be found",
                "run without adapters, or without --hicache-storage-backend",
            )
        if self._is_shared and config.tp_size > 1:
            for entry in self._options.tier_entries:
                if entry.config.kind == "disk":
                    raise ConfigError(
                        *entry.named,
                        f"SGLang stores the KV of this model on one of its {config.tp_size} tensor-parallel ranks, and "
                        "the others cannot read a disk tier, which belongs to one rank",
                        'write "kind": "shared_dir" with a directory of its own',
                    )

    def _register(self, name: str, host_pool: Any) -> None:
        config = self._config
        rank = rank_of(name, host_pool, self._is_shared, f"{config.tp_rank}/{config.tp_size}")
        self._pools[name] = pool = HostPages(name, host_pool, rank)
        if self._transfers.bridge is not None:
            pool.divide(self._transfers.bridge.block_bytes)

    def _put(
        self,
        pool: HostPages,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
        chained: Sequence[HostPages],
    ) -> list[bool]:
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            self._log_once("chain", NO_CHAIN, "backup")
        elif pool.is_of_rank or not self._is_shared or self._config.is_storage_writer:
            return self._transfers.put(pool, hashes, indices, before, chained)
        return [False] * len(hashes)

    def _log_once(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("kvoffload: " + message, *values, exc_info=exc_info)


def _leading(there: Sequence[bool]) -> int:
    """Returns how many values at the beginning are True."""
    return next((i for i, each in enumerate(there) if not each), len(there))
