"""Python calls, index operations and keys probed on the scheduler's thread: stores, hits and idle steps.

Counts do not depend on the machine, so one run is enough. A call is that of a function of kvoffload; comprehensions and
generators are none, and neither is what stands for compiled code where that is missing. An index operation is a call of
a table of blocks, the host's or a tier's, that looks keys up; all keys given to these are the keys probed.

Every request has the same device blocks: with exclusive contents, what the request before had there leaves for them.
The jobs of the disk tiers are run between the steps, and are not counted. The operations are:

- store: a request is looked up, computes all of its blocks in one step and ends; the steps until all tiers have them
- host hit: lookup and load of blocks in host memory, with one step
- disk hit: the lookup of blocks that only tiers have, two steps in which they are read, the lookup that finds them, and
  the load, with one step
- idle step: ``build_connector_meta`` of a step with nothing to do; the same with ``update_connector_output``; both
  calls of a step without tokens
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import kvoffload
from kvoffload.abc import KVGroup, ScheduledStep
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.table import BlockTable
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.opening import named
from kvoffload.tiers.threads import Executor

SIZES = (4, 64, 512)
"""Blocks of a request."""
BLOCK_TOKENS = 16
SLOT_BYTES = 4096
SOURCE = str(Path(kvoffload.__file__).parent)
REFERENCE = str(Path(SOURCE, "native", "reference.py"))
LOOKUPS = ("chain", "find", "find_in_transfer", "get", "leading_ready", "split")
"""Methods of a table that look keys up. The keys are the last argument: one for ``get``."""
STEP, BOTH, NO_TOKENS = "idle step, one call", "idle step, both calls", "step without tokens"


@dataclass(frozen=True)
class Cell:
    """What a scheduler half is measured with."""

    num_blocks: int
    num_tiers: int = 1
    is_exclusive: bool = False


@dataclass(eq=False)
class BenchRequest:
    """A request with its own blocks, in the device blocks of every request."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS + 1

    @property
    def keys(self) -> list[bytes]:
        return [make_offload_key(block_hash, 0) for block_hash in self.block_hashes]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(range(1, len(self.block_hashes) + 2)),)


@dataclass
class Trace:
    """Counts calls of Python functions of kvoffload, and operations of the index, while it is entered."""

    calls: int = 0
    index_operations: int = 0
    keys_probed: int = 0
    files: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    by_function: dict[str, int] = field(default_factory=dict)
    receivers: list[str] = field(default_factory=list)
    """Classes of the objects that a lookup passes from the engine's call to the table, where there are most."""
    _is_inside: bool = False
    """Whether a method of a table is running: in plain Python they call each other."""

    def run(self, call: Callable[[], Any]) -> Any:
        before = {name: getattr(BlockTable, name) for name in LOOKUPS}
        for name, method in before.items():
            setattr(BlockTable, name, self._counted(method))
        sys.setprofile(self._note)
        try:
            return call()
        finally:
            sys.setprofile(None)
            for name, method in before.items():
                setattr(BlockTable, name, method)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_name == "<lambda>" or not (code.co_name.startswith("<") or code.co_flags & CO_GENERATOR)
        if event == "call" and is_function and code.co_filename.startswith(SOURCE) and code.co_filename != REFERENCE:
            self.calls += 1
            self.files.add(code.co_filename)
            owner, _, rest = code.co_qualname.partition(".")
            if rest and not owner.startswith("<"):
                self.classes.add(f"{code.co_filename}:{owner}")
            place = f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_qualname}"
            self.by_function[place] = self.by_function.get(place, 0) + 1

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(table: Any, *args: Any) -> Any:
            if self._is_inside:
                return method(table, *args)
            self.index_operations += 1
            self.keys_probed += 1 if isinstance(args[-1], bytes) else len(args[-1])
            self._note_receivers(table, sys._getframe(1))
            self._is_inside = True
            try:
                return method(table, *args)
            finally:
                self._is_inside = False

        return counted

    def _note_receivers(self, table: Any, frame: FrameType | None) -> None:
        objects, is_lookup = {id(table): type(table).__name__}, False
        while frame is not None:
            is_lookup |= frame.f_code.co_name == "get_num_new_matched_tokens"
            if frame.f_code.co_filename.startswith(SOURCE) and "self" in frame.f_locals:
                objects.setdefault(id(frame.f_locals["self"]), type(frame.f_locals["self"]).__name__)
            frame = frame.f_back
        if is_lookup and len(objects) > len(self.receivers):
            self.receivers = list(objects.values())[::-1]


class Clock:
    """Seconds that pass between steps, and a little whenever it is read."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Jobs(Executor):
    """Runs jobs when it is told to."""

    def __init__(self) -> None:
        self._queue = deque[Callable[[], None]]()

    def submit_maintenance(self, job: Callable[[], None]) -> bool:
        self._queue.append(job)
        return True

    submit_read = submit_write = submit_maintenance

    def run(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Nothing ends meanwhile."""

    def close(self, timeout_s: float) -> bool:
        self.run()
        return True


