"""The conformance suite of vLLM's secondary tiers, as a pytest class: what vLLM's ``SecondaryTierManager`` asks for,
then what kvoffload asks of every tier beside that: no wrong bytes, whatever happens to the medium, no blocks of others,
a budget, no wait without an end.

Subclasses give an entry of vLLM's option ``secondary_tiers``, of which the suite builds the tier with vLLM's own
configuration and factory. After every step it checks that jobs were reported once, that what was reported as loaded has
the right bytes, and that no other row has changed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.lazy import lazily

base = lazily("vllm.v1.kv_offload.base")
vllm_servers = lazily("demo.vllm_servers")
NUM_ROWS = 128
DEADLINE_S = 30.0
"""What has not happened by then counts as never."""
BLOCKED_S = 2.0
"""A call of the scheduler that takes longer has blocked, even on a machine that is busy with other things."""
SETTLE_S = 0.1
"""How long a test waits to see that nothing happens."""


class Fault(Enum):
    """What happens to the bytes on a medium."""

    FLIPPED = "one bit of every page has changed"
    TRUNCATED = "files end in the middle of their first page"
    REPLACED = "pages hold the bytes of others"


def chain(num_blocks: int, name: str = "chain") -> list[bytes]:
    """Returns the keys of a request's chunks, in order. Chains of other names have no key in common."""
    return [base.make_offload_key(hashlib.sha256(f"{name} {i}".encode()).digest(), 0) for i in range(num_blocks)]


