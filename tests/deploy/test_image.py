"""The Dockerfile and the systemd unit agree with the repository, with the manifests, and with their linters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvoffload import OffloadConfig
from kvoffload.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
UNIT = ROOT / "deploy" / "systemd" / "vllm.service"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BASE = (ROOT / "deploy" / "kubernetes" / "base" / "vllm.yaml").read_text()

# A package of the development tools brings it, beside Python.
HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

needs_hadolint = pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def lint(text: str) -> str:
    assert HADOLINT is not None
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=60).stdout


@needs_hadolint
def test_the_dockerfile_has_no_fault_that_the_linter_knows() -> None:
    assert lint(DOCKERFILE) == ""


def test_the_build_context_has_what_the_package_is_built_from() -> None:
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    kept = set(re.findall(r"^!(\S+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    project = PYPROJECT["project"]
    assert {"pyproject.toml", "setup.py", "src", "README.md", *project["license-files"]} == copied


def test_the_image_and_the_pods_have_the_same_user_and_the_same_vllm() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE.partition("ARG EXTRAS")[2].rpartition("USER 0")[2], re.MULTILINE)
    (owner,) = re.findall(r"install -d -m 700 -o (\d+)", DOCKERFILE)
    (pod,) = re.findall(r"runAsUser: (\d+)", BASE)
    assert user == owner == pod
    (base,) = re.findall(r"^ARG BASE=\S+:(\S+)$", DOCKERFILE, re.MULTILINE)
    (tag,) = re.findall(r"newTag: (\S+)", (ROOT / "deploy" / "kubernetes" / "base" / "kustomization.yaml").read_text())
    assert base == tag


# systemd.


def verify(unit: str, folder: Path) -> str:
    """Returns what systemd says about ``unit``, whose programs are not installed here."""
    path = folder / "vllm.service"
    path.write_text(re.sub(r"/opt/vllm/bin/\w+", "/bin/true", unit))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    return "\n".join(line for line in done.stderr.splitlines() if "vllm.service" in line)


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert verify(UNIT.read_text(), tmp_path) == ""


def test_the_unit_has_room_for_its_options() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    options = json.loads((UNIT.parent / "kv-transfer.json").read_text())["kv_connector_extra_config"]
    OffloadConfig.from_mapping(options | {"host_bytes": "1MiB"})
    assert parse_bytes("MemoryMax", unit["MemoryMax"]) == parse_bytes("host_bytes", options["host_bytes"]) + (24 << 30)
    assert int(unit["LimitNOFILE"]) > parse_bytes("disk_bytes", options["disk_bytes"]) >> 30
    assert Path(options["disk_dir"]) == Path("/var/cache") / unit["CacheDirectory"]
    assert (unit["CacheDirectoryMode"], unit["KillMode"]) == ("0700", "mixed")
    (drain,) = re.findall(r"--shutdown-timeout (\d+)", unit["ExecStart"])
    assert int(unit["TimeoutStopSec"]) >= int(drain) + 15
