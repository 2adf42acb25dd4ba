"""What the checks say about facts that this machine does not have."""

from __future__ import annotations

import re
import tempfile
from functools import partial

import pytest

from kvoffload.doctor.configuration import PlannedServer
from kvoffload.doctor.directories import mount_of
from kvoffload.doctor.engine import check_variables, check_version
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


@pytest.mark.parametrize(
    ("environment", "fixes"),
    [
        ({}, []),
        ({"VLLM_PORT": "8000", "VLLM_DP_MASTER_PORT": "29500"}, []),
        # Of a Service "vllm-pods": vLLM does not read it.
        ({"VLLM_PODS_PORT": "tcp://10.0.0.7:8000", "VLLM_SERVICE_PORT": "8000"}, []),
        ({"VLLM_PORT": "tcp://10.0.0.7:8000"}, ["enableServiceLinks: false"]),
        ({"VLLM_DP_MASTER_PORT": "tcp://10.0.0.7:1"}, ['rename the Service "vllm-dp-master"']),
        ({"VLLM_PORT": "http"}, ["set VLLM_PORT to a number"]),
    ],
)
def test_variables_that_vllm_cannot_read(environment: dict[str, str], fixes: list[str]) -> None:
    found = findings_of(partial(check_variables, environment)).values()
    assert [(each.id, each.level) for each in found] == [("engine.port_variable", Level.PROBLEM)] * len(fixes)
    assert all(fix in each.fix for fix, each in zip(fixes, found, strict=True))


def test_mounts_are_read() -> None:
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of("/").point == "/"
    assert mount_of(tempfile.gettempdir()).kind != "unknown"
