"""vLLM's own offloading as its scheduler process builds it, without an engine.

Everything here is vLLM's: its configuration of a small model, its factory of secondary tiers, its scheduler half.
Only the weights are missing, which a scheduler never loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK_TOKENS = 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65_536,
}


@dataclass(frozen=True)
class Server:
    """The settings of a server that make its blocks different from the blocks of other servers.

    ``row_bytes`` of the usual one is 4096: 16 tokens, key and value, 32 numbers of 4 bytes.
    """

    model: str = "model"
    weights: str = "weights"
    dtype: str = "float32"
    head_size: int = 32
    hash_seed: str = "0"

    def write(self, folder: Path) -> Path:
        """Writes the files of the model below ``folder``."""
        path = folder / self.model
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": self.head_size, "dtype": self.dtype}))
        payload = self.weights.encode()
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}})
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + payload)
        return path


def offloading_scheduler(
    spec_class: type[Any], server: Server, folder: Path, entry: Mapping[str, Any], cpu_bytes: int
) -> tuple[Any, Any]:
    """Returns the scheduler half of vLLM's OffloadingConnector for ``server``, and its ``spec_class``, a
    TieringOffloadingSpec. ``entry`` is its only one of ``secondary_tiers``; the model's files go below ``folder``."""
    extra = {"cpu_bytes_to_use": cpu_bytes, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [dict(entry)]}
    with patch.dict(os.environ, PYTHONHASHSEED=server.hash_seed):
        config: Any = EngineArgs(
            model=str(server.write(folder)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=server.dtype,
            block_size=BLOCK_TOKENS,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
            ),
        ).create_engine_config()
        group = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=server.head_size, dtype=getattr(torch, server.dtype)
        )
        caches = KVCacheConfig(
            num_blocks=1024, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], group)]
        )
        spec = spec_class(build_offloading_config(config, caches))
        scheduler = OffloadingConnectorScheduler(spec, config, caches)
        # The engine does this last.
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        return scheduler, spec


class _OneTier(TieringOffloadingSpec):
    """Makes the secondary tier over rows that the caller owns, and no primary tier worth the name."""

    rows: memoryview
    tier: Any

    def get_manager(self) -> Any:
        (entry,) = self.secondary_tier_configs
        self.tier = SecondaryTierFactory.create_secondary_tier(entry, self.rows, self)
        return CPUOffloadingManager(num_chunks=1)


def secondary_tier(server: Server, folder: Path, entry: Mapping[str, Any], rows: memoryview) -> Any:
    """Returns the tier that vLLM makes of ``entry`` for ``server`` over ``rows``: a view with one row per chunk."""
    spec_class = type("OneTier", (_OneTier,), {"rows": rows})
    _, spec = offloading_scheduler(spec_class, server, folder, entry, 1 << 20)
    assert rows.strides is not None
    assert rows.strides[0] == spec.kv_bytes_per_chunk, "the rows have another size than the chunks of this server"
    return spec.tier


def row_bytes(server: Server) -> int:
    """Returns the bytes per row of the host memory of ``server``, as vLLM rounds them up."""
    number = torch.empty(0, dtype=getattr(torch, server.dtype))
    used = 2 * BLOCK_TOKENS * server.head_size * int(number.element_size())
    unit = int(TieringOffloadingSpec.BLOCK_SIZE_ALIGNMENT)
    return -(-used // unit) * unit


def set_positions(context: Any, keys: Sequence[bytes]) -> None:
    """Tells a request's context where each of its keys ends, as vLLM's connector does."""
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, (i + 1) * BLOCK_TOKENS)
