"""The entry of an object store in a configuration."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvoffload.abc import ConfigError
from kvoffload.tiers.remote.config import RemoteTierConfig

SCHEMES = ("s3", "gs", "az", "file")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)*/?")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_CREDENTIALS = "credentials come from the environment, never from the entry: see docs/shared.md"


@dataclass(frozen=True)
class ObjectStoreConfig(RemoteTierConfig):
    """A bucket of Amazon S3 or a compatible store, of Google Cloud Storage or of Azure Blob Storage."""

    kind = "object_store"
    connect = "kvoffload.tiers.object_store.client:connect"
    example = {"url": "s3://bucket"}

    url: str
    """The bucket, "s3://BUCKET", "gs://BUCKET" or "az://CONTAINER", and perhaps a folder in it, "s3://BUCKET/FOLDER".
    In the folder, the names of all values begin with ``prefix``. "file:///DIRECTORY" is for tests."""
    endpoint: str = ""
    """Where a store that is compatible with S3 serves requests, "https://HOST:PORT". With "http://", the bytes of
    blocks are not encrypted on their way. By default the endpoint of Amazon S3, or AWS_ENDPOINT_URL."""
    region: str = ""
    """The region of an S3 bucket. By default that of the environment, or us-east-1."""
    lookup_deadline_ms: float | None = field(default=500.0, kw_only=True)
    """As of every tier. An answer takes tens of milliseconds, and a long chain several of them."""

    def __post_init__(self) -> None:
        _check_url(self.url)
        _check_endpoint(self.endpoint, self.url)
        if not isinstance(self.region, str) or (self.region and not _REGION.fullmatch(self.region)):
            raise ConfigError("region", self.region, "", 'write the name of a region, such as "eu-central-1"')
        if self.region and not self.url.startswith("s3:"):
            raise ConfigError("region", self.region, "only s3:// has regions", "remove it")
        super().__post_init__()
        check_installed()

    @property
    def address(self) -> str:
        return f"{self.url} ({self.endpoint})" if self.endpoint else self.url


def _check_url(url: object) -> None:
    fix = 'write "s3://BUCKET", "gs://BUCKET" or "az://CONTAINER", perhaps with a folder behind it'
    if not isinstance(url, str):
        raise ConfigError("url", url, "", fix)
    if "@" in url:
        # Not repeated: this ends in logs.
        raise ConfigError("url", url, "has a user or a password", _CREDENTIALS)
    parts = _split(url)
    if parts is None or parts.query or parts.fragment:
        # A query may be a signature.
        raise ConfigError("url", url, "has something behind ? or #", _CREDENTIALS)
    is_file = parts.scheme == "file"
    is_right = parts.scheme in SCHEMES and (
        bool(parts.path.strip("/")) and not parts.netloc if is_file else bool(_BUCKET.fullmatch(parts.netloc))
    )
    if not is_right or not _PATH.fullmatch(parts.path):
        raise ConfigError("url", url, "", f"{fix}; letters, digits and ._- only, with single slashes between them")


def _check_endpoint(endpoint: object, url: str) -> None:
    if endpoint == "":
        return
    fix = 'write where the store serves requests, such as "https://minio.local:9000", or leave it out for Amazon S3'
    if not isinstance(endpoint, str):
        raise ConfigError("endpoint", endpoint, "", fix)
    if "@" in endpoint:
        raise ConfigError("endpoint", endpoint, "has a user or a password", _CREDENTIALS)
    parts = _split(endpoint)
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not _HOST.fullmatch(parts.netloc)
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
    ):
        raise ConfigError("endpoint", endpoint, "", f"{fix}; the bucket belongs into url")
    if not url.startswith("s3:"):
        raise ConfigError("endpoint", endpoint, "only for stores that are compatible with S3", "write url as s3://...")


def _split(text: str) -> Any:
    try:
        return urlsplit(text)
    except ValueError:
        return None


def check_installed() -> None:
    """Raises ConfigError if the client is missing."""
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError("kind", "object_store", "obstore is not installed", "run pip install obstore")
