"""Registers the host pool with the driver of a device in the background, so that the device can copy from and to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvoffload.abc import ByteArray
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""Bytes that one call registers at most, or one slot if that is larger. While a call runs, the driver delays other work
of this process and of other processes on the machine: at about 0.1 s per GiB for 6 ms. The pause after each call is as
long, so 500 GiB take 100 s, and no launch waits longer than one call. Some drivers fail from 512 GiB per call on, some
versions of Linux from 2 GiB on."""
MIN_CHUNK_BYTES = 32 << 20
"""A chunk that cannot be registered is halved, but not below this."""
CLOSE_DEADLINE_S = 5.0
"""How long ``close`` waits: for the call in progress, for the end of copies, and for all chunks."""
LOG_EVERY_S = 10.0
_VERSION = Path("/proc/version")

_STILL_REGISTERED: list[ByteArray] = []
"""Memory that could not be unregistered. It stays mapped, because the driver pins these addresses: other memory that
came there could not be registered, and a call in progress would pin it."""


class Registrar(Protocol):
    """The calls of a driver. Each may raise any Exception."""

    def enter_thread(self) -> None:
        """Prepares the calling thread, once, before its other calls."""

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory for the device. The calls of one thread must not fail while another thread captures a graph."""

    def unregister(self, address: int) -> None:
        """Ends the registration that began at ``address``."""


class Registration:
    """Registers the slots of a pool in a background thread, in their order.

    ``slots`` are bytes of shape (num_slots, slot_bytes). ``wait_until_touched`` returns True when the first so many of
    these bytes are in memory and are not moved any more, as collapsing to huge pages does, or False if the pool is
    closed before.

    Each chunk ends where a slot ends. After each call the thread pauses for as long as the call took, so that the work
    that waited for it can run. If the driver refuses even a small chunk, the thread stops for good, with one warning;
    the slots so far remain registered.
    """

    def __init__(
        self,
        slots: ByteArray,
        registrar: Registrar,
        wait_until_touched: Callable[[int], bool],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        min_chunk_bytes: int = MIN_CHUNK_BYTES,
    ) -> None:
        self._slots: ByteArray | None = slots
        """None when nothing is registered any more."""
        self._num_slots, self._slot_bytes = slots.shape
        self._address = slots.ctypes.data
        self._registrar = registrar
        self._wait_until_touched = wait_until_touched
        self.boundary_slots = _power_of_two(min_chunk_bytes // self._slot_bytes)
        """A chunk ends at a multiple of this or at the end of the pool. One copy must not cross such a multiple, since
        drivers refuse copies of memory from two registrations."""
        self._chunk_slots = _power_of_two(chunk_bytes // self._slot_bytes)
        self._num_ready = 0
        self._registered: list[int] = []
        self._closing = threading.Event()
        self._released = threading.Event()
        self._closer: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="kvoffload-register", daemon=True)
        self._thread.start()

    @property
    def num_ready_slots(self) -> int:
        """How many slots, from the first on, are registered. It only grows until ``close``, and needs no lock."""
        return self._num_ready

    def release(self) -> None:
        """Says that no copy of these slots is in progress and none will begin. ``close`` waits for this; until then the
        slots remain registered, because the driver would delay an engine that is still serving."""
        self._released.set()

    def close(self) -> bool:
        """Unregisters all chunks in a background thread, once ``release`` was called. Waits up to CLOSE_DEADLINE_S.
        Returns whether nothing is registered any more. Call it before the memory is freed.

        If copies do not end in time, the chunks remain registered until the process ends. May be called twice.
        """
        if self._closer is None:
            self._closing.set()
            self._closer = threading.Thread(target=self._unregister_all, name="kvoffload-unregister", daemon=True)
            self._closer.start()
        self._closer.join(CLOSE_DEADLINE_S)
        return not (self._closer.is_alive() or self._thread.is_alive() or self._registered)

    def _run(self) -> None:
        logged = time.monotonic()
        size = self._chunk_slots
        try:
            self._registrar.enter_thread()
        except Exception as error:
            self._warn(error)
            return
        while self._num_ready < self._num_slots:
            count = min(size, self._num_slots - self._num_ready)
            if not self._wait_until_touched((self._num_ready + count) * self._slot_bytes) or self._closing.is_set():
                return
            address, called = self._address + self._num_ready * self._slot_bytes, time.monotonic()
            try:
                self._registrar.register(address, count * self._slot_bytes)
            except Exception as error:
                if count <= self.boundary_slots:
                    self._warn(error)
                    return
                while size >= count:
                    size //= 2
                continue
            self._registered.append(address)
            self._num_ready += count
            now = time.monotonic()
            if now - logged >= LOG_EVERY_S:
                logged = now
                logger.info("kvoffload: %s of the host pool registered with the device", self._done())
            self._closing.wait(now - called)
        logger.info("kvoffload: %s of the host pool registered with the device", self._done())

    def _done(self) -> str:
        return (
            f"{format_bytes(self._num_ready * self._slot_bytes)} of {format_bytes(self._num_slots * self._slot_bytes)}"
        )

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "kvoffload: the driver registered only %s of the host pool (%s). Copies of the rest go through a small "
            "buffer and are slower. %s",
            self._done(),
            error or type(error).__name__,
            _cause(),
        )

    def _unregister_all(self) -> None:
        deadline = time.monotonic() + CLOSE_DEADLINE_S
        self._thread.join(CLOSE_DEADLINE_S)
        is_idle = self._released.wait(max(0.0, deadline - time.monotonic()))
        try:
            if self._thread.is_alive() or not is_idle:
                raise TimeoutError(f"copies, or a call of the driver, have not ended within {CLOSE_DEADLINE_S:g} s")
            self._num_ready = 0
            self._registrar.enter_thread()
            while self._registered:
                self._registrar.unregister(self._registered[-1])
                self._registered.pop()
            self._slots = None
        except Exception as error:
            if self._slots is not None:
                _STILL_REGISTERED.append(self._slots)
            logger.warning("kvoffload: the host pool stays registered until the process ends: %s", error)


def _power_of_two(most: int) -> int:
    """Returns the largest power of two that is not above ``most``; 1 if there is none."""
    return 1 << max(0, most.bit_length() - 1)


def _cause() -> str:
    """Returns what probably limits registering here, and how to raise the limit."""
    if "microsoft" in _VERSION.read_text().lower():
        return "Windows limits how much memory WSL may pin: set host_bytes lower."
    return (
        "The locked-memory limit (ulimit -l) is not the cause, because the driver does not apply it. The driver needs "
        "some MiB of the machine's memory for each GiB, so set host_bytes lower if that memory is full; "
        "`dmesg | grep NVRM` on the machine tells more. Confidential computing and some sandboxes forbid registering."
    )
