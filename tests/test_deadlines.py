"""Files that hang end no start: calls under a deadline."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvoffload import OffloadConfig
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


def test_directories_that_hang_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together; then their paths are compared as they are written. The control follows a symbolic link."""
    never = threading.Event()
    real = os.path.realpath
    monkeypatch.setattr(config, "PATHS_DEADLINE_S", 0.05)
    monkeypatch.setattr(os.path, "realpath", lambda path: never.wait() and real(path))
    try:
        # The threads themselves: the number of one that ends meanwhile may be given to another.
        others = set(threading.enumerate())
        tiers = [{"kind": "shared_dir", "dir": f"/dead/{n}", "bytes": "1GiB"} for n in range(4)]
        OffloadConfig.from_mapping({"host_bytes": "1GiB", "tiers": tiers})
        assert len([thread for thread in threading.enumerate() if thread not in others]) == 1
        with pytest.raises(ConfigError, match="has the same directory or one inside the other"):
            OffloadConfig.from_mapping({"host_bytes": "1GiB", "tiers": [*tiers, {**tiers[0], "dir": "/dead/1/in"}]})
    finally:
        # Also for pytest, which follows links when it reports a failure.
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
