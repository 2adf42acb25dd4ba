"""guarded: keeps unexpected errors from reaching the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Switchable(Protocol):
    """What an engine calls, and what can be switched off."""

    off: bool

    def switch_off(self, where: str) -> None:
        """Ends offloading for good, because ``where`` has failed, and logs the exception in progress."""


def guarded(fallback: Callable[..., Any]) -> Callable[[Method], Method]:
    """Nothing raises into the engine: an unexpected error switches the object off, and from then on ``fallback``
    answers in the method's place. It must not raise, so it asks neither the manager nor the engine for anything."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Switchable, *args: Any, **kwargs: Any) -> Any:
            if not self.off:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.switch_off(method.__name__)
            return fallback(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
