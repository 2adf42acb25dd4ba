"""Traces that a server has recorded (see ``kvoffload.observe.trace``): a header, then a JSON object a request.

The header, ``{"kvoffload_trace": 1, "block_tokens": ..., "started": seconds since 1970, ...}``, comes again wherever
a server has started anew. A request's line has Mooncake's fields, where ``hash_ids`` go on over the blocks of the
output, and ``device_tokens``, ``host_tokens`` and ``disk_tokens``: what that server found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.lab.readers.lines import MAX_TOKENS, Source, out_of_order, parse_object, prefix_ids, seconds, whole
from kvoffload.lab.readers.mooncake import MILLISECOND
from kvoffload.lab.trace import Trace, TraceError, make_trace

VERSION = 1
HEADER = "kvoffload_trace"
FOUND = ("device_tokens", "host_tokens", "disk_tokens")


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """``info`` has the last header's fields and, as ``device_tokens`` and so on, what all requests found in each tier.

    Raises TraceError, also for a ``block_tokens`` that is not the trace's own.
    """
    header: dict[str, Any] | None = None
    starts: list[float] = []
    size = 0
    times: list[float] = []
    rows: list[tuple[int, ...]] = []
    chains: list[list[int]] = []
    for number, line in source.lines():
        try:
            data = parse_object(line)
            if HEADER in data:
                tokens = _check_header(data, f"{source.path}:{number}")
                if header is not None and tokens != size:
                    raise TraceError(
                        f"{source.path}:{number}: blocks of {tokens} tokens from here on, of {size} before: make two "
                        "files of it, each with its header"
                    )
                header, size = data, tokens
                starts.append(data["started"])
            elif header is None:
                raise ValueError("a request before any header")
            else:
                row, chain = _request(data, size)
                times.append(starts[-1] + seconds(data, "timestamp", MILLISECOND))
                rows.append(row)
                chains.append(chain)
        except TraceError:
            raise
        except ValueError as error:
            source.problem(number, error)
    if header is None:
        source.empty()
    if block_tokens not in (None, size):
        raise TraceError(f"block_tokens={block_tokens}: {source.path.name} was recorded with {size}; leave it out")
    source.refuse_if_empty(len(times))
    inputs, outputs, *found = map(list, zip(*rows, strict=True))
    first = min(starts)
    return make_trace(
        source.path.name,
        size,
        [at - first for at in times],
        inputs,
        outputs,
        chains,
        [min(len(chain), tokens // size) for chain, tokens in zip(chains, inputs, strict=True)],
        problems=tuple(source.problems.kept),
        num_problems=source.problems.count,
        info={
            **header,
            "format": "recorded",
            "starts": len(starts),
            "out_of_order": out_of_order(times),
            **dict(zip(FOUND, map(sum, found), strict=True)),
        },
    )


def _check_header(data: Mapping[str, Any], where: str) -> int:
    if data[HEADER] != VERSION:
        raise TraceError(
            f"{where}: {HEADER}={data[HEADER]!r}: this kvoffload reads format {VERSION}; use the one it came from"
        )
    seconds(data, "started")
    return whole(data, "block_tokens", 1)


def _request(data: Mapping[str, Any], block_tokens: int) -> tuple[tuple[int, ...], list[int]]:
    inputs, outputs, chain = whole(data, "input_length", 1), whole(data, "output_length"), prefix_ids(data)
    if not inputs // block_tokens <= len(chain) <= (inputs + outputs) // block_tokens:
        raise ValueError(
            f"{len(chain)} hash_ids for input_length={inputs} and output_length={outputs} in blocks of {block_tokens}"
        )
    found = [whole(data, name, 0, MAX_TOKENS) if name in data else 0 for name in FOUND]
    if sum(found) > inputs:
        raise ValueError(f"{', '.join(FOUND)}: more was found than the input_length={inputs} that was asked for")
    return (inputs, outputs, *found), chain
