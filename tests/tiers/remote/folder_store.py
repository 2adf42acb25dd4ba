"""A store in a folder, which a client's process can reach: a file per value, and files that make it fail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from tests.tiers.remote.memory_store import fill

VALUES = "values"


class FolderStore:
    """What a test does to the store in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / VALUES).mkdir(exist_ok=True)

    def settings(self) -> dict[str, str]:
        return {"folder": str(self.folder)}

    def switch(self, fault: str, on: bool = True) -> None:
        """Switches a fault: unreachable, hang, hang-get, hang-put, crash, fail, full, chatter. Or ``rows``: clients
        that connect from now on move values through registered memory."""
        if on:
            (self.folder / fault).touch()
        else:
            (self.folder / fault).unlink(missing_ok=True)

    def values(self) -> list[Path]:
        return sorted(path for path in (self.folder / VALUES).iterdir() if "identities" not in path.name)

    def path(self, name: str) -> Path:
        return self.folder / VALUES / name.replace("/", "_")


class FolderClient(StoreClient):
    def __init__(self, store: FolderStore) -> None:
        self._store = store
        self.registers_memory = self._is_on("rows")
        self._registered: list[ByteArray] = []

    def register(self, memory: ByteArray) -> None:
        self._registered.append(memory)

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        self._fail("")
        return [Outcome.OK if self._store.path(name).exists() else Outcome.MISSING for name in names]

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._fail("-get")
        self._check(buffers)
        return [self._get(self._store.path(name), parts) for name, parts in zip(names, buffers, strict=True)]

    def _check(self, buffers: Sequence[Sequence[ByteArray]]) -> None:
        """Asserts that registered memory is used if it has to be."""
        for each in buffers if self.registers_memory else ():
            (whole,) = each
            assert any(np.shares_memory(whole, memory) for memory in self._registered)

    def _get(self, path: Path, parts: Sequence[ByteArray]) -> Outcome:
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except FileNotFoundError:
            return Outcome.MISSING
        return fill(data, parts)

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._fail("-put")
        if self._is_on("full"):
            return [Outcome.FULL] * len(names)
        self._check(buffers)
        return [self._put(self._store.path(name), parts) for name, parts in zip(names, buffers, strict=True)]

    def _put(self, path: Path, parts: Sequence[ByteArray]) -> Outcome:
        unfinished = self._store.folder / f"{os.getpid()}-{id(parts)}"
        np.concatenate(parts).tofile(unfinished)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return Outcome.HELD
        finally:
            unfinished.unlink()
        return Outcome.OK

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        self._fail("")
        for name in names:
            self._store.path(name).unlink(missing_ok=True)
        return [Outcome.OK] * len(names)

    def _is_on(self, fault: str) -> bool:
        return (self._store.folder / fault).exists()

    def _fail(self, kind: str) -> None:
        while self._is_on("hang") or (kind and self._is_on("hang" + kind)):
            time.sleep(0.01)
        if self._is_on("crash"):
            os.abort()
        if self._is_on("fail"):
            raise StoreError("the store fails on purpose")
        if self._is_on("chatter"):
            print("x" * 100_000, file=sys.stderr, flush=True)


def connect(settings: Mapping[str, Any]) -> FolderClient:
    store = FolderStore(Path(settings["folder"]))
    if (store.folder / "unreachable").exists():
        raise StoreError("the store is unreachable on purpose")
    return FolderClient(store)


def refuse(settings: Mapping[str, Any]) -> StoreClient:
    raise StoreError("go away \x1b[2J\ud800" + "x" * 9999)
