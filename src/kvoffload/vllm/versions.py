"""The differences between versions of vLLM in what kvoffload uses."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.engine.core import EngineCore

from kvoffload.abc import ConfigError
from kvoffload.supported import TESTED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

NAME = f"vLLM {vllm.__version__}"

SINCE = {
    "CacheHitSource": "0.32",
    "_cache_hit_source": "0.32",
    "hash_block_size": "0.32",
    "num_hash_lookahead_tokens": "0.33",
    "on_request_access": "0.33",
    "restore_kv_caches": "0.33",
    "unregister_kv_caches": "0.33",
}
"""Names in vLLM that kvoffload uses and 0.31 does not have, with the first version that has them."""


def attribute(owner: Any, name: str, before: Any = None) -> Any:
    """Returns ``owner.name``, or ``before`` in versions that, according to SINCE, do not have it yet.

    Raises ConfigError if a version should have the name and does not: a setting that has moved must not read as one
    that is not set.
    """
    if name in SINCE and not is_since(SINCE[name]):
        return before
    try:
        return getattr(owner, name)
    except AttributeError:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(
            fault=f"{NAME} has no {of}.{name}, which kvoffload needs to know",
            fix=f"kvoffload is tested with vLLM {', '.join(TESTED)}: use one of these",
        ) from None


def is_since(version: str) -> bool:
    """Whether this vLLM is ``version`` (major and minor number) or later. True for a version that is not a number."""
    own = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return own is None or (int(own[1]), int(own[2])) >= tuple(map(int, version.split(".")))


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:
    HIT_SOURCE = None


_SAMPLE = re.compile("[0-9]+_")


def parent_request(request_id: str) -> str:
    """Returns the id of the request of which ``request_id`` is a sample, or ``request_id`` itself.

    vLLM runs a request with n > 1 as n requests, and prefixes its id with "0_", "1_" and so on. It appends random
    characters to the id that a client gives, so no client can make two requests look like samples of one (unless
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, and then it can do so for its own ids only).
    """
    sample = _SAMPLE.match(request_id)
    return request_id if sample is None else request_id[sample.end() :]


def keeps_over_pauses(vllm_config: VllmConfig) -> bool:
    """Whether blocks can be kept while the engine pauses or sleeps: the first request afterwards must wait for a
    comparison of the weights, and copies must have ended before the device blocks lose their memory."""
    sleeps = bool(attribute(vllm_config.model_config, "enable_sleep_mode"))
    return not sleeps or hasattr(base.KVConnectorBase_V1, "restore_kv_caches")


def keeps_blocks(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's device cache keeps whole blocks until it hands them out again. A sleep loses what only the device
    holds."""
    sleeps = bool(attribute(vllm_config.model_config, "enable_sleep_mode"))
    return bool(vllm_config.cache_config.enable_prefix_caching) and not sleeps


def next_free(pool: BlockPool, n: int) -> Iterator[int]:
    """Returns up to ``n`` device blocks that vLLM hands out next; none in versions that keep them elsewhere."""
    head = getattr(pool.free_block_queue, "fake_free_list_head", None)
    block = getattr(head, "next_free_block", None)
    # The last one of the list is no block.
    while n and block is not None and block.next_free_block is not None:
        yield block.block_id
        block, n = block.next_free_block, n - 1


def is_pausing() -> bool:
    """Whether vLLM calls this because its engine pauses or falls asleep. It passes that on to no connector, and resets
    the caches with the call that a trainer makes."""
    return caller_locals(getattr(EngineCore, "_reset_caches", None)) is not None


