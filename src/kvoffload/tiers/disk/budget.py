"""The budget of a directory: for the tier's slots, files of other fingerprints, and files that are not the tier's."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from kvoffload.tiers.disk.foreign import ForeignFolders
from kvoffload.tiers.disk.format import is_block_file
from kvoffload.tiers.disk.layout import SlotLayout, check_capacity
from kvoffload.tiers.disk.storage import Storage, is_full
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Budget:
    """The files in the directory never take more than ``used_bytes``, nor these more than ``capacity_bytes``.

    ``num_slots``, the most slots that there can be, leaves room for the files that were not the tier's at the start;
    these are left alone. ``foreign``, the files of other fingerprints, are removed when their room is needed.
    Raises OSError, also if there is room for no slot.
    """

    def __init__(self, capacity_bytes: int, layout: SlotLayout, storage: Storage, fingerprint: str) -> None:
        self.capacity_bytes = capacity_bytes
        self.layout = layout
        self.foreign = ForeignFolders(storage, fingerprint)
        self._stray_bytes = storage.held_bytes(
            lambda folder, name: (folder, name) in self.foreign or (folder == fingerprint and is_block_file(name))
        )
        self.num_slots = layout.slots_within(capacity_bytes - self._stray_bytes)
        if self.num_slots < 1:
            raise OSError(
                errno.ENOSPC,
                f"files in the directory that are not kvoffload's take {format_bytes(self._stray_bytes)}, which leaves "
                f"no room for a block in {format_bytes(capacity_bytes)}; remove them or give the tier more bytes",
            )

    def used_bytes(self, num_slots: int) -> int:
        """Returns the bytes that the directory takes if the tier has ``num_slots``."""
        return self.layout.bytes_of(num_slots) + self.foreign.nbytes + self._stray_bytes

    def make_room(self, num_slots: int) -> None:
        """Removes files of other fingerprints until ``num_slots`` fit, or no such file is left."""
        while self.used_bytes(num_slots) > self.capacity_bytes and self.foreign:
            self.foreign.remove_oldest()

    def with_room(self, do: Callable[[], _T]) -> _T:
        """Calls ``do``, and again as long as the medium is full and a file of another fingerprint can be removed."""
        while True:
            try:
                return do()
            except OSError as error:
                if not is_full(error) or not self.foreign:
                    raise
                self.foreign.remove_oldest()

    def include(self, num_slots: int) -> None:
        """Grows to ``num_slots`` that exist and cannot be removed."""
        self.num_slots = max(self.num_slots, num_slots)
        self.capacity_bytes = max(self.capacity_bytes, self.used_bytes(num_slots))

    def is_short(self, possible: int, *, is_first_use: bool) -> bool:
        """Returns whether the medium can give only fewer bytes: ``possible``, which includes the used ones. Raises
        ConfigError on first use: the setting is wrong. Later others have filled the medium, which is a warning."""
        if is_first_use:
            check_capacity(self.capacity_bytes, possible)
        is_short = self.capacity_bytes > possible
        if is_short:
            logger.warning(
                "kvoffload: disk tier of %s: the file system can give only %s of that now, so the tier holds fewer "
                "blocks until it can grow; free space there, or give the tier fewer bytes",
                format_bytes(self.capacity_bytes),
                format_bytes(possible),
            )
        return is_short
