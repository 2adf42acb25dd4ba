"""Reads traces that a server recorded (see ``kvoffload.observe.trace``): a header, then one JSON object per request.

Every start of the server adds a header, ``{"kvoffload_trace": 1, "block_tokens": ..., "started": seconds since 1970,
...}``. A request has the fields of Mooncake's traces, but its ``hash_ids`` continue with the blocks of the output, and
``device_tokens``, ``host_tokens`` and ``disk_tokens``: what that server found. Optional are ``session`` and ``tenant``,
and ``prompt_blocks``: how many of the ids belong to the prompt, where that is not the number of its whole blocks.
``drop``, ``expect_return_s``, ``p_return`` and ``retain_s`` are the request options of these names.
``prefill_tokens`` and ``prefill_ms`` are there where the server measured how fast it computed the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.abc import Hints
from kvoffload.lab.readers.lines import Source, optional_name, parse_object, prefix_ids, seconds, whole
from kvoffload.lab.readers.mooncake import MILLISECOND
from kvoffload.lab.trace import PREFILL_SPEED, Trace, TraceBuilder, TraceError
from kvoffload.observe.trace import HEADER, VERSION

FOUND = ("device_tokens", "host_tokens", "disk_tokens")


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the trace. Its ``info`` has the fields of the last header, and the total tokens found in each tier as
    ``device_tokens`` and so on, and PREFILL_SPEED if the server measured it.

    Raises TraceError, also if ``block_tokens`` differs from the trace's own.
    """
    header: dict[str, Any] | None = None
    starts: list[float] = []
    size = 0
    rows = TraceBuilder()
    found = [0] * len(FOUND)
    computed, computing_s = 0, 0.0
    is_torn = False
    """Whether the line before has no end: that of a server that was killed."""
    for number, line in source.lines():
        try:
            data = parse_object(line)
            if HEADER in data:
                source.num_torn += is_torn
                tokens = _check_header(data, f"{source.path}:{number}")
                if header is not None and tokens != size:
                    raise TraceError(
                        f"{source.path}:{number}: blocks have {tokens} tokens from here on, but {size} before: split "
                        "the file before this header"
                    )
                header, size = data, tokens
                starts.append(data["started"])
            elif header is None:
                raise ValueError("a request before any header")
            else:
                (inputs, outputs, prompt_blocks, *here), chain = _request(data, size)
                at = starts[-1] + seconds(data, "timestamp", MILLISECOND)
                names = optional_name(data, "session"), optional_name(data, "tenant")
                rows.add(at, inputs, outputs, chain, prompt_blocks, *names, _hints(data))
                if "prefill_ms" in data:
                    computed += whole(data, "prefill_tokens")
                    computing_s += seconds(data, "prefill_ms", MILLISECOND)
                found = [total + tokens for total, tokens in zip(found, here, strict=True)]
            is_torn = False
        except TraceError:
            raise
        except ValueError as error:
            source.problem(number, error)
            is_torn = not line.rstrip().endswith(b"}")
    source.num_torn += is_torn
    if header is None:
        source.empty()
    if block_tokens not in (None, size):
        raise TraceError("block_tokens", block_tokens, f"{source.path.name} was recorded with {size}", "leave it out")
    return source.trace(
        rows,
        size,
        min(starts),
        {
            **header,
            "starts": len(starts),
            **dict(zip(FOUND, found, strict=True)),
            **({PREFILL_SPEED: computed / computing_s} if computed and computing_s > 0 else {}),
        },
    )


def _hints(data: Mapping[str, Any]) -> Hints | None:
    """Returns what the client knew; the session is not among it. Raises ValueError."""
    numbers = {name: seconds(data, name) for name in ("expect_return_s", "p_return", "retain_s") if name in data}
    drop = data.get("drop", False)
    if not isinstance(drop, bool) or numbers.get("p_return", 0) > 1:
        raise ValueError(f"drop={drop!r}, p_return={numbers.get('p_return')}: not what a client can say")
    return Hints(None, drop, **numbers) if numbers or drop else None


def _check_header(data: Mapping[str, Any], where: str) -> int:
    if data[HEADER] != VERSION:
        raise TraceError(
            f"{where}: {HEADER}={data[HEADER]!r}: this version of kvoffload reads format {VERSION}; use the version "
            "that recorded it"
        )
    seconds(data, "started")
    if PREFILL_SPEED in data and not seconds(data, PREFILL_SPEED) > 0:
        raise ValueError(f"{PREFILL_SPEED}={data[PREFILL_SPEED]!r}: not a speed")
    return whole(data, "block_tokens", 1)


def _request(data: Mapping[str, Any], block_tokens: int) -> tuple[tuple[int, ...], list[int]]:
    inputs, outputs, chain = whole(data, "input_length", 1), whole(data, "output_length"), prefix_ids(data)
    prompt_blocks = whole(data, "prompt_blocks") if "prompt_blocks" in data else inputs // block_tokens
    most = max(prompt_blocks, (inputs + outputs) // block_tokens)
    if not prompt_blocks <= len(chain) <= most or prompt_blocks > -(-inputs // block_tokens):
        raise ValueError(
            f"{len(chain)} hash_ids for input_length={inputs} and output_length={outputs} in blocks of {block_tokens}"
        )
    found = [whole(data, name) if name in data else 0 for name in FOUND]
    if sum(found) > inputs:
        raise ValueError(f"{', '.join(FOUND)}: the sum is more than input_length={inputs}")
    return (inputs, outputs, prompt_blocks, *found), chain
