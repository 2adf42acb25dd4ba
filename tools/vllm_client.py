"""Unpacks vLLM's multi-turn benchmark client, which no wheel has: ``python tools/vllm_client.py 0.32.0 FOLDER``.

It is in vLLM's source distribution. The packages that it needs beside vLLM's own are installed into FOLDER too.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path, PurePosixPath

from pip._internal.commands import create_command

CLIENT = "benchmarks/multi_turn"
"""Its folder in the source distribution."""
LACKING = ("pandas", "python-dateutil", "tzdata", "xlsxwriter")
"""What it imports and vLLM does not bring, and what that needs."""
JSON = "application/vnd.pypi.simple.v1+json"


def main(version: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(download(f"vllm-{version}.tar.gz"))) as source:
        for member in source:
            path = PurePosixPath(member.name)
            content = source.extractfile(member)
            if content is not None and path.parent.match(f"*/{CLIENT}"):
                (folder / path.name).write_bytes(content.read())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder / "packages"), *LACKING], check=True)


def index() -> str:
    """Returns the address of the index that pip is configured to use."""
    options, _ = create_command("download").parse_args([])
    address: str = options.index_url
    return address


def download(name: str) -> bytes:
    """Returns a file of the package vllm from the index, which must have its SHA-256. pip would build it first."""
    page = f"{index().rstrip('/')}/vllm/"
    with urllib.request.urlopen(urllib.request.Request(page, headers={"Accept": JSON}), timeout=60) as answer:
        files = {file["filename"]: file for file in json.load(answer)["files"]}
    if name not in files:
        sys.exit(f"{page} has no {name}: name a version of vLLM with a source distribution")
    with urllib.request.urlopen(urllib.parse.urljoin(page, files[name]["url"]), timeout=600) as answer:
        content: bytes = answer.read()
    if hashlib.sha256(content).hexdigest() != files[name]["hashes"]["sha256"]:
        sys.exit(f"{name}: the index has another SHA-256 for it: run this again")
    return content


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
