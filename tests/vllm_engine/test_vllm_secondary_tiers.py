"""The conformance suite of secondary tiers: vLLM's own, in all installed versions, with what is known to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_versions import OVERLAYS, in_front
from vllm_harness import DEADLINE_S

from kvoffload.tiering import bridge_thread
from kvoffload.tiers.disk import directory
from kvoffload.tiers.disk import tier as disk
from tests.suites import secondary_tier_conformance
from tests.suites.secondary_tier_conformance import SecondaryTierConformance, chain

pytestmark = pytest.mark.vllm

BUDGET = 8 << 20


@pytest.mark.soak
class TestFs(SecondaryTierConformance):
    """vLLM's own. A test that does not fail any more fails here: take it from ``fails``, and from docs/peers.md."""

    fails = frozenset(
        {
            "bytes_that_changed_on_the_medium_are_not_loaded[flipped-after lookup]",
            "bytes_that_changed_on_the_medium_are_not_loaded[flipped-before start]",
            "bytes_that_changed_on_the_medium_are_not_loaded[replaced-after lookup]",
            "bytes_that_changed_on_the_medium_are_not_loaded[replaced-before start]",
            "servers_that_compute_other_blocks_do_not_find_these[other weights under the same name]",
            "servers_that_compute_other_blocks_do_not_find_these[larger rows]",
            "servers_that_compute_other_blocks_do_not_find_these[another seed of the hashes]",
            "the_budget_holds",
            "nothing_is_kept_that_no_request_can_reach",
            "lookups_end_while_the_medium_stands_still",
            "drain_and_shutdown_end_while_the_medium_stands_still",
        }
    )
    bounded_s = 2.0
    budget_bytes = BUDGET
    """It takes no limit. This is what another tier was given."""

    def entry(self, folder: Path) -> dict[str, Any]:
        return {"type": "fs", "root_dir": str(folder), "n_read_threads": 4, "n_write_threads": 4}

    def lose(self, folder: Path) -> None:
        for path in folder.rglob("*.bin"):
            path.unlink()

    @pytest.fixture(autouse=True)
    def _expect(self, request: pytest.FixtureRequest) -> None:
        if request.node.name.removeprefix("test_") in self.fails:
            raises = (AssertionError, pytest.fail.Exception)
            request.applymarker(pytest.mark.xfail(strict=True, raises=raises, reason="docs/peers.md"))

    def hold(self, tier: Any) -> AbstractContextManager[None]:
        return standing_still(
            "vllm.v1.kv_offload.tiering.fs.manager", "batch_load_block", "batch_store_block", "batch_lookup_C"
        )


@contextmanager
def standing_still(owner: str, *names: str) -> Iterator[None]:
    """Makes the functions ``names`` of a module or class wait, and fail in the end."""
    released = threading.Event()

    def stand_still(*arguments: Any) -> None:
        released.wait()
        raise OSError("the file system has stood still")

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(f"{owner}.{name}", stand_still)
        try:
            yield
        finally:
            released.set()


@pytest.mark.parametrize(
    ("faulty", "found_by"),
    [
        ("ReportsTwice", "test_every_job_is_reported_once"),
        ("ReportsNothing", "test_every_job_is_reported_once"),
        ("ReportsMissingAsLoaded", "test_what_is_not_there_is_not_reported_as_loaded"),
        ("NamesOtherKeys", "test_what_is_not_there_is_not_reported_as_loaded"),
        ("WritesOtherRows", "test_a_load_gives_what_was_stored_and_changes_nothing_else"),
        ("DoesNotDrain", "test_after_drain_no_row_is_touched_and_every_job_is_reported"),
        ("KeepsAView", "test_shutdown_releases_the_rows_threads_and_files"),
        ("KeepsAThread", "test_shutdown_releases_the_rows_threads_and_files"),
        ("KeepsAFile", "test_shutdown_releases_the_rows_threads_and_files"),
        ("Blocks", "test_calls_of_the_scheduler_do_not_block"),
        ("IsNeverIdle", "test_a_new_tier_is_empty_and_idle"),
        ("NeverAnswers", "test_a_new_tier_is_empty_and_idle"),
        ("CountsWhatItNeverDeclared", "test_metrics_were_declared"),
    ],
)
def test_the_suite_finds_faults(faulty: str, found_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secondary_tier_conformance, "DEADLINE_S", 0.5)

    class Suite(TestFs):
        bounded_s = 0.5

        def entry(self, folder: Path) -> dict[str, Any]:
            return super().entry(folder) | {"type": faulty, "module_path": "faulty_fs_tiers"}

    suite = Suite()
    suite.folder, suite.opened = tmp_path, []
    arguments = [False] if "shutdown" in found_by else []
    with pytest.raises((AssertionError, BufferError, pytest.fail.Exception)):
        getattr(suite, found_by)(*arguments)
    for steps in suite.opened:
        steps.tier.shutdown()


