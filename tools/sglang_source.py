"""Unpacks the Python code of SGLang's server: ``python tools/sglang_source.py sglang==0.5.23 FOLDER``.

Tests run parts of it, and need nothing that it requires: see ``tests/sglang/parts.py``.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from interface import wheel


def main(requirement: str, folder: Path) -> None:
    package, _, version = requirement.partition("==")
    with zipfile.ZipFile(wheel(package, version)) as source:
        names = (name for name in source.namelist() if name.startswith("sglang/srt/") and name.endswith(".py"))
        source.extractall(folder, names)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
