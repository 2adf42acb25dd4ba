"""What a test makes is closed after it, also if it fails."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=Closable)
_made: list[Closable] = []


def closed_later(made: _Made) -> _Made:
    """Has ``made`` closed when the test ends. Returns it."""
    _made.append(made)
    return made


def close_all() -> None:
    while _made:
        _made.pop().close()
