"""Parses capacities: a percentage of a trace's distinct blocks, a number of blocks, or an amount of memory."""

from __future__ import annotations

import math
import re

from kvoffload.abc import ConfigError
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.lab.model import ModelShape
from kvoffload.lab.trace import Trace
from kvoffload.units import format_bytes, parse_bytes

MAX_BLOCKS = 1 << 40
_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%", re.ASCII)
_BLOCKS = re.compile(r"\d{1,30}", re.ASCII)


def parse_capacity(text: str, trace: Trace, model: ModelShape, setting: str = "capacity") -> int:
    """Returns the blocks in "1%" (of the trace's distinct blocks, rounded down, at least 1), "5859" (blocks) or "64GiB"
    (memory for KV of ``model``, whole blocks). Raises ConfigError that names ``setting``."""
    fix = (
        "write a percentage of the trace's distinct blocks such as 1%, a number of blocks such as 5859, or an amount "
        "of memory such as 64GiB"
    )
    text = text.strip()
    if percent := _PERCENT.fullmatch(text):
        share = float(percent[1])
        if not 0 < share <= 100:
            raise ConfigError(setting, text, "must be more than 0% and at most 100%", fix)
        return max(1, int(share / 100 * trace.num_distinct + 1e-9))
    if _BLOCKS.fullmatch(text):
        blocks = int(text)
        if not 1 <= blocks <= MAX_BLOCKS:
            raise ConfigError(setting, text, f"must be 1 to {MAX_BLOCKS} blocks", fix)
        return blocks
    try:
        amount = parse_bytes(setting, text)
    except ConfigError as error:
        raise ConfigError(setting, text, "not a capacity", fix) from error
    block_bytes = model.bytes_per_token * trace.block_tokens
    blocks = int(amount // block_bytes) if block_bytes else 0
    if blocks < 1:
        raise ConfigError(
            setting,
            text,
            f"too small for one block of {format_bytes(int(block_bytes))} ({trace.block_tokens} "
            f"tokens of {model.name})",
            fix,
        )
    return min(blocks, MAX_BLOCKS)


def parse_size(text: str, trace: Trace, model: ModelShape, setting: str = "capacity") -> int:
    """Returns the bytes of memory in one of the texts of ``parse_capacity``. Raises ConfigError that names
    ``setting``."""
    text = text.strip()
    if _PERCENT.fullmatch(text) or _BLOCKS.fullmatch(text):
        return parse_capacity(text, trace, model, setting) * slot_bytes(trace, model)
    return parse_bytes(setting, text)


def slot_bytes(trace: Trace, model: ModelShape) -> int:
    """Returns the memory of a server per block of ``trace``, with padding."""
    return padded_slot_bytes(math.ceil(trace.block_tokens * model.bytes_per_token))
