"""The vLLM adapter. vLLM finds it as ``"kv_connector": "KVOffloadConnector"``."""

from kvoffload.vllm.connector import KVOffloadConnector

__all__ = ["KVOffloadConnector"]
