"""What a rank of SGLang says about itself, beyond what it hands to a storage backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_context, get_model, get_parallel, get_server_args, get_serving

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig


def arguments() -> dict[str, Any]:
    """Returns the resolved arguments of SGLang, nothing where a backend is used without a server."""
    if not get_context().is_config_namespace_published("model"):
        return {}
    resolved: dict[str, Any] = get_server_args().resolved_dict()
    # An update of the weights from another directory changes only this.
    return {**resolved, "model_path": get_model().model_path}


def weights() -> tuple[str, str] | None:
    """Returns what SGLang says about the weights in use: their directory and the version that clients have set. None
    without a server."""
    if not get_context().is_config_namespace_published("serving"):
        return None
    return str(get_model().model_path), str(get_serving().weight_version)


def weights_at_start(arguments: dict[str, Any]) -> tuple[str, str] | None:
    """Returns what ``weights`` would return if clients had set no version since the server was started with
    ``arguments``."""
    now = weights()
    return now and (now[0], str(arguments.get("weight_version", now[1])))


def place_on_node(config: HiCacheStorageConfig, arguments: dict[str, Any], per_node: int | None) -> tuple[int, int]:
    """Returns the index of this rank among the ranks on its node, each of which has a backend, and how many these are.
    ``per_node``: their number, if the user says it."""
    if not arguments:
        index = (config.dp_rank * config.pp_size + config.pp_rank) * config.tp_size + config.tp_rank
        count = per_node or config.pp_size * config.tp_size
        return index % count, count
    parallel = get_parallel()
    # A replica has ranks of its own, which SGLang numbers from 0 again.
    replicas = 1 if parallel.dp_rank is None else int(arguments["dp_size"])
    ranks = parallel.pp_size * parallel.tp_size
    index = (parallel.dp_rank or 0) * ranks + parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    count = per_node or max(1, ranks * replicas // int(arguments["nnodes"]))
    return index % count, count
