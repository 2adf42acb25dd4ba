"""What kvoffload reads of an engine: requests, block tables and scheduled steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvoffload.abc.types import (
    BlockHash,
)


class Request(Protocol):
    """What the scheduler half of the connector reads of an engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be when the steps under way are done."""
        ...

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One per whole hash-block of known tokens."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class KVBlocks(Protocol):
    """The device blocks a request holds."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per KV cache group, from the request's first block on. 0 is the null block; any other
        id belongs to one group at a time."""
        ...


@dataclass(slots=True)
class ScheduledStep:
    """What an engine decided for one step, in engine-neutral form."""

    num_scheduled_tokens: Mapping[str, int]
    """Per request, tokens to compute in this step."""
    block_ids: Mapping[str, tuple[Sequence[int], ...]] = field(default_factory=dict)
    """Per request and group, device block ids given to it since its last step."""
    replaced: frozenset[str] = frozenset()
    """Requests whose ``block_ids`` are their whole block table: new and resumed ones."""
    preempted: Iterable[str] = ()
    """Requests that lost all their blocks in this step."""
    overwritten: Collection[int] = ()
    """Device blocks that the engine may write to before its workers are told of this step, so that no fence can
    protect them: what still reads them is lost."""
