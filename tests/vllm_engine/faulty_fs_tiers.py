"""Tiers of vLLM's own offloading that break one rule each, for the conformance suite."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.fs import manager as fs


class ReportsTwice(fs.FileSystemTierManager):
    def get_finished_jobs(self) -> list[Any]:
        return 2 * list(super().get_finished_jobs())


class ReportsNothing(fs.FileSystemTierManager):
    def get_finished_jobs(self) -> list[Any]:
        list(super().get_finished_jobs())
        return []


class ReportsMissingAsLoaded(fs.FileSystemTierManager):
    def get_finished_jobs(self) -> list[Any]:
        return [replace(result, success=True) for result in super().get_finished_jobs()]


class NamesOtherKeys(fs.FileSystemTierManager):
    def get_finished_jobs(self) -> list[Any]:
        return [
            result if result.success else replace(result, successful_keys=(b"another key",))
            for result in super().get_finished_jobs()
        ]


class WritesOtherRows(fs.FileSystemTierManager):
    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        self._primary_kv_view.cast("B")[127 * self._block_size] = 1


class DoesNotDrain(fs.FileSystemTierManager):
    def drain_jobs(self) -> None:
        pass

    def submit_load(self, job_metadata: Any) -> None:
        time.sleep(0.02)
        threading.Timer(0.05, super().submit_load, [job_metadata]).start()


class KeepsAView(fs.FileSystemTierManager):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rows = self._primary_kv_view.cast("B")


class KeepsAThread(fs.FileSystemTierManager):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


class KeepsAFile(fs.FileSystemTierManager):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._log = Path("/dev/null").open("rb")  # noqa: SIM115


class Blocks(fs.FileSystemTierManager):
    def lookup(self, key: Any, req_context: Any) -> Any:
        time.sleep(0.006)
        return super().lookup(key, req_context)


class IsNeverIdle(fs.FileSystemTierManager):
    def has_pending_work(self) -> bool:
        return True


class NeverAnswers(fs.FileSystemTierManager):
    def lookup(self, key: Any, req_context: Any) -> Any:
        return LookupResult.RETRY


class CountsWhatItNeverDeclared(fs.FileSystemTierManager):
    def get_stats(self) -> Any:
        stats = OffloadingConnectorStats()
        stats.increase_counter("undeclared", 1)
        return stats
