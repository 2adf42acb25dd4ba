"""The sizes and deadlines of a CudaTransfer."""

from __future__ import annotations

from dataclasses import dataclass

ROW_ALIGNMENT = 256
"""In staging memory the rows of each group start at a multiple of it."""
DEVICE_PAGE_BYTES = 2 << 20
"""The driver takes whole pages of this size for an allocation that is not much smaller."""


def aligned(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to ROW_ALIGNMENT."""
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def device_bytes(nbytes: int) -> int:
    """Returns what the driver takes for an allocation of ``nbytes``."""
    return -(-nbytes // DEVICE_PAGE_BYTES) * DEVICE_PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and deadlines. Tests use smaller ones.

    A fence of stores makes the engine wait as long as a kernel takes to gather its rows, at 2 TB/s 0.5 us per MiB,
    beside a launch of 5 us. Rows that are in flight are gathered at once, because each of these chunks has staging
    memory of its own. Rows that are still queued are gathered on another stream, into memory that only fences use. So
    nothing of this waits for the bus, unless two fences come within the time of a copy, or a fence has rows of more
    than ``fence_bytes``: then 19 us per MiB of PCIe 5 x16.
    """

    chunk_bytes: int = 8 << 20
    """What one chunk copies: 152 us of PCIe 5 x16."""
    chunk_rows: int = 8192
    in_flight: int = 4
    """How many chunks of one direction are issued before the first of them has ended. Rows that a fence needs at once
    come on top of it."""
    stage_bytes: int = 8 << 20
    """Device memory in which the rows of one chunk are gathered, or from which they are scattered. Each chunk in flight
    has its own."""
    fence_bytes: int = 2 << 20
    """The same for the rows of fences, per direction."""
    bounce_bytes: int = 1 << 20
    """Size of a bounce buffer: as much as one thread copies in about 0.1 ms."""
    num_bounce_buffers: int = 8
    """Bounce buffers per direction. Stores that a fence needs at once fail if there are too few: no step waits for
    memcpy."""
    lock_warning_s: float = 5.0
    """How long a fence waits for the thread that copies, which may be issuing one chunk, before it says so and waits
    on."""
    close_deadline_s: float = 5.0
    """How long ``close`` waits for the threads and for copies in progress."""


DEFAULT_LIMITS = Limits()
