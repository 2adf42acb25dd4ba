"""What this process writes in a shared directory: a seat, and the disk tier in it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from kvoffload.tiers.disk.format import HEADER_BYTES, INDEX_NAME, JOURNAL_NAME
from kvoffload.tiers.disk.storage import Storage, read_fresh
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.shared_dir.seats import BEAT_S, SILENT_S, GoneSeats, Seat, SeatState

logger = logging.getLogger(__name__)

LOOK_AROUND_S = 30.0
"""Time between two searches for seats of servers that are gone."""
VANISHED_ERRORS = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


class Writer:
    """The seat of this process in ``root``, and its blocks in the disk tier ``own``.

    ``keep`` and ``end`` wait for the medium, and are called by one thread at a time.
    """

    def __init__(
        self, root: Storage, seat: Seat, own: DiskTier, gone_after_s: float, clock: Callable[[], float]
    ) -> None:
        self.seat = seat
        self.own = own
        self._gone = GoneSeats(root, seat, gone_after_s, clock)
        self._clock = clock
        self._next_beat = self._next_look = -float("inf")
        self._is_failing = False

    def keep(self) -> None:
        """Writes heartbeat and journal, and empties seats of servers that are gone, each when it is due. Notices that
        the seat is lost."""
        if self.seat.is_lost:
            return
        now = self._clock()
        try:
            if now >= self._next_beat:
                self.seat.beat()
                self._next_beat = now + BEAT_S
            if not self.seat.is_lost:
                self.own.write_journal()
            self._is_failing = False
        except OSError as error:
            self.seat.is_lost = error.errno in VANISHED_ERRORS
            if not self.seat.is_lost and not self._is_failing:
                logger.warning(
                    "kvoffload: shared directory: the heartbeat or the journal of %s cannot be written (%s); after "
                    "%.0f s another server may take the folder. Check the file system",
                    self.seat.name,
                    error,
                    SILENT_S,
                )
            self._is_failing = True
            return
        if now >= self._next_look and not self.seat.is_lost:
            self._next_look = now + LOOK_AROUND_S
            try:
                self._gone.look_around()
                self.own.files.remove_excess()
                for name in (INDEX_NAME, JOURNAL_NAME):
                    read_fresh(self.seat.storage, self.own.files.folder.name, name, HEADER_BYTES)
            except OSError as error:
                self.seat.is_lost = error.errno in VANISHED_ERRORS
                logger.debug("kvoffload: shared directory: folders cannot be looked at (%s)", error)

    def end(self) -> None:
        """Notes in the heartbeat that the process has ended."""
        try:
            if not self.seat.is_lost:
                self.seat.beat(SeatState.ENDED)
        except OSError as error:
            logger.debug("kvoffload: shared directory: %s: %s", self.seat.name, error)
