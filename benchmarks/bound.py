"""What host memory would find under a policy that knows the rest of the trace: Belady, "A Study of Replacement
Algorithms for a Virtual-Storage Computer", IBM Systems Journal 1966, applied to chains of blocks. We know of no policy
that finds longer prefixes."""

from __future__ import annotations

import heapq

import numpy as np

from kvoffload.lab.trace import Ints, Trace


def found_by_bound(trace: Trace, capacity: int) -> tuple[Ints, float]:
    """Returns the tokens that each request finds in ``capacity`` blocks, and the blocks written per access.

    The block whose next use is furthest away leaves, a chain's tail before its head, and a new block is refused if
    every other one is needed sooner. Blocks of outputs are stored, but only prompts use blocks.
    """
    next_uses = _next_uses(trace)
    held: dict[int, int] = {}
    """The next use of each block in the cache."""
    furthest: list[tuple[int, int]] = []
    """A heap of blocks behind their negative next use; stale where ``held`` has another one."""
    found, written = [], 0
    for request, prompt_blocks in enumerate(trace.prompt_blocks.tolist()):
        chain: list[int] = trace.chain(request).tolist()
        start = trace.offsets[request]
        uses = dict(zip(chain, next_uses[start : start + len(chain)].tolist(), strict=True))
        found.append(next((i for i, block in enumerate(chain[:prompt_blocks]) if block not in held), prompt_blocks))
        for part in (chain[: min(prompt_blocks, capacity)], chain[prompt_blocks:capacity]):
            new = sorted((block for block in part if block not in held), key=uses.__getitem__)
            num_wanted = len(new)
            while len(held) + len(new) > capacity:
                while furthest and held.get(furthest[0][1]) != -furthest[0][0]:
                    heapq.heappop(furthest)
                if furthest and -furthest[0][0] > uses[new[-1]]:
                    del held[heapq.heappop(furthest)[1]]
                else:
                    new.pop()
            held.update(dict.fromkeys(new, -1))
            written += len(new)
            if len(new) < num_wanted:
                break
        for block in held.keys() & uses.keys():
            held[block] = uses[block]
            heapq.heappush(furthest, (-uses[block], block))
    return np.minimum(np.array(found) * trace.block_tokens, trace.input_tokens), written / max(1, trace.num_accesses)


def _next_uses(trace: Trace) -> Ints:
    """Returns, per access, when a prompt has its block next: a number that ascends by request, then by place in the
    chain."""
    never = trace.num_accesses
    following = [never] * trace.num_distinct
    lengths = np.diff(trace.offsets)
    places = np.arange(never) - np.repeat(trace.offsets[:-1], lengths)
    is_prompt = (places < np.repeat(trace.prompt_blocks, lengths)).tolist()
    found = np.empty(never, dtype=np.int64)
    blocks = trace.blocks.tolist()
    for access in range(never - 1, -1, -1):
        block = blocks[access]
        found[access] = following[block]
        if is_prompt[access]:
            following[block] = access
    return found
