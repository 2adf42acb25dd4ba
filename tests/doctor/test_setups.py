"""The doctor on set-ups that are broken for real, and on the same set-ups healed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.doctor import directories
from kvoffload.doctor.findings import Level
from kvoffload.tiers.disk.config import DirectoryConfig, DiskConfig
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from tests.doctor.rig import QUICK, Diagnosis, diagnose, look_at, model_file, needs_root, private
from tests.lab.traces import LLAMA

ANOTHER = 65534
MNT_DETACH = 2
UNITS = ("_bytes", "_per_s", "_ms", "_tokens")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """A disk tier in an own directory, and a model that is served: the control of what is broken below."""
    folder = tmp_path_factory.mktemp("healthy")
    disk = private(folder / "disk")
    options = {"host_bytes": "64MiB", "policy": "lru", "disk_dir": str(disk), "disk_bytes": "32MiB"}
    found = diagnose(options, "--model", model_file(folder, LLAMA))
    assert list(disk.iterdir()) == []
    return found


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """The same with more memory than there is, wrong entries, and directories that cannot be used."""
    folder = tmp_path_factory.mktemp("broken")
    open_to_others = private(folder / "open")
    open_to_others.chmod(0o777)
    key = folder / "key"
    key.write_text("k" * 64)
    key.chmod(0o644)
    tiers = [
        {"kind": "disk", "dir": "relative", "bytes": "32MiB"},
        {"kind": "disk", "dir": str(open_to_others), "bytes": "32MiB"},
        {"kind": "disk", "dir": str(private(folder / "large")), "bytes": "4000TiB"},
        {"kind": "shared_dir", "dir": str(folder / "none"), "bytes": "32MiB"},
        {"kind": "disc", "dir": str(private(folder / "kind")), "bytes": "32MiB"},
    ]
    return diagnose({"host_bytes": "900TiB", "tiers": tiers})


def test_a_healthy_setup_has_no_problem(healthy: Diagnosis) -> None:
    assert healthy.exit_status == 0
    assert healthy.ids("problem") == set()
    of_disk = {f"directory.{each}" for each in ("private", "space", "direct_io", "speed")}
    assert {"config.valid", "memory.fits", "model.room"} | of_disk <= healthy.ids()
    assert healthy.one("model.room")["figures"]["host_memory_tokens"] == 512
    assert healthy.one("directory.speed")["figures"]["read_bytes_per_s"] > 0


REFUSED, UNMOUNTED = ("config.refused", "problem"), "does not exist; .* another file system may not be mounted"


@pytest.mark.parametrize(
    ("id", "level", "text", "fix"),
    [
        (*REFUSED, "host_bytes=.*900 TiB.*: this machine has", "set host_bytes to what it can spare"),
        (*REFUSED, r"tiers\[0\].dir='relative': not an absolute path", "write an absolute path"),
        (*REFUSED, r"tiers\[4\].kind='disc'", "did you mean disk?"),
        ("directory.refused", "problem", r"tiers\[1\].*others can write to it \(mode 777\)", "run chmod 700 on it"),
        ("directory.space", "problem", r"tiers\[2\].bytes=.*4000 TiB.*can give only", "set it to .* or less"),
        ("directory.missing", "warning", UNMOUNTED, "install -d -m 700"),
    ],
)
def test_what_is_broken_is_named_with_its_fix(
    broken: Diagnosis, healthy: Diagnosis, id: str, level: str, text: str, fix: str
) -> None:
    assert broken.exit_status == 1
    found = [each for each in broken.findings if each["id"] == id and re.search(text, each["text"])]
    assert len(found) == 1, broken.output
    assert found[0]["level"] == level
    assert re.search(fix, found[0]["fix"])
    assert not any(each["id"] == id and each["level"] == level for each in healthy.findings)


def test_warnings_and_problems_have_fixes_and_figures_have_units(broken: Diagnosis, healthy: Diagnosis) -> None:
    for each in (*broken.findings, *healthy.findings):
        assert each["fix"] or each["level"] in ("ok", "note"), each
        for name, value in each["figures"].items():
            if isinstance(value, float):
                assert name.endswith(UNITS), name
    assert re.fullmatch(r"\d+ problems and \d+ warnings?: fix the problems before you deploy\.", broken.verdict)


# Memory.


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup with a limit of 512 MiB, in the one of this process."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    version_1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if version_1 is not None:
        root, limit = root / "memory", "memory.limit_in_bytes"
    group = root / (version_1 or paths.get("", "/")).lstrip("/") / f"kvoffload-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(512 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup can be made here ({error})")
    try:
        yield group
    finally:
        group.rmdir()


MAIN = """
from kvoffload.cli import group
from kvoffload.doctor.examine import Effort

