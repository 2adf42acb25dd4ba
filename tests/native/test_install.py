"""Without a C compiler the package is installed all the same, and says that it runs on plain Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("Cython")
pytest.importorskip("setuptools")

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")


def install(folder: Path, compiler: str | None) -> tuple[Path, str]:
    """Builds a wheel and unpacks it. Returns where, and what the command says about its version."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            # With the C files of the last build, if they are newer than their sources, Cython has nothing to do.
            unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(source, folder / "source" / name, ignore=unwanted)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(source, folder / "source" / name)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} | ({"CC": compiler} if compiler else {})
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    command = [sys.executable, "-c", build]
    subprocess.run(command, cwd=folder / "source", env=environment, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    environment["PYTHONPATH"] = str(folder / "installed")
    environment.pop("KVOFFLOAD_NATIVE", None)
    command = [sys.executable, "-P", "-c", "from kvoffload.cli import main; main()", "--version"]
    ended = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return folder / "installed" / "kvoffload", ended.stdout


def test_without_a_compiler(tmp_path: Path) -> None:
    installed, version = install(tmp_path, "/bin/false")
    assert "plain Python: native code was not compiled" in version
    assert not [path for path in installed.rglob("*") if path.suffix in (".so", ".c")]
    assert (installed / "py.typed").exists()
    assert list(installed.rglob("*.j2"))


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler here")
def test_with_a_compiler(tmp_path: Path) -> None:
    """What the test above must not find."""
    installed, version = install(tmp_path, None)
    assert "native code" in version
    assert "plain" not in version
    assert list(installed.rglob("*.so"))
