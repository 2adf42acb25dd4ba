"""What kvoffload reads of an engine: requests, block tables and scheduled steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvoffload.abc.types import BlockHash


class Request(Protocol):
    """The part of an engine's request that the scheduler half reads. If there is a ``cache_salt``, a string on which
    the block hashes depend, it may say which tenant the request belongs to."""

    @property
    def request_id(self) -> str:
        """Names the request until it has ended and its load, if one is in progress, was reported."""
        ...

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the tokens sampled so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be when the steps in flight have ended."""
        ...

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One hash per whole hash-block of known tokens."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


Following: TypeAlias = Callable[[Request, int, int], bytes]
"""``following(request, position, n)`` returns bytes that describe the ``n`` known tokens of a Request from ``position``
on, by everything that shapes their embeddings: token ids alone do not describe the placeholders of an image. Other
tokens have other bytes, in every process that shares blocks."""


class KVBlocks(Protocol):
    """The device blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Returns block ids per KV cache group, from the request's first block on. Id 0 is the null block; any other
        id belongs to one group at a time."""
        ...


class BoundaryState(NamedTuple):
    """A state that is final when the step's forward pass is done: the one of KV cache group ``group`` after the first
    ``num_tokens`` tokens of a request, in ``device_block``."""

    group: int
    device_block: int
    num_tokens: int


@dataclass(slots=True)
class ScheduledStep:
    """The engine's decisions for one step."""

    num_scheduled_tokens: Mapping[str, int]
    """Tokens to compute in this step, per request."""
    block_ids: Mapping[str, tuple[Sequence[int], ...]] = field(default_factory=dict)
    """New device block ids since the request's last step, per request and group."""
    replaced: frozenset[str] = frozenset()
    """Requests whose ``block_ids`` are their whole block table: new and resumed ones."""
    preempted: Iterable[str] = ()
    """Requests that lost all their blocks in this step."""
    overwritten: Collection[int] = ()
    """Device blocks that the engine may write to before its workers receive this step. No fence can protect them, so
    stores that still read them fail."""
    boundary_states: Mapping[str, Sequence[BoundaryState]] = field(default_factory=dict)
    """Per request, the states that this step completes, for groups with ``KVGroup.state``. Each is offered once. Its
    device block does not change before it is freed, so the fences protect it as they protect blocks of KV."""
    written: Collection[int] = ()
    """Device blocks, besides new ones, that the engine writes to after its workers have received this step: stores that
    still read them are fenced."""
