"""One file to send back: the facts, figures and gates of all parts, and the ends of their logs, without secrets."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import read

NAME = "report.json"
LOG_BYTES = 20_000
"""How much of the end of each log is in the file."""
_IDENTIFIERS = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}|\b(?:\d{1,3}\.){3}\d{1,3}\b|\b[\w.+-]+@[\w-]+\.[\w.]+")
"""UUIDs of GPUs, network addresses, mail addresses."""
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
MIN_SECRET_LENGTH = 6


def write(out: Path, parts: Iterable[str]) -> Path:
    """Writes the file into ``out``, where the parts' reports and logs are, and returns its path."""
    import kvoffload

    found = [name for name in parts if (out / f"{name}.json").exists()]
    reports = [read(out / f"{name}.json") for name in found]
    logs = {path.name: path.read_text(errors="replace")[-LOG_BYTES:] for path in sorted(out.glob("*.log"))}
    content = {
        "kvoffload": kvoffload.__version__,
        "parts": [{**report, "rows": [asdict(row) for row in report["rows"]]} for report in reports],
        "logs": logs,
    }
    path = out / NAME
    path.write_text(json.dumps(redacted(content, secrets(os.environ)), indent=1) + "\n")
    return path


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Returns texts that must not be in the file: names of the user and the machine, the home directory, and values of
    variables that look like keys. The longest come first."""
    found = {str(Path.home()), getpass.getuser(), socket.gethostname()}
    found |= {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    return sorted((each for each in found if len(each) >= MIN_SECRET_LENGTH or each in _names()), key=len, reverse=True)


def _names() -> set[str]:
    # These would blacken other words.
    return {getpass.getuser(), socket.gethostname()} - {"root", "user", "gpu", "localhost"}


def redacted(value: Any, texts: list[str]) -> Any:
    """Returns ``value`` with ``texts`` and identifiers replaced in all of its strings."""
    if isinstance(value, dict):
        return {name: redacted(each, texts) for name, each in value.items()}
    if isinstance(value, list):
        return [redacted(each, texts) for each in value]
    if not isinstance(value, str):
        return value
    for text in texts:
        value = value.replace(text, "[removed]")
    return _IDENTIFIERS.sub("[removed]", value)
