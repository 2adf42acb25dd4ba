"""Python calls, index operations, files and classes on the way of a disk hit, and calls of an idle step.

Counts do not depend on the machine, so one run is enough. The request asks for BLOCKS blocks, all of them on disk and
none in host memory. Its way has three parts: the lookup, which finds that a tier has them; the steps in which they are
read; and the lookup that finds them in host memory, with the load. Waiting for the disk is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import kvoffload
from benchmarks.report import Row, publish
from kvoffload.abc import KVGroup, ScheduledStep
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.table import BlockTable
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.start import open_disk_tier

BLOCKS = 64
BLOCK_TOKENS = 16
SOURCE = str(Path(kvoffload.__file__).parent)
LOOKUPS = ("find", "find_in_transfer", "leading_ready", "split")
"""Methods of the table that look every key up in the index."""


@dataclass(eq=False)
class BenchRequest:
    """A request with its own device blocks."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS + 1

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(range(1, len(self.block_hashes) + 2)),)


@dataclass
class Trace:
    """Counts calls of Python functions of kvoffload, and operations of the index, while it is entered."""

    num_calls: int = 0
    num_index_ops: int = 0
    files: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    by_function: dict[str, int] = field(default_factory=dict)
    receivers: list[str] = field(default_factory=list)
    """Classes of the objects that a lookup passes from the engine's call to the table, where there are most."""

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
        if event == "call" and code.co_filename.startswith(SOURCE):
            self.num_calls += 1
            self.files.add(code.co_filename)
            owner, _, rest = code.co_qualname.partition(".")
            if rest and not owner.startswith("<"):
                self.classes.add(f"{code.co_filename}:{owner}")
            place = f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_qualname}"
            self.by_function[place] = self.by_function.get(place, 0) + 1

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(table: Any, *args: Any) -> Any:
            self.num_index_ops += 1
            objects = {id(table): type(table).__name__}
            frame: FrameType | None = sys._getframe(1)
            is_lookup = False
            while frame is not None:
                is_lookup |= frame.f_code.co_name == "get_num_new_matched_tokens"
                if frame.f_code.co_filename.startswith(SOURCE) and "self" in frame.f_locals:
                    objects.setdefault(id(frame.f_locals["self"]), type(frame.f_locals["self"]).__name__)
                frame = frame.f_back
            if is_lookup and len(objects) > len(self.receivers):
                self.receivers = list(objects.values())[::-1]
            return method(table, *args)

        return counted


class Server:
    """A scheduler half in front of a disk tier. Its worker does every job at once."""

    def __init__(self, directory: Path) -> None:
        self.pool = HostPool(4 * BLOCKS, 4096)
        self.host = LRUOffloadingManager(HostBackend(BLOCK_TOKENS, 4 * BLOCKS))
        self.tier = open_disk_tier(str(directory), 64 << 20, TierContext([self.pool.data], "c" * 64))
        self.manager = TieredOffloadingManager(self.host, [self.tier], TieringSettings([BLOCK_TOKENS]))
        self.scheduler = OffloadingConnectorScheduler(self.manager, EngineSpec([KVGroup(BLOCK_TOKENS)]))

    def ask(self, request: BenchRequest) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, 0)

    def step(
        self, scheduled: Mapping[str, int] | None = None, tables: Mapping[str, tuple[Sequence[int], ...]] | None = None
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
        """Waits until the disk has ended everything, without polling it."""
        while self.tier.has_jobs:
            self.tier.wait(0.05)
            if self.tier._io.has_done:
                break

    def finish(self, request: BenchRequest) -> None:
        request.num_computed_tokens = request.num_tokens
        self.scheduler.request_finished(request)
        while self.scheduler.has_pending_work() or self.manager.has_transfers:
            self.step()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.pool.close()


def measure(directory: Path) -> dict[str, Trace]:
    server = Server(directory)
    hashes = [os.urandom(32) for _ in range(BLOCKS)]
    first = BenchRequest("first", hashes)
    server.ask(first)
    server.start(first, 0)
    server.finish(first)
    traces = {name: Trace() for name in ("disk hit", "idle step", "both calls", "without tokens")}
    for name in ("warm", "hit"):
        server.manager.drop([make_offload_key(each, 0) for each in hashes], only_host=True)
        request = BenchRequest(name, hashes)
        trace = traces["disk hit"] if name == "hit" else Trace()
        assert trace.run(partial(server.ask, request)) == (None, False)
        trace.run(lambda: server.step({"other": 1}))
        server.settle()
        trace.run(lambda: server.step({"other": 1}))
        found, _ = trace.run(partial(server.ask, request))
        assert found == BLOCKS * BLOCK_TOKENS, found
        trace.run(partial(server.start, request, BLOCKS * BLOCK_TOKENS))
        server.finish(request)
    nothing = ScheduledStep({"other": 1}, {})
    traces["idle step"].run(lambda: server.scheduler.build_connector_meta(nothing))
    traces["both calls"].run(lambda: server.step({"other": 1}))
    traces["without tokens"].run(server.step)
    assert not server.scheduler.off
    server.close()
    return traces


def main(out: Path, quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as temporary:
        traces = measure(Path(temporary))
    hit, idle = traces["disk hit"], traces["idle step"]
    rows = [
        Row(f"disk hit of {BLOCKS} blocks, three steps", hit.num_calls, "calls"),
        Row("idle step with a disk tier, build_connector_meta", idle.num_calls, "calls"),
        Row("the same with update_connector_output", traces["both calls"].num_calls, "calls"),
        Row("idle step of an engine without tokens, both calls", traces["without tokens"].num_calls, "calls"),
        Row("disk hit", hit.num_index_ops, "index operations"),
        Row("lookup, between the engine's call and the table", len(hit.receivers) - 1, "receivers"),
        Row("disk hit", len(hit.files), "files"),
        Row("disk hit", len(hit.classes), "classes"),
    ]
    publish("calls", "Python calls on the scheduler's thread", rows, out)
    if not quick:
        print(f"  receivers: {' > '.join(hit.receivers)}")
        print("\n".join(f"  {n:4} {place}" for place, n in sorted(hit.by_function.items(), key=lambda each: -each[1])))
