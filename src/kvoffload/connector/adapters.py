"""Adapters of a model, such as LoRA: KV that was computed with one belongs to its bytes, whatever its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvoffload.abc import Request
from kvoffload.cache.keys import ADAPTER_BYTES, root_hash

Digests: TypeAlias = frozenset[bytes]
"""The digests of one adapter on all ranks. No two ranks have the same one, so a mixture of two adapters is a subset of
neither. Empty: it could not be read."""
DROPPED = b""
"""Stands for the digest of an adapter that is not loaded any more."""
UNREADABLE = b"unreadable"
"""Stands for the digest of an adapter that cannot be read."""
NO_ADAPTER = bytes(ADAPTER_BYTES)
"""Stands in keys for the model alone, where there are adapters."""


class Adapter(NamedTuple):
    """What a request adds to the weights of the model."""

    number: int
    """By which the engine knows it. Other bytes may have the same number later."""
    handle: Any
    """By which the engine's workers load it."""
    is_reread: bool = False
    """Whether the engine reads its files again for this request."""
    shapes_all: bool = True
    """Whether its bytes, with the block hashes, determine the KV of this request."""
    source: str = ""
    """Where and how the engine reads it. Other bytes may be there later."""


AdapterOf: TypeAlias = Callable[[Request], Adapter | None]
"""Returns the adapter of a request."""


class Need(NamedTuple):
    """The bytes with which the blocks of a load were computed."""

    adapter: int
    digests: Digests
    is_reread: bool = False
    """See Adapter."""


class AdapterWatch(Protocol):
    """Knows the bytes of the adapters that one rank has loaded, or would load."""

    def changes(self) -> Mapping[int, bytes]:
        """Returns the digests of the adapters that were loaded since the last call, by number; DROPPED for one that is
        not loaded any more."""

    def ask(self, question: int, adapter: Adapter) -> None:
        """Asks for the digest of the bytes that the next step with ``adapter`` uses. Does not wait for files."""

    def answers(self, wait_s: float = 0.0) -> Mapping[int, bytes]:
        """Returns the digests that were found since the last call, by question; UNREADABLE if there is none.
        Waits at most ``wait_s`` for one if there are questions."""

    def digest(self, number: int) -> bytes:
        """Returns the digest of a loaded adapter as of the last call of ``changes``; DROPPED if it is not loaded."""

    def check(self, need: Need) -> Future[bool]:
        """Finds out whether the next step with an adapter will use bytes that have one of these digests, as far as is
        known. Does not wait for files."""


def variant(digests: Digests) -> bytes:
    """Returns what stands for an adapter in keys."""
    return root_hash(*sorted(digests))[:ADAPTER_BYTES]
