"""A simulated file system: one server, and clients whose caches make it behave like NFS, or a local disk.

What a client sees of another's work, as of a Linux client without delegations:

- attributes (size, time, allocated bytes) and directory entries may be out of date for as long as Mount says; opening a
  file renews its attributes, and drops its cached pages if the file has changed;
- reads that are not direct come from the client's page cache, page by page, and end at the size that the client knows;
  a client that has the file open for writing too never drops those pages;
- writes that are not direct reach the server at a sync, at a close, after ``flush_s``, or sooner, in any order;
- direct reads and writes reach the server at once, ``transfer_bytes`` at a time, so a reader may see half of a write;
- a file that one client removes is gone for the others, whose handles end in ESTALE; if the client itself has it open,
  it gets another name and takes room until it is closed, and for good if the client is killed;
- a lock belongs to the open file that took it, as ``flock`` has it: a client excludes itself, and closing another of
  its open files frees nothing;
- the lock of a client that was killed, or cut off, is free after ``lease_s``. The client does not notice.

A local disk (SimulatedStorage) is the same server with one client at a time that caches nothing: what a killed process
has written stays, a power loss undoes some pages written since the last sync, and a removed file takes room, without a
name, until it is closed.

``tests/tools/test_nfs_guest.py`` runs the same checks on a real mount. All time is simulated, one seed replays a run.
"""

from __future__ import annotations

import copy
import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.storage import Storage, StoredFile, nothing
from tests.sim.storage import PAGE, fill, num_bytes, os_error, resized

LOCK_NAME = "lock"
READ_AHEAD = 4
"""Pages that a read fetches beyond its own, and that grow old in the cache."""
MAX_DIRTY = 64
"""Pieces of buffered writes that a client keeps before it sends some of them."""


@dataclass(frozen=True)
class Mount:
    """How a client has mounted the server's directory. Times in seconds; ``skew_s`` is how far its clock is ahead."""

    attributes_s: float = 30.0
    entries_s: float = 30.0
    flush_s: float = 30.0
    lease_s: float = 90.0
    is_direct: bool = True
    transfer_bytes: int = PAGE
    skew_s: float = 0.0
    is_local: bool = False
    """Whether it is no network file system, see above."""


LOCAL = Mount(attributes_s=0.0, entries_s=0.0, lease_s=0.0, is_local=True)


@dataclass(eq=False)
class Inode:
    """A file on the server. ``change`` grows with everything that happens to it."""

    number: int
    data: ByteArray = field(default_factory=lambda: np.zeros(0, np.uint8))
    size: int = 0
    modified: float = 0.0
    change: int = 0
    is_gone: bool = False
    unsynced: dict[int, ByteArray] = field(default_factory=dict)
    """On a local disk: pages written since the last sync, with their contents at that time."""


@dataclass(eq=False)
class Folder:
    entries: dict[str, Inode | Folder] = field(default_factory=dict)
    is_gone: bool = False


