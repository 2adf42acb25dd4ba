"""The parts of SGLang that run without its kernels: HiCache's storage interface, its controller with its threads, and
its host pools over tensors of the CPU. What they import beyond that is replaced by modules in which all is false."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="SGLang's host pools are tensors")

SOURCE = Path(os.environ.get("KVOFFLOAD_SGLANG", Path(sys.prefix, "sglang")))
"""Where the Makefile unpacks SGLang's Python code."""
if not (SOURCE / "sglang" / "srt").is_dir():
    pytest.skip(f"SGLang's code is not in {SOURCE}: make sglang", allow_module_level=True)

REPLACED = (
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.disaggregation",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.cpp_utils",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.model_executor",
    "sglang.srt.platforms",
    "sglang.srt.server_args",
    "sglang.srt.utils",
)
"""Modules that need a GPU, other packages or an engine."""
PACKAGES = ("IPython", "orjson", "sgl_kernel", "torchvision")
"""Packages that SGLang imports. Other tests of the process must not find the replacements."""
MODEL = "a model"


class _Nothing:
    """A function that returns False, a value that is false, and an object whose attributes are the same."""

    def __call__(self, *_: object, **__: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Replacement(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (), {}) if name[0].isupper() else _Nothing()
        setattr(self, name, value)
        return value


class _Replacements:
    """Finds the modules below ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == each or name.startswith(f"{each}.") for each in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Replacement(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sglang.srt.mem_cache.cpp_utils.native_hash":
            # SGLang's is compiled when it is first used.
            vars(module)["get_native_hash"] = page_hashes


def page_hashes(tokens: Sequence[int], parent: bytes | None, page_size: int) -> list[str]:
    """Returns a chained hash per page of tokens, in the form of SGLang's."""
    hashes: list[str] = []
    digest = parent or b""
    for first in range(0, len(tokens) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + repr(list(tokens[first : first + page_size])).encode()).digest()
        hashes.append(digest.hex())
    return hashes


_packages = _Replacements(PACKAGES)
sys.meta_path.insert(0, _packages)
if "sglang" not in sys.modules:
    # SGLang's own package module imports its client, which needs other packages.
    _package = types.ModuleType("sglang")
    _package.__path__ = [str(SOURCE / "sglang")]
    sys.modules["sglang"] = _package
    sys.meta_path.insert(0, _Replacements(REPLACED))

storage_interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
backend_factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
base_controller = importlib.import_module("sglang.srt.managers.cache_controller")
controller = importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
host_base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
mha = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
mla = importlib.import_module("sglang.srt.mem_cache.pool_host.mla")
mamba = importlib.import_module("sglang.srt.mem_cache.pool_host.mamba")
dsa = importlib.import_module("sglang.srt.mem_cache.pool_host.dsa")
group = importlib.import_module("sglang.srt.mem_cache.pool_host.group")

sys.meta_path.remove(_packages)
for _name in [name for name, module in sys.modules.items() if isinstance(module, _Replacement)]:
    if _name.partition(".")[0] in PACKAGES:
        del sys.modules[_name]

HostPool = Any
BUDGET = 1 << 30
"""Bytes that the host pools of a test may have together, instead of all but 10 GB of the machine."""


def mha_pool(
    layout: str = "page_first", pages: int = 64, page_size: int = 4, layers: int = 2, heads: int = 2, dim: int = 64
) -> HostPool:
    """Returns a host pool with keys and values, bfloat16."""
    layer = torch.zeros((1, heads, dim), dtype=torch.bfloat16)
    buffers = SimpleNamespace(k=[layer] * layers, v=[layer] * layers, k_data_ptrs=None, v_data_ptrs=None)
    info = SimpleNamespace(
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        buffers=buffers,
        transfer_buffers=buffers,
        scales=None,
        validate=lambda: None,
    )
    return _kv_pool(mha.MHATokenToKVPoolHost, info, layout, pages, page_size, layers)


def mla_pool(layout: str = "page_first", pages: int = 64, page_size: int = 4, layers: int = 2) -> HostPool:
    """Returns a host pool with the latent KV of MLA, bfloat16."""
    info = SimpleNamespace(
        dtype=torch.bfloat16,
        kv_lora_rank=96,
        qk_rope_head_dim=32,
        packed_fp8=False,
        device=torch.device("cpu"),
        device_layer_num=layers,
        layer_indices=tuple(range(layers)),
        buffers=[torch.zeros((1, 1, 128), dtype=torch.bfloat16)] * layers,
        data_ptrs=None,
        scales=None,
        validate=lambda: None,
    )
    return _kv_pool(mla.MLATokenToKVPoolHost, info, layout, pages, page_size, layers, target_layer_num=layers)


def _kv_pool(
    made: Any, info: SimpleNamespace, layout: str, pages: int, page_size: int, layers: int, **more: int
) -> HostPool:
    with host_base.host_memory_budget_scope(BUDGET):
        return made(
            info,
            1.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=1,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=pages * page_size,
            **more,
        )


def mamba_pool(states: int = 16, layers: int = 2) -> HostPool:
    """Returns a host pool with states, float32, and their convolutions, bfloat16."""
    info = SimpleNamespace(
        temporal=torch.zeros((layers, 1, 2, 16, 24), dtype=torch.float32),
        conv=[torch.zeros((layers, 1, 3, 40), dtype=torch.bfloat16)],
        extra_checkpoint_buffers=[],
        validate=lambda: None,
    )
    with host_base.host_memory_budget_scope(BUDGET):
        return mamba.MambaPoolHost(info, 1.0 * states, 0, device_capacity=1, pin_memory=False, layout="page_first")


def indexer_pool(anchor: HostPool) -> HostPool:
    """Returns the host pool of the indexer of sparse attention: its pages have the indices of ``anchor``."""
    page_bytes = 33 * anchor.page_size
    info = SimpleNamespace(
        dtype=torch.uint8,
        bytes_per_token_per_layer=33,
        page_bytes=lambda page_size: 33 * page_size,
        host_bytes=lambda page_num, layer_num, page_size: page_num * layer_num * page_bytes,
    )
    layer = torch.zeros((1, page_bytes), dtype=torch.uint8)
    device = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=2,
        layer_num=2,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[layer, layer],
    )
    decl = SimpleNamespace(storage_info=info, device_pool=device, owned_device_layers=None)
    with host_base.host_memory_budget_scope(BUDGET):
        return dsa.DSAIndexerPoolHost(decl, anchor, pin_memory=False)


