"""Requirements of a package without those that a machine does not need."""

from __future__ import annotations

import runpy
from pathlib import Path

SELECTED = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "requirements.py"))["selected"]
LINES = ["numpy>=1.24", "cuda-python<14,>=13", "cuda-python-more", 'nixl>=1; python_version < "3" and extra == "n"']


def test_extras_and_named_packages_are_left_out() -> None:
    assert SELECTED(LINES, []) == LINES[:3]
    assert SELECTED(LINES, ["CUDA-python", "num"]) == ["numpy>=1.24", "cuda-python-more"]
