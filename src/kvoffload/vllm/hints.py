"""What vLLM itself knows of a request: whether it may load or drops tokens, what stands in the place of tokens, its
session, hints of an orchestrator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvoffload.connector.options import PARAM
from kvoffload.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.request import Request

FIRST_TO_NAME_SESSIONS = "0.32"
"""The first version that removes the block hashes of dropped tokens."""
MAX_ACTIONS = 64
"""Actions of a request that are looked at."""


def drops_tokens(request: Request) -> bool:
    """Whether a request is a session with streaming input, of a version that keeps block hashes of dropped tokens: when
    more input comes, it drops the last token that was sampled."""
    return request.resumable and not versions.is_since(FIRST_TO_NAME_SESSIONS)


def engine_options(request: Request) -> Mapping[str, object]:
    """Returns request options: the ``session`` that vLLM names, and the payloads of the actions of type PARAM in its
    ``kv_hints``, of which the last one counts most. Values are not checked.

    A request that returns something for every token of its prompt, as with ``prompt_logprobs``, may not load: vLLM
    computes what is missing in a cache, and so must have nothing in it.
    """
    options: dict[str, object] = {}
    session = getattr(request, "session_id", None)
    if session is not None:
        options["session"] = session
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        payload = getattr(action, "payload", None)
        if getattr(action, "action_type", None) == PARAM and isinstance(payload, Mapping):
            options |= payload
    if request.skip_reading_prefix_cache:
        options["load"] = False
    return options


def following(request: Any, position: int, n: int) -> bytes:
    """Describes ``n`` tokens of a request by everything that vLLM hashes of a block with these tokens: their ids, and
    for the placeholders of an image, or embeddings that the client has sent, what stands in their place."""
    tokens = [int(token) for token in request.all_token_ids[position : position + n]]
    extra_keys, _ = generate_block_hash_extra_keys(request, position, position + n, 0)
    return repr((tokens, extra_keys)).encode()
