"""A store in a folder, which a client's process can reach: a file per value, and files that make it fail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from tests.tiers.remote.memory_store import MemoryClient

VALUES = "values"


class FolderStore:
    """What a test does to the store in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / VALUES).mkdir(exist_ok=True)

    def settings(self) -> dict[str, str]:
        return {"folder": str(self.folder)}

    def switch(self, fault: str, on: bool = True) -> None:
        """Switches a fault: unreachable, hang, hang-get, hang-put, crash, chatter. Or ``rows``: clients
        that connect from now on move values through registered memory."""
        if on:
            (self.folder / fault).touch()
        else:
            (self.folder / fault).unlink(missing_ok=True)

    def values(self) -> list[Path]:
        return sorted(path for path in (self.folder / VALUES).iterdir() if "identities" not in path.name)

    def path(self, name: str) -> Path:
        return self.folder / VALUES / name.replace("/", "_")


class Files(MutableMapping[str, ByteArray]):
    """Values in files."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> ByteArray:
        try:
            return np.fromfile(self._store.path(name), dtype=np.uint8)
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: ByteArray) -> None:
        unfinished = self._store.folder / f"{os.getpid()}-{id(value)}"
        value.tofile(unfinished)
        unfinished.rename(self._store.path(name))

    def __delitem__(self, name: str) -> None:
        self._store.path(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self._store.values())

    def __len__(self) -> int:
        return len(self._store.values())


class FolderClient(MemoryClient):
    def __init__(self, store: FolderStore) -> None:
        super().__init__()
        self._store = store
        self.values = Files(store)
        self.registers_memory = self._is_on("rows")
        self._registered: list[ByteArray] = []

    def register(self, memory: ByteArray) -> None:
        self._registered.append(memory)

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._check(buffers)
        return super().get(names, buffers)

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._check(buffers)
        return super().put(names, buffers)

    def _check(self, buffers: Sequence[Sequence[ByteArray]]) -> None:
        """Asserts that registered memory is used if it has to be."""
        for each in buffers if self.registers_memory else ():
            (whole,) = each
            assert any(np.shares_memory(whole, memory) for memory in self._registered)

    def _is_on(self, fault: str) -> bool:
        return (self._store.folder / fault).exists()

    def _call(self, name: str, names: Sequence[str]) -> None:
        while self._is_on("hang") or self._is_on(f"hang-{name}"):
            time.sleep(0.01)
        if self._is_on("crash"):
            os.abort()
        if self._is_on("chatter"):
            print("x" * 100_000, file=sys.stderr, flush=True)


def connect(settings: Mapping[str, Any]) -> FolderClient:
    store = FolderStore(Path(settings["folder"]))
    if (store.folder / "unreachable").exists():
        raise StoreError("the store is unreachable on purpose")
    return FolderClient(store)


def refuse(settings: Mapping[str, Any]) -> StoreClient:
    raise StoreError("go away \x1b[2J\ud800" + "x" * 9999)
