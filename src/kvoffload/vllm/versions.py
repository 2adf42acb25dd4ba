"""Where vLLM's versions differ in what kvoffload uses of them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")
NAME = f"vLLM {vllm.__version__}"

KVConnectorTransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
FAILS_WHOLE_LOADS = KVConnectorTransferResults is not None
"""A failed load can be reported by its request. Without it: by device block, for a single KV cache group only."""
FIRST_TO_FAIL_WHOLE_LOADS = "0.30"
DRAINS_HOLDERS_FIRST = hasattr(Scheduler, "_holds_kv_blocks")
"""Waiting requests that hold device blocks are scheduled before those that do not. Without it a request that was told
to ask again may stand in the way of the one whose load it waited for, for ever: then nobody may be told so."""
FIRST_TO_DRAIN_HOLDERS_FIRST = "0.31"

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:
    HIT_SOURCE = None


_SAMPLE = re.compile("[0-9]+_")


def parent_request(request_id: str) -> str:
    """The id of the request that ``request_id`` is a sample of, or ``request_id`` itself.

    vLLM runs a request with n > 1 as n requests, with "0_", "1_" and so on before its id. It puts random characters
    behind the id that a client gives, so no client can make two requests look like samples of one (unless
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, and then it can do so for its own ids only).
    """
    sample = _SAMPLE.match(request_id)
    return request_id if sample is None else request_id[sample.end() :]


def warn_if_untested() -> None:
    if not vllm.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        logger.warning(
            "kvoffload is tested with vLLM %s; this is %s, and it tries", ", ".join(TESTED), vllm.__version__
        )


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one block hash covers."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    return int(known or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def expected_hash_root(vllm_config: VllmConfig) -> bytes | None:
    """What the chain of every prompt's block hashes will begin with, if it is the same in each process with these
    settings; None if it is drawn at random."""
    algorithm = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    # Before 0.31 there is no such function, and without this variable the root is random.
    resolve: Callable[[Any], str | None]
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", lambda _: os.environ.get("PYTHONHASHSEED"))
    seed = resolve(algorithm)
    return bytes(algorithm(seed)) if seed is not None and seed == resolve(algorithm) else None


def hash_root() -> bytes | None:
    """What it does begin with, once the engine has come up."""
    return getattr(kv_cache_utils, "NONE_HASH", None)


def most_data_parallel_engines(vllm_config: VllmConfig) -> int | None:
    """Of one of several engines of a dense model: how many there are at most on its node. vLLM makes each believe that
    it is alone; from 0.30 on one setting still holds what the user has asked for on all nodes."""
    most = getattr(vllm_config.parallel_config, "elastic_ep_max_dp_size", None)
    return most if isinstance(most, int) and most > 1 else None
