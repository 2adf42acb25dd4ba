"""The storage backend of SGLang's HiCache. SGLang loads it by ``"module_path": "kvoffload.sglang"``."""

from kvoffload.sglang.storage import KVOffloadStorage

__all__ = ["KVOffloadStorage"]
