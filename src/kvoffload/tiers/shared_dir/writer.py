"""What this process writes in a shared directory: a seat, the disk tier in it, and another seat if that one is lost."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from kvoffload.abc import ConfigError
from kvoffload.tiers.disk.format import HEADER_BYTES, INDEX_NAME, JOURNAL_NAME
from kvoffload.tiers.disk.storage import Storage, read_fresh
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.shared_dir.background import Rest
from kvoffload.tiers.shared_dir.seats import BEAT_S, SILENT_S, GoneSeats, Seat, SeatState

logger = logging.getLogger(__name__)

LOOK_AROUND_S = 30.0
"""Time between two searches for seats of servers that are gone."""
VANISHED_ERRORS = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


class Writer:
    """The seat of this process in ``root``, and its blocks in the disk tier ``own``.

    ``keep``, ``end`` and ``close`` wait for the medium, and are called by one thread at a time.
    """

    def __init__(
        self, root: Storage, seat: Seat, own: DiskTier, gone_after_s: float, clock: Callable[[], float]
    ) -> None:
        self.root = root
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

    def close(self) -> None:
        """Gives up a seat that was never used, and closes its files."""
        self.end()
        self.own.files.close()
        self.root.close()


class Renewal:
    """Takes a new seat for a server that has lost its own. ``open_writer`` takes a seat in a shared directory.

    ``work`` and ``close`` wait for the medium, and are called by one thread at a time; ``take`` is called by the
    scheduler's.
    """

    def __init__(self, open_writer: Callable[[Storage], Writer], clock: Callable[[], float]) -> None:
        self._open_writer = open_writer
        self._rest = Rest(clock)
        self._lock = threading.Lock()
        """Held while the new writer is taken or dropped."""
        self._next: Writer | None = None
        self._replaced: Writer | None = None
        """A writer whose files are to be closed."""

    def work(self, lost: Writer | None) -> None:
        """Opens a writer in place of ``lost``, keeps it until it is taken, and closes the files of a replaced
        writer. With None no other writer is needed."""
        if self._replaced is not None:
            # ``lost`` may be this one: the next call knows.
            self._replaced.own.files.close()
            self._replaced = None
            return
        opened = self._next
        if opened is not None:
            # A server without requests may not take it for hours. Without a heartbeat it would look like a seat whose
            # server is gone, and on a mount without common locks another server would adopt or empty it.
            opened.keep()
            if lost is None or opened.seat.is_lost:
                self._drop(opened)
        elif lost is not None and self._replaced is None and self._rest.is_over:
            with self._rest.after():
                self._open(lost)

    def _open(self, lost: Writer) -> None:
        try:
            root = lost.root.reopened()
            try:
                self._next = self._open_writer(root)
            except BaseException:
                root.close()
                raise
        except (OSError, ConfigError) as error:
            logger.debug("kvoffload: shared directory: no new folder (%s)", error)

    def _drop(self, opened: Writer) -> None:
        with self._lock:
            if self._next is not opened:
                return
            self._next = None
        opened.close()

    def take(self, lost: Writer) -> Writer | None:
        """Returns the new writer in place of ``lost``, which has no jobs under way and is not used any more. Returns
        None if there is none yet, or if the files of the one before ``lost`` are not closed."""
        with self._lock:
            writer = self._next
            if writer is None or self._replaced is not None:
                return None
            # In this order, so that ``work`` sees at any time that ``lost`` needs no other writer.
            self._replaced, self._next = lost, None
        return writer

    def close(self) -> None:
        """Closes the writers that were opened and are not in use."""
        if self._replaced is not None:
            self._replaced.own.files.close()
        if self._next is not None:
            self._drop(self._next)
