"""Traces made from lists, where the recorded traces of real servers are, which some tests replay, and a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.lab.trace import Trace, TraceBuilder

TRACES = Path(os.environ.get("KVOFFLOAD_TRACES") or "no-folder-of-traces")
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="KVOFFLOAD_TRACES names no folder")
LLAMA: dict[str, Any] = {
    "_name_or_path": "Llama-3.1-8B",
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
"""A config.json whose KV is 128 KiB per token."""


def make_trace(
    name: str,
    block_tokens: int,
    times: Sequence[float],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    chains: Sequence[Sequence[int]],
    prompt_blocks: Sequence[int] | None = None,
    sessions: Sequence[str | None] | None = None,
    tenants: Sequence[str | None] | None = None,
    **more: Any,
) -> Trace:
    """Returns a trace made from lists. Requests are sorted by time; requests of the same time stay in order.

    ``chains`` has the block ids of each request, in [0, 2**64). ``prompt_blocks``: by default the length of the chain.
    """
    rows = TraceBuilder()
    for i, chain in enumerate(chains):
        rows.add(
            times[i],
            input_tokens[i],
            output_tokens[i],
            chain,
            None if prompt_blocks is None else prompt_blocks[i],
            None if sessions is None else sessions[i],
            None if tenants is None else tenants[i],
        )
    return rows.build(name, block_tokens, **more)