def callers() -> Iterator[FrameType]:
    """Yields the frames of the functions that have called this one, the latest first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller_locals(function: Any) -> Mapping[str, Any] | None:
    """Returns the local variables of ``function`` if it is among the callers, or None."""
    code = getattr(function, "__code__", None)
    return next((frame.f_locals for frame in callers() if frame.f_code is code), None)


def trace_headers(vllm_config: VllmConfig) -> Callable[[Any], Mapping[str, str] | None] | None:
    """Returns what reads the headers of a request's trace, or None if vLLM's tracing is off. A version without these
    names is served without spans."""
    with contextlib.suppress(AttributeError):
        if vllm_config.observability_config.otlp_traces_endpoint is not None:
            return lambda request: getattr(request, "trace_headers", None)
    return None


def why_too_old() -> str | None:
    """Returns what is wrong with a version of vLLM before the first that kvoffload serves, or None."""
    if is_since(TESTED[0]):
        return None
    return (
        f"vLLM {vllm.__version__} is installed, and kvoffload needs {TESTED[0]} or later: "
        f"pip install 'vllm=={TESTED[-1]}.*'"
    )


def warn_if_untested() -> None:
    release = ".".join(vllm.__version__.split(".")[:2])
    if release not in TESTED:
        logger.warning(
            "kvoffload is tested with vLLM %s, not with %s, but tries to serve it", ", ".join(TESTED), vllm.__version__
        )


def fences_first(vllm_config: VllmConfig) -> bool:
    """Whether workers call the connector in a step before they fill blocks with zeros and copy blocks.

    The older of vLLM's model runners calls ``handle_preemptions`` first of all. The newer one prepares the blocks
    first. False for versions that do not say which of them runs.
    """
    return getattr(vllm_config, "use_v2_model_runner", None) is False


PROJECTING_DRAFTERS = {"dflash", "dspark"}
"""Drafters whose KV at a position is projected from the model's hidden states at that position, so it depends on no
later token. What they write for tokens to be drafted lies behind the known ones, and is replaced when these are."""


def num_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Returns on how many tokens after its own the KV of a drafter depends: one if it is run on the model's hidden
    states and the token after each, more if each module of an MTP drafter has KV of its own, and none otherwise."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in PROJECTING_DRAFTERS:
        # vLLM counts one for these as well, because it needs the next token to draft from.
        return 0
    return int(attribute(vllm_config, "num_prefill_lookahead_tokens"))


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Returns the number of tokens that one block hash covers."""
    known = attribute(kv_cache_config, "hash_block_size")
    return int(known or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def kv_cache_layout(vllm_config: VllmConfig) -> str | None:
    """Returns the name of the order in which the KV cache lies in memory, or None before vLLM has decided on one."""
    layout = attribute(vllm_config.cache_config, "kv_cache_layout")
    return None if layout is None else str(layout)


def canonical_mappings(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Any], rank: int
) -> Mapping[str, Any]:
    """Returns, by layer, vLLM's ``CanonicalPageMapping`` of the tensor-parallel rank with this number."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

    # vLLM answers for one stage only. Each stage is a tensor-parallel engine of its own.
    config, parallel = copy.copy(vllm_config), copy.copy(vllm_config.parallel_config)
    parallel.pipeline_parallel_size, parallel.world_size, parallel.rank = 1, parallel.tensor_parallel_size, rank
    config.parallel_config = parallel
    found: Mapping[str, Any] = canonical_mapping.derive_canonical_mappings(config, kv_cache_config, dict(kv_caches))
    return found


def expected_hash_root(vllm_config: VllmConfig) -> bytes | None:
    """Returns the value with which the chain of block hashes of every prompt will begin, or None if each process draws
    one at random."""
    algorithm = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    resolve: Callable[[Any], str | None] = attribute(kv_cache_utils, "resolve_none_hash_seed")
    seed = resolve(algorithm)
    return bytes(algorithm(seed)) if seed is not None and seed == resolve(algorithm) else None


def hash_root_error(expected: bytes | None) -> str | None:
    """Returns what is wrong if the chains of block hashes do not begin with the ``expected`` value, or None. vLLM sets
    it after it has made its connectors and tiers."""
    if getattr(kv_cache_utils, "NONE_HASH", None) == expected:
        return None
    return (
        f"the block hashes of {NAME} do not have the root that was predicted, so no other process would find these "
        "blocks; set PYTHONHASHSEED=0 (any number, the same at every start)"
    )


def most_data_parallel_engines(vllm_config: VllmConfig) -> int | None:
    """Returns an upper bound for the number of engines per node, for one of several engines of a dense model.

    vLLM configures each of them as if it were alone. One setting still holds the number on all nodes.
    """
    most = attribute(vllm_config.parallel_config, "elastic_ep_max_dp_size")
    return most if isinstance(most, int) and most > 1 else None
