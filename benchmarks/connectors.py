"""Connectors for ``benchmarks.ttft``, which on a CPU copy on a thread, as a GPU copies beside its computations, and
for ``benchmarks.engine``, one that does nothing for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvoffload.vllm.connector import KVOffloadConnector
from tests.sim.faults import ThreadedTransfer


class SpinningTransfer(ThreadedTransfer):
    def wait_any(self, timeout_s: float) -> None:
        """Returns at once."""


class ThreadedKVOffloadConnector(KVOffloadConnector):
    """Copies on a thread beside the engine's thread."""

    transfer_class = ThreadedTransfer

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.connector_worker.transfer = self.transfer_class(self.connector_worker.transfer)


class SpinningKVOffloadConnector(ThreadedKVOffloadConnector):
    """Does the same without waiting in idle steps, so that these compete with the thread."""

    transfer_class = SpinningTransfer


class NothingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads nothing. It burns ``burn_ns`` of CPU time in each step, by default none."""

    burn_ns = 0

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return KVOffloadConnector.get_required_kvcache_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.burn_ns:
            end = time.thread_time_ns() + self.burn_ns
            while time.thread_time_ns() < end:
                pass
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


SCHEDULER_HALF = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
)
WORKER_HALF = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "build_connector_worker_meta",
)
METRICS = ("get_kv_connector_stats",)


class SwitchedConnector(KVOffloadConnector):
    """KVOffloadConnector, or NothingConnector while it is switched off. In both cases a call costs the same."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.nothing = NothingConnector(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # Otherwise the first use of each device block would take page faults.
        for pages in kv_caches.values():
            pages.fill_(0)
        super().register_kv_caches(kv_caches)

    def switch(
        self, is_on: bool, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda name, method: method
    ) -> None:
        """From now on ``is_on`` decides which of both does the work, with ``wrap`` around each method of it."""
        served = super() if is_on else self.nothing
        for name in (*SCHEDULER_HALF, *WORKER_HALF, *METRICS):
            setattr(self, name, wrap(name, getattr(served, name)))
