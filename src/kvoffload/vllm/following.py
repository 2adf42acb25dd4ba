"""What the tokens after a block are, for keys of blocks whose KV depends on them."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys


def following(request: Any, position: int, n: int) -> bytes:
    """Describes ``n`` tokens of a request by everything that vLLM hashes of a block with these tokens: their ids, and
    for the placeholders of an image, or embeddings that the client has sent, what stands in their place."""
    tokens = [int(token) for token in request.all_token_ids[position : position + n]]
    extra_keys, _ = generate_block_hash_extra_keys(request, position, position + n, 0)
    return repr((tokens, extra_keys)).encode()
