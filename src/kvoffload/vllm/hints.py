"""What vLLM itself knows about a request: whether it may load, its session, and hints of an orchestrator."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvoffload.connector.options import PARAM
from kvoffload.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.request import Request

FIRST_TO_NAME_SESSIONS = "0.32"
"""The first version that removes the block hashes of dropped tokens."""
MAX_ACTIONS = 64
"""Actions of a request that are looked at."""
MAX_SESSIONS = 1 << 12
"""Sessions with streaming input that are remembered where names do not last."""


class StreamedSessions:
    """The blocks behind the first inputs of sessions with streaming input. Their hashes may be of tokens that a session
    has dropped: when more input comes, it drops the last token that was sampled. vLLM then finds such a block for
    a prompt that has these tokens."""

    def __init__(self) -> None:
        self._begun: deque[tuple[Sequence[bytes], int, int]] = deque(maxlen=MAX_SESSIONS)
        """The growing block hashes of each session, and how many blocks and tokens its first input has."""
        self._limits: OrderedDict[bytes, int] = OrderedDict()
        """The hash of the first block behind each first input, and the tokens of that input."""

    def limit(self, request: Request) -> int | None:
        """Returns up to which token blocks of a request that has just arrived surely have the KV of its tokens."""
        for _ in range(len(self._begun)):
            hashes, num_blocks, num_tokens = begun = self._begun.popleft()
            if len(hashes) > num_blocks:
                self._limits[hashes[num_blocks]] = num_tokens
            else:
                self._begun.append(begun)
        while len(self._limits) > MAX_SESSIONS:
            self._limits.popitem(last=False)
        found = [self._limits[each] for each in request.block_hashes if each in self._limits] if self._limits else []
        if request.resumable:
            self._begun.append((request.block_hashes, len(request.block_hashes), request.num_prompt_tokens))
            found.append(request.num_prompt_tokens)
        return min(found, default=None)

    def __bool__(self) -> bool:
        return bool(self._begun or self._limits)


_streamed = StreamedSessions()


def engine_options(request: Request) -> Mapping[str, object]:
    """Returns request options: the ``session`` that vLLM names, and the payloads of the actions of type PARAM in its
    ``kv_hints``, of which the last one counts most. Values are not checked.

    A request that returns something for every token of its prompt, as with ``prompt_logprobs``, may not load: vLLM
    computes what is missing in a cache, and so must have nothing in it.

    Where names do not last, only the first input of a session with streaming input is stored and loaded, and of other
    requests only what lies before the blocks of such a session.
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
    if (request.resumable or _streamed) and not versions.is_since(FIRST_TO_NAME_SESSIONS):
        said, most = options.get("max_tokens"), _streamed.limit(request)
        if most is not None and (type(said) is not int or not 0 <= said < most):
            options["max_tokens"] = most
    return options
