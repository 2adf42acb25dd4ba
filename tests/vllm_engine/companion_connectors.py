"""Connectors that stand beside others in a MultiConnector and misbehave on purpose."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from kvoffload.vllm.connector import KVOffloadConnector, KVOffloadMetadata, scheduled_step

BROKEN_VALUE = 7.0
"""What a broken load leaves in its blocks."""


class BrokenExampleConnector(ExampleConnector):  # type: ignore[misc]
    """When it ``is_broken``, about half of its loads leave wrong bytes behind some block, and report that."""

    is_broken = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = Random(0)
        self._errors: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for request in self._get_connector_metadata().requests:
            blocks = (request.slot_mapping[:: self._block_size] // self._block_size).tolist()
            if request.is_store or not self.is_broken or self._random.random() < 0.5:
                continue
            broken = blocks[self._random.randrange(len(blocks)) :]
            for layer in forward_context.no_compile_layers.values():
                if (cache := getattr(layer, "kv_cache", None)) is not None:
                    cache[broken] = BROKEN_VALUE
            self._errors.update(broken)

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors


class TrustingKVOffloadConnector(KVOffloadConnector):
    """Does not hear of failed loads of others, so what was computed with them is stored. Outputs must change."""

    def update_connector_output(self, connector_output: Any) -> None:
        failed, connector_output.invalid_block_ids = connector_output.invalid_block_ids, set()
        super().update_connector_output(connector_output)
        connector_output.invalid_block_ids = failed


class EarlyKVOffloadConnector(KVOffloadConnector):
    """Stores the blocks of requests that wait for the load of another connector as if they had arrived (vLLM #35092).
    Outputs must change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[str, tuple[list[int], ...]] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens == 0:
            self._waiting[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> KVOffloadMetadata:
        step = scheduled_step(scheduler_output, False, self._fences_first)
        waiting = {name: ids for name, ids in self._waiting.items() if name not in step.num_scheduled_tokens}
        self._waiting.clear()
        step = replace(
            step,
            num_scheduled_tokens={**step.num_scheduled_tokens, **dict.fromkeys(waiting, 1)},
            block_ids={**step.block_ids, **waiting},
            replaced=step.replaced | waiting.keys(),
        )
        return KVOffloadMetadata(self.connector_scheduler.build_connector_meta(step))


for connector in (TrustingKVOffloadConnector, EarlyKVOffloadConnector):
    # Without a name vLLM could not show metrics.
    KVConnectorFactory.register_connector(connector.__name__, __name__, connector.__name__)