class Server:
    """A scheduler half in front of disk tiers. Its worker does every job at once."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        num_slots, misses = 16 * cell.num_blocks, MissMemory()
        self.clock, self.jobs = Clock(), Jobs()
        self.pool = HostPool(num_slots, SLOT_BYTES)
        host = PolicyOffloadingManager(
            HostBackend(BLOCK_TOKENS, num_slots),
            LRUPolicy(num_slots),
            must_store=True,
            misses=misses,
            clock=self.clock,
            device_blocks=cell.num_blocks + 1 if cell.is_exclusive else 0,
        )
        settings = DiskSettings("c" * 64, 16 << 20)
        tiers = [
            named(
                DiskTier(
                    DirectoryStorage(directory / f"tier-{n}"),
                    [self.pool.data],
                    settings,
                    executor=self.jobs,
                    clock=self.clock,
                ),
                f"disk-{n}",
            )
            for n in range(cell.num_tiers)
        ]
        self.manager = TieredOffloadingManager(host, tiers, TieringSettings([KVGroup(BLOCK_TOKENS)]), clock=self.clock)
        self.scheduler = OffloadingConnectorScheduler(
            self.manager,
            EngineSpec([KVGroup(BLOCK_TOKENS)]),
            misses=misses if cell.is_exclusive else None,
            clock=self.clock,
        )

    def ask(self, request: BenchRequest) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, 0)

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        tables: Mapping[str, tuple[Sequence[int], ...]] | None = None,
    ) -> None:
        meta = self.scheduler.build_connector_meta(
            ScheduledStep(scheduled or {}, tables or {}, frozenset(tables or ()))
        )
        self.scheduler.update_connector_output(WorkerReport(done=dict.fromkeys([*meta.stores, *meta.loads], 1)))

    def start(self, request: BenchRequest, num_loaded: int) -> None:
        self.scheduler.update_state_after_alloc(request, request, num_loaded)
        name = request.request_id
        self.step({name: request.num_tokens - num_loaded}, {name: request.get_block_ids()})

    def settle(self) -> None:
        self.clock.now += 0.02
        self.jobs.run()

    def end(self, request: BenchRequest, trace: Trace) -> None:
        """Ends the request, and steps until all tiers have its blocks."""
        request.num_computed_tokens = request.num_tokens
        trace.run(partial(self.scheduler.request_finished, request))
        while self.scheduler.has_pending_work() or self.manager.has_transfers:
            self.settle()
            trace.run(partial(self.step, {"other": 1}))

    def store(self, request: BenchRequest, trace: Trace) -> None:
        assert trace.run(partial(self.ask, request)) == (0, False)
        trace.run(partial(self.start, request, 0))
        self.end(request, trace)

    def host_hit(self, request: BenchRequest, trace: Trace) -> None:
        num_tokens = request.num_tokens - 1
        assert trace.run(partial(self.ask, request)) == (num_tokens, True)
        trace.run(partial(self.start, request, num_tokens))
        self.end(request, Trace())

    def disk_hit(self, request: BenchRequest, trace: Trace) -> None:
        self.manager.drop(request.keys, only_host=True)
        assert trace.run(partial(self.ask, request)) == (None, False)
        trace.run(partial(self.step, {"other": 1}))
        self.settle()
        trace.run(partial(self.step, {"other": 1}))
        self.host_hit(request, trace)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.pool.close()


def measure(directory: Path, cell: Cell) -> dict[str, Trace]:
    """Returns what the operations have cost, by name. Each is done before, so that all rates are known."""
    server = Server(directory, cell)
    hashes = [[os.urandom(32) for _ in range(cell.num_blocks)] for _ in range(3)]
    server.store(BenchRequest("first", hashes[0]), Trace())
    for name, before, new in zip(("warm", "measured"), hashes, hashes[1:], strict=False):
        traces = {each: Trace() for each in ("store", "host hit", "disk hit", STEP, BOTH, NO_TOKENS)}
        server.store(BenchRequest(f"{name} store", new), traces["store"])
        server.host_hit(BenchRequest(f"{name} host hit", before), traces["host hit"])
        server.disk_hit(BenchRequest(f"{name} disk hit", new), traces["disk hit"])
    nothing = ScheduledStep({"other": 1}, {})
    traces[STEP].run(lambda: server.scheduler.build_connector_meta(nothing))
    traces[BOTH].run(lambda: server.step({"other": 1}))
    traces[NO_TOKENS].run(server.step)
    assert not server.scheduler.off
    server.close()
    return traces


def main(out: Path, quick: bool) -> None:
    traces = dict[tuple[bool, int, int], dict[str, Trace]]()
    sizes = SIZES[:1] if quick else SIZES
    for is_exclusive in (False, True):
        for num_tiers in (1, 2):
            for num_blocks in sizes:
                with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as temporary:
                    cell = Cell(num_blocks, num_tiers, is_exclusive)
                    traces[is_exclusive, num_tiers, num_blocks] = measure(Path(temporary), cell)
    rows = []
    print(f"\nPython calls / index operations / keys probed {''.join(f'{n:>16} blocks' for n in sizes)}")
    for name in next(iter(traces.values())):
        for is_exclusive in (False, True):
            for num_tiers in (1, 2):
                contents, shown = "exclusive" if is_exclusive else "inclusive", ""
                for num_blocks in sizes:
                    trace = traces[is_exclusive, num_tiers, num_blocks][name]
                    rows.append(
                        {
                            "operation": name,
                            "contents": contents,
                            "tiers": num_tiers,
                            "blocks": num_blocks,
                            "calls": trace.calls,
                            "index_operations": trace.index_operations,
                            "keys_probed": trace.keys_probed,
                            "files": len(trace.files),
                            "classes": len(trace.classes),
                        }
                    )
                    shown += f"{f'{trace.calls} / {trace.index_operations} / {trace.keys_probed}':>23}"
                print(f"  {name:<22} {contents} {num_tiers} tier{'s' if num_tiers > 1 else ' '}   {shown}")
    hit = traces[False, 1, sizes[0]]["disk hit"]
    print(f"  a disk hit: {len(hit.files)} files, {len(hit.classes)} classes; receivers: {' > '.join(hit.receivers)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "calls.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
