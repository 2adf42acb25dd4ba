"""Digests of whole files. Every byte is read once, and not again while the file stays unchanged.

XXH3-128 detects accidents: a file that was trained further, truncated or mixed up with another. It does not protect
against an attacker who constructs files with equal digests, but anyone who can write the weights controls the server's
answers anyway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from kvoffload.deadlines import FILES_DEADLINE_S, within
from kvoffload.locks import try_to_lock

PIECE_BYTES = 64 << 20
"""Each piece of a file has a digest of its own, so that threads can share a large file."""
BUFFER_BYTES = 1 << 20
"""Bytes per read: less than the cache of a core, so that hashing does not read the bytes from memory again."""
MAX_THREADS = 8
LOG_AFTER_S = 1.0
"""If hashing takes longer, a line in the log says so."""

FILE_NAME = "digests.json"
MAX_ENTRIES = 4096
MAX_FILE_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""A file that was changed less than this ago may be changed again without a change of its timestamps."""
LOCK_DEADLINE_S = 1.0
_VERSION = 1
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class FileChangedError(OSError):
    """The file changed while it was hashed."""


def file_digests(paths: Sequence[Path], cache: DigestCache | None = None) -> list[str]:
    """Returns 32 hex digits over every byte of each of ``paths``, in order. Does not read files that ``cache`` knows.

    Raises OSError for a path that is not a readable regular file, or that changes meanwhile.
    """
    states = [os.stat(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{path}: not a regular file")
    known = cache.load() if cache is not None else {}
    began = cache.clock() if cache is not None else 0
    names = [content_name(state) for state in states]
    unread = {name: (path, state) for name, path, state in zip(names, paths, states, strict=True) if name not in known}
    made = _hash_all(unread)
    if cache is not None:
        cache.save({name: made[name] for name, (_, state) in unread.items() if is_settled(state, began)}, used=names)
    return [made.get(name) or known[name] for name in names]


def content_name(state: os.stat_result) -> str:
    """Returns text that identifies a file and its present content on this machine."""
    return f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"


def is_settled(state: os.stat_result, now: int) -> bool:
    """Whether every change of the file after ``now``, in nanoseconds since 1970, will change its timestamps."""
    # Whole seconds: this file system does not keep exact times of change, or invents them.
    return state.st_ctime_ns % 1_000_000_000 != 0 and max(state.st_mtime_ns, state.st_ctime_ns) + SETTLED_NS < now


def _hash_all(files: dict[str, tuple[Path, os.stat_result]]) -> dict[str, str]:
    if not files:
        return {}
    pieces = [
        (path, name, begin, min(begin + PIECE_BYTES, state.st_size))
        for name, (path, state) in files.items()
        for begin in range(0, state.st_size, PIECE_BYTES)
    ]
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces)))
    began = time.monotonic()
    digests: dict[str, list[bytes]] = {name: [] for name in files}
    with ThreadPoolExecutor(threads, "kvoffload-digest") as pool:
        for (_, name, _, _), digest in zip(pieces, pool.map(_hash_piece, pieces), strict=True):
            digests[name].append(digest)
    seconds = time.monotonic() - began
    if seconds > LOG_AFTER_S:
        nbytes = sum(state.st_size for _, state in files.values())
        logger.info(
            "kvoffload: hashed %.1f GB of weight files in %.1f s (%.1f GB/s, %d threads); later starts skip this",
            nbytes / 1e9,
            seconds,
            nbytes / 1e9 / seconds,
            threads,
        )
    return {name: xxhash.xxh3_128(b"".join(parts)).hexdigest() for name, parts in digests.items()}


def _hash_piece(piece: tuple[Path, str, int, int]) -> bytes:
    path, name, begin, end = piece
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(BUFFER_BYTES, end - begin)))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Not mmap: if the file is truncated meanwhile, access to a missing page would kill the process.
        while begin < end and (count := os.preadv(fd, [buffer[: end - begin]], begin)):
            digest.update(buffer[:count])
            begin += count
        if begin < end or content_name(os.fstat(fd)) != name:
            raise FileChangedError(f"{path}: changed while it was hashed")
    finally:
        os.close(fd)
    return digest.digest()


