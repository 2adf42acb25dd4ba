"""vLLM's plugin entry point: makes ``KVOffloadConnector`` known by its name alone."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVOffloadConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVOffloadConnector", "kvoffload.vllm.connector", "KVOffloadConnector")
