"""The native loop of copies has no race and no wrong access: an engine and both threads under gcc's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvoffload import native

SOURCE = Path(__file__).with_name("transfer_stress.c")
HEADERS = Path(native.__file__).parent
ROUNDS = 4000
SANITIZERS = ("address,undefined", "thread")


def build(folder: Path, sanitizer: str, *options: str) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    program = folder / "stress"
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-I{HEADERS}", f"-fsanitize={sanitizer}", *options]
    built = subprocess.run([compiler, *flags, SOURCE, "-o", program], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"the libraries of -fsanitize={sanitizer} are not installed")
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, mode: str) -> subprocess.CompletedProcess[str]:
    # The program ends without freeing what it needs until then.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    ended = subprocess.run([program, str(ROUNDS), mode], env=environment, capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in ended.stderr:
        pytest.skip("this kernel places memory where this sanitizer has its own")
    return ended


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_an_engine_and_both_threads(tmp_path: Path, sanitizer: str) -> None:
    program = build(tmp_path, sanitizer, "-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
    for mode in ("batch", "refuse"):
        ended = run(program, mode)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr[:2000]
        num_right, rest = ended.stdout.split(" right, ")
        assert int(num_right) > ROUNDS / 8
        # Both threads may be refused at the same time.
        assert (" 0 batches" in rest) is (mode == "batch")


def test_without_its_fences_the_stress_fails(tmp_path: Path) -> None:
    ended = run(build(tmp_path, "undefined", "-DNO_FENCES"), "batch")
    assert ended.returncode == 3
    assert "wrong bytes of store" in ended.stdout
