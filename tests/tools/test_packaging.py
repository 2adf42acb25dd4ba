"""What a source distribution and a wheel contain, and the page that an index shows."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
pytest.importorskip("Cython")

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^]]*\]\((?!\w+:|#)([^)#]+)")
"""A relative link in Markdown."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution in ``dist``, and in ``lib`` what a wheel contains beside compiled code."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".git", ".venv*", "*.so", "__pycache__", "build", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(folder / "dist")]
    command += ["build_py", "--build-lib", str(folder / "lib")]
    done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_source_distribution_has_all_that_pages_link_to(built: Path, tmp_path: Path) -> None:
    (archive,) = (built / "dist").iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    assert len(pages) > 15
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text())]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
    assert (root / "CHANGELOG.md").exists()
    assert (root / "src" / "kvoffload" / "native" / "_cache.pyx").exists()
    assert not list(root.rglob("*.so"))

    information = email.message_from_string((root / "PKG-INFO").read_text())
    shown = str(information.get_payload())
    assert "KV" in shown
    assert LINK.findall(shown) == []
    assert LINK.findall((root / "README.md").read_text())


def test_a_wheel_has_no_sources_of_native_code(built: Path) -> None:
    native = built / "lib" / "kvoffload" / "native"
    assert {path.suffix for path in native.iterdir()} == {".py"}
    assert (built / "lib" / "kvoffload" / "py.typed").exists()
    assert list((built / "lib" / "kvoffload").rglob("*.css"))
