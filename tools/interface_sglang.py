"""Checks from source alone that a version of SGLang has what its adapter uses: ``python tools/interface_sglang.py
sglang==0.5.23``. Works as ``tools/interface.py`` does for vLLM; the tables below hold what cannot be derived."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from interface import ROOT, Check, Class, Source, constant, report, reviewed_of

ADAPTER = ROOT / "src" / "kvoffload" / "sglang"
POOLS = "sglang.srt.mem_cache.pool_host"
HOST_POOLS = {
    f"{POOLS}.mha:MHATokenToKVPoolHost": ("get_hybrid_pool_buffer", "head_num", "head_dim"),
    f"{POOLS}.mla:MLATokenToKVPoolHost": ("kv_cache_dim",),
    f"{POOLS}.mamba:MambaPoolHost": ("get_hybrid_pool_buffer",),
    f"{POOLS}.dsa:DSAIndexerPoolHost": ("get_hybrid_pool_buffer",),
    "sglang.srt.mem_cache.memory_pool_host:DeepSeekV4PagedHostPool": (),
}
"""Classes of host pools, and what only some of them have."""
OF_EVERY_POOL = (
    "dtype",
    "get_data_page",
    "get_dummy_flat_data_page",
    "get_page_buffer_meta",
    "kv_buffer",
    "layout",
    "page_size",
    "set_from_flat_data_page",
    "size_per_token",
    "start_layer",
    "end_layer",
)
OTHERS = {
    f"{POOLS}.base:HostKVCache": ("clear", "logical_page_size", "mem_state", "storage_format_tag"),
    "sglang.srt.runtime_context:RuntimeContext": ("is_config_namespace_published",),
    "sglang.srt.observability.metrics_collector:StorageMetrics": (
        "prefetch_pgs",
        "prefetch_bandwidth",
        "backup_pgs",
        "backup_bandwidth",
    ),
}
"""Attributes that the adapter reads of objects whose class its annotations do not name."""
ARGUMENTS = (
    "model_path",
    "revision",
    "download_dir",
    "enable_lora",
    "dp_size",
    "nnodes",
    "weight_version",
    "hicache_storage_backend",
)
"""Arguments of SGLang that the adapter reads, besides those of ``fingerprint.py``."""
PARALLEL = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank")
DYNAMIC = {"ParallelContext", "_ConfigBag"}
"""Classes that look attributes up when they are read. PARALLEL and ARGUMENTS name those that the adapter reads."""
CONTROLLER = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
TREE = "sglang.srt.mem_cache.unified_radix_cache"
TEXTS = {
    "ServerArgs.resolved_dict": ("sglang.srt.server_args", "def resolved_dict(self) -> dict[str, Any]:"),
    "how a backend is made": (
        "sglang.srt.mem_cache.storage.backend_factory",
        "return backend_class(storage_config, kwargs)",
    ),
    "interface_v1": (CONTROLLER, 'bool(self.storage_config.extra_config.get("interface_v1", 0))'),
    "the pool of the KV comes first": (CONTROLLER, "self.storage_backend.register_mem_pool_host("),
    "then all others": (HYBRID, "self.storage_backend.register_mem_host_pool_v2(entry.host_pool, entry.name)"),
    "then it is said that these are all": (HYBRID, "self.storage_backend.on_host_pools_registered()"),
    "states are stored before KV": (HYBRID, "self.storage_backend.batch_set_v2(transfers, extra_info=extra_info)"),
    "chains go on batch by batch": (CONTROLLER, "prefix_keys = prefix_keys + batch_hashes"),
    "the setting for chains": (HYBRID, '"hicache_storage_pass_prefix_keys", False'),
    "a backend is closed": (CONTROLLER, "self.storage_backend.close()"),
    "a flush clears the host pools": (TREE, "self.cache_controller.mem_pool_host.clear()"),
    "one rank stores replicated KV": (CONTROLLER, "return not self.storage_config.is_storage_writer"),
    "pages outside batch calls": (CONTROLLER, "self.storage_backend.batch_exists(batch_hashes, extra_info)"),
}
"""What SGLang does with a backend, which no name says: a module and a part of its text."""
SETTINGS = "sglang.srt.arg_groups.fields"


class SGLangCheck(Check):
    """Compares the adapter of SGLang with ``source``."""

    def __init__(self, source: Source, version: str) -> None:
        super().__init__(source, version, ADAPTER, reviewed_of("sglang"))

    def has(self, owner: object, name: str) -> bool:
        return super().has(owner, name) or (isinstance(owner, Class) and owner.node.name in DYNAMIC)

    def tables(self) -> None:
        where = Path(__file__).name
        for path, names in HOST_POOLS.items():
            for name in (*OF_EVERY_POOL, *names):
                self.expect(path, name, where)
        for path, names in OTHERS.items():
            for name in names:
                self.expect(path, name, where)
        for name in PARALLEL:
            module = self.source.module("sglang.srt.runtime_context")
            there = module is not None and re.search(rf'"{name}"|\b{name}:', module.text) is not None
            self.add("attribute", f"get_parallel().{name}", where, None if there else "no such attribute", "")
        for name, (path, text) in TEXTS.items():
            module = self.source.module(path)
            there = module is not None and text in module.text
            self.add("text", name, where, None if there else f"not written in {path}: {text}", "")
        tree = ast.parse((ADAPTER / "fingerprint.py").read_text())
        known = self._arguments()
        for name in (*ARGUMENTS, *constant(tree, "SETTINGS"), *constant(tree, "FILES")):
            self.add("argument", name, "fingerprint.py", None if name in known else "no such argument of SGLang", "")
        for name in constant(ast.parse((ADAPTER / "pools.py").read_text()), "REPLICATED"):
            there = any(path.endswith(f":{name}") for path in HOST_POOLS)
            self.add("class", name, "pools.py", None if there else "not among HOST_POOLS", "")

    def _arguments(self) -> set[str]:
        """Returns the names of SGLang's arguments."""
        names: set[str] = set()
        for part in ("model", "memory", "parallel", "lora", "spec", "exec_", "mm", "serving", "device", "schedule"):
            module = self.source.module(f"{SETTINGS}.{part}")
            for node in ast.walk(ast.parse(module.text)) if module else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
        return names


if __name__ == "__main__":
    sys.exit(report("SGLang", "sglang", SGLangCheck))
