"""What is not known to be harmless is shown nowhere: not in errors, not by the doctor, not in the log at start."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload.abc import ConfigError
from kvoffload.abc.shown import shown
from kvoffload.config import IntegrationConfig, OffloadConfig
from kvoffload.doctor import configuration
from kvoffload.doctor.findings import Report
from kvoffload.doctor.source import ConfigSource, read_source
from tests.doctor.rig import diagnose

SECRET = "hunter2SECRET"
TEXTS = st.sampled_from(
    [
        SECRET,
        f"redis://:{SECRET}@h:6379",
        f"redis://h:6379?password={SECRET}",
        f"{SECRET}@host",
        f"https://{SECRET}@host",
        f"a; b: {SECRET}",
    ]
)
VALUES = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abk_. ", max_size=6), inner, max_size=3)
)
NAMES = st.sampled_from(["requirepass", "pass", "pw", "aws", "zzz", "auth.x", "skip", "a b", "url"])
SETTINGS_WITH_SECRETS = st.sampled_from(
    ["url", "endpoint", "username", "hmac_key_file", "password_file", "key_file", "master", "metadata", "ca_file"]
)
"""Settings of tiers in which somebody may have written a secret by mistake."""


@st.composite
def entries(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        return draw(VALUES)
    kind = draw(st.sampled_from(["redis", "object_store", "mooncake", "disk", "shared_dir"]))
    place = {"url": "redis://h:6379"} if kind in ("redis", "object_store") else {"dir": "/nowhere/kv", "bytes": "1GiB"}
    entry: dict[str, Any] = {"kind": kind, **({"master": "h:1"} if kind == "mooncake" else place)}
    for name in draw(st.lists(SETTINGS_WITH_SECRETS | NAMES, max_size=3)):
        entry[name] = draw(VALUES)
    return entry


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {"host_bytes": "64MiB"}
    for name in draw(st.lists(NAMES, max_size=2)):
        options[name] = draw(VALUES)
    if draw(st.booleans()):
        options["tiers"] = draw(VALUES | st.lists(entries(), max_size=3))
    if draw(st.booleans()):
        tenant = st.dictionaries(NAMES | st.sampled_from(["quota", "salt_sha256"]), VALUES, max_size=2)
        options["tenants"] = draw(VALUES | st.dictionaries(st.sampled_from(["a", "a.b"]), tenant | VALUES, max_size=2))
    return options


@given(configurations())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_secret_in_an_unknown_place_is_shown_nowhere(options: Mapping[str, Any]) -> None:
    texts: list[str] = []
    with ExitStack() as caught:
        caught.enter_context(suppress(ConfigError))
        try:
            OffloadConfig.from_mapping(options)
        except ConfigError as error:
            texts += [str(error), repr(error), str(vars(error)), str(error.__cause__)]
    with suppress(ConfigError):
        try:
            IntegrationConfig.from_mapping({"tier": options.get("tiers")}, "secondary_tiers[0].")
        except ConfigError as error:
            texts.append(str(error))
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    configuration.check(ConfigSource(options, transfer), Report(lambda message: texts.append(str(message))))
    assert texts
    assert SECRET not in "".join(texts)


SHOWN: dict[str, list[object]] = {
    "zzz": [True, None],
    "host_bytes": ["8 gigs"],
    "tenants.a.b.quota.host": ["8 gigs"],
    "tiers[1].url": ["redis://h:6379/x y"],
    "endpoint": ["minio:9000"],
    "master": ["10.0.0.5"],
    "hmac_key_file": ["/etc/key"],
    "tiers[0].dir": ["/mnt/a@b"],
    "--config": ["kv.json"],
}
HIDDEN: dict[str, list[object]] = {
    "zzz": ["a", b"a", object()],
    "tiers[1].url": ["redis://u@h", "s3://b?sig=x", 987654321],
    "endpoint": ["SECRET@host"],
    "hmac_key_file": ["8J+Rg/x=="],
    "tiers[0].username": [987654321],
    "host_bytes": ["redis://u:SECRET@h"],
    "record_trace": ["http://u:SECRET@h/x"],
    "--config": ["pass: x"],
}


def test_what_is_shown() -> None:
    for setting, values in SHOWN.items():
        assert [shown(setting, value) for value in values] == list(map(repr, values))
    for setting, values in HIDDEN.items():
        assert [shown(setting, value) for value in values] == ["***"] * len(values), setting
    parts: list[object] = ["", ["a", 1], {"a": 1}]
    assert [shown("zzz", value) for value in parts] == ["''", "[***, 1]", "{***}"]


@pytest.mark.parametrize(
    "options",
    [
        {"requirepass": 987654321},
        {"tiers": [{"kind": "redis", "url": "redis://h:1", "requirepass": 987654321}]},
        {"tiers": [{"kind": "redis", "url": "redis://h:1", "username": 987654321}]},
        {"policy": "redis://:987654321@h:6379"},
    ],
)
def test_a_number_may_be_a_password(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_mapping({"host_bytes": "64MiB", **options})
    assert "987654321" not in str(caught.value)


def test_the_command_shows_no_secret(tmp_path: Path) -> None:
    """As text and as JSON, even if a library repeats what it was given."""
    tier = {"kind": "redis", "url": "redis://127.0.0.1:1", "requirepass": SECRET}
    options = {"host_bytes": "64MiB", "tiers": [tier, {"kind": "redis", "url": f"redis://:{SECRET}@h"}], "pass": SECRET}
    assert SECRET not in diagnose(options).output
    path = tmp_path / "kv"
    path.write_text(f"pass: {SECRET}")
    for text in (f"pass: {SECRET}", str(path), "{" + SECRET):
        with pytest.raises(ConfigError) as caught:
            read_source(text)
        assert SECRET not in str(caught.value)
