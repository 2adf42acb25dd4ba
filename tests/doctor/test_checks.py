"""What the checks say about facts that this machine does not have."""

from __future__ import annotations

import re
import tempfile
from functools import partial

import pytest

from kvoffload.doctor.configuration import PlannedServer
from kvoffload.doctor.directories import mount_of
from kvoffload.doctor.engine import check_version
from kvoffload.doctor.findings import Level
from tests.doctor.rig import findings_of

DISK = PlannedServer(host_bytes=1 << 30)


@pytest.mark.parametrize(
    ("version", "plan", "id", "level"),
    [
        (None, DISK, "engine.missing", Level.NOTE),
        ("0.32.0", DISK, "engine.tested", Level.OK),
        ("0.32.0+cpu", DISK, "engine.tested", Level.OK),
        ("0.30.1", PlannedServer(), "engine.too_old", Level.PROBLEM),
        ("0.31.0", DISK, "engine.tested", Level.OK),
        ("0.33.0", DISK, "engine.tested", Level.OK),
        ("0.40.0", DISK, "engine.untested", Level.WARNING),
        ("dev", DISK, "engine.untested", Level.WARNING),
    ],
)
def test_versions_of_vllm(version: str | None, plan: PlannedServer, id: str, level: Level) -> None:
    (found,) = findings_of(partial(check_version, version, plan)).values()
    assert (found.id, found.level) == (id, level)
    # zsh looks for files of that name if a star is not quoted.
    assert "*" not in re.sub("'[^']*'", "", found.fix)


def test_mounts_are_read() -> None:
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of("/").point == "/"
    assert mount_of(tempfile.gettempdir()).kind != "unknown"
