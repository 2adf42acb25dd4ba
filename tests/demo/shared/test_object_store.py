"""What the demo does to an object store is what it says, and a store that cannot run here names the line to run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.stores import CREDENTIALS, ObjectStore, StoreMissingError
from kvoffload.tiers.object_store.client import connect
from kvoffload.tiers.remote.client import Outcome, StoreError
from tests.tiers.object_store.rig import PATIENT

NAMES = [f"kvoffload/{'5e' * 32}/{i:064x}00000000" for i in range(4)]
needs_moto = pytest.mark.skipif(ObjectStore.missing() is not None, reason=str(ObjectStore.missing()))


@needs_moto
def test_what_the_demo_does_to_moto_is_what_it_says(tmp_path: Path) -> None:
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    with ObjectStore(tmp_path) as store:
        client = connect({"region": "", "prefix": "kvoffload", **store.entry()}, PATIENT)
        values = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)
        rows = [[row] for row in values]
        found = np.zeros_like(values)
        buffers = [[row] for row in found]
        assert client.put(NAMES, rows) == [Outcome.OK] * 4
        client.put(["kvoffload/identities/5e/0"], [rows[0]])
        assert store.corrupt() == 4
        assert client.get(NAMES, buffers) == [Outcome.OK] * 4
        assert not (found == values).all(axis=1).any()
        store.kill()
        with pytest.raises(StoreError, match="cannot be reached"):
            client.exists(NAMES)
        store.start()
        assert client.exists(NAMES) == [Outcome.MISSING] * 4
        client.close()
    assert {name: os.environ.get(name) for name in CREDENTIALS} == before


@pytest.mark.parametrize(
    ("lacking", "line"),
    [("obstore", "pip install obstore"), ("moto", "pip install 'moto[server]'")],
)
def test_a_store_that_cannot_run_names_the_line_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, line: str
) -> None:
    find: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else find(name) or object())
    with pytest.raises(StoreMissingError) as raised:
        ObjectStore(tmp_path)
    assert line in str(raised.value)
