"""The entry point for vLLM's plugins: registers ``KVOffloadConnector`` under its name."""

from __future__ import annotations

import contextlib


def register() -> None:
    """Registers the connector. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM refuses a name that is already registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("KVOffloadConnector", "kvoffload.vllm.connector", "KVOffloadConnector")