class NfsServer:
    """The medium: ``capacity_bytes`` for all files. ``clock``: the time by which everything here happens."""

    def __init__(self, capacity_bytes: int, seed: int = 0, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = self.peak_bytes = 0
        self.root = Folder()
        self.random = Random(seed)
        self.clock = clock
        self.stalled_until = float("-inf")
        """No access ends before this time."""
        self.locks: dict[Inode, tuple[NfsClient, float]] = {}
        """The owner of each locked file, and the time until which it is known to be alive."""
        self.on_remove: Callable[[NfsClient, Folder, str], None] = lambda client, folder, name: None
        """Called before a client removes a file."""
        self._numbers = itertools.count(1)

    def connect(self, mount: Mount = Mount(), seed: int = 0, **hooks: Callable[..., None]) -> NfsClient:
        return NfsClient(self, mount, seed, **hooks)

    def new_file(self) -> Inode:
        return Inode(next(self._numbers), modified=self.clock())

    def resize(self, inode: Inode, size: int) -> None:
        before = len(inode.data)
        inode.data = resized(inode.data, size, self.capacity_bytes - self.used_bytes)
        inode.unsynced = {page: old for page, old in inode.unsynced.items() if page * PAGE < len(inode.data)}
        inode.size = size
        self._changed(inode)
        self.used_bytes += len(inode.data) - before
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def put(self, inode: Inode, offset: int, raw: ByteArray) -> None:
        if offset + len(raw) > inode.size:
            self.resize(inode, offset + len(raw))
        inode.data[offset : offset + len(raw)] = raw
        self._changed(inode)

    def inodes(self, folder: Folder | None = None) -> Iterator[Inode]:
        """Yields the files below ``folder``, by default all."""
        for node in (self.root if folder is None else folder).entries.values():
            yield from self.inodes(node) if isinstance(node, Folder) else [node]

    def remove(self, inode: Inode) -> None:
        inode.is_gone = True
        self.used_bytes -= len(inode.data)
        inode.data = inode.data[:0]
        self.locks.pop(inode, None)

    def held_bytes(self, folder: Folder | None = None) -> int:
        """Returns the bytes that the files below ``folder`` take, by default all files."""
        return sum(len(inode.data) for inode in self.inodes(folder))

    def take_lock(self, inode: Inode, client: NfsClient) -> bool:
        """Gives the lock to a client that does not hold it, unless another one does. Returns whether it did."""
        _, until = self.locks.get(inode, (client, 0.0))
        if until > self.clock():
            return False
        self.locks[inode] = (client, float("inf"))
        return True

    def _changed(self, inode: Inode) -> None:
        inode.change += 1
        inode.modified = self.clock()


@dataclass
class _Attributes:
    size: int
    allocated: int
    modified: float
    change: int
    fetched: float


@dataclass
class _Cache:
    """What a client keeps of one file. ``dirty``: offset, bytes and time of buffered writes not sent yet, in order."""

    attributes: _Attributes
    pages: dict[int, ByteArray] = field(default_factory=dict)
    pages_change: int = -1
    """The file's ``change`` for which ``pages`` hold."""
    dirty: list[tuple[int, ByteArray, float]] = field(default_factory=list)


class NfsClient:
    """One machine that has mounted the server's directory, with one process on it.

    ``pause`` is called before each access to the server, and between the parts of a transfer. ``stall(seconds)`` waits
    while the server or the network hangs.
    """

    def __init__(
        self,
        server: NfsServer,
        mount: Mount,
        seed: int = 0,
        pause: Callable[[], None] | None = None,
        stall: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.server = server
        self.mount = mount
        self.random = Random(seed)
        self.handles: dict[NfsFile, Inode] = {}
        self.locked: set[Inode] = set()
        """Files that are locked here, as far as the client knows."""
        self._pause = pause
        self._stall = stall
        self._dead = False
        self._cut_off_until = float("-inf")
        self._caches: dict[Inode, _Cache] = {}
        self._entries: dict[tuple[Folder, str], tuple[Inode | Folder | None, float]] = {}
        """What a lookup has found, and when."""
        self._listings: dict[Folder, tuple[list[str], float]] = {}
        self._renamed: dict[Inode, tuple[Folder, str]] = {}
        """Files that were removed while they were open here, and their new names, "" on a local disk."""

    def storage(self) -> NfsStorage:
        """Returns the mounted directory."""
        return NfsStorage(self, ())

    def reader(self) -> NfsStorage:
        """Returns the mounted directory, for reading only."""
        return NfsStorage(self, (), read_only=True)

    def wall_clock(self) -> float:
        return self.server.clock() + self.mount.skew_s

    def on_pause(self, pause: Callable[[], None]) -> None:
        """Calls ``pause`` instead of the one before."""
        self._pause = pause

    # Faults.

    def kill(self) -> None:
        """The machine is gone: a part of its buffered writes never arrives, and its locks stay for a while."""
        for inode, cache in self._caches.items():
            for offset, raw, _ in cache.dirty:
                if self.random.random() < 0.5 and not inode.is_gone:
                    self._send(inode, offset, raw)
        self._dead = True
        for handle in list(self.handles) if self.mount.is_local else ():
            self.close(handle)
        self.handles.clear()
        self._expire_locks()

    def cut_off(self, seconds: float) -> None:
        """The network to this client hangs for ``seconds``, after which its locks may be gone."""
        self._cut_off_until = self.server.clock() + seconds
        if seconds > self.mount.lease_s:
            self._expire_locks()

    def _expire_locks(self) -> None:
        for inode, (owner, until) in self.server.locks.items():
            if owner is self:
                self.server.locks[inode] = (self, min(until, self.server.clock() + self.mount.lease_s))

    def lock(self, inode: Inode) -> bool:
        """Locks a file for one more of the client's open files. Returns False if another open file has the lock, here
        or elsewhere."""
        if inode in self.locked or not self.server.take_lock(inode, self):
            return False
        self.locked.add(inode)
        return True

    def unlock(self, inode: Inode) -> None:
        """Gives up a lock that was taken here, and that another client may have by now."""
        self.locked.discard(inode)
        locks = self.server.locks
        if locks.get(inode, (None, 0.0))[0] is self:
            del locks[inode]

    def tick(self) -> None:
        """Sends buffered writes that are old, and some others."""
        if self._dead or self.is_stalled:
            return
        now = self.server.clock()
        for inode, cache in self._caches.items():
            due = [now - when >= self.mount.flush_s or self.random.random() < 0.02 for _, _, when in cache.dirty]
            if any(due):
                self._flush(inode, cache, due)

    # Access to the server.

    @property
    def is_stalled(self) -> bool:
        return max(self.server.stalled_until, self._cut_off_until) > self.server.clock()

    def access(self) -> None:
        """Waits as long as the server hangs. Raises OSError if the process has ended."""
        self.check_alive()
        if self._pause is not None:
            self._pause()
        if self.is_stalled:
            self._stall(max(self.server.stalled_until, self._cut_off_until) - self.server.clock())
        self.check_alive()

    def look_up(self) -> None:
        """Accesses the server for names or attributes, which costs no time on a local disk."""
        if self.mount.is_local:
            self.check_alive()
        else:
            self.access()

    def check_alive(self) -> None:
        if self._dead:
            raise os_error(errno.EBADF)

    def parts(self, offset: int, nbytes: int) -> Iterator[list[tuple[int, int]]]:
        """Yields the parts in which a direct transfer reaches the medium, each after an access: the ranges of bytes
        that arrive together."""
        step = self.mount.transfer_bytes
        parts = [[(start, min(start + step, nbytes))] for start in range(0, nbytes, step)]
        for part in self._split(offset, nbytes) if self.mount.is_local else parts:
            self.access()
            yield part

    def _split(self, offset: int, nbytes: int) -> list[list[tuple[int, int]]]:
        """Returns the one or two parts of a transfer that a kill may tear."""
        rng = self.server.random
        if self._pause is None or nbytes < 2 or rng.random() < 0.5:
            return [[(0, nbytes)]]
        if rng.random() < 0.5:
            cut = rng.randrange(1, nbytes)
            return [[(0, cut)], [(cut, nbytes)]]
        bounds = [0, *range(PAGE - offset % PAGE, nbytes, PAGE), nbytes]
        parts: list[list[tuple[int, int]]] = [[], []]
        for stretch in itertools.pairwise(bounds):
            parts[rng.random() < 0.5].append(stretch)
        return parts

    def attributes(self, inode: Inode, fresh: bool = False) -> _Attributes:
        """Returns what the client knows, or asks the server if that is too old."""
        cache = self._caches.get(inode)
        now = self.server.clock()
        if fresh or cache is None or now - cache.attributes.fetched >= self.mount.attributes_s:
            self.look_up()
            if inode.is_gone:
                raise os_error(errno.ESTALE)
            cache = self._learn(inode)
        return cache.attributes

    def cache_of(self, inode: Inode) -> _Cache:
        self.attributes(inode)
        return self._caches[inode]

    def _learn(self, inode: Inode) -> _Cache:
        """Notes the present attributes, and drops pages that they show to be old."""
        now = self.server.clock()
        attributes = _Attributes(inode.size, len(inode.data), inode.modified, inode.change, now)
        cache = self._caches.setdefault(inode, _Cache(attributes))
        cache.attributes = attributes
        if cache.pages_change != inode.change:
            # A client that has the file open for buffered writes takes every change for its own.
            if not any(other is inode and file.may_buffer for file, other in self.handles.items()):
                cache.pages.clear()
            cache.pages_change = inode.change
        return cache

    def node(self, folder: Folder, name: str) -> Inode | Folder | None:
        """Returns what the name stands for as far as the client knows, None for nothing."""
        known = self._entries.get((folder, name))
        now = self.server.clock()
        if known is not None and now - known[1] < self.mount.entries_s and not (known[0] and known[0].is_gone):
            return known[0]
        self.look_up()
        if folder.is_gone:
            raise os_error(errno.ESTALE)
        found = folder.entries.get(name)
        self._entries[folder, name] = (found, now)
        return found

    def listing(self, folder: Folder) -> list[str]:
        known = self._listings.get(folder)
        now = self.server.clock()
        if known is None or now - known[1] >= self.mount.entries_s:
            self.look_up()
            if folder.is_gone:
                raise os_error(errno.ESTALE)
            known = self._listings[folder] = (sorted(folder.entries), now)
        return known[0]

    def forget_entries(self, folder: Folder, name: str) -> None:
        """Forgets what was known of an entry that this client has changed."""
        self._entries.pop((folder, name), None)
        self._listings.pop(folder, None)

    def put(self, inode: Inode, offset: int, raw: ByteArray) -> None:
        """Writes at the server, and keeps what the client knows of the file."""
        if inode.is_gone:
            raise os_error(errno.ESTALE)
        if self.mount.is_local:
            if offset + len(raw) > inode.size:
                self.server.resize(inode, offset + len(raw))
            for page in range(offset // PAGE, -(-(offset + len(raw)) // PAGE)):
                inode.unsynced.setdefault(page, inode.data[page * PAGE : (page + 1) * PAGE].copy())
        self._send(inode, offset, raw)

    def _send(self, inode: Inode, offset: int, raw: ByteArray) -> None:
        cache = self._caches.get(inode)
        is_known = cache is not None and cache.pages_change == inode.change
        self.server.put(inode, offset, raw)
        if cache is not None:
            if is_known:
                # No one else has written meanwhile: the pages are still good, except those that were overwritten.
                cache.pages_change = inode.change
                for page in range(offset // PAGE, -(-(offset + len(raw)) // PAGE)):
                    cache.pages.pop(page, None)
            self._learn(inode)

    def resize(self, inode: Inode, size: int) -> None:
        if inode.is_gone:
            raise os_error(errno.ESTALE)
        self.server.resize(inode, size)
        self._learn(inode)

    def buffer(self, inode: Inode, offset: int, raw: ByteArray) -> None:
        """Keeps a write until it is sent."""
        cache = self.cache_of(inode)
        now = self.server.clock()
        for start in range(offset - offset % PAGE, offset + len(raw), PAGE):
            first, last = max(start, offset), min(start + PAGE, offset + len(raw))
            cache.dirty.append((first, raw[first - offset : last - offset].copy(), now))
        cache.attributes.size = max(cache.attributes.size, offset + len(raw))
        if len(cache.dirty) > MAX_DIRTY:
            self.access()
            self._flush(inode, cache, [self.random.random() < 0.5 for _ in cache.dirty])

    def flush(self, inode: Inode) -> None:
        """Sends every buffered write of the file. Raises OSError if one is lost."""
        cache = self._caches.get(inode)
        if cache is not None and cache.dirty:
            self.access()
            if not self._flush(inode, cache, [True] * len(cache.dirty)):
                raise os_error(errno.ESTALE if inode.is_gone else errno.ENOSPC)

    def _flush(self, inode: Inode, cache: _Cache, due: Sequence[bool]) -> bool:
        """Sends the pieces that are ``due``; of pieces of one page, earlier ones go first. Returns whether all have
        arrived; those that have not are lost."""
        pages = {offset // PAGE for (offset, _, _), is_due in zip(cache.dirty, due, strict=True) if is_due}
        sent = [piece for piece in cache.dirty if piece[0] // PAGE in pages]
        cache.dirty = [piece for piece in cache.dirty if piece[0] // PAGE not in pages]
        try:
            for offset, raw, _ in sent:
                self.put(inode, offset, raw)
        except OSError:
            return False
        return True

    # Open files.

    def rename_if_open(self, folder: Folder, inode: Inode) -> bool:
        """Gives a file that is open here another name, or none, instead of removing it. Returns whether it is open."""
        if inode not in self.handles.values():
            return False
        if self.mount.is_local:
            self._renamed[inode] = (folder, "")
            return True
        hidden = f".nfs{inode.number:016x}"
        folder.entries[hidden] = inode
        self._renamed[inode] = (folder, hidden)
        self.forget_entries(folder, hidden)
        return True

    def close(self, handle: NfsFile) -> None:
        inode = self.handles.pop(handle, None)
        if inode is None:
            return
        if inode in self._renamed and inode not in self.handles.values():
            folder, hidden = self._renamed.pop(inode)
            folder.entries.pop(hidden, None)
            self.server.remove(inode)
            self.forget_entries(folder, hidden)


class NfsStorage(Storage):
    """A directory of the server, as ``client`` sees it. ``path``: the names of the folders that lead to it.
    ``read_only``: files are opened for reading only, and nothing is changed."""

    read_only = False

    def __init__(self, client: NfsClient, path: tuple[str, ...], read_only: bool = False) -> None:
        self.client = client
        self._path = path
        self.read_only = read_only
        self._locked: Inode | None = None

    def child(self, name: str) -> NfsStorage:
        """Returns the folder ``name`` as a storage of its own. It is made if it does not exist."""
        if name not in self.folders() and not self.read_only:
            self.make_folder(name)
        return NfsStorage(self.client, (*self._path, name), self.read_only)

    def lock(self) -> None:
        if not self.try_lock():
            raise ConfigError("dir: another client has locked it; give each its own directory")

    def try_lock(self) -> bool:
        if self._locked is not None:
            return True
        client = self.client
        folder = self._folder("")
        client.access()
        inode = folder.entries.setdefault(LOCK_NAME, client.server.new_file())
        client.forget_entries(folder, LOCK_NAME)
        assert isinstance(inode, Inode)
        if client.lock(inode):
            self._locked = inode
        return self._locked is not None

    def folders(self) -> list[str]:
        folder = self._folder("")
        return [name for name in self.client.listing(folder) if isinstance(self.client.node(folder, name), Folder)]

    def files(self, folder: str) -> list[str]:
        where = self._folder(folder)
        return [name for name in self.client.listing(where) if isinstance(self.client.node(where, name), Inode)]

    def make_folder(self, folder: str) -> None:
        self._check_writable()
        self.client.access()
        here = self._folder("")
        here.entries.setdefault(folder, Folder())
        self.client.forget_entries(here, folder)

    def remove_folder(self, folder: str) -> None:
        self._check_writable()
        self.client.access()
        here, gone = self._folder(""), self._folder(folder)
        if gone.entries:
            raise os_error(errno.ENOTEMPTY)
        gone.is_gone = True
        here.entries.pop(folder, None)
        self.client.forget_entries(here, folder)

    def open(self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False) -> NfsFile:
        where = self._folder(folder)
        self.client.access()
        inode = None if create else self.client.node(where, name)
        if create:
            self._check_writable()
            inode = where.entries.setdefault(name, self.client.server.new_file())
            self.client.forget_entries(where, name)
        if inode is None:
            raise os_error(errno.ENOENT)
        if isinstance(inode, Folder):
            raise os_error(errno.EISDIR)
        self.client.attributes(inode, fresh=True)
        return NfsFile(self.client, inode, direct, fresh, self.read_only or fresh)

    def remove(self, folder: str, name: str) -> None:
        self._check_writable()
        where = self._folder(folder)
        self.client.access()
        inode = where.entries.get(name)
        self.client.forget_entries(where, name)
        if inode is None:
            raise os_error(errno.ENOENT)
        if isinstance(inode, Folder):
            raise os_error(errno.EISDIR)
        self.client.server.on_remove(self.client, where, name)
        if not self.client.rename_if_open(where, inode):
            self.client.server.remove(inode)
        del where.entries[name]

    def held_bytes(self, is_left_out: Callable[[str, str], bool] = nothing) -> int:
        return sum(self._held(self._folder(""), "", is_left_out))

    def _held(self, folder: Folder, path: str, is_left_out: Callable[[str, str], bool]) -> Iterator[int]:
        for name in self.client.listing(folder):
            node = self.client.node(folder, name)
            if isinstance(node, Folder):
                yield from self._held(node, f"{path}/{name}" if path else name, is_left_out)
            elif node is not None and (path or name != LOCK_NAME) and not is_left_out(path, name):
                yield self.client.attributes(node).allocated

    def free_bytes(self) -> int:
        self.client.access()
        return max(0, self.client.server.capacity_bytes - self.client.server.used_bytes)

    def close(self) -> None:
        inode, self._locked = self._locked, None
        if inode is not None:
            self.client.unlock(inode)

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)

    def _folder(self, folder: str) -> Folder:
        """Returns a folder of this directory, "" for the directory itself. Raises OSError."""
        self.client.check_alive()
        found = self.client.server.root
        for name in (*self._path, folder) if folder else self._path:
            node = self.client.node(found, name)
            if node is None:
                raise os_error(errno.ENOENT)
            if not isinstance(node, Folder):
                raise os_error(errno.ENOTDIR)
            found = node
        return found


class SimulatedStorage(NfsStorage):
    """A local disk for one simulated process, with room for ``capacity_bytes``.

    ``restart`` kills the process, and makes the storage of the next one on the same disk. ``pause`` is called before
    each access to the medium and in the middle of reads and writes: if it does not return, the process was killed
    there, and a part of the bytes or pages has been written.
    """

    def __init__(
        self,
        capacity_bytes: int,
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._on(NfsServer(capacity_bytes, seed, clock), pause)

    def _on(self, server: NfsServer, pause: Callable[[], None] | None) -> None:
        self.server = server
        super().__init__(NfsClient(server, LOCAL, pause=pause), ())

    @property
    def capacity_bytes(self) -> int:
        return self.server.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int) -> None:
        self.server.capacity_bytes = capacity_bytes

    @property
    def is_locked(self) -> bool:
        return any(until > self.server.clock() for _, until in self.server.locks.values())

    @property
    def num_open(self) -> int:
        """Number of files that this process has open."""
        return len(self.client.handles)

    @property
    def used_bytes(self) -> int:
        """Bytes that all files take, including those that were removed but are still open."""
        return self.server.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest ``used_bytes`` so far, or since ``reset_peak``."""
        return self.server.peak_bytes

    def reset_peak(self) -> None:
        self.server.peak_bytes = self.server.used_bytes

    def sync(self) -> None:
        """Makes everything written so far safe from power losses."""
        for inode in self.server.inodes():
            inode.unsynced.clear()

    def kill(self) -> None:
        self.client.kill()

    def power_loss(self) -> None:
        self.kill()
        for inode in self.server.inodes():
            for page, old in inode.unsynced.items():
                if self.server.random.random() < 0.5:
                    inode.data[page * PAGE : (page + 1) * PAGE] = old
        self.sync()

    def restart(self, pause: Callable[[], None] | None = None) -> SimulatedStorage:
        self.kill()
        successor = SimulatedStorage(0)
        successor._on(self.server, pause)
        return successor

    def clone(self) -> SimulatedStorage:
        """Returns a storage on another disk that has the same files."""
        other = SimulatedStorage(self.capacity_bytes, clock=self.server.clock)
        other.server.root = copy.deepcopy(self.server.root)
        other.server.used_bytes = other.server.held_bytes()
        return other


class NfsFile(StoredFile):
    """An open file. ``direct`` and ``fresh``: only whole pages may be read or written, and the cache is avoided if the
    mount can; ``fresh`` drops the cached pages that it reads if not."""

    def __init__(self, client: NfsClient, inode: Inode, direct: bool, fresh: bool, read_only: bool) -> None:
        self.is_direct = client.mount.is_local or ((direct or fresh) and client.mount.is_direct)
        self.read_only = read_only
        self._client = client
        self._inode = inode
        self._aligned = direct or fresh
        self._drops_pages = fresh
        client.handles[self] = inode

    @property
    def may_buffer(self) -> bool:
        """Whether it is open for writes that are not direct."""
        return not self.read_only and not self.is_direct

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        self._check(buffers, offset)
        wanted = num_bytes(buffers)
        raw = self._read_direct(offset, wanted) if self.is_direct else self._read_cached(offset, wanted)
        return fill(buffers, raw)

    def _read_direct(self, offset: int, wanted: int) -> ByteArray:
        self._client.flush(self._inode)
        self._client.attributes(self._inode, fresh=True)
        raw = np.zeros(max(0, min(wanted, self._inode.size - offset)), np.uint8)
        for start, end in self._parts(offset, len(raw)):
            there = self._inode.data[offset + start : offset + end]
            raw[start : start + len(there)] = there
        return raw

    def _read_cached(self, offset: int, wanted: int) -> ByteArray:
        client = self._client
        cache = client.cache_of(self._inode)
        end = min(offset + wanted, cache.attributes.size)
        if end <= offset:
            return np.zeros(0, np.uint8)
        first, last = offset // PAGE, -(-end // PAGE)
        if self._drops_pages:
            for page in range(first, last):
                cache.pages.pop(page, None)
        ahead = range(last, min(last + READ_AHEAD, -(-cache.attributes.size // PAGE)))
        found = [cache.pages[page] if page in cache.pages else self._fetch(cache, page) for page in range(first, last)]
        for page in ahead:
            if page not in cache.pages:
                self._fetch(cache, page)
        raw = np.concatenate(found)[offset - first * PAGE : end - first * PAGE]
        for start, piece, _ in cache.dirty:
            low, high = max(start, offset), min(start + len(piece), end)
            if low < high:
                raw[low - offset : high - offset] = piece[low - start : high - start]
        return raw

    def _fetch(self, cache: _Cache, page: int) -> ByteArray:
        """Reads a page into the cache. It may be newer than the attributes there, or than the pages beside it."""
        self._client.access()
        if self._inode.is_gone:
            raise os_error(errno.ESTALE)
        there = self._inode.data[page * PAGE : (page + 1) * PAGE]
        cache.pages[page] = np.zeros(PAGE, np.uint8)
        cache.pages[page][: len(there)] = there
        return cache.pages[page]

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        self._check(buffers, offset)
        self._check_writable()
        raw = np.concatenate([buffer.reshape(-1) for buffer in buffers])
        if not self.is_direct:
            self._client.buffer(self._inode, offset, raw)
            return len(raw)
        for start, end in self._parts(offset, len(raw)):
            self._client.put(self._inode, offset + start, raw[start:end])
        return len(raw)

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        for part in self._client.parts(offset, nbytes):
            if self._inode.is_gone:
                raise os_error(errno.ESTALE)
            yield from part

    def modified(self) -> float:
        self._check()
        return self._client.attributes(self._inode).modified

    @property
    def is_cached(self) -> bool:
        return not self.is_direct

    def sync(self) -> None:
        """Sends every buffered write. Raises OSError if one is lost."""
        self._check()
        self._client.flush(self._inode)
        self._inode.unsynced.clear()

    def size(self) -> int:
        self._check()
        return self._client.attributes(self._inode).size

    def allocated_bytes(self) -> int:
        self._check()
        return self._client.attributes(self._inode).allocated

    def resize(self, size: int) -> None:
        self._check()
        self._check_writable()
        self._client.flush(self._inode)
        self._client.access()
        self._client.resize(self._inode, size)

    def close(self) -> None:
        """Sends every buffered write, and closes the file. Writes that are lost are lost without an error, as wherever
        a program ignores what close returns."""
        if self not in self._client.handles:
            return
        try:
            self._client.flush(self._inode)
        except OSError:
            pass
        finally:
            self._client.close(self)

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)

    def _check(self, buffers: Sequence[ByteArray] = (), offset: int = 0) -> None:
        self._client.check_alive()
        if self not in self._client.handles:
            raise os_error(errno.EBADF)
        if self._aligned and (offset % PAGE or any(buffer.size % PAGE for buffer in buffers)):
            raise os_error(errno.EINVAL)
