"""Files that hang end no start: calls under a deadline."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvoffload.abc import ConfigError
from kvoffload.deadlines import within
from kvoffload.tiers import config
from kvoffload.tiers.config import load_tiers


def test_a_call_returns_raises_or_ends_at_its_deadline() -> None:
    assert within(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"has not answered for 0 s"):
        within(0.01, never.wait)
    never.set()


def test_a_file_of_an_entry_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe hangs like a mount whose server is gone. The control: the pipe is written to."""
    path = tmp_path / "key"
    os.mkfifo(path)
    entry = {"kind": "redis", "url": "redis://localhost", "hmac_key_file": str(path)}
    writer = threading.Thread(target=lambda: path.write_bytes(b"k" * 40))
    writer.start()
    load_tiers([entry])
    writer.join()
    monkeypatch.setattr(config, "FILES_DEADLINE_S", 0.2)
    with pytest.raises(
        ConfigError,
        match=r"tiers\[0\].kind='redis': a file of the entry: its file system has not answered for 0 s; look at",
    ):
        load_tiers([entry])
    # Ends the thread that hangs.
    path.write_bytes(b"k" * 40)
