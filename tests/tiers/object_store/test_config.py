"""The entry of an object store: each mistake is named with its key, its value and the fix."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import load_tiers
from kvoffload.tiers.object_store import config as module
from kvoffload.tiers.object_store.config import ObjectStoreConfig

URL = "s3://bucket/folder"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client counts as installed."""
    monkeypatch.setattr(module, "check_installed", lambda: None)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("url", ["s3://bucket", URL, "gs://bucket/a/b", "az://container", "file:///tmp/bucket"])
def test_a_url_is_enough(url: str) -> None:
    (config,) = load_tiers([{"kind": "object_store", "url": url}])
    assert isinstance(config, ObjectStoreConfig)
    assert config.address == url
    assert config.capacity_bytes is None
    assert json.loads(json.dumps(config.settings()))["url"] == url


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "url is not set"),
        ({"url": 7}, r"tiers\[0\].url=\*\*\*: write .*s3://BUCKET"),
        ({"url": "bucket"}, r"tiers\[0\].url=\*\*\*: write .*s3://BUCKET"),
        ({"url": "http://bucket"}, r"tiers\[0\].url='http://bucket'"),
        ({"url": "s3:///folder"}, r"tiers\[0\].url='s3:///folder'"),
        ({"url": "s3://b"}, r"tiers\[0\].url='s3://b'"),
        ({"url": "s3://bucket//folder"}, r"tiers\[0\].url='s3://bucket//folder'.*single slashes"),
        ({"url": "s3://bucket/a b"}, r"tiers\[0\].url='s3://bucket/a b'"),
        ({"url": "file://bucket/a"}, r"tiers\[0\].url='file://bucket/a'"),
        ({"url": "s3://[x"}, r"tiers\[0\].url='s3://\[x"),
        ({"endpoint": "minio:9000"}, r"tiers\[0\].endpoint='minio:9000': .*https://minio.local:9000"),
        ({"endpoint": "http://minio:9000/bucket"}, r"tiers\[0\].endpoint=.*the bucket belongs into url"),
        ({"endpoint": 9000}, r"tiers\[0\].endpoint=\*\*\*"),
        ({"url": "gs://bucket", "endpoint": "http://minio:9000"}, r"tiers\[0\].endpoint=.*compatible with S3"),
        ({"region": "a b"}, r"tiers\[0\].region='a b': .*eu-central-1"),
        ({"url": "gs://bucket", "region": "europe"}, r"tiers\[0\].region='europe': only s3:// has regions"),
        ({"prefix": "/kv"}, r"tiers\[0\].prefix='/kv'"),
        ({"bucket": "b"}, "unknown key"),
    ],
)
def test_mistakes_are_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tiers([{"kind": "object_store", **({"url": URL} if entry else {}), **entry}])


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "entry",
    [
        {"url": "s3://KEYID:PLANTED@bucket"},
        {"url": "az://container?sig=PLANTED"},
        {"url": "s3://bucket#PLANTED"},
        {"endpoint": "https://KEYID:PLANTED@minio:9000"},
        {"endpoint": "https://minio:9000?X-Amz-Signature=PLANTED"},
    ],
)
def test_credentials_in_the_entry_are_refused_and_not_repeated(entry: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.(url|endpoint)=") as raised:
        load_tiers([{"kind": "object_store", "url": URL, **entry}])
    assert "PLANTED" not in str(raised.value)
    assert "KEYID" not in str(raised.value)


def test_a_missing_client_is_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run pip install obstore"):
        load_tiers([{"kind": "object_store", "url": URL}])


@pytest.mark.usefixtures("_installed")
def test_an_hmac_key_is_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("PLANTED" * 8)
    config = ObjectStoreConfig(url=URL, hmac_key_file=str(path))
    assert "PLANTED" not in json.dumps(config.settings()) + config.address + repr(config)