class DigestCache:
    """Digests of files by device, inode, size and timestamps, kept in ``folder`` for later processes.

    Never raises: a cache that cannot be used costs time and leads to one warning. Entries that other users could have
    written are ignored. Several processes may use a folder at the same time.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], int] = time.time_ns) -> None:
        """``folder``: by default the user's cache folder. ``clock``: nanoseconds since 1970."""
        self._folder = folder or user_folder()
        self.clock = clock
        self._warned = False

    def load(self) -> dict[str, str]:
        """Returns the digests that are kept, the least recently used first."""
        return self._within_deadline(self._load) or {}

    def _within_deadline(self, do: Callable[[], _T]) -> _T | None:
        try:
            return within(FILES_DEADLINE_S, do)
        except OSError as error:
            self._warn(error)
            return None

    def _load(self) -> dict[str, str]:
        with contextlib.ExitStack() as stack:
            return self._read(self._open(stack))

    def save(self, made: dict[str, str], used: Sequence[str] = ()) -> None:
        """Adds ``made``, and marks these and the kept entries of ``used`` as most recently used. Keeps at most
        MAX_ENTRIES."""
        if made:
            self._within_deadline(lambda: self._save(made, used))

    def _save(self, made: dict[str, str], used: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            folder = self._open(stack)
            if _take_lock(folder, stack):
                kept = self._read(folder)
                recent = {name: kept.pop(name) for name in used if name in kept} | made
                entries = [*kept.items(), *recent.items()][-MAX_ENTRIES:]
                _replace(folder, json.dumps({"version": _VERSION, "digests": dict(entries)}).encode())

    def _open(self, stack: contextlib.ExitStack) -> int:
        """Returns a descriptor of the folder, which ``stack`` closes. Raises OSError if the folder must not be used."""
        if self._folder is None:
            raise FileNotFoundError("this user has no home directory; set XDG_CACHE_HOME")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        _check_owner(os.fstat(folder))
        return folder

    def _read(self, folder: int) -> dict[str, str]:
        try:
            # Not blocking: the path could be a pipe.
            fd = os.open(FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return {}
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            _check_owner(state)
            raw = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
        try:
            return _parse(raw)
        except (ValueError, RecursionError) as error:
            self._warn(error)
            return {}

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvoffload: digests of weight files cannot be kept in %s, so each start reads all weights: %s",
                self._folder,
                error,
            )


def user_folder() -> Path | None:
    """Returns the folder that the XDG base directory specification defines, or None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvoffload"
    return None


def _check_owner(state: os.stat_result) -> None:
    if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_WRITE:
        raise PermissionError("another user owns it or can write to it; make it this user's with mode 0700")


def _parse(raw: bytes) -> dict[str, str]:
    described = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    if not isinstance(described, dict) or described.get("version") != _VERSION:
        raise ValueError(f"{FILE_NAME} is damaged or has another version")
    digests: Any = described.get("digests")
    if not isinstance(digests, dict):
        raise ValueError(f"{FILE_NAME} has no digests")
    for digest in digests.values():
        if not (isinstance(digest, str) and len(digest) == 32 and set(digest) <= set("0123456789abcdef")):
            raise ValueError(f"{FILE_NAME} has an entry that is not a digest")
    return dict(digests)


def _take_lock(folder: int, stack: contextlib.ExitStack) -> bool:
    """Locks the folder until ``stack`` is closed. Returns whether that succeeded within LOCK_DEADLINE_S."""
    fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    stack.callback(os.close, fd)
    return try_to_lock(fd, LOCK_DEADLINE_S)


def _replace(folder: int, raw: bytes) -> None:
    """Replaces the file atomically. The caller must hold the lock."""
    part = f"{FILE_NAME}.part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder), "wb") as file:
        file.write(raw)
    os.rename(part, FILE_NAME, src_dir_fd=folder, dst_dir_fd=folder)