def fill(pool: HostPool, seed: int) -> None:
    """Writes random bytes to all memory of ``pool``."""
    generator = torch.Generator().manual_seed(seed)
    for data in memory(pool):
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))


def memory(pool: HostPool) -> Iterator[Any]:
    """Yields the memory of a host pool as bytes."""
    buffers = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    for tensor in buffers:
        yield tensor.view(-1).view(torch.uint8)


def page(pool: HostPool, index: int) -> bytes:
    """Returns the bytes of the page that begins with slot ``index``."""
    return bytes(pool.get_data_page(index, flat=True).contiguous().view(-1).view(torch.uint8).numpy())


def extra_config(**options: object) -> dict[str, Any]:
    """Returns what --hicache-storage-backend-extra-config holds after SGLang has taken its own settings out."""
    return {
        "backend_name": "kvoffload",
        "module_path": "kvoffload.sglang",
        "class_name": "KVOffloadStorage",
        "interface_v1": 1,
        "model_fingerprint": MODEL,
        **options,
    }


class Rank:
    """One rank of a server: SGLang's controller of HiCache with its threads, and its host pools, without a device."""

    def __init__(
        self,
        pools: Mapping[str, HostPool],
        options: Mapping[str, Any],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        is_mla: bool = False,
    ) -> None:
        entries = [
            group.PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=name == "kv")
            for name, pool in pools.items()
        ]
        self.pools = dict(pools)
        self.controller = made = controller.HybridCacheController.__new__(controller.HybridCacheController)
        made.mem_pool_host = group.HostPoolGroup(entries)
        made.storage_host_pool = pools["kv"]
        made.mem_pool_device = (base_controller.MLATokenToKVPool if is_mla else SimpleNamespace)()
        made.page_size = pools["kv"].page_size
        made.host_memory_mode = "cache"
        made.enable_storage = made.enable_storage_metrics = False
        made.tp_group = made.attn_cp_group = made.attn_tp_group = made.pp_group = None
        made.prefetch_hits_sync_groups, made.prefetch_completion_sync_groups = [], []
        made.storage_stop_event = threading.Event()
        made.extra_host_mem_release_queues = {}
        made.pp_prefetch_command_group = made.pp_prefetch_command_thread = None
        made.pp_prefetch_command_queue = Queue()
        made.pp_prefetch_state_lock = threading.Lock()
        made.pp_prefetch_states, made.pp_prefetch_decisions = {}, {}
        made.write_queue, made.load_queue, made.ack_write_queue, made.ack_load_queue = [], [], [], []
        self._parallel = SimpleNamespace(
            attn_dcp_size=1, attn_dcp_rank=0, tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1
        )
        with self._as_this_rank():
            made.attach_storage_backend(
                "dynamic",
                prefetch_threshold=1,
                model_name=None,
                storage_backend_extra_config=dict(options),
                host_pools=entries,
            )
        self.storage = made.storage_backend

    @contextmanager
    def _as_this_rank(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base_controller, "get_parallel", lambda: self._parallel)
            yield

    def store(
        self,
        tokens: Sequence[int],
        indices: Any,
        prefix: Sequence[str] | None = (),
        sidecars: Sequence[Any] = (),
    ) -> int:
        """Stores the pages of ``tokens``, which lie at ``indices``, as SGLang's tree does for a node. Returns how many
        tokens SGLang's backup thread has stored."""
        parent = bytes.fromhex(prefix[-1]) if prefix else None
        hashes = page_hashes(tokens, parent, self.controller.page_size)
        before = None if prefix is None else list(prefix)
        self.controller.write_storage(indices, list(tokens), hashes, before, extra_pools=list(sidecars) or None)
        done: int = self.controller.ack_backup_queue.get(timeout=60).completed_tokens
        return done

    def hits(self, tokens: Sequence[int], prefix: Sequence[str] = (), sidecars: Sequence[Any] = ()) -> Any:
        """Returns SGLang's operation after its prefetch thread has looked the pages of ``tokens`` up."""
        handle = SimpleNamespace(rid="request")
        last = prefix[-1] if prefix else None
        self.controller.prefetch(handle, list(tokens), last, list(prefix), list(sidecars) or None)
        return self.controller.prefetch_hit_queue.get(timeout=60)

    def load(self, tokens: Sequence[int], prefix: Sequence[str] = (), sidecars: Sequence[Any] = ()) -> Any:
        """Prefetches the pages of ``tokens``. Returns SGLang's operation, with ``completed_tokens`` and
        ``pool_hits``."""
        operation = self.hits(tokens, prefix, sidecars)
        operation.pool_hits = {}
        if not operation.storage_hit_count:
            operation.completed_tokens = 0
            return operation
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
        for transfer in operation.pool_transfers or ():
            if transfer.indices_from_pool is None:
                pool = self.pools[str(transfer.name)]
                transfer.host_indices = pool.alloc(len(transfer.keys) * pool.page_size)
        self.controller.prefetch_buffer.put(operation)
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            if ack.completed_req:
                return operation
            if ack.completed_tokens is not None:
                operation.completed_tokens = ack.completed_tokens
            operation.pool_hits.update(ack.pool_hits or {})

    @property
    def threads(self) -> list[threading.Thread]:
        made = self.controller
        return [made.prefetch_thread, made.prefetch_io_aux_thread, made.prefetch_sync_thread, made.backup_thread]

    def flush(self) -> None:
        """Does what SGLang does with HiCache when it flushes its caches, as it does after an update of weights."""
        self.controller.reset()
        self.controller.mem_pool_host.clear()

    def close(self) -> None:
        self.controller.detach_storage_backend()


def storage_config(**fields: Any) -> Any:
    """Returns the configuration that SGLang gives to a storage backend of one rank."""
    return storage_interface.HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": None,
            **fields,
        }
    )
