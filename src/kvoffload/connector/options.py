"""Request options: what a client may ask for its own request, and what it knows about the use of its blocks."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import xxhash

from kvoffload.abc import Hints, Request
from kvoffload.cache.retention import MAX_RETAIN_S
from kvoffload.connector.handover import is_handover

logger = logging.getLogger(__name__)

PARAM = "kvoffload"
"""The key under which ``kv_transfer_params`` holds a request's options."""
NEVER = 1 << 62
"""More tokens than any request has."""
MAX_TENANT_CHARS = 128
MAX_SESSION_CHARS = 256
"""Characters of the name of a session."""
MAX_EXPECTED_S = 1e9
"""The latest return that can be announced, in seconds."""
UNKNOWN = "unknown"
"""Stands for all names of options that do not exist, in metrics."""
_FIRST_SESSION = 2
_SESSIONS = (1 << 63) - _FIRST_SESSION
_SEED = secrets.randbits(64)
"""So that no client can find a name with the number of another session."""


def _is_number(most: float) -> Callable[[Any], bool]:
    # Neither NaN nor an infinity is in the range, and an int of any size can be compared.
    return lambda value: type(value) in (int, float) and 0 <= value <= most


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _option(default: Any, is_valid: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"is_valid": is_valid})


LIMITS = {"store", "load", "max_tokens"}
"""Options with which a client cannot allow what its engine forbids: the lower value counts."""
EngineOptions: TypeAlias = Callable[[Request], Mapping[str, object]]
"""Returns options of a request that its engine knows, such as its session. They are checked as those of clients."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What ``kv_transfer_params`` says: "kvoffload", a mapping with any of OPTIONS, and "do_remote_decode"."""

    store: bool = _option(True, _is_bool)
    """Whether its KV may be stored."""
    load: bool = _option(True, _is_bool)
    """Whether stored KV may be looked up and loaded for it."""
    max_tokens: int = _option(NEVER, lambda value: type(value) is int and value >= 0)
    """The number of its first tokens that may be stored and loaded."""
    session: str | None = _option(None, lambda value: isinstance(value, str) and 0 < len(value) <= MAX_SESSION_CHARS)
    """The name of its conversation or agent."""
    drop: bool = _option(False, _is_bool)
    """Whether it is the last one of its session."""
    expect_return_s: float | None = _option(None, _is_number(MAX_EXPECTED_S))
    """Seconds from its end to the next one of its session."""
    p_return: float | None = _option(None, _is_number(1))
    """The probability that there is a next one of its session."""
    retain_s: float | None = _option(None, _is_number(MAX_RETAIN_S))
    """Seconds after its end for which its blocks are to be retained; 0: they need not be any more."""
    tenant: str | None = _option(None, lambda v: type(v) is str and 0 < len(v) <= MAX_TENANT_CHARS and v.isprintable())
    """Whose request it is; None: its ``cache_salt`` may say."""
    handover: Mapping[str, Any] | None = _option(None, is_handover)
    """What another server hands over to it, see ``is_handover``."""
    remote_decode: bool = False
    """Whether a decoder elsewhere reads its KV when it is done."""
    is_passed_on: bool = False
    """Whether it goes on elsewhere, with KV that this connector or another one of its engine sends there."""
    is_sent: bool = False
    """Whether the client sent options. It gets an answer then."""
    ignored: tuple[str, ...] = ()
    """Options that were left out: names of OPTIONS, and UNKNOWN once for all others."""

    @classmethod
    def from_params(cls, params: object, engine_options: Mapping[str, object] | None = None) -> RequestOptions:
        """Reads what a client sent, which may be anything. Options that are unknown or invalid are left out, with a
        debug line. None counts as not sent. ``engine_options``: options that the engine itself has for the request;
        those of the client count more, except that neither can allow what the other forbids."""
        params = params if isinstance(params, Mapping) else {}
        sent = params.get(PARAM)
        goes_on = bool(params.get("do_remote_decode"))
        if sent is None and not goes_on and not engine_options:
            return DEFAULT
        options = sent if isinstance(sent, Mapping) else {}
        known: dict[str, Any] = {}
        ignored: list[str] = []
        for source in (engine_options or {}, options):
            for name, is_valid in OPTIONS.items():
                value: Any = source.get(name)
                if value is not None and is_valid(value):
                    known[name] = min(value, known.get(name, value)) if name in LIMITS else value
                elif value is not None:
                    ignored.append(name)
        if not options.keys() <= OPTIONS.keys() or not isinstance(sent, Mapping | None):
            ignored.append(UNKNOWN)
        if ignored:
            logger.debug("kvoffload: options of a request are not valid and are left out: %s", ", ".join(ignored))
        known |= {"is_sent": sent is not None, "ignored": tuple(ignored)}
        return cls(**known, remote_decode=goes_on, is_passed_on=goes_on)

    def to_pass_on(self) -> dict[str, Any]:
        """Returns what the same request must say where it goes on: all options of the client but a hand-over."""
        said = {name: getattr(self, name) for name in OPTIONS if name != "handover"}
        return {name: value for name, value in said.items() if value != getattr(DEFAULT, name)}

    def hints(self, namespace: bytes) -> Hints | None:
        """Returns what is known about the next use of its blocks; None if nothing is. ``namespace`` is that of its
        tenant: sessions of two tenants are not the same, whatever their names."""
        if self.session is None and not self.drop and self.expect_return_s is self.p_return is self.retain_s is None:
            return None
        session = None if self.session is None else session_number(self.session, namespace)
        return Hints(session, self.drop, self.expect_return_s, self.p_return, self.retain_s)


OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    each.name: each.metadata["is_valid"] for each in fields(RequestOptions) if each.metadata
}
"""Every option of ``kv_transfer_params["kvoffload"]``, and whether a value is valid."""
DEFAULT = RequestOptions()


def session_number(name: str, namespace: bytes) -> int:
    """Returns the number for the name of a session of the tenant with ``namespace``, see ``Hints.session``."""
    digest = xxhash.xxh3_64_intdigest(namespace + name.encode(errors="surrogatepass"), _SEED)
    return _FIRST_SESSION + digest % _SESSIONS
