"""kvoffload's events in vLLM's form, so that a router can index host memory as it indexes devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvoffload.cache.keys import key_block_hash, key_group_idx
from kvoffload.connector.build import NAMESPACE_BYTES
from kvoffload.vllm import versions
from kvoffload.vllm.layout import EngineLayout

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from kvoffload.abc import BlockDescription, OffloadingEvent, OffloadKey


def vllm_events(events: Iterable[OffloadingEvent], layout: EngineLayout) -> Iterator[KVCacheEvent]:
    """Yields stored blocks with their tokens and parents, one event per run of a chain, and removed blocks by hash.

    Leaves out the blocks of draft groups, because their keys are not those of their own tokens.
    """
    for event in events:
        described = event.blocks or [None] * len(event.keys)
        by_group: dict[int, list[tuple[OffloadKey, BlockDescription | None]]] = {}
        for key, block in zip(event.keys, described, strict=True):
            by_group.setdefault(key_group_idx(key), []).append((key, block))
        for g, blocks in by_group.items():
            if layout.groups[g].group.draft:
                continue
            if event.removed:
                hashes = [_name(key_block_hash(key)[NAMESPACE_BYTES:]) for key, _ in blocks]
                yield _make(BlockRemoved, block_hashes=hashes, medium=event.medium, group_idx=g)
            else:
                for run in _runs([block for _, block in blocks if block is not None]):
                    yield _stored(run, event.medium, g, layout)


def _runs(blocks: list[BlockDescription]) -> Iterator[list[BlockDescription]]:
    """Yields the longest runs of adjacent blocks of one request."""
    run: list[BlockDescription] = []
    for block in blocks:
        if run and not (block.request is run[-1].request and block.start == run[-1].end):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _stored(run: list[BlockDescription], medium: str, g: int, layout: EngineLayout) -> KVCacheEvent:
    request: Any = run[0].request
    lora = request.lora_request
    parent = run[0].parent_hash
    group, spec = layout.groups[g].group, layout.groups[g].spec
    return _make(
        BlockStored,
        block_hashes=[_name(block.block_hash) for block in run],
        parent_block_hash=None if parent is None else _name(parent),
        token_ids=list(request.all_token_ids[run[0].start : run[-1].end]),
        block_size=group.block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=medium,
        lora_name=lora.name if lora else None,
        extra_keys=_extra_keys(run),
        group_idx=g,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
    )


def _extra_keys(run: list[BlockDescription]) -> list[tuple[Any, ...] | None] | None:
    """Returns what vLLM hashes into each block besides its tokens, in the form of its own events."""
    keys = [generate_block_hash_extra_keys(block.request, block.start, block.end, 0)[0] for block in run]
    untag = versions.attribute(kv_cache_utils, "to_event_extra_keys")
    untagged: list[tuple[Any, ...] | None] | None = keys if untag is None else untag(keys)
    return untagged


def _name(block_hash: bytes) -> Any:
    return maybe_convert_block_hash(block_hash)  # type: ignore[arg-type, unused-ignore]


def _make(kind: Any, **fields: Any) -> KVCacheEvent:
    """Returns an event with those of ``fields`` that this version of vLLM knows."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})
