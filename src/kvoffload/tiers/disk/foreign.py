"""Folders of other fingerprints in the tier's directory, whose files are removed when their room is needed."""

from __future__ import annotations

import logging
import time
from contextlib import closing, suppress
from dataclasses import dataclass

from kvoffload.tiers.disk.format import INDEX_NAME, is_block_file, is_fingerprint, slab_number
from kvoffload.tiers.disk.storage import Storage

logger = logging.getLogger(__name__)

FOLDER_BYTES = 4096
GIVEN_BACK_S = 0.5
"""Some file systems (XFS) give the space of a removed file back a little later: it is waited for so long."""
LOOK_S = 0.01


@dataclass(slots=True)
class _Folder:
    """One fingerprint's folder. ``files``: name and allocated bytes of each file, in reverse order of removal."""

    name: str
    modified: float
    files: list[tuple[str, int]]


class ForeignFolders:
    """The files that other models have left in ``storage``. ``nbytes``: bytes of the medium that they take.

    The last slab of the model that has not been used for the longest time is removed first, an index last. Raises
    OSError.
    """

    def __init__(self, storage: Storage, own_folder: str) -> None:
        self._storage = storage
        found = [self._look_at(name) for name in storage.folders() if is_fingerprint(name) and name != own_folder]
        self._folders = sorted((each for each in found if each is not None), key=lambda folder: folder.modified)
        self._files = {(folder.name, file) for folder in self._folders for file, _ in folder.files}
        self.nbytes = sum(nbytes for folder in self._folders for _, nbytes in folder.files)

    def __bool__(self) -> bool:
        """Whether a file is left."""
        return bool(self._folders)

    def __contains__(self, file: tuple[str, str]) -> bool:
        """Whether the file, given by folder and name, was among them at the start."""
        return file in self._files

    def remove_oldest(self) -> None:
        """Removes one file, and waits until the medium has its space back, at most GIVEN_BACK_S."""
        folder, free = self._folders[0], self._storage.free_bytes()
        name, nbytes = folder.files[-1]
        with suppress(FileNotFoundError):
            self._storage.remove(folder.name, name)
        deadline = time.monotonic() + GIVEN_BACK_S
        # Others use the medium, too, so not all of it may be seen to come back.
        while self._storage.free_bytes() < free + nbytes // 2 and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        folder.files.pop()
        self.nbytes -= nbytes
        if not folder.files:
            self._folders.pop(0)
            # Fails, as it should, if there are files of others in it.
            with suppress(OSError):
                self._storage.remove_folder(folder.name)

    def _look_at(self, name: str) -> _Folder | None:
        try:
            files = [file for file in self._storage.files(name) if is_block_file(file)]
        except PermissionError as error:
            logger.warning("kvoffload: disk tier: %s; it is left alone", error.strerror)
            return None
        sizes, modified = dict[str, int](), 0.0
        for each in files:
            # A file that cannot be opened counts as one that is not the tier's.
            with suppress(OSError), closing(self._storage.open(name, each)) as file:
                sizes[each] = file.allocated_bytes()
                modified = file.modified() if each == INDEX_NAME else modified
        index = (INDEX_NAME, sizes.pop(INDEX_NAME, 0) + FOLDER_BYTES)
        # The recency file comes before the slabs, which have numbers.
        rest = sorted(sizes.items(), key=lambda file: slab_number(file[0]) or -1)
        return _Folder(name, modified, [index, *rest])
