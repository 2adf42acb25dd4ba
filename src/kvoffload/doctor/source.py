"""Reads the option ``--config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.supported import CONNECTOR

MAX_CONFIG_BYTES = 1 << 20
OPTIONS_KEY = "kv_connector_extra_config"
SEVERAL = "MultiConnector"
"""vLLM's connector that has others, listed under "connectors"."""
_EXAMPLE = """--config '{"host_bytes": "64GiB"}' or --config FILE"""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration as it was given. ``options``: kvoffload's own. ``transfer``: the whole of vLLM's
    ``--kv-transfer-config`` if that was given, or kvoffload's entry in that of several connectors; otherwise None.
    ``several``: the configuration of these."""

    options: Mapping[str, Any]
    transfer: Mapping[str, Any] | None = None
    several: Mapping[str, Any] | None = None


def read_json(option: str, text: str, example: str) -> Any:
    """Returns what ``text`` says: JSON, or the path of a file with JSON. Raises ConfigError that names ``option`` and
    proposes ``example`` if it cannot be read, or is not JSON."""
    said = option
    # "@FILE" is how SGLang takes a file.
    text = text.removeprefix("@")
    if not text.lstrip().startswith(("{", "[")):
        said = f"{option}={text!r}"
        try:
            with Path(text).expanduser().open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES).decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(option, text, f"cannot be read ({reason})", f"write {example}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(said, NOT_SET, f"not JSON ({error})", f"correct it there, or write {example}") from error


def read_source(text: str) -> ConfigSource:
    """Returns the configuration in ``text``: JSON, or the path of a file with JSON. The JSON is the value of vLLM's
    ``--kv-transfer-config``, or only the ``kv_connector_extra_config`` in it.

    Raises ConfigError if it cannot be read, or is not JSON.
    """
    said, content = "--config", read_json("--config", text, _EXAMPLE)
    if not isinstance(content, Mapping):
        raise ConfigError(said, NOT_SET, "not a JSON object", f"write {_EXAMPLE}")
    if "kv_connector" not in content and OPTIONS_KEY not in content:
        return ConfigSource(content)
    options = content.get(OPTIONS_KEY) or {}
    if not isinstance(options, Mapping):
        raise ConfigError(said, NOT_SET, f"{OPTIONS_KEY} is not a JSON object", f'write "{OPTIONS_KEY}": {{...}}')
    if content.get("kv_connector") == SEVERAL:
        entries = options.get("connectors")
        if not isinstance(entries, list):
            raise ConfigError(said, NOT_SET, f'the "connectors" of {SEVERAL} are not a list', "write [{...}, {...}]")
        for entry in entries:
            if isinstance(entry, Mapping) and entry.get("kv_connector") == CONNECTOR:
                return replace(read_source(json.dumps(entry)), several=content)
        raise ConfigError(said, NOT_SET, f'none of the "connectors" of {SEVERAL} is {CONNECTOR}', "add it there")
    return ConfigSource(options, content)
