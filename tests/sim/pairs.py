"""Every two features together, on the model engine: rows of a covering array, each a server with everything it names.

``FEATURES`` has the values of each feature, and ``CONFLICTS`` the pairs of values that no server has.
``covering_array`` chooses rows so that every other pair of values is in one of them; ``beside_the_default`` has the
default with one or two values changed. ``run_row`` runs a row: a server, and with a lower tier the next one on the
same medium. The laws of the model engine must hold, and these,
which concern several features:

- bills of tenants add up to what was copied; no record retains or stores more than its request has;
- events of host memory, added up, are what it holds, and describe the tokens that the engine has for a block;
- what a server has handed over is in the shared tier when all writes have ended, if nothing made it worthless;
- what it has promised to retain on disk is there, or counted as lost;
- no block is called never stored that a request with the same tenant has computed, where the host has room for all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias

from kvoffload.abc import (
    ByteArray,
    KVGroup,
    LookupState,
    MissReason,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    Retained,
    Tier,
)
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.tenants import HOST, TenantConfig, Tenants
from kvoffload.connector.handover import Handover
from kvoffload.connector.options import PARAM
from kvoffload.connector.request import RequestState
from kvoffload.observe.records import RequestRecord
from kvoffload.tiers.disk.tier import DiskTier
from tests.clock import Clock
from tests.sim.adapters import ModelAdapters
from tests.sim.content import EngineRequest
from tests.sim.engine import ModelEngine
from tests.sim.media import MEDIA
from tests.sim.memory_tier import MemoryTier
from tests.sim.planted import wrap
from tests.sim.scenario import Scenario, add_states
from tests.sim.servers import ServerLife, SharedMedium, SharingServer
from tests.sim.shared_folder import SharedFolderMedium
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.simulation import quiet

Row: TypeAlias = dict[str, str]
"""The value of each feature."""

SHARED = ("folder", "store", "bucket")
KIND = {"folder": "shared_dir", "store": "store", "bucket": "object_store"}
FEATURES: Mapping[str, tuple[str, ...]] = {
    "contents": ("exclusive", "inclusive"),
    "tier": ("none", "memory", "disk", *SHARED, "disk and store"),
    "tenants": ("none", "shares"),
    "retention": ("off", "on"),
    "hints": ("none", "drop", "return"),
    "adapters": ("none", "two"),
    "weights": ("the same", "updated", "reset", "slept"),
    "hand-over": ("off", "on"),
    "layout": ("plain", "in parts", "canonical"),
    "groups": ("one", "windows", "chunks", "states", "drafts"),
    "block factor": ("1", "2"),
    "events": ("off", "on"),
    "steps": ("one by one", "asynchronous"),
    "device cache": ("on", "off"),
    "store_threshold": ("none", "2"),
    "ranks": ("one", "pipeline", "tensor", "same KV"),
    "copies": ("work", "fail"),
    "aborts": ("none", "some"),
    "policy": ("auto", "lru", "arc"),
    "looks ahead": ("yes", "no"),
    "deadline": ("long", "short", "none"),
}


class Conflict(NamedTuple):
    """What no server has together: ``one`` value, and any of ``others``."""

    one: tuple[str, str]
    others: tuple[tuple[str, str], ...]
    effect: str
    """What happens instead, for users. Empty: the model engine has no such thing."""


CONFLICTS = (
    Conflict(
        ("contents", "exclusive"),
        (
            ("block factor", "2"),
            *(("groups", kind) for kind in FEATURES["groups"][1:]),
            ("layout", "in parts"),
            ("adapters", "two"),
            ("device cache", "off"),
        ),
        'contents are inclusive; `"host_contents": "exclusive"` is refused',
    ),
    Conflict(
        ("layout", "canonical"), (("groups", "states"),), "`canonical_layout` has no effect, and the log says why"
    ),
    Conflict(("groups", "states"), (("device cache", "off"),), "nothing is offloaded: refused at start"),
    Conflict(("retention", "on"), (("tenants", "none"),), "the answer says `retain_refused: no_quota`"),
    Conflict(("layout", "canonical"), tuple(("ranks", ranks) for ranks in FEATURES["ranks"][1:]), ""),
)
REFUSED = frozenset(frozenset((conflict.one, other)) for conflict in CONFLICTS for other in conflict.others)
WORDS = {
    ("contents", "exclusive"): "exclusive contents",
    ("block factor", "2"): "`block_size_factor` above 1",
    ("groups", "windows"): "sliding windows",
    ("groups", "chunks"): "chunked attention",
    ("groups", "states"): "recurrent layers",
    ("groups", "drafts"): "drafters",
    ("layout", "in parts"): "blocks in parts",
    ("layout", "canonical"): "`canonical_layout`",
    ("adapters", "two"): "adapters",
    ("device cache", "off"): "prefix caching off",
    ("retention", "on"): "retention",
    ("tenants", "none"): "no tenant with a `retain`",
}
"""Values in the words of docs/support.md."""
TENANTS = ("a", "b")
BLOCK = 2
DISK_BLOCKS = 160


def covering_array(seed: int = 0, tries: int = 40) -> list[Row]:
    """Returns rows such that every pair of values that is not refused is in one of them."""
    rng = Random(seed)
    missing = {
        frozenset(pair)
        for one, other in itertools.combinations(FEATURES, 2)
        for pair in itertools.product([(one, v) for v in FEATURES[one]], [(other, v) for v in FEATURES[other]])
    } - REFUSED
    rows = []
    while missing:
        best: Row = {}
        best_new: set[frozenset[tuple[str, str]]] = set()
        for _ in range(tries):
            row = dict(rng.choice(sorted(map(sorted, missing))))
            names = [name for name in FEATURES if name not in row]
            rng.shuffle(names)
            for name in names:
                able = [v for v in FEATURES[name] if not any(_pair(name, v, *item) in REFUSED for item in row.items())]
                if not able:
                    break
                gain = {v: sum(_pair(name, v, *item) in missing for item in row.items()) for v in able}
                row[name] = rng.choice([v for v in able if gain[v] == max(gain.values())])
            new = pairs_of(row) & missing
            if len(row) == len(FEATURES) and len(new) > len(best_new):
                best, best_new = row, new
        rows.append({name: best[name] for name in FEATURES})
        missing -= best_new
    return rows


BASES: tuple[Row, ...] = (
    {},
    {"tier": "store", "hand-over": "on"},
    {"tier": "disk", "tenants": "shares", "retention": "on"},
)
"""Servers whose promises need several features, beside the default: the first value of each feature."""


def beside_the_default(num_changes: int) -> list[Row]:
    """Returns the servers of BASES with every ``num_changes`` values that are others, and with what these need."""
    needs = {("contents", "exclusive"): "inclusive", ("tenants", "none"): "shares"}
    rows: dict[str, Row] = {}
    for base in BASES:
        default = {name: values[0] for name, values in FEATURES.items()} | base
        for names in itertools.combinations(FEATURES, num_changes):
            for values in itertools.product(*(FEATURES[name] for name in names)):
                row = default | dict(zip(names, values, strict=True))
                for pair in pairs_of(row) & REFUSED:
                    row |= {name: needs[name, value] for name, value in pair if (name, value) in needs}
                if not pairs_of(row) & REFUSED:
                    rows[str(row)] = row
    return list(rows.values())


def _pair(*names: str) -> frozenset[tuple[str, str]]:
    return frozenset(((names[0], names[1]), (names[2], names[3])))


def pairs_of(row: Row) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def scenario_of(row: Row, seed: int) -> Scenario:
    """Returns a scenario with the features of a row; ``seed`` chooses its sizes."""
    rng = Random(f"pairs {seed}")
    factor = int(row["block factor"])
    scenario = dataclasses.replace(
        Scenario.random_without_heads(seed),
        num_layers=2,
        block_size=BLOCK,
        block_size_factor=factor,
        groups=(),
        counts=(),
        num_scratch_blocks=0,
        document_tokens=rng.randint(12, 40),
        max_new_tokens=rng.choice((1, 6, 18)),
        num_requests=rng.randint(10, 20),
        options_rate=0.0,
        copy_failure_rate=0.3 if row["copies"] == "fail" else 0.0,
        prefix_caching=row["device cache"] == "on",
        async_scheduling=row["steps"] == "asynchronous",
        abort_chance=0.1 if row["aborts"] == "some" else 0.0,
        policy=row["policy"],
        store_threshold=None if row["store_threshold"] == "none" else 2,
        update_chance=0.06 if row["weights"] == "updated" else 0.0,
        reset_chance=0.04 if row["weights"] == "reset" else 0.0,
        sleep_chance=0.1 if row["weights"] == "slept" else 0.0,
        keeps_device_cache=row["weights"] == "updated" and rng.random() < 0.5,
        remote_decode_rate=0.5 if row["hand-over"] == "on" else 0.0,
        load_deadline_ms={"long": 1000.0, "short": 3.0, "none": 0.0}[row["deadline"]],
        drops_last_state=False,
        # What is promised waits for its tier in the host. The last blocks of a prompt are stored if there is room.
        num_host_blocks=400 if "on" in (row["hand-over"], row["retention"]) else rng.choice((8, 24, 400, 400)),
        documents_seed=seed,
    )
    other = {
        "windows": [KVGroup(BLOCK, factor, sliding_window=rng.choice((2, 5, 8)))],
        "chunks": [KVGroup(BLOCK, factor, attention_chunk=rng.choice((4, 6)))],
        "drafts": [KVGroup(BLOCK, factor, lookahead=rng.choice((1, 2)))],
    }.get(row["groups"], [])
    groups: tuple[KVGroup, ...] = (KVGroup(BLOCK, factor), *other)
    if row["groups"] == "states":
        groups = add_states(groups, rng)
        scenario = dataclasses.replace(scenario, max_question_tokens=rng.choice((0, 2)))
    # ``with_groups`` gives each group room.
    scenario = scenario.with_groups(groups, rng)
    if len(groups) == 1:
        scenario = dataclasses.replace(scenario, groups=())
    scenario = dataclasses.replace(
        scenario,
        options_rate=0.0,
        heads=None,
        num_ranks={"one": 1, "same KV": rng.choice((2, 3))}.get(row["ranks"], 2),
        tensor_parallel=row["ranks"] in ("tensor", "same KV"),
        replicas=6 if row["ranks"] == "same KV" else 1,
    )
    if row["layout"] == "in parts":
        counts = tuple(rng.choice((1, 2, 3)) for _ in groups)
        counts = counts if max(counts) > 1 else (2, *counts[1:])
        scenario = dataclasses.replace(scenario, counts=counts, num_host_blocks=scenario.num_host_blocks * sum(counts))
    while row["layout"] == "canonical" and scenario.heads is None:
        scenario = scenario.with_heads(rng)
    return dataclasses.replace(
        scenario, is_exclusive=row["contents"] == "exclusive", looks_ahead=row["looks ahead"] == "yes"
    )


class PairServer(SharingServer):
    """One server with the features of a row, and what it has promised to whom."""

    def __init__(self, row: Row, seed: int, medium: SharedMedium, disk: SimulatedStorage, clock: Clock) -> None:
        self.row = row
        scenario = scenario_of(row, seed)
        life = ServerLife(
            scenario=scenario,
            weights=0,
            pause_s=0.0,
            end="close",
            end_at=None,
            disk_blocks=DISK_BLOCKS if "disk" in row["tier"] else 0,
            lookup_deadline_ms=min(100.0, scenario.load_deadline_ms),
            load_only_if_faster=False,
            num_threads=2,
            max_queued=4096,
            write_share=0.5,
            full_steps=range(0),
        )
        super().__init__(0, life, medium, disk, clock, itertools.count(1), set())
        self._rng = Random(f"server {seed}")
        self.has_tiers = row["tier"] != "none"
        if row["tenants"] == "shares":
            self.tenants = _tenants(scenario.num_host_blocks, self._rng, row["retention"] == "on")
        if row["adapters"] == "two":
            self.adapters = ModelAdapters(2, seed)
        self.spec = {
            "enable_events": row["events"] == "on",
            "adapter_of": None if self.adapters is None else self.adapters.adapter_of,
        }
        self.counts: Counter[str] = Counter()
        self.disk: Tier | None = None
        self.requests: dict[str, EngineRequest] = {}
        self._in_host: set[OffloadKey] = set()
        """What host memory holds according to its events."""
        self._handed_over: set[OffloadKey] = set()
        self._retained: dict[int | None, Sequence[OffloadKey]] = {}
        """What was last promised to stay on disk for each session."""
        self._ended_at: list[tuple[int, list[str]]] = []
        self._computed: set[str] = set()
        """Blocks of the first group that requests have computed which ended a few steps ago, by tenant and key."""
        self._num_records = 0

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        if self.row["tier"] == "memory":
            return [MemoryTier(pools, 60, self.executor, self.clock)]
        if self.row["tier"] in ("disk", "none"):
            self.disk = self._open_disk(pools) if self.row["tier"] == "disk" else None
            return [] if self.disk is None else [self.disk]
        return super().make(pools)

    def open_disk(self, *arguments: Any, **settings: Any) -> DiskTier:
        if self.tenants is None:
            return super().open_disk(*arguments, **settings)
        tenants = self.tenants
        return super().open_disk(
            *arguments, **settings, shares=lambda num_blocks, _: tenants.shares("disk", num_blocks, 1)
        )

    def change(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            options: dict[str, Any] = {}
            if self.tenants is not None and (tenant := self._rng.choice((*TENANTS, None))):
                options["tenant"] = tenant
            if self.row["hints"] != "none" and self._rng.random() < 0.5:
                options |= {"session": self._rng.choice("xyz")}
                options |= {"drop": True} if self.row["hints"] == "drop" else {"expect_return_s": 0.05}
            if self.row["retention"] == "on" and self._rng.random() < 0.5:
                options |= {"session": self._rng.choice("xyz"), "retain_s": self._rng.choice((0, 0.01, 100.0, 100.0))}
            if options:
                request.kv_transfer_params = {**(request.kv_transfer_params or {}), PARAM: options}
            if self.adapters is not None:
                request.adapter = self._rng.randint(0, self.adapters.count)
                request.block_hashes.clear()
                request.append([])
            self.requests[request.request_id] = request

    def start(self, patch: Callable[[Any], None] | None = None) -> None:
        super().start(patch)
        engine, stores = self.engine, self.engine.scheduler.stores
        is_exclusive = engine.policy_manager.history is not None and stores.leaving is not None
        assert is_exclusive == (self.row["contents"] == "exclusive"), "the row says otherwise"
        engine.on_end = self._ended

        def watched(hand_over: Callable[[RequestState], Handover | None], state: RequestState) -> Handover | None:
            answer = hand_over(state)
            if answer is not None:
                keys = answer.keys(engine.scheduler.layout, state.blocks.keys)
                assert keys, "an answer that this server itself does not understand"
                self._handed_over.update(keys)
            return answer

        def watched_retain(
            retain: Callable[..., Retained], keys: Sequence[OffloadKey], req_context: ReqContext
        ) -> Retained:
            answer = retain(keys, req_context)
            hints = req_context.hints
            assert hints is not None
            in_time = answer.tier == "disk" and hints.retain_s is not None and hints.retain_s > 10
            self._retained[hints.session] = keys if in_time else ()
            return answer

        wrap(stores, "hand_over", watched)
        wrap(engine.scheduler.manager, "retain", watched_retain)

    def run(self, patch: Callable[[Any], None] | None = None) -> Counter[str]:
        """Serves all requests, and ends. Returns counts of what happened. Raises the error of a law that is broken."""
        self.start(patch)
        self._serve()
        for _ in range(200):
            # What was handed over is written without requests too, and what was expected is read.
            self.clock.now += 0.01
            self.drain_threads()
            self.engine.scheduler.manager.poll()
        self._serve()
        self._check_handed_over()
        self.finish()
        self._check_end()
        self.close()
        self.die()
        return self.counts

    def _serve(self) -> None:
        while self.engine.has_work:
            self.turn()
            self.medium.now = max(self.medium.now, self.clock.now)
            self.medium.tick()
            self.medium.check()
            self._take_events()
            self._take_records()

    def _ended(self, request: EngineRequest, answer: dict[str, Any] | None) -> None:
        record = next((r for r in self.engine.scheduler.records if r.req_id == request.request_id), None)
        if record is None:
            return
        assert record.retained_tokens <= request.num_computed_tokens, f"{record.retained_tokens} retained"
        assert (record.retained_tokens > 0) == (record.retained_in is not None)
        assert record.retained_tokens % self.engine.scheduler.layout.align == 0
        keys = [f"{record.tenant} {key}" for key in engine_keys(self.engine, request)]
        self._ended_at.append((self.engine.steps, keys))
        self.counts["retained requests"] += record.retained_in is not None
        self.counts["handed over"] += bool(answer and "handover" in answer.get(PARAM, {}))

    def _take_records(self) -> None:
        for record in itertools.islice(self.engine.scheduler.records, self._num_records, None):
            self._num_records += 1
            self._check_reason(record)
        while self._ended_at and self._ended_at[0][0] < self.engine.steps - 3:
            self._computed.update(self._ended_at.pop(0)[1])

    def _check_reason(self, record: RequestRecord) -> None:
        """Raises AssertionError if a block is called never stored that must have been."""
        row = self.row
        may_go = row["weights"] != "the same" or row["copies"] == "fail" or row["hints"] == "drop"
        # Records name blocks without the bytes of their adapters.
        may_go |= (
            row["adapters"] != "none" or self.engine.scenario.num_host_blocks < 400 or not self.engine.groups[0].is_full
        )
        if may_go or record.reason is not MissReason.NEVER_STORED:
            return
        self.counts["blocks never stored"] += 1
        assert f"{record.tenant} {record.missed_key}" not in self._computed, f"{record.missed_key} was computed"

    def _take_events(self) -> None:
        for event in self.engine.scheduler.take_events():
            self.counts["events"] += 1
            if event.tier is None:
                (self._in_host.difference_update if event.removed else self._in_host.update)(event.keys)
            if not event.removed and event.blocks is not None:
                _check_descriptions(event)

    def _check_handed_over(self) -> None:
        """Raises AssertionError if something that was handed over is nowhere to be found by another server."""
        tier = self.tier
        row = self.row
        spoils = row["weights"] != "the same" or row["copies"] == "fail" or row["adapters"] != "none"
        if tier is None or not self._handed_over or spoils or row["deadline"] == "none":
            return
        keys = sorted(self._handed_over)
        assert not tier.stats().num_evicted, "others have taken the room of what was handed over"
        for _ in range(100):
            states = tier.contains(keys)
            if not (states == LookupState.RETRY).any():
                break
            self.clock.now += 0.01
            self.drain_threads()
            tier.poll()
        absent = itertools.compress(keys, (states == LookupState.MISS).tolist())
        reasons = Counter(self.engine.scheduler.manager.explain_miss(key).reason for key in absent)
        assert not reasons, f"of {len(keys)} blocks that were handed over some are not in the tier: {dict(reasons)}"
        medium = next(name for name in SHARED if name in row["tier"])
        self.counts[f"blocks handed over by a {medium}"] += len(keys)

    def _check_end(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        metrics = scheduler.metrics.snapshot()
        self._take_events()
        if self.row["events"] == "on":
            table = engine.policy_manager.table
            held = set(table.loadable_keys(table.slots()))
            assert self._in_host == held, "events of host memory are not what it holds"
        s = engine.scenario
        if not s.groups and not s.counts:
            stored = metrics.get("store_blocks", 0) * s.block_size * s.block_size_factor
            assert sum(record.stored_tokens for record in scheduler.records) == stored, "records count something else"
        if self.tenants is not None:
            self._check_bills(metrics)
        self._check_retained()
        self.counts["loaded blocks"] += sum(engine.loaded_blocks)
        self.counts["stored blocks"] += int(metrics.get("store_blocks", 0))
        for name in ("weight_changes", "store_failures", "load_failures"):
            self.counts[name] += int(metrics.get(name, 0))

    def _check_retained(self) -> None:
        """Raises AssertionError if something is neither on disk, as promised, nor counted as lost."""
        keys = sorted({key for of_session in self._retained.values() for key in of_session})
        if not keys or self.row["weights"] != "the same":
            return
        disk = self.watches[0].tier if self.watches else self.disk
        assert disk is not None
        num_missing = int((disk.contains(keys) == LookupState.MISS).sum())
        num_lost = sum(use.num_retained_lost for use in disk.tenant_uses())
        assert num_missing <= num_lost, f"{num_missing} of {len(keys)} retained blocks are not on disk, {num_lost} lost"
        self.counts["blocks retained on disk"] += len(keys)

    def _check_bills(self, metrics: Mapping[str, float]) -> None:
        billed = sum(
            value for name, value in metrics.items() if name.startswith("tenant_moved_bytes") and ",host" in name
        )
        block_bytes = sum(pool.shape[1] for pool in self.engine.host_pools)
        moved = metrics.get("store_blocks", 0) + metrics.get("load_blocks", 0)
        assert billed == moved * block_bytes, f"{billed} bytes billed, {moved} blocks of {block_bytes} copied"


def engine_keys(engine: ModelEngine, request: EngineRequest) -> list[str]:
    """Returns the whole blocks that a request has computed in the first group, without its tenant, in hex."""
    size = engine.groups[0].block_tokens
    num_blocks = request.processed_tokens // size
    step = size // request.hash_block_size
    hashes = request.block_hashes[step - 1 : num_blocks * step : step]
    return [make_offload_key(block_hash, 0).hex() for block_hash in hashes]


def _check_descriptions(event: OffloadingEvent) -> None:
    for block in event.blocks or ():
        if block is not None:
            assert block.block_hash in block.request.block_hashes, "a block that its request does not have"
            assert 0 <= block.start < block.end <= block.request.num_tokens


def _tenants(num_blocks: int, rng: Random, retains: bool) -> Tenants:
    """Returns tenants with random shares of the host's blocks, and of the disk's, each of one byte."""
    configs = []
    for name in TENANTS:
        retain = {HOST: rng.randint(1, max(1, min(8, num_blocks // 8))), "disk": DISK_BLOCKS // 8} if retains else {}
        guaranteed = {tier: n + rng.randint(1, max(1, n)) for tier, n in retain.items()}
        quota = {HOST: rng.randint(max(num_blocks // 2, 1), num_blocks)}
        configs.append(TenantConfig(name, guaranteed, quota, retain))
    return Tenants(b"", configs)


def run_row(row: Row, seed: int, patch: Callable[[Any], None] | None = None) -> Counter[str]:
    """Runs servers with the features of ``row``, one after the other on the same medium."""
    kind = next((KIND[name] for name in SHARED if name in row["tier"]), "store")
    medium = MEDIA[kind](seed, True)  # type: ignore[call-arg]
    if isinstance(medium, SharedFolderMedium) and row["hand-over"] == "on":
        # All that is handed over has room until it is looked for.
        medium.num_blocks, medium.slab_blocks = 4000, 100
    disk, clock, counts = SimulatedStorage(0, seed), Clock(1000.0), Counter[str]()
    try:
        with quiet():
            for _ in range(2 if row["tier"] not in ("none", "memory") else 1):
                counts += PairServer(row, seed, medium, disk, clock).run(patch)
    except AssertionError as error:
        raise type(error)(f"seed {seed}, {row}: {error}") from error
    return counts + Counter({"simulations": 1})


def conflicts_in_words() -> str:
    """Returns the table of docs/support.md."""
    lines = ["| together | | what happens |", "|---|---|---|"]
    for one, others, effect in CONFLICTS:
        if effect:
            lines.append(f"| {WORDS[one]} | {', '.join(WORDS[other] for other in others)} | {effect} |")
    return "\n".join(lines)
