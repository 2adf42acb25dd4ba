"""The stores of the demo: how each is started, what a server is given to use it, and how it is made to fail."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.demo.act import EngineProcess
from kvoffload.demo.errors import DemoError
from kvoffload.demo.flips import flip
from kvoffload.tiers.disk.format import HEADER_BYTES, Header

STALL_S = 30.0
SLOWDOWN = 10
DUTY_S = 0.05
"""A slowed process runs for the first tenth of each period of this length."""
DIRECTORY_BYTES = 1 << 30
"""Budget of one server."""


class StoreMissingError(DemoError):
    """This store cannot run here. The message says why, and the one line to run."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Two servers that use one store. ``second`` serves the requests during a fault."""

    first: EngineProcess
    second: EngineProcess


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which a store fails. ``how`` says what is really done. Requests go on for ``lasts_s`` at least."""

    name: str
    how: str
    begin: Callable[[Servers], object]
    end: Callable[[Servers], object] = lambda servers: None
    lasts_s: float = 0.0


class Store(ABC):
    """A store that runs while this is used as a context manager."""

    name: ClassVar[str]
    """As in ``shared.json``: the kind of the tier."""
    title: ClassVar[str]
    visible_s: ClassVar[float] = 0.0
    """Time in which a server notices what another one has stored."""

    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """Returns a server's entry of the option ``tiers``."""

    @abstractmethod
    def corrupt(self) -> int:
        """Changes bytes of every stored value, under its right key. Returns how many values or files were changed."""

    @abstractmethod
    def faults(self) -> Sequence[Fault]:
        """Returns the faults, in an order in which each finds what the one before has left."""

    @abstractmethod
    def close(self) -> None:
        """Ends the store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ServerStore(Store):
    """A store of one or several processes of its own."""

    processes: ClassVar[str]
    """What these are, with a verb: "redis-server was"."""
    how_full: ClassVar[str]
    how_empty: ClassVar[str]
    how_killed: ClassVar[str] = ""
    """What is really done so that the store is full, restarted empty, or killed."""

    def __init__(self) -> None:
        self._throttle: Throttle | None = None

    @abstractmethod
    def start(self) -> None:
        """Starts what does not run."""

    @abstractmethod
    def kill(self) -> None:
        """Kills what runs."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Returns the processes that run."""

    @abstractmethod
    def fill(self) -> object:
        """The store has no room from now on."""

    @abstractmethod
    def drain(self) -> object:
        """Ends what ``fill`` has begun."""

    @abstractmethod
    def exchange(self) -> int:
        """Gives each key the value of the next, and the last that of the first. Returns how many."""

    def clear(self) -> object:
        """Restarts the store, empty."""
        self.kill()
        self.start()
        return None

    def faults(self) -> Sequence[Fault]:
        processes = self.processes
        return (
            Fault(
                f"stalled {STALL_S:.0f} s",
                f"{processes} stopped (SIGSTOP)",
                lambda servers: send(self.pids(), signal.SIGSTOP),
                lambda servers: send(self.pids(), signal.SIGCONT),
                STALL_S,
            ),
            Fault(
                "ten times slower",
                f"{processes} allowed to run for a tenth of the time (SIGSTOP and SIGCONT every 50 ms)",
                lambda servers: self._slow_down(),
                lambda servers: self._speed_up(),
            ),
            Fault("full", self.how_full, lambda servers: self.fill(), lambda servers: self.drain()),
            Fault("restarted empty", self.how_empty, lambda servers: self.clear()),
            Fault(
                "killed",
                f"{processes} killed (SIGKILL), and started again{self.how_killed} after the requests",
                lambda servers: self.kill(),
                lambda servers: self.start(),
            ),
            # These come last, because corrupt blocks that are found pause the tier again and again, longer each time.
            Fault("answering garbage", "bytes of all values were changed", lambda servers: self.corrupt()),
            Fault("other keys' values", "each key got the value of the next", lambda servers: self.exchange()),
        )

    def _slow_down(self) -> None:
        self._throttle = Throttle(self.pids())

    def _speed_up(self) -> None:
        if self._throttle is not None:
            self._throttle.close()
            self._throttle = None

    def close(self) -> None:
        self._speed_up()
        self.kill()


class DirectoryStore(Store):
    """A directory that both servers use."""

    name = "shared_dir"
    title = "a shared directory"
    visible_s = 4.0

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "dir": str(self.path), "bytes": DIRECTORY_BYTES}

    def slabs(self) -> list[Path]:
        """Returns the files with the bytes of blocks, of all servers."""
        return sorted(path for path in self.path.rglob("slab-*") if path.is_file())

    def corrupt(self) -> int:
        return flip(self.slabs())

    def exchange(self) -> None:
        """Gives every slot of the slabs the bytes of the next slot: the values of other keys."""
        for slab in self.slabs():
            slot_bytes = _slot_bytes(slab)
            with _opened(slab) as raw:
                raw[:] = np.roll(raw, -slot_bytes)

    def _calls(self, mode: str) -> Callable[[Servers], object]:
        return lambda servers: servers.second.call("break_files", directory=str(self.path), mode=mode)

    def faults(self) -> Sequence[Fault]:
        normal = self._calls("normal")
        wrapped = "system calls of the second server on files of the directory"
        # Until its folder is deleted, the blocks are those of the first server.
        return (
            Fault("killed", "the first server was killed (SIGKILL)", lambda servers: servers.first.kill()),
            Fault(
                f"stalled {STALL_S:.0f} s",
                f"{wrapped} do not return (wrapped in its process)",
                self._calls("stalled"),
                normal,
                STALL_S,
            ),
            Fault("ten times slower", f"{wrapped} take ten times as long (wrapped)", self._calls("slow"), normal),
            Fault("full", f"{wrapped} that write or allocate fail with ENOSPC (wrapped)", self._calls("full"), normal),
            Fault("restarted empty", "the first server's folder was deleted", lambda servers: self.delete_first()),
            Fault("answering garbage", "bytes of all slab files were changed", lambda servers: self.corrupt()),
            Fault("other keys' values", "every slot got the bytes of the next", lambda servers: self.exchange()),
        )

    def delete_first(self) -> None:
        """Deletes the files of the server that came first."""
        folders = sorted({slab.relative_to(self.path).parts[0] for slab in self.slabs()})
        for path in (self.path / folders[0]).rglob("*"):
            if path.is_file():
                path.unlink()

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ByteArray]:
    """Yields the bytes of a file, which are written back."""
    raw = np.memmap(path, np.uint8, "r+")
    yield raw
    raw.flush()


def _slot_bytes(slab: Path) -> int:
    """Returns the bytes of one slot of a slab, from the index beside it."""
    return Header.unpack(np.fromfile(slab.with_name("index"), np.uint8, HEADER_BYTES)).block_bytes


class Throttle:
    """Lets processes run for one part in SLOWDOWN of the time, by signals, until it is closed."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        running = DUTY_S / SLOWDOWN
        while not self._ended.is_set():
            send(self._pids, signal.SIGSTOP)
            self._ended.wait(DUTY_S - running)
            send(self._pids, signal.SIGCONT)
            self._ended.wait(running)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        send(self._pids, signal.SIGCONT)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Sends a signal to those processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