group()(obj=Effort(seconds=0.01))
"""


def run_elsewhere(prefix: str, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Runs the command behind the shell command ``prefix``. Returns the exit status and the findings."""
    command = ["sh", "-c", f'{prefix} "$@"', "sh", sys.executable, "-c", MAIN, "doctor", "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


@needs_root
def test_a_container_that_is_too_small(small_group: Path, healthy: Diagnosis) -> None:
    options = json.dumps({"host_bytes": "512MiB"})
    status, findings = run_elsewhere(f"echo $$ > {small_group}/cgroup.procs && exec", "--config", options)
    assert status == 1
    (found,) = [each for each in findings if each["id"] == "memory.too_little"]
    assert found["level"] == "problem"
    assert "within the memory limit of 512 MiB of cgroup" in found["text"]
    assert re.match("set host_bytes to .* or less, or raise the container's memory limit", found["fix"])
    assert "memory.too_little" not in healthy.ids()


# Directories.


WITHOUT_OVERRIDE = "exec setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all"
"""Runs a command as root, to whom the permissions of files apply as to other users."""


@needs_root
def test_directories_that_this_user_may_not_use(tmp_path: Path) -> None:
    for name in ("closed", "shut", "read-only", "of-another", "own"):
        private(tmp_path / name)
    (tmp_path / "closed").chmod(0)
    (tmp_path / "shut").chmod(0)
    (tmp_path / "read-only").chmod(0o500)
    (tmp_path / "of-another").chmod(0o755)
    os.chown(tmp_path / "of-another", ANOTHER, ANOTHER)
    names = ("closed", "read-only/below", "of-another", "own", "shut/below")
    tiers = [{"kind": "disk", "dir": str(tmp_path / name), "bytes": "32MiB"} for name in names]
    options = json.dumps({"host_bytes": "64MiB", "tiers": tiers})
    status, findings = run_elsewhere(WITHOUT_OVERRIDE, "--config", options)
    assert status == 1

    def found(tier: str, id: str) -> dict[str, str]:
        (one,) = [each for each in findings if (each["tier"], each["id"]) == (tier, id)]
        return one

    assert found("disk", "directory.refused")["level"] == "problem"
    assert "Permission denied" in found("disk", "directory.refused")["text"]
    assert "install -d -m 700 -o 0" in found("disk", "directory.refused")["fix"]
    assert found("disk-2", "directory.not_writable")["level"] == "problem"
    assert "install -d -m 700 -o 0" in found("disk-2", "directory.not_writable")["fix"]
    assert f"belongs to user {ANOTHER}" in found("disk-3", "directory.refused")["text"]
    assert f"sudo -u '#{ANOTHER}' kvoffload doctor" in found("disk-3", "directory.refused")["fix"]
    assert {each["level"] for each in findings if each["tier"] == "disk-4"} <= {"ok", "warning"}
    assert found("disk-5", "directory.not_writable")["level"] == "problem"


@needs_root
@pytest.mark.parametrize("kind", [DiskConfig, SharedDirConfig])
def test_a_file_system_that_has_space_and_no_inodes(tmp_path: Path, kind: type[DirectoryConfig]) -> None:
    """The control has inodes again."""
    mounted = private(tmp_path / "mounted")
    options = "size=64m,nr_inodes=64,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", mounted], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        folder = private(mounted / "kv")
        files: list[Path] = []
        with suppress(OSError):
            for number in range(64):
                files.append(mounted / str(number))
                files[-1].touch()
        assert len(files) < 64
        found = look_at(folder, kind)["directory.inodes"]
        assert found.level is Level.PROBLEM
        assert found.text.startswith(f"{folder}: no inodes are left")
        assert found.fix.endswith(f"df -i {folder} shows how many there are")
        for each in files[:32]:
            each.unlink()
        assert "directory.inodes" not in look_at(folder, kind)
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.fixture
def silent_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers: whatever touches it hangs."""
    folder, libc = private(tmp_path / "silent"), ctypes.CDLL(None)
    try:
        connection = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here ({error})")
    try:
        options = f"fd={connection},rootmode=40000,user_id=0,group_id=0"
        if libc.mount(b"silent", bytes(folder), b"fuse", 0, options.encode()):
            pytest.skip("no file system can be mounted here")
        yield folder
        assert libc.umount2(bytes(folder), MNT_DETACH) == 0
    finally:
        # All that still waits for an answer gets an error.
        os.close(connection)


@needs_root
def test_a_file_system_that_never_answers(silent_file_system: Path, healthy: Diagnosis) -> None:
    options = {"host_bytes": "64MiB", "disk_dir": str(silent_file_system), "disk_bytes": "32MiB"}
    found = diagnose(options, effort=replace(QUICK, deadline_s=5.0))
    assert found.exit_status == 1
    hung = found.one("doctor.hung", "disk")
    assert hung["level"] == "problem"
    said = f"no answer within 5 s while the doctor looks at {silent_file_system}; nothing else was checked"
    assert hung["text"] == said
    assert "mount it again" in hung["fix"]
    # What touches no medium was checked before.
    assert {"config.valid", "memory.fits"} <= found.ids()
    assert {"engine.missing", "engine.tested"} & found.ids()
    assert "doctor.hung" not in healthy.ids()


def test_a_directory_that_a_server_uses(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path / "disk")
    storage.lock()
    try:
        used = look_at(tmp_path / "disk")
    finally:
        storage.close()
    assert used["directory.in_use"].level is Level.WARNING
    assert "stop that server first" in used["directory.in_use"].fix
    assert "directory.in_use" not in look_at(tmp_path / "disk")
    assert not [path for path in (tmp_path / "disk").iterdir() if path.name.startswith(directories.SCRATCH_PREFIX)]


def test_a_directory_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(private(tmp_path / "target"))
    for name, wrong in (("file", "is not a directory"), ("file/below", "not a directory"), ("link", "symbolic link")):
        found = look_at(tmp_path / name)
        assert list(found) == ["directory.refused"]
        assert wrong in found["directory.refused"].text
