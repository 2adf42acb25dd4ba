"""Builds the scheduler half of the connector, with everything below it, from a configuration."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload.abc import Admission, ByteArray, ConfigError, OffloadingManager, Tier
from kvoffload.cache.admission import ReuseFilter, TenantAdmission, tracker_size
from kvoffload.cache.keys import namespace
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import HOST, OTHER, Tenants
from kvoffload.config import HostContents, OffloadConfig, contents_of
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.host.pool import PoolHandle
from kvoffload.observe.trace import TraceRecorder
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings, TierSettings
from kvoffload.tiers.config import TierConfig, TierContext, distinct_names
from kvoffload.tiers.disk.format import is_fingerprint
from kvoffload.tiers.opening import named, open_tiers
from kvoffload.units import Amount, format_bytes

logger = logging.getLogger(__name__)


def build_scheduler(
    config: OffloadConfig,
    engine: EngineSpec,
    pools: Sequence[ByteArray | PoolHandle],
    fingerprint: str,
    tiers: Sequence[Tier] = (),
) -> OffloadingConnectorScheduler:
    """Returns the scheduler half for ``engine``, ready to serve.

    ``pools`` has one host pool per rank: its bytes, shape (num_blocks, slot_bytes), or the PoolHandle of a pool in
    another process. ``fingerprint`` is the result of ``kvoffload.fingerprint`` over everything that shapes the bytes of
    a block: blocks are found again only under the same one. ``tiers``: further tiers below those of the configuration,
    the fastest first; they are closed with the scheduler half.

    Raises ConfigError if a setting is wrong, a pool cannot be reached or a tier's directory cannot be used. If a tier's
    medium itself fails, a warning says so and the others serve.
    """
    if not isinstance(fingerprint, str) or not is_fingerprint(fingerprint):
        raise ConfigError("fingerprint", fingerprint, "must be 64 hex digits", "make it with kvoffload.fingerprint")
    contents = contents_of(config.host_contents, engine.why_inclusive)
    host_pools = _HostPools(engine, pools)
    host_pools.check(config)
    for handle in host_pools.handles if tiers or config.tier_entries else ():
        if handle is not None:
            # No tier of this process can read a pool on another machine.
            handle.check_reachable()
    # What is open already is closed again if the rest fails.
    with contextlib.ExitStack() as opened:
        recorder = _make_recorder(config, host_pools, contents)
        if recorder is not None:
            opened.callback(recorder.close)
        below, entries = list[tuple[Tier, TierConfig | None]](), config.tier_entries
        tenants = Tenants(namespace(fingerprint), config.tenants, config.tier_budgets)
        if entries:
            context = host_pools.context(fingerprint, config.policy)
            shares = (lambda name: partial(tenants.shares, name, engines=engine.engines)) if config.tenants else None
            below += open_tiers(entries, context, opened, shares)
        names = distinct_names([*config.tier_names, *(tier.name for tier in tiers)])[len(entries) :]
        below += [(named(tier, name), None) for tier, name in zip(tiers, names, strict=True)]
        is_exclusive, misses = contents is HostContents.EXCLUSIVE, MissMemory()
        scheduler = OffloadingConnectorScheduler(
            _make_manager(config, host_pools, below, tenants, is_exclusive, misses),
            replace(engine, num_workers=host_pools.num_workers),
            tenants=tenants,
            misses=misses if is_exclusive else None,
            load_deadline_ms=config.load_deadline_ms,
            recorder=recorder,
            slot_bytes=host_pools.slot_bytes,
        )
        opened.pop_all()
    # What is set needs no reason.
    why = engine.why_inclusive if config.host_contents is None else None
    said = f"{contents} contents" + (f", because {why}" if why else "")
    logger.info("kvoffload: host pool of %s; %s", host_pools.describe(is_exclusive), said)
    if config.tenants:
        configured = ", ".join(name for name in tenants.names if name != OTHER)
        logger.info("kvoffload: tenants: %s; all other requests are of the tenant %s", configured or "none", OTHER)
    logger.info("kvoffload: model fingerprint %s", fingerprint)
    return scheduler


def _make_manager(
    config: OffloadConfig,
    pools: _HostPools,
    tiers: Sequence[tuple[Tier, TierConfig | None]],
    tenants: Tenants,
    is_exclusive: bool,
    misses: MissMemory,
) -> OffloadingManager:
    """Returns the manager of the host pools, in front of ``tiers`` if there are any. Each is beside its entry."""
    engine, groups, shares = pools.engine, pools.layout.groups, None

    def admission(threshold: int | None, entries: Sequence[TierConfig]) -> Admission | None:
        if threshold is None:
            return None
        tier_blocks = sum(entry.capacity_bytes or 0 for entry in entries) // (pools.block_bytes * engine.engines)
        size = tracker_size((pools.num_blocks + tier_blocks) // (1 if shares is None else len(shares.names)))
        make = partial(ReuseFilter, threshold, size, engine.parent_request)
        return make() if shares is None else TenantAdmission(shares, make)

    def settings(entry: TierConfig | None) -> TierSettings:
        if entry is None:
            return TierSettings()
        return TierSettings(entry.lookup_deadline_ms, admission(entry.store_threshold, [entry]))

    if config.tenants:
        shares = tenants.shares(HOST, pools.num_blocks, pools.node_block_bytes, engine.engines)
    host = PolicyOffloadingManager(
        HostBackend(groups[0].block_tokens, pools.num_blocks),
        make_policy(config.policy, pools.num_blocks, shares),
        engine.enable_events,
        must_store=bool(tiers),
        admission=admission(config.store_threshold, [entry.config for entry in config.tier_entries]),
        misses=misses,
        device_blocks=pools.device_blocks if is_exclusive else 0,
    )
    if not tiers:
        return host
    tiering = TieringSettings(
        groups,
        lookup_deadline_ms=config.lookup_deadline_ms,
        load_deadline_ms=config.load_deadline_ms,
        load_only_if_faster=config.load_only_if_faster,
        tiers=[settings(entry) for _, entry in tiers],
        tenants=tenants,
    )
    return TieredOffloadingManager(host, [tier for tier, _ in tiers], tiering)


def _is_pool(pool: object) -> bool:
    if not isinstance(pool, np.ndarray):
        return isinstance(pool, PoolHandle)
    is_array_of_slots = pool.dtype == np.uint8 and pool.ndim == 2 and pool.size > 0
    return is_array_of_slots and pool.flags.writeable and pool.flags.c_contiguous


class _HostPools:
    """The host pools of one engine, in blocks, bytes and tokens: one per rank, or per set of ranks with the same KV."""

    def __init__(self, engine: EngineSpec, pools: Sequence[ByteArray | PoolHandle]) -> None:
        if not isinstance(pools, Sequence) or not pools:
            raise ConfigError("pools must be a list that is not empty: pass the bytes or handle of one pool per rank")
        for pool in pools:
            if not _is_pool(pool):
                data = "HostPool.data, writable bytes of shape (num_blocks, slot_bytes) with a block at least"
                fix = f"pass {data}, or HostPool.handle() of a pool in another process"
                raise ConfigError(f"pools has a {type(pool).__name__}: {fix}")
        self.num_workers = engine.num_workers or len(pools)
        if self.num_workers % len(pools):
            fault = f"must be {len(pools)}, the number of pools, or a multiple of it if as many ranks share each pool"
            raise ConfigError("num_workers", engine.num_workers, fault, "or leave it out")
        self.engine = engine
        self.layout = engine.layout
        self.device_blocks = (engine.device_blocks or 1) - 1
        """Of the engine, without the null block, which is never used; 0 if they are not known."""
        self._pools = pools
        self.handles = [pool if isinstance(pool, PoolHandle) else None for pool in pools]
        shapes = [(p.num_blocks, p.slot_bytes) if isinstance(p, PoolHandle) else p.shape for p in pools]
        self.num_blocks = min(num_blocks for num_blocks, _ in shapes)
        self.slot_bytes = [slot_bytes for _, slot_bytes in shapes]
        """Bytes of one block in each pool."""
        self.block_bytes: int = sum(self.slot_bytes)
        """Bytes of one block on all ranks."""
        self._by_node: dict[object, list[tuple[int, int]]] = {}
        """The shapes of the pools of each node."""
        for handle, shape in zip(self.handles, shapes, strict=True):
            self._by_node.setdefault(None if handle is None else handle.place, []).append(shape)
        self.node_block_bytes = max(sum(slot_bytes for _, slot_bytes in node) for node in self._by_node.values())
        """Bytes of one block on the ranks of one node, at most."""

    def check(self, config: OffloadConfig) -> None:
        """Raises ConfigError if the pools or groups do not fit ``config``."""
        engines = self.engine.engines
        for shapes in self._by_node.values():
            nbytes = sum(num_blocks * slot_bytes for num_blocks, slot_bytes in shapes) * engines
            if nbytes > config.host_bytes:
                fault = f"the host pools of this node take {format_bytes(nbytes)}"
                fix = f"make each pool with config.num_blocks(block_bytes, {len(shapes) * engines}) slots"
                raise ConfigError("host_bytes", Amount(config.host_bytes), fault, fix)
        for group in self.layout.groups:
            factor = 1 if group.state else config.factor(group.device_block_size)
            if group.block_size_factor != factor:
                fault = f"KVGroup(block_size_factor={group.block_size_factor}): the configuration says {factor}"
                right = f"block_size_factor=config.factor({group.device_block_size})"
                raise ConfigError(fault=fault, fix=f"make the group with {right}, or 1 if it has a state")

    def context(self, fingerprint: str, policy: str) -> TierContext:
        """Returns what tiers are opened with. Raises ConfigError if a pool cannot be opened."""
        arrays = [pool.open() if isinstance(pool, PoolHandle) else pool for pool in self._pools]
        return TierContext(
            # The slots that every rank has.
            pools=[array[: self.num_blocks] for array in arrays],
            fingerprint=fingerprint,
            handles=self.handles,
            identity=self.engine.identity,
            policy=policy,
            engine=self.engine.engine,
            engines=self.engine.engines,
            groups=self.layout.groups,
        )

    @property
    def device_tokens(self) -> int:
        """How many tokens have all their KV on the device."""
        groups, align = self.engine.groups, math.lcm(*self.layout.device_block_sizes)
        # States come on top, unless there is nothing else.
        sizes = [group.device_block_size for group in groups if not group.state]
        return self.device_blocks * align // (sum(align // size for size in sizes) or len(groups))

    def describe(self, is_exclusive: bool) -> str:
        """Describes the pools: "8 GiB = 65,536 tokens, 4.1x the device cache", or "... beyond the device's 16,000"."""
        tokens = self.layout.chains.tokens(self.num_blocks)
        text, num_pools = format_bytes(self.num_blocks * self.block_bytes), len(self._pools)
        if self.num_workers > num_pools:
            text += f" in {num_pools} pool{'s' * (num_pools > 1)} for {self.num_workers} ranks"
        elif num_pools > 1:
            text += f" on {num_pools} ranks"
        if len(self._by_node) > 1:
            text += f" of {len(self._by_node)} nodes"
        if self.engine.engines > 1:
            text += f", one of {self.engine.engines} engines' shares,"
        text += f" = {tokens:,} tokens"
        if is_exclusive:
            text += f" beyond the device's {self.device_tokens:,}"
        elif self.device_tokens:
            text += f", {tokens / self.device_tokens:.1f}x the device cache"
        if self.layout.states:
            place_of = self.layout.chains.tokens(len(self.layout.states))
            text += f"; each position with states takes the place of {place_of:,} of them"
        return text


def _make_recorder(config: OffloadConfig, pools: _HostPools, contents: HostContents) -> TraceRecorder | None:
    """Returns the recorder of the trace that ``config`` asks for, one per engine. Raises ConfigError for a bad path."""
    if config.record_trace is None:
        return None
    path, engine = Path(config.record_trace), pools.engine
    if engine.engines > 1:
        path = path.with_name(f"{path.stem}-engine{engine.engine}{path.suffix}")
    groups = pools.layout.groups
    block_tokens = groups[pools.layout.traced].block_tokens
    header = {
        "device_blocks": pools.device_tokens // block_tokens,
        "pool_blocks": pools.layout.chains.tokens(pools.num_blocks) // block_tokens,
        "policy": config.policy,
        "host_contents": contents,
        "store_threshold": config.store_threshold,
        "groups": len(engine.groups),
    }
    logger.info("kvoffload: all requests are recorded in the trace %s", path)
    return TraceRecorder(str(path), block_tokens, header)
