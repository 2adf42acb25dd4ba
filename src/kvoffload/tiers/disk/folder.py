"""The folder of one fingerprint, and its open files."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import ByteArray
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.tiers.disk.format import is_block_file
from kvoffload.tiers.disk.storage import Storage, StoredFile

WRITE_TRIES = 2


class Folder:
    """The folder ``fingerprint`` of ``storage``. Files that were opened stay open until ``close``, or until they are
    given to ``release``. ``close`` gives up the lock of ``storage``, too. Every method may raise OSError."""

    def __init__(self, storage: Storage, fingerprint: str) -> None:
        self.name = fingerprint
        self.storage = storage
        self._files: list[StoredFile] = []

    def make(self) -> None:
        self.storage.make_folder(self.name)

    def names(self) -> list[str]:
        """Returns the names of the tier's files, none without a folder."""
        if self.name not in self.storage.folders():
            return []
        return [name for name in self.storage.files(self.name) if is_block_file(name)]

    def open(self, name: str, create: bool = False, direct: bool = False) -> StoredFile:
        self._files.append(self.storage.open(self.name, name, create=create, direct=direct))
        return self._files[-1]

    def release(self, file: StoredFile) -> None:
        """Closes one file."""
        self._files.remove(file)
        file.close()

    def remove(self, name: str) -> None:
        self.storage.remove(self.name, name)

    def has_vanished(self) -> bool:
        """Whether others have removed or replaced files that are open, or the directory. May be called by any
        thread."""
        return self.storage.has_vanished() or any(file.is_removed() for file in list(self._files))

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.storage.close()


def write_all(file: StoredFile, buffers: Sequence[ByteArray], offset: int) -> None:
    """Raises OSError if not every byte was written. A write that comes short is continued: the next call fails with the
    reason."""
    size = sum(buffer.size for buffer in buffers)
    # O_DIRECT can continue at whole pages only.
    unit = SLOT_ALIGNMENT if size % SLOT_ALIGNMENT == 0 else 1
    done = 0
    for _ in range(WRITE_TRIES):
        done += file.write(_without_head(buffers, done) if done else buffers, offset + done)
        if done == size:
            return
        done -= done % unit
    raise OSError(f"only {done} of {size} bytes were written")


def _without_head(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """Returns ``buffers`` without their first ``nbytes``."""
    left = []
    for buffer in buffers:
        if nbytes < buffer.size:
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - buffer.size)
    return left
