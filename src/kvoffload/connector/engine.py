"""What an engine says of itself to the scheduler half, and what keeps errors from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias, TypeVar

from kvoffload.abc import ConfigError, Following, KVGroup
from kvoffload.config import LARGE_BLOCKS, OTHER_LAYERS
from kvoffload.connector.adapters import AdapterOf
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.options import EngineOptions
from kvoffload.connector.parts import Parts

TraceHeaders: TypeAlias = Callable[[Any], Mapping[str, str] | None]
"""Returns a request's headers with its OpenTelemetry trace, or None."""
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the scheduler half knows of its engine. Only the groups are needed; the defaults are those of an engine
    alone on its node that shares device blocks between requests.

    The constructor raises ConfigError for a wrong value, if block sizes do not divide, or if ``following`` is missing.
    """

    groups: Sequence[KVGroup]
    """The KV cache groups: one for each set of layers that share a block table."""
    _: KW_ONLY
    hash_block_size: int | None = None
    """Tokens per block hash. Default: the greatest common divisor of the device block sizes."""
    parts: Parts | None = None
    """How blocks are divided, see ``kvoffload.connector.parts``. Workers copy ``parts.page_groups``."""
    following: Following | None = None
    """Describes the tokens after a block. Needed if a group has a ``lookahead``."""
    num_workers: int | None = None
    """Ranks that report jobs. Default: as many as there are pools. If there are more, ranks with the same KV share a
    pool: one of them stores, and the others use FollowerTransfer."""
    share_loads: bool = True
    """Whether a request whose blocks are being loaded for another waits, to find them on the device: for engines that
    share device blocks between requests, and schedule waiting requests that hold some before those that hold none."""
    enable_events: bool = False
    """Whether ``take_events`` returns events. Those of stored blocks carry a BlockDescription."""
    device_blocks: int | None = None
    """Blocks of the device's KV cache. Without it host memory repeats the device."""
    engine: int = 0
    """The index of this engine among the ``engines`` of its node."""
    engines: int = 1
    """Engines that share the budgets of this node."""
    keeps_blocks: bool = False
    """Whether the engine finds a whole block of known tokens until its device block is handed out again, and changes it
    before that only if it takes tokens back or caches are reset. Then host memory need not repeat the device."""
    next_free: Callable[[int], Iterable[int]] | None = None
    """Returns up to n device blocks, those handed out next first. What they hold is stored early: no step waits."""
    parent_request: Callable[[str], str] = str
    """Maps the id of a request to the id under which the reuse filter counts it."""
    engine_options: EngineOptions | None = None
    """Returns what the engine itself knows of a request, as request options."""
    drops_tokens: Callable[[Any], bool] | None = None
    """Whether a request may drop tokens and keep block hashes that cover them. Nothing is loaded or stored for it, or
    stored of what is computed with device blocks that it has filled."""
    adapter_of: AdapterOf | None = None
    """Returns the adapter of a request, for engines whose block hashes do not depend on its bytes."""
    trace_headers: TraceHeaders | None = None
    """If it is set, requests get spans, see ``kvoffload.observe.spans``."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """What the fingerprint depends on in words, such as {"dtype": "bfloat16"}: see ``kvoffload.tiers.identity``."""
    is_beside_others: bool = False
    """Whether the engine has other connectors, which load into device blocks too, see
    ``OffloadingConnectorScheduler.loads_of_others_failed``. ``do_remote_decode`` of a request is meant for these."""
    layout: KeyLayout = field(init=False, repr=False, compare=False)
    """The groups, or their parts, and how their blocks are named."""

    def __post_init__(self) -> None:
        groups, parts = self.groups, self.parts
        if not isinstance(groups, Sequence) or not all(isinstance(group, KVGroup) for group in groups):
            raise ConfigError("groups", groups, "", "pass a list with one KVGroup per KV cache group of the engine")
        if parts is not None and not isinstance(parts, Parts):
            raise ConfigError("parts", parts, "pass plan_parts(...).parts", "or leave it out")
        if parts is not None and len(parts.counts) != len(groups):
            raise ConfigError("parts", parts, f"must have one count for each of the {len(groups)} groups")
        for name in ("engines", "hash_block_size", "device_blocks", "num_workers"):
            value = getattr(self, name)
            if (value is not None or name == "engines") and (type(value) is not int or value < 1):
                raise ConfigError(name, value, "must be a whole number, at least 1")
        index, engines = self.engine, self.engines
        if type(index) is not int or not 0 <= index < engines:
            raise ConfigError("engine", index, f"must be a whole number from 0 to {engines - 1}, of {engines} engines")
        for name in ("share_loads", "enable_events", "keeps_blocks", "is_beside_others"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(name, value, "must be True or False")
        optional = ("following", "next_free", "engine_options", "drops_tokens", "adapter_of", "trace_headers")
        for name in ("parent_request", *optional):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name not in optional):
                raise ConfigError(name, value, "must be a function", "or leave it out")
        words = self.identity
        if not isinstance(words, Mapping) or not all(isinstance(word, str) for item in words.items() for word in item):
            raise ConfigError("identity", words, 'must be a mapping of strings, such as {"dtype": "bfloat16"}')
        object.__setattr__(self, "layout", KeyLayout(groups, self.hash_block_size, self.following, parts))

    @property
    def why_inclusive(self) -> str | None:
        """Why host memory must repeat what the device holds; None if it need not."""
        if not self.keeps_blocks or self.device_blocks is None:
            return "the device cache does not keep blocks (keeps_blocks, device_blocks; sleep mode, no prefix caching)"
        if self.adapter_of is not None:
            return "the engine serves adapters"
        layout = self.layout
        if any(group.block_size_factor > 1 for group in layout.groups):
            return LARGE_BLOCKS
        if layout.windows or layout.states:
            return OTHER_LAYERS
        if layout.ahead:
            return "the KV of a drafter depends on later tokens"
        return "blocks are stored in parts" if layout.parts.is_divided else None


def guarded(fallback: Callable[..., Any]) -> Callable[[Method], Method]:
    """Nothing raises into the engine: an unexpected error calls the object's ``switch_off``, and while it is ``off``
    ``fallback`` answers instead. It must not raise, so it asks neither manager nor engine for anything."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.off:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.switch_off(method.__name__)
            return fallback(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
