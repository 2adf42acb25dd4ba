"""kvoffload in vLLM: name this package as ``kv_connector_module_path``, ``KVOffloadConnector`` as connector."""

from kvoffload.vllm.connector import KVOffloadConnector

__all__ = ["KVOffloadConnector"]
