"""What a system keeps of the prompts: its folder on disk, and the processes beside the engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.peers import faults
from benchmarks.peers.systems import Service, Settings, System

SMALL_DISK_BYTES = 96 << 20


class Place:
    """The folder and the services of ``system``, whose logs stay in ``work``, and its budgets.

    The memory of services belongs to them, so that they are stopped with the engine: what a second engine finds is on
    disk.
    """

    def __init__(self, system: System, work: Path, host_bytes: int, disk_bytes: int) -> None:
        self.system = system
        self.work = work
        self.logs = work
        """Where an engine's log goes."""
        self.folder = system.disk_dir(work)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.is_kept = False
        self._kept = work / "kept"
        self._budgets = host_bytes, disk_bytes
        self._services: list[Service] = []
        self._used: list[Settings] = []
        self._is_running = False

    def begin(self) -> Settings:
        """Is called before an engine starts. Returns what it is given. Raises StartError."""
        if not self._is_running:
            # Again on the same ports.
            self._services = self._services or self.system.services(self.work, *self._budgets)
            for service in self._services:
                service.start()
            self._is_running = True
        self._used.append(self.system.settings(self.work, *self._budgets))
        return self._used[-1]

    def end(self) -> None:
        """Is called after an engine was shut down."""
        for service in reversed(self._services):
            service.stop()
        self._is_running = False

    def crash(self) -> None:
        """Is called when an engine is killed: kills what writes for it."""
        for service in self._services:
            service.kill()
        self._is_running = False

    def empty(self) -> None:
        """Makes it start anew, with nothing stored."""
        self.crash()
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)

    def keep(self) -> None:
        """Keeps a copy of what is stored."""
        faults.copy_folder(self.folder, self._kept)
        self.is_kept = True

    def restore(self) -> None:
        """Stores again what was kept."""
        self.crash()
        faults.copy_folder(self._kept, self.folder)

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        """Starts it anew on a small disk. Yields what fills that, called when an engine has started."""
        self.empty()
        with faults.small_disk(self.folder, SMALL_DISK_BYTES) as fill, contextlib.ExitStack() as stack:
            stack.callback(self.crash)
            yield fill

    def close(self) -> None:
        """Leaves no process and no block behind."""
        self.crash()
        for settings in self._used:
            settings.clean()
        for folder in (self.folder, self._kept):
            shutil.rmtree(folder, ignore_errors=True)
