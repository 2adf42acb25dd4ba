"""What a rank of SGLang says about itself, beyond what it hands to a storage backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

logger = logging.getLogger(__name__)


def arguments() -> dict[str, Any]:
    """Returns the resolved arguments of SGLang, nothing where a backend is used without a server."""
    from sglang.srt import runtime_context

    if not runtime_context.get_context().is_config_namespace_published("model"):
        return {}
    resolved: dict[str, Any] = runtime_context.get_server_args().resolved_dict()
    return resolved


def weight_version() -> str | None:
    """Returns the version of the weights that clients have set. It changes with them at the latest when SGLang flushes
    its caches, but clients may leave the flush out."""
    from sglang.srt import runtime_context

    if not runtime_context.get_context().is_config_namespace_published("serving"):
        return None
    return str(runtime_context.get_serving().weight_version)


def place_on_node(config: HiCacheStorageConfig, arguments: dict[str, Any], per_node: int | None) -> tuple[int, int]:
    """Returns the index of this rank among the ranks on its node that have a backend each, and how many these are.

    ``per_node`` overrides the number that SGLang's arguments say.
    """
    from sglang.srt import runtime_context

    if not arguments:
        index = (config.dp_rank * config.pp_size + config.pp_rank) * config.tp_size + config.tp_rank
        ranks = config.pp_size * config.tp_size
        return index % (per_node or ranks), per_node or ranks
    parallel = runtime_context.get_parallel()
    replica = parallel.dp_rank or 0
    replicas = int(arguments["dp_size"]) if parallel.dp_rank is not None else 1
    ranks = parallel.pp_size * parallel.tp_size
    index = replica * ranks + parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    count = per_node or max(1, ranks * replicas // int(arguments["nnodes"]))
    return index % count, count
