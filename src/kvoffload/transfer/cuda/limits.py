"""The sizes and deadlines of a CudaTransfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and deadlines. Tests use smaller ones."""

    chunk_bytes: int = 8 << 20
    """Device memory in which the rows of one chunk are gathered, or from which they are scattered. A direction has two
    such halves."""
    chunk_rows: int = 8192
    in_flight: int = 4
    """How many chunks of one direction are issued before the first of them has ended. Rows that a fence needs at once
    come on top of it."""
    bounce_bytes: int = 1 << 20
    """Size of a bounce buffer: as much as one thread copies in about 0.1 ms."""
    num_bounce_buffers: int = 8
    """Bounce buffers per direction. Stores that a fence needs at once fail if there are too few: no step waits for
    memcpy."""
    jobs_per_step: int = 512
    """How many jobs are turned into rows in one step: about 1 ms."""
    lock_deadline_s: float = 5.0
    """How long a fence waits for the thread that copies, which may be issuing one chunk, before it raises."""
    close_deadline_s: float = 5.0
    """How long ``close`` waits for the thread and for copies in progress."""


DEFAULT_LIMITS = Limits()
