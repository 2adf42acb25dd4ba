"""Compares loading tokens from each medium with computing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.doctor.findings import Figure, Finding, Level

HOST = "host memory"
TOKENS = 8192
"""Tokens of the example."""
NOTABLE_RATIO = 1.25
"""Measurements differ by less than this from run to run."""


@dataclass(frozen=True, slots=True)
class Medium:
    """Where blocks are loaded from. ``tier`` is empty for host memory."""

    name: str
    read_bytes_per_s: float
    tier: str = ""


def worth_findings(
    media: list[Medium],
    bytes_per_token: float | None,
    prefill_tokens_per_s: float | None,
    is_model_given: bool,
    is_gated: bool = True,
) -> Iterator[Finding]:
    """Yields per medium whether a hit pays. ``prefill_tokens_per_s``: the speed of the engine for one request.
    ``is_gated``: whether blocks that are faster to compute are not loaded."""
    if not bytes_per_token:
        if not is_model_given:
            text = "what a hit is worth depends on the KV bytes per token of the model"
            yield Finding("worth.no_model", Level.NOTE, text, "add --model DIR-or-config.json")
        return
    for medium in media:
        rate = medium.read_bytes_per_s / bytes_per_token
        figures: dict[str, Figure] = {
            "break_even_tokens_per_s": round(rate),
            "load_ms": round(TOKENS / rate * 1e3, 1),
            "tokens": TOKENS,
        }
        loads = f"{medium.name}: loads {TOKENS:,} tokens in {_time(TOKENS / rate)}"
        if prefill_tokens_per_s is None:
            text = f"{loads}: pays if the server computes fewer than {_rounded(rate)} tokens/s per request"
            yield Finding("worth.break_even", Level.NOTE, text, "", medium.tier, figures)
            continue
        ratio = rate / prefill_tokens_per_s
        figures |= {"prefill_tokens_per_s": prefill_tokens_per_s, "speedup": round(ratio, 2)}
        text = f"{loads}; computing them takes {_time(TOKENS / prefill_tokens_per_s)}: "
        if ratio >= NOTABLE_RATIO:
            text += f"{ratio:.1f} times faster"
            yield Finding("worth.pays", Level.OK, text, "", medium.tier, figures)
        elif ratio > 1 / NOTABLE_RATIO:
            text += "about the same, so a hit saves work of the device and little time"
            yield Finding("worth.even", Level.NOTE, text, "", medium.tier, figures)
        else:
            result = (
                "so most prefixes that are found there are computed" if is_gated else "but it is loaded in any case"
            )
            text += f"{1 / ratio:.1f} times slower, {result}"
            fix = "use a faster medium, or remove the tier" if medium.tier else "do not offload this model here"
            yield Finding("worth.slower", Level.WARNING, text, fix, medium.tier, figures)


def _time(seconds: float) -> str:
    return (
        f"{seconds:,.1f} s"
        if seconds >= 1
        else f"{seconds * 1e3:,.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.1f} ms"
    )


def _rounded(number: float) -> str:
    """Returns ``number`` with two significant digits or none after the point."""
    digits = 10 ** max(0, len(str(int(number))) - 2)
    return f"{int(number // digits * digits):,}"
