"""The files ``slab-00000`` and so on: the payloads of the blocks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.folder import Folder, write_all
from kvoffload.tiers.disk.format import slab_name, slab_number
from kvoffload.tiers.disk.layout import SlotLayout
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, StoredFile, shorten

logger = logging.getLogger(__name__)


class Slabs:
    """Slots of ``layout`` in the slabs of ``folder``. ``syncs``: a write returns when the
    payloads are on the medium, for other machines that read them."""

    def __init__(self, folder: Folder, layout: SlotLayout, syncs: bool) -> None:
        self._folder = folder
        self._slots_per_slab = layout.slots_per_slab
        self._block_bytes = layout.block_bytes
        self._syncs = syncs
        self._files: list[StoredFile] = []

    def write(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Writes payloads from ``slot`` on, within its slab. Raises OSError if not every byte was written."""
        slab, place = divmod(slot, self._slots_per_slab)
        file = self._files[slab]
        write_all(file, buffers, place * self._block_bytes)
        if self._syncs and file.is_cached:
            # Its record may reach other machines at any time from now on.
            file.sync()

    def read(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Reads payloads from ``slot`` on, within its slab. Raises OSError if not every byte was read."""
        slab, place = divmod(slot, self._slots_per_slab)
        size = sum(map(len, buffers))
        done = self._files[slab].read(buffers, place * self._block_bytes)
        if done != size:
            raise OSError(f"only {done} of {size} bytes were read")

    # Sizes.

    def open_found(self, names: Collection[str], num_slots: int) -> int:
        """Opens the slabs that a former process has left, up to the first that is missing or not whole, and cuts off
        what is beyond ``num_slots``. ``names``: the files in the folder. Returns how many slots there are. Raises
        OSError."""
        num_found = 0
        while num_found % self._slots_per_slab == 0:
            number = num_found // self._slots_per_slab
            found = self._open_found(number, num_slots) if slab_name(number) in names else 0
            if not found:
                break
            num_found += found
        return num_found

    def _open_found(self, number: int, num_slots: int) -> int:
        left = num_slots - number * self._slots_per_slab
        if left <= 0:
            return 0
        try:
            file = self._folder.open(slab_name(number), direct=True)
        except OSError as error:
            if isinstance(error, PermissionError):
                logger.warning("kvoffload: disk tier: %s; its blocks are not used", error.strerror)
            if error.errno in NO_FILE_ERRORS:
                return 0
            # The next start may be able to open it, so nothing is removed.
            raise
        found = min(file.size() // self._block_bytes, self._slots_per_slab, left)
        if not self._folder.storage.read_only:
            file.resize(found * self._block_bytes)
        if found:
            self._files.append(file)
        else:
            self._folder.release(file)
        return found

    def open_next(self, number: int) -> None:
        """Opens the slab ``number``, a new one unless it is the last. Raises OSError."""
        if number == len(self._files):
            self._files.append(self._folder.open(slab_name(number), create=True, direct=True))

    def resize(self, num_slots: int) -> None:
        """Gives the last slab so many slots that there are ``num_slots``. Raises OSError."""
        last = len(self._files) - 1
        self._files[last].resize((num_slots - last * self._slots_per_slab) * self._block_bytes)

    def trim(self, num_slots: int) -> None:
        """Removes slots beyond ``num_slots``, and slabs that are not open. Raises OSError."""
        for name in self._folder.names():
            number = slab_number(name)
            if number is not None and number >= len(self._files):
                self._folder.remove(name)
        for number, file in enumerate(self._files):
            here = min(self._slots_per_slab, num_slots - number * self._slots_per_slab)
            shorten(file, max(0, here) * self._block_bytes)