def content(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns the bytes of the chunk ``key``."""
    return np.random.default_rng(list(key)).integers(0, 256, nbytes, dtype=np.uint8)


def spoil_files(folder: Path, fault: Fault, page_bytes: int = 4096) -> None:
    """Plants ``fault`` in all files below ``folder`` that have a whole page."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size >= page_bytes]
    for path in paths:
        size = path.stat().st_size // page_bytes * page_bytes
        if fault is Fault.TRUNCATED:
            os.truncate(path, page_bytes // 2)
            continue
        pages = np.fromfile(path, dtype=np.uint8, count=size).reshape(-1, page_bytes)
        if fault is Fault.FLIPPED:
            pages[:, page_bytes // 2] ^= 0x40
        elif len(pages) > 1:
            pages = np.roll(pages, 1, axis=0)
        else:
            other = paths[paths.index(path) - 1]
            pages = np.fromfile(other, dtype=np.uint8, count=page_bytes).reshape(-1, page_bytes)
        with path.open("r+b") as file:
            file.write(pages.tobytes())


def bytes_on_disk(folder: Path) -> int:
    """Returns the bytes that are allocated to the files below ``folder``."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


class Steps:
    """Drives one tier as vLLM's manager does, and checks its invariants after every step."""

    def __init__(self, make: Callable[[memoryview], Any], nbytes: int) -> None:
        self.memory = mmap.mmap(-1, NUM_ROWS * nbytes)
        # vLLM's rows are signed bytes.
        rows = np.frombuffer(self.memory, dtype=np.int8).reshape(NUM_ROWS, nbytes)
        rows[:] = 0x33
        self.rows: npt.NDArray[np.uint8] | None = rows.view(np.uint8)
        self.view = rows.data
        self.nbytes = nbytes
        self.shadow = self.rows.copy()
        """The bytes that rows must hold, except rows that are being loaded."""
        self.jobs: dict[int, Any] = {}
        """The jobs that the tier has not reported."""
        self.loaded: dict[int, set[bytes]] = {}
        """By load that was reported: the keys that have arrived."""
        self.ok: dict[int, bool] = {}
        """Whether a job that was reported has succeeded."""
        self.free = list(range(NUM_ROWS))
        self.slowest = 0.0
        """Seconds of the longest call that must not block."""
        self._ids = itertools.count()
        self.tier = make(self.view)

    # Requests.

    def request(self, keys: Sequence[bytes]) -> Any:
        """Begins a request whose chain is ``keys``."""
        context = base.ReqContext(f"request-{next(self._ids)}")
        vllm_servers.set_positions(context, keys)
        assert hasattr(self._timed(self.tier.on_new_request, context), "policy")
        return context

    def end(self, context: Any) -> None:
        self._timed(self.tier.on_request_finished, context)

    def look_up(self, context: Any, keys: Sequence[bytes]) -> list[Any]:
        """Looks ``keys`` up once."""
        results = [self._timed(self.tier.lookup, key, context) for key in keys]
        kinds = base.LookupResult
        assert set(results) <= {kinds.HIT, kinds.MISS, kinds.RETRY}
        return results

    def answers(self, context: Any, keys: Sequence[bytes], seconds: float | None = None) -> list[bool]:
        """Looks ``keys`` up, step by step, until the tier knows of each whether it has it."""
        deadline = time.monotonic() + (seconds or DEADLINE_S)
        while base.LookupResult.RETRY in (results := self.look_up(context, keys)):
            assert time.monotonic() < deadline, "a lookup said RETRY without an end"
            self.step()
            time.sleep(0.002)
        return [result is base.LookupResult.HIT for result in results]

    def find(self, keys: Sequence[bytes], whole: Sequence[bytes] | None = None) -> list[bytes]:
        """Returns the ``keys`` that a new request for the chain ``whole`` finds."""
        context = self.request(whole or keys)
        found = self.answers(context, keys)
        self.end(context)
        return [key for key, is_there in zip(keys, found, strict=True) if is_there]

    def await_found(self, keys: Sequence[bytes]) -> None:
        """Waits until all of ``keys``, a chain, are found."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.find(keys)) != list(keys):
            assert time.monotonic() < deadline, f"only {len(found)} of {len(keys)} chunks that were stored are found"
            time.sleep(0.02)

    def store_until_found(self, keys: Sequence[bytes]) -> None:
        """Stores ``keys``, a chain, again and again until they are found: a tier may drop stores for a while."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.store(keys)
            if len(found := self.find(keys)) == len(keys):
                return
            assert time.monotonic() < deadline, f"only {len(found)} of {len(keys)} chunks that were stored are found"
            time.sleep(0.1)

    # Jobs.

    def submit_store(self, context: Any, keys: Sequence[bytes]) -> int:
        return self._submit(context, keys, is_load=False)

    def submit_load(self, context: Any, keys: Sequence[bytes]) -> int:
        return self._submit(context, keys, is_load=True)

    def _submit(self, context: Any, keys: Sequence[bytes], is_load: bool) -> int:
        assert self.rows is not None
        taken, self.free = self.free[: len(keys)], self.free[len(keys) :]
        assert len(taken) == len(keys), "too few rows for this test"
        if not is_load:
            for row, key in zip(taken, keys, strict=True):
                self.rows[row] = self.shadow[row] = content(key, self.nbytes)
        job = lazily("vllm.v1.kv_offload.tiering.base").TransferJob(
            next(self._ids), list(keys), np.array(taken, np.int32), is_load, context
        )
        self.jobs[job.job_id] = job
        self._timed(self.tier.submit_load if is_load else self.tier.submit_store, job)
        return int(job.job_id)

    def store(self, keys: Sequence[bytes], size: int = 32) -> None:
        """Stores the chain ``keys`` and waits until the jobs have ended, for whatever reason."""
        context = self.request(keys)
        for i in range(0, len(keys), size):
            self.wait(self.submit_store(context, keys[i : i + size]))
        self.end(context)

    def load(self, keys: Sequence[bytes], whole: Sequence[bytes] | None = None) -> set[bytes]:
        """Loads ``keys`` for a new request of the chain ``whole``. Returns the keys that have arrived."""
        context = self.request(whole or keys)
        job = self.submit_load(context, keys)
        self.wait(job)
        self.end(context)
        return self.loaded[job]

    def wait(self, *jobs: int) -> None:
        """Steps until the tier has reported ``jobs``, or all."""
        deadline = time.monotonic() + DEADLINE_S
        while self.jobs.keys() & jobs if jobs else self.jobs:
            assert time.monotonic() < deadline, f"not reported: jobs {sorted(self.jobs)}"
            self.step()
            time.sleep(0.002)

    def step(self) -> None:
        """Makes the calls of a step of vLLM's manager, except lookups and new jobs."""
        for result in self._timed(lambda: list(self.tier.get_finished_jobs())):
            self._take(result)
        self._timed(self.tier.on_schedule_end, base.ScheduleEndContext((), ()))
        self._timed(self.tier.has_pending_work)
        self.check_rows()

    def _take(self, result: Any) -> None:
        assert self.rows is not None
        job = self.jobs.pop(result.job_id, None)
        assert job is not None, f"reported twice, or never submitted: {result}"
        rows = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        done = set(job.keys if result.success else result.successful_keys or ())
        assert done <= set(job.keys), "reported keys that are not the job's"
        assert result.transfer_time is None or result.transfer_time >= 0
        assert result.transfer_bytes is None or result.transfer_bytes >= 0
        self.ok[job.job_id] = result.success
        if job.is_promotion:
            self.loaded[job.job_id] = done
            for key in done:
                right = np.array_equal(self.rows[rows[key]], content(key, self.nbytes))
                assert right, "wrong bytes were reported as loaded"
        # From now on others use these rows: who still reads them reads this, and who writes is noticed.
        for row in rows.values():
            self.rows[row] = self.shadow[row] = 0x5A
            self.free.append(row)

    def check_rows(self) -> None:
        """Asserts that no row has changed, except rows that are being loaded."""
        assert self.rows is not None
        changed = np.flatnonzero((self.rows != self.shadow).any(axis=1)).tolist()
        being_loaded = {row for job in self.jobs.values() if job.is_promotion for row in job.chunk_ids.tolist()}
        assert set(changed) <= being_loaded, "rows have changed that no load under way is about"

    def watch(self) -> None:
        """Asserts that no row changes for a while."""
        assert self.rows is not None
        before = self.rows.copy()
        time.sleep(SETTLE_S)
        assert np.array_equal(before, self.rows), "rows were written after the tier said that it had ended"

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        self.slowest = max(self.slowest, time.perf_counter() - start)
        return result

    # The end.

    def close(self) -> None:
        """Shuts the tier down and frees the rows, which fails if anything still refers to them."""
        self.tier.shutdown()
        self.free_rows()

    def free_rows(self) -> None:
        """What vLLM's primary tier does after the others are down."""
        for handler in logging.getLogger().handlers:
            # pytest's. An exception that was logged refers to frames, and they to rows.
            getattr(handler, "records", []).clear()
        self.rows = None
        self.view.release()
        self.memory.close()


class SecondaryTierConformance:
    """The hooks, helpers that make tiers, and the tests."""

    bounded_s = 15.0
    """Seconds in which calls that may wait must end, whatever the medium does."""
    serves_after_drain = True
    """Whether blocks that are stored after ``drain_jobs`` are found. vLLM calls it when it resets its caches."""
    budget_bytes: int
    """The most bytes that the tier may have on its medium."""

    def entry(self, folder: Path) -> dict[str, Any]:
        """Returns the entry of ``secondary_tiers`` for a tier that keeps at most ``budget_bytes`` below ``folder``."""
        raise NotImplementedError

    def lose(self, folder: Path) -> None:
        """Makes the medium lose all blocks, as if somebody had deleted them."""
        raise NotImplementedError

    def hold(self, tier: Any) -> AbstractContextManager[None]:
        """Returns a context in which the medium of ``tier`` answers nothing."""
        raise NotImplementedError

    # Helpers.

    @pytest.fixture(autouse=True)
    def _tiers(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path
        self.opened: list[Steps] = []
        yield
        for steps in self.opened:
            with suppress(Exception):
                steps.tier.shutdown()

    def start(self, server: Any | None = None) -> Steps:
        """Starts ``server`` in a process of its own, as far as the tier can see."""
        server = server or vllm_servers.Server()
        models, entry = self.folder / "models", self.entry(self.medium)
        steps = Steps(
            lambda rows: vllm_servers.secondary_tier(server, models, entry, rows), vllm_servers.row_bytes(server)
        )
        self.opened.append(steps)
        return steps

    def start_with(self, keys: Sequence[bytes], server: Any | None = None) -> Steps:
        """Starts ``server`` and stores ``keys``, a chain."""
        steps = self.start(server)
        steps.store(keys)
        steps.await_found(keys)
        return steps

    def settle(self, steps: Steps) -> None:
        """Steps until the tier is idle. As long as it is not, an engine without requests spins."""
        deadline = time.monotonic() + DEADLINE_S
        while steps.tier.has_pending_work():
            assert time.monotonic() < deadline, "has_pending_work without an end"
            steps.step()
            time.sleep(0.002)

    def within(self, seconds: float, call: Callable[[], Any]) -> None:
        """Calls ``call``, which must return in time and not raise."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        assert not thread.is_alive(), f"{call} has not returned after {seconds:.0f} s"
        assert not raised, f"raised {raised[0]!r}"

    @property
    def medium(self) -> Path:
        """Where the tier keeps its blocks."""
        return self.folder / "tier"

    # What vLLM's ``SecondaryTierManager`` asks for.

    def test_a_new_tier_is_empty_and_idle(self) -> None:
        steps = self.start()
        assert steps.find(chain(4)) == []
        assert list(steps.tier.get_finished_jobs()) == []
        assert list(steps.tier.take_events()) == []
        assert steps.tier.block_size_bytes == steps.nbytes
        self.settle(steps)
        steps.close()

    def test_a_load_gives_what_was_stored_and_changes_nothing_else(self) -> None:
        keys = chain(12)
        steps = self.start_with(keys)
        assert steps.load(keys[::-1], keys) == set(keys)
        assert steps.load(keys[3:5], keys) == set(keys[3:5])
        # Each chunk is its own: others of the same chain are not loaded.
        assert steps.load(keys[:1], keys) == set(keys[:1])
        self.settle(steps)

    def test_what_is_not_there_is_not_reported_as_loaded(self) -> None:
        """vLLM looks up first, but chunks may go before it loads them."""
        keys, unknown = chain(4), chain(4, "unknown")
        steps = self.start_with(keys)
        assert steps.load(unknown) == set()
        assert steps.load(keys[:2] + unknown[:2], keys[:2] + unknown[:2]) <= set(keys)
        context = steps.request([])
        job = steps.submit_load(context, [b"a key of another form", b""])
        steps.wait(job)
        assert steps.loaded[job] == set()
        assert steps.answers(context, [b"a key of another form", unknown[0]]) == [False, False]
        steps.tier.touch(unknown, context)
        assert steps.load(keys) == set(keys)

    def test_every_job_is_reported_once(self) -> None:
        """Many at once, with the same keys, without keys, of requests that have ended, and stores beside loads of the
        same chunks. ``Steps`` checks what is reported."""
        keys, others = chain(8), [chain(4, f"other {i}") for i in range(6)]
        steps = self.start_with(keys)
        contexts = [steps.request(keys) for _ in range(3)]
        jobs = [steps.submit_store(contexts[0], []), steps.submit_load(contexts[0], [])]
        loads = [steps.submit_load(context, keys) for context in contexts]
        jobs += [steps.submit_store(context, keys) for context in contexts]
        for other in others:
            context = steps.request(other)
            jobs += [steps.submit_store(context, other[:2]), steps.submit_store(context, other[2:])]
            steps.end(context)
        for context in contexts:
            steps.end(context)
        steps.wait()
        assert steps.ok.keys() >= {*jobs, *loads}
        assert [steps.loaded[job] for job in loads] == [set(keys)] * 3
        time.sleep(SETTLE_S)
        steps.step()
        for other in others:
            steps.await_found(other)
            assert steps.load(other) == set(other)
        self.settle(steps)

    def test_a_lookup_ends_without_the_request_or_with_it(self) -> None:
        keys = chain(6)
        steps = self.start_with(keys)
        gone = steps.request(keys)
        steps.look_up(gone, keys)
        steps.end(gone)
        context = steps.request(keys + chain(3, "behind"))
        assert steps.answers(context, keys + chain(3, "behind")) == [True] * 6 + [False] * 3
        # A request may ask for the same chunk again, and for a promotion that is under way.
        job = steps.submit_load(context, keys)
        assert steps.answers(context, keys) == [True] * 6
        steps.wait(job)
        steps.end(context)
        self.settle(steps)

    def test_after_drain_no_row_is_touched_and_every_job_is_reported(self) -> None:
        keys, others = chain(24), [chain(8, f"other {i}") for i in range(4)]
        steps = self.start_with(keys)
        context = steps.request(keys)
        steps.look_up(context, keys)
        loads = [steps.submit_load(context, keys[i : i + 8]) for i in range(0, 24, 8)]
        stores = [steps.submit_store(steps.request(other), other) for other in others]
        self.within(self.bounded_s, steps.tier.drain_jobs)
        steps.watch()
        steps.step()
        assert not steps.jobs, "jobs were not reported after drain"
        assert steps.ok.keys() >= {*loads, *stores}
        steps.end(context)
        # vLLM goes on with the same tier.
        new = chain(4, "new")
        steps.store(new)
        if self.serves_after_drain:
            steps.await_found(new)
            assert steps.load(new) == set(new)
        self.within(self.bounded_s, steps.tier.drain_jobs)
        self.settle(steps)

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    def test_shutdown_releases_the_rows_threads_and_files(self, busy: bool) -> None:
        """vLLM unmaps the rows next: a reference that is left is a BufferError, or a write into other memory."""
        keys, others = chain(16), [chain(8, f"other {i}") for i in range(6)]
        self.start_with(keys).close()  # Some libraries keep a thread or file for good when they are used first.
        threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        steps = self.start()
        steps.store(keys)
        if busy:
            steps.submit_load(steps.request(keys), keys)
            for other in others:
                steps.submit_store(steps.request(other), other)
            steps.look_up(steps.request(keys), keys)
        self.within(self.bounded_s, steps.tier.shutdown)
        steps.watch()
        steps.free_rows()
        deadline = time.monotonic() + self.bounded_s
        while left := {thread.name for thread in set(threading.enumerate()) - threads}:
            assert time.monotonic() < deadline, f"threads are left: {left}"
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= files, "files are left open"

    def test_calls_of_the_scheduler_do_not_block(self) -> None:
        keys = chain(64)
        steps = self.start_with(keys)
        seconds = []
        for i in range(4):
            context = steps.request(keys + chain(64, f"unknown {i}"))
            for key in keys + chain(64, f"unknown {i}"):
                start = time.perf_counter()
                steps.look_up(context, [key])
                seconds.append(time.perf_counter() - start)
            steps.submit_load(context, keys[:16])
            steps.step()
        steps.wait()
        assert statistics.median(seconds) < 0.005
        assert steps.slowest < BLOCKED_S

    def test_metrics_were_declared(self) -> None:
        keys = chain(8)
        steps = self.start_with(keys)
        assert steps.load(keys) == set(keys)
        assert steps.load(chain(2, "unknown")) == set()
        entry = self.entry(self.medium)
        declared = type(steps.tier).build_metric_definitions(entry)
        vllms = lazily("vllm.v1.kv_offload.tiering.spec").TieringOffloadingSpec.build_metric_definitions(
            {"cpu_bytes_to_use": 1, "secondary_tiers": []}
        )
        assert not set(declared) & set(vllms), "names of vLLM's own metrics"
        counted = []
        for _ in range(2):
            stats = steps.tier.get_stats()
            data = {} if stats is None or stats.is_empty() else stats.data
            types, values = data.get("types", {}), data.get("data", {})
            assert set(values) <= set(declared), "metrics that were not declared make vLLM raise"
            for name, by_labels in values.items():
                assert type(declared[name]).__name__.lower() == f"offloading{types[name]}metadata"
                assert all(len(labels) == len(declared[name].labelnames) for labels in by_labels)
            counted.append(sum(sum(each.values()) for name, each in values.items() if types[name] == "counter"))
        assert counted[1] == 0 or counted[1] < counted[0], "get_stats gives counts of the last time again"
        # Nobody takes them where events are off.
        assert list(steps.tier.take_events()) == []

    @pytest.mark.parametrize("seed", range(3))
    def test_any_calls_in_any_order(self, seed: int) -> None:
        """``Steps`` checks rows, reports and bytes."""
        rng = Random(seed)
        steps = self.start()
        # Chains that share their heads, as prompts do.
        stem = chain(6)
        chains = [stem[: rng.randint(0, 6)] + chain(rng.randint(2, 8), f"tail {i}") for i in range(6)]
        live: list[tuple[Any, list[bytes], int]] = []
        for _ in range(120):
            action = rng.randrange(6)
            if action == 0 or not live:
                keys = rng.choice(chains)
                live.append((steps.request(keys), keys, 0))
                continue
            i = rng.randrange(len(live))
            context, keys, stored = live[i]
            part = keys[stored : stored + rng.randint(1, 4)]
            if action == 1 and len(part) <= len(steps.free):
                steps.submit_store(context, part)
                live[i] = (context, keys, stored + len(part))
            elif action == 2:
                found = [
                    k for k, r in zip(keys, steps.look_up(context, keys), strict=True) if r is base.LookupResult.HIT
                ]
                if len(found) <= len(steps.free):
                    steps.submit_load(context, found)
            elif action == 3:
                steps.tier.touch(keys, context)
            elif action == 4 and rng.random() < 0.4:
                steps.end(live.pop(i)[0])
            steps.step()
            time.sleep(rng.choice([0, 0, 0.001]))
        steps.wait()
        for context, keys, stored in live:
            steps.wait(steps.submit_store(context, keys[stored:]))
            steps.end(context)
        for _, keys, _ in live:
            steps.await_found(keys)
            assert steps.load(keys) == set(keys)
        steps.close()

    # What kvoffload asks of every tier beside vLLM's contract.

    def test_a_later_process_finds_what_was_stored(self) -> None:
        keys = chain(40)
        self.start_with(keys).close()
        steps = self.start()
        steps.await_found(keys)
        assert steps.load(keys) == set(keys)
        more = keys + chain(3, "more")
        context = steps.request(more)
        steps.wait(steps.submit_store(context, more[40:]))
        steps.await_found(more)

    @pytest.mark.parametrize("promised", [True, False], ids=["after lookup", "before start"])
    @pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
    def test_bytes_that_changed_on_the_medium_are_not_loaded(self, fault: Fault, promised: bool) -> None:
        """Requests do not look for ever for blocks that cannot be loaded."""
        keys = chain(16)
        steps = self.start_with(keys)
        self.settle(steps)
        # What is in memory does not count.
        steps.close()
        if promised:
            steps = self.start()
            context = steps.request(keys)
            assert steps.answers(context, keys) == [True] * len(keys)
        spoil_files(self.medium, fault)
        if not promised:
            steps = self.start()
            context = steps.request(keys)
        for _ in range(len(keys) + 1):
            found = [key for key, hit in zip(keys, steps.answers(context, keys), strict=True) if hit]
            job = steps.submit_load(context, found)
            steps.wait(job)
            if steps.loaded[job] == set(found):
                break
        else:
            pytest.fail("chunks are promised again and again that cannot be loaded")
        assert steps.loaded[job] != set(keys), "the fault did not reach the medium"
        steps.end(context)
        # Trouble ends by itself, and what is computed again is stored again: sooner or later.
        for stored in (chain(4, "new"), keys):
            for _ in range(len(stored) + 1):
                steps.store_until_found(stored)
                if (loaded := steps.load(stored)) == set(stored):
                    break
            assert loaded == set(stored)

    def test_what_the_medium_has_lost_is_a_miss(self) -> None:
        keys = chain(8)
        steps = self.start_with(keys)
        self.settle(steps)
        context = steps.request(keys)
        steps.answers(context, keys)
        self.lose(self.medium)
        job = steps.submit_load(context, keys)
        steps.wait(job)
        if not steps.loaded[job]:
            assert steps.answers(context, keys[:1]) == [False]
        steps.end(context)
        steps.close()
        later = self.start()
        assert later.load(later.find(keys), keys) <= set(keys)
        later.store_until_found(keys)
        assert later.load(keys) == set(keys)

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"model": "another", "weights": "other weights"}, id="another model"),
            pytest.param({"weights": "other weights"}, id="other weights under the same name"),
            pytest.param({"dtype": "bfloat16"}, id="another dtype"),
            pytest.param({"head_size": 64}, id="larger rows"),
            pytest.param({"hash_seed": "1"}, id="another seed of the hashes"),
        ],
    )
    def test_servers_that_compute_other_blocks_do_not_find_these(self, other: dict[str, Any]) -> None:
        keys = chain(6)
        self.start_with(keys).close()
        steps = self.start(vllm_servers.Server(**other))
        assert steps.find(keys) == []
        assert steps.load(keys) == set()

    def test_the_budget_holds(self) -> None:
        steps, size = self.start(), 32
        for i in range(2 * self.budget_bytes // (size * steps.nbytes)):
            keys = chain(size, f"chain {i}")
            context = steps.request(keys)
            job = steps.submit_store(context, keys)
            while job in steps.jobs:
                steps.step()
                time.sleep(0.001)
            steps.end(context)
            if i % 8 == 0:
                used = bytes_on_disk(self.medium)
                assert used <= self.budget_bytes, f"{used:,} bytes on the medium, {self.budget_bytes:,} are allowed"
        found = steps.find(keys)
        assert found, "nothing of the last chain is there"
        assert steps.load(found, keys) == set(found)
        assert bytes_on_disk(self.medium) <= self.budget_bytes

    def test_nothing_is_kept_that_no_request_can_reach(self) -> None:
        """vLLM looks chains up from their heads: chunks behind one that was never stored are out of reach."""
        keys = chain(8)
        steps = self.start()
        context = steps.request(keys)
        steps.wait(steps.submit_store(context, keys[4:]))
        steps.end(context)
        self.settle(steps)
        steps.close()
        assert self.start().find(keys) == []

    def test_lookups_end_while_the_medium_stands_still(self) -> None:
        """vLLM itself has no deadline for a tier that says RETRY: the request would wait for ever."""
        keys, unknown = chain(16), chain(4, "unknown")
        steps = self.start_with(keys)
        self.settle(steps)
        with self.hold(steps.tier):
            context = steps.request(keys)
            steps.submit_load(context, keys)
            steps.submit_store(steps.request(unknown), unknown)
            steps.answers(context, keys, self.bounded_s)
            steps.answers(steps.request(unknown), unknown, self.bounded_s)
            assert steps.slowest < BLOCKED_S
        steps.wait()

    def test_drain_and_shutdown_end_while_the_medium_stands_still(self) -> None:
        """vLLM calls them on the scheduler's thread, and the rows must be free afterwards."""
        keys, others = chain(16), [chain(8, f"other {i}") for i in range(3)]
        steps = self.start_with(keys)
        self.settle(steps)
        with self.hold(steps.tier):
            for again in range(2):
                steps.submit_load(steps.request(keys), keys)
                for other in others:
                    steps.submit_store(steps.request(other), other)
                assert steps.slowest < BLOCKED_S
                if not again:
                    self.within(self.bounded_s, steps.tier.drain_jobs)
                    steps.watch()
                    steps.step()
                    assert not steps.jobs
            self.within(self.bounded_s, steps.tier.shutdown)
            steps.watch()
            steps.free_rows()
