"""kvoffload's events in vLLM's form, so that a router can index host memory and lower tiers as it indexes devices."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvoffload.cache.keys import ADAPTER_BYTES, NAMESPACE_BYTES, key_block_hash, key_group_idx
from kvoffload.vllm.layout import EngineLayout

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from kvoffload.abc import BlockDescription, OffloadingEvent, OffloadKey

MAX_CONTENTS = 1 << 16
"""Blocks of host memory whose contents are remembered for the events of lower tiers, about 230 bytes plus 8 per token
for each. Events of other blocks name them by hash only."""


class _Content(NamedTuple):
    """What a stored event says about one block."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: array[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


NOTHING = _Content(b"", None, array("q"), None, None, None)


class EventTranslator:
    """Turns events into vLLM's: stored blocks with their tokens and parents, one event per run of a chain, and removed
    blocks by hash.

    A block is written to a lower tier, or read from it, while it is in host memory. So where there are lower tiers, the
    contents of a block are remembered from its announcement in host memory until it has left, for ``max_contents``
    blocks at most. Where they are not known, the event has hashes but no tokens, as vLLM's own offloading events may.
    Groups with a lookahead are left out, because their keys do not have the hashes of the device's blocks. A state is
    announced as vLLM announces its own: kind "mamba", with the tokens of the block at whose end it stands. Of a block
    in parts, the last one is announced: it becomes loadable last and is evicted first.
    """

    def __init__(self, layout: EngineLayout, has_adapters: bool = False, max_contents: int = MAX_CONTENTS) -> None:
        """``has_adapters``: whether the engine serves adapters, of which its keys then say something."""
        self._layout = layout
        self._max_contents = max_contents
        self._before_hash = NAMESPACE_BYTES + (ADAPTER_BYTES if has_adapters else 0)
        self._groups = {part: g for g, part in enumerate(layout.parts.last)}
        """The KV cache group of each part that is announced."""
        self._contents: OrderedDict[OffloadKey, _Content] = OrderedDict()

    def translate(self, events: Iterable[OffloadingEvent], has_tiers: bool) -> Iterator[KVCacheEvent]:
        """Yields vLLM's events for those of one step. ``has_tiers``: whether there are lower tiers."""
        left: dict[OffloadKey, None] = {}
        for event in events:
            described = event.blocks or [None] * len(event.keys)
            by_group: defaultdict[int, list[tuple[OffloadKey, BlockDescription | None]]] = defaultdict(list)
            for key, block in zip(event.keys, described, strict=True):
                by_group[key_group_idx(key)].append((key, block))
            for part, blocks in by_group.items():
                g = self._groups.get(part)
                if g is None or self._layout.groups[g].group.lookahead:
                    continue
                if event.removed:
                    keys = [key for key, _ in blocks]
                    yield _make(
                        BlockRemoved,
                        block_hashes=list(map(self._name_of, keys)),
                        medium=event.medium,
                        group_idx=g,
                        locality=_locality(event),
                        ownership=event.tier,
                    )
                    if event.tier is None:
                        left.update(dict.fromkeys(keys))
                else:
                    for key, block in blocks:
                        if event.tier is None:
                            left.pop(key, None)
                        if block is not None and (event.tier is None or key not in self._contents):
                            self._contents[key] = _content(block)
                    yield from self._stored(event, g, [key for key, _ in blocks])
        if not has_tiers:
            self._contents.clear()
        # Events of tiers in the same batch come after those of host memory, and may still need what has left it.
        for key in left:
            self._contents.pop(key, None)
        while len(self._contents) > self._max_contents:
            self._contents.popitem(last=False)

    def _stored(self, event: OffloadingEvent, g: int, keys: Sequence[OffloadKey]) -> Iterator[KVCacheEvent]:
        contents = list(map(self._contents.get, keys))
        for run in _runs([content for content in contents if content is not None]):
            yield self._event(event, g, [_name(content.block_hash) for content in run], run)
        unknown = [self._name_of(key) for key, content in zip(keys, contents, strict=True) if content is None]
        if unknown:
            yield self._event(event, g, unknown, [])

    def _name_of(self, key: OffloadKey) -> Any:
        return _name(key_block_hash(key)[self._before_hash :])

    def _event(self, event: OffloadingEvent, g: int, names: list[Any], run: list[_Content]) -> KVCacheEvent:
        """Returns the stored event of a run, or, with an empty run, that of blocks whose contents are not known."""
        group, first = self._layout.groups[g], run[0] if run else NOTHING
        return _make(
            BlockStored,
            block_hashes=names,
            parent_block_hash=None if first.parent_hash is None else _name(first.parent_hash),
            token_ids=[token for content in run for token in content.token_ids],
            block_size=group.group.block_tokens if run else 0,
            lora_id=first.lora_id,
            medium=event.medium,
            lora_name=first.lora_name,
            extra_keys=to_event_extra_keys([content.extra_keys for content in run]) if run else None,
            group_idx=g,
            kv_cache_spec_kind=get_kv_cache_spec_kind(group.spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(group.spec),
            locality=_locality(event),
            ownership=event.tier,
        )


def _content(block: BlockDescription) -> _Content:
    request: Any = block.request
    lora = request.lora_request
    return _Content(
        block.block_hash,
        block.parent_hash,
        array("q", request.all_token_ids[block.start : block.end]),
        lora.adapter_id if lora else None,
        lora.name if lora else None,
        generate_block_hash_extra_keys(request, block.start, block.end, 0)[0],
    )


def _runs(contents: list[_Content]) -> Iterator[list[_Content]]:
    """Yields the longest runs of adjacent blocks of one chain."""
    run: list[_Content] = []
    for content in contents:
        if run and content.parent_hash != run[-1].block_hash:
            yield run
            run = []
        run.append(content)
    if run:
        yield run


def _locality(event: OffloadingEvent) -> str | None:
    """Returns where a tier is, seen from this server, in vLLM's words."""
    if event.tier is None:
        return None
    return "REMOTE" if event.is_shared else "LOCAL"


def _name(block_hash: bytes) -> Any:
    return maybe_convert_block_hash(block_hash)  # type: ignore[arg-type, unused-ignore]


def _make(kind: Any, **fields: Any) -> KVCacheEvent:
    """Returns an event with those of ``fields`` that this version of vLLM knows."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})
