"""Estimates time to first token from the speeds of the device and the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvoffload.lab.model import ModelShape
from kvoffload.lab.trace import Floats, Ints


class Origin(StrEnum):
    """Where a speed is from, in words."""

    GIVEN = "as given"
    MEASURED = "measured by the recorded server"
    GUESSED = "a guess: give --prefill-speed"


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one engine. The defaults are typical of a model with 8 billion parameters on one data-centre GPU,
    host memory over 16 lanes of PCIe 4 and one NVMe disk; measure your own."""

    prefill_tokens_per_s: float = 10_000.0
    """For short prompts. In a long prompt, attention to its earlier tokens adds FLOPs per token."""
    host_bytes_per_s: float = 20e9
    """From host memory to the device."""
    disk_bytes_per_s: float = 3e9
    """From disk to host memory."""
    prefill_origin: Origin = Origin.GUESSED

    def __str__(self) -> str:
        return (
            f"TTFT is an estimate without queueing: prefill at {self.prefill_tokens_per_s:,.0f} tokens/s "
            f"({self.prefill_origin}), loads at {self.host_bytes_per_s / 1e9:g} GB/s from RAM and "
            f"{self.disk_bytes_per_s / 1e9:g} GB/s from disk."
        )


DEFAULT_SPEEDS = Speeds()


def ttft_seconds(
    model: ModelShape, speeds: Speeds, prompt_tokens: Ints, device_tokens: Ints, host_tokens: Ints, disk_tokens: Ints
) -> Floats:
    """Returns the time to first token of each request alone on the machine: without queueing and batching, so shorter
    than on a busy server.

    Blocks that were found are loaded, then the rest is computed, at least one token. Blocks on disk go through host
    memory; they are loaded only if that is faster than computing them. All arrays have one entry per request.
    """
    in_memory = device_tokens + host_tokens
    flops_per_s = speeds.prefill_tokens_per_s * model.linear_flops_per_token

    def compute(found: Ints) -> Floats:
        start = np.minimum(found, np.maximum(prompt_tokens - 1, 0))
        flops: Floats = model.prefill_flops(start.astype(np.float64), prompt_tokens.astype(np.float64))
        return flops / flops_per_s

    from_disk = disk_tokens * model.bytes_per_token * (1 / speeds.disk_bytes_per_s + 1 / speeds.host_bytes_per_s)
    seconds: Floats = np.minimum(compute(in_memory), from_disk + compute(in_memory + disk_tokens))
    return seconds + host_tokens * (model.bytes_per_token / speeds.host_bytes_per_s)