class TestDisk(SecondaryTierConformance):
    """Ours, over the disk tier."""

    budget_bytes = 32 << 20

    @pytest.fixture(autouse=True)
    def _short_deadlines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are waited for only where the disk stands still."""
        monkeypatch.setattr(disk, "CLOSE_DEADLINE_S", 0.5)
        monkeypatch.setattr(disk, "FINISH_DEADLINE_S", 0.2)
        monkeypatch.setattr(bridge_thread, "FLUSH_DEADLINE_S", 0.2)

    def entry(self, folder: Path) -> dict[str, Any]:
        tier = {"kind": "disk", "dir": str(folder), "bytes": self.budget_bytes}
        # A slow machine reads late. No test waits for the end of the deadline.
        options = {"tier": tier, "load_deadline_ms": 1000 * DEADLINE_S}
        return {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", **options}

    def lose(self, folder: Path) -> None:
        for path in folder.rglob("slab-*"):
            path.unlink()

    def hold(self, tier: Any) -> AbstractContextManager[None]:
        return standing_still(f"{directory.__name__}._DirectoryFile", "read", "write")

    def test_a_tier_that_is_off_answers_and_says_so(self) -> None:
        keys = chain(8)
        steps = self.start_with(keys)
        load = steps.submit_load(steps.request(keys), keys)
        steps.tier.switch_off("a test")
        assert steps.find(keys) == []
        store = steps.submit_store(steps.request(keys), keys)
        steps.wait(load, store)
        assert not steps.ok[store]
        assert steps.tier.get_stats().data["data"]["kvoffload:off"] == {(): 1.0}
        steps.close()

    def test_a_check_that_fails_in_the_bridge_shows_in_the_metrics(self) -> None:
        steps = self.start()
        steps.tier.bridge._thread.ask(lambda: 1 // 0, None)  # as a bug in a call
        assert steps.tier.get_stats().data["data"]["kvoffload:off"] == {(): 1.0}
        steps.close()

    def test_a_request_that_began_before_a_reset_stores_nothing(self) -> None:
        """Its device blocks may have been computed with other weights."""
        keys = chain(8)
        steps = self.start()
        before = steps.request(keys)
        steps.tier.drain_jobs()
        job = steps.submit_store(before, keys)
        steps.wait(job)
        assert not steps.ok[job]
        steps.end(before)
        self.settle(steps)
        assert steps.find(keys) == []
        after = steps.request(keys)
        steps.wait(steps.submit_store(after, keys))
        steps.end(after)
        self.settle(steps)
        assert steps.find(keys) == (keys if self.serves_after_drain else [])
        steps.close()

    def test_an_idle_step_does_not_ask_the_bridge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its lock may be held by the thread that copies."""
        steps = self.start_with(chain(8))
        self.settle(steps)
        steps.tier.get_stats()
        asked: list[str] = []
        for name in ("take_counts", "take_events", "finished", "lookup", "explain"):
            monkeypatch.setattr(steps.tier.bridge, name, lambda *arguments, name=name: asked.append(name))
        monkeypatch.setattr("kvoffload.vllm.secondary_tier.time", SimpleNamespace(monotonic=lambda: 0.0))
        for _ in range(3):
            steps.step()
            assert list(steps.tier.take_events()) == []
            assert steps.tier.get_stats() is None
        assert asked == []

    def test_the_last_request_before_a_pause_is_counted_with_its_step(self) -> None:
        """vLLM asks for statistics in steps only, and takes none while there is no request."""
        keys = chain(4)
        steps = self.start()
        context = steps.request(keys)
        assert not any(steps.answers(context, keys))
        steps.tier.get_stats()
        steps.tier.on_schedule_end(secondary_tier_conformance.base.ScheduleEndContext((context.req_id,), ()))
        counts = steps.tier.get_stats().data["data"]
        assert counts["kvoffload:misses"] == {("never_stored",): 1}
        steps.end(context)
        steps.close()


@pytest.mark.soak
@pytest.mark.parametrize("version", OVERLAYS)
def test_another_version_of_vllm(version: str) -> None:
    """Ours passes, and vLLM's own fail the same tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"PYTHONPATH": in_front(version), "KVOFFLOAD_TEST_SCALE": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert child.returncode == 0, child.stdout


@pytest.mark.soak
class TestSharedDir(TestDisk):
    """Ours, over a shared directory."""

    serves_after_drain = False
    """The weights may have changed, and other servers use these blocks."""

    def entry(self, folder: Path) -> dict[str, Any]:
        entry = super().entry(folder)
        entry["tier"]["kind"] = "shared_dir"
        return entry
