"""What tests leave is closed; file systems that they mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.made import close_all


class Mounts:
    """Mounts file systems, which only root can do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mounted = 0

    def mount(self, *arguments: str) -> Path:
        self.path.mkdir(exist_ok=True)
        self.run("mount", *arguments, str(self.path))
        self._mounted += 1
        self.path.chmod(0o700)
        return self.path

    def remount(self, options: str) -> None:
        self.run("mount", "-o", f"remount,{options}", str(self.path))

    def unmount(self) -> None:
        while self._mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
            self._mounted -= 1

    @staticmethod
    def run(*command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{command[0]} is not possible here: {error}")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    mounts = Mounts(tmp_path / "mounted")
    yield mounts
    mounts.unmount()
