"""The entry of a Redis server: each mistake is named with its key, its value and the fix, and no password is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import TierContext, load_tiers
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.redis.location import Address, Location, parse_url

URL = "redis://10.0.0.5:6379"
SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://a", Location((Address("a", 6379),), False, 0)),
        ("redis://a:1/3", Location((Address("a", 1),), False, 3)),
        ("rediss://a.b-c_d:6380/", Location((Address("a.b-c_d", 6380),), True, 0)),
        ("redis://[fd00::1]:7,[::1]", Location((Address("fd00::1", 7), Address("::1", 6379)), False, 0)),
        ("rediss://a,b:2", Location((Address("a", 6379), Address("b", 2)), True, 0)),
        ("unix:///run/redis/redis.sock", Location((Address("/run/redis/redis.sock", 0),), False, 0)),
    ],
)
def test_urls(url: str, location: Location) -> None:
    assert parse_url(url) == location
    (config,) = load_tiers([{"kind": "redis", "url": url}])
    assert isinstance(config, RedisConfig)
    assert (config.address, config.capacity_bytes) == (url, None)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, r"url is not set.*redis://10.0.0.5:6379"),
        ({"url": 7}, r"tiers\[0\].url=\*\*\*: write url="),
        ({"url": "10.0.0.5:6379"}, r"tiers\[0\].url='10.0.0.5:6379': write url="),
        ({"url": "http://a"}, r"url='http://a': write"),
        ({"url": "redis://"}, r"url='redis://': write"),
        ({"url": "redis://a:99999"}, r"url='redis://a:99999': ports"),
        ({"url": "redis://a:0"}, r"url='redis://a:0': ports"),
        ({"url": "redis://a,b/3"}, r"url='redis://a,b/3': .*leave out /3"),
        ({"url": "redis://" + ",".join(["a"] * 65)}, "64 nodes at most"),
        ({"url": f"redis://:{SECRET}@a"}, r"url=\*\*\*: .*password_file"),
        ({"url": f"redis://u:{SECRET}/@@a"}, r"url=\*\*\*: .*password_file"),
        ({"url": f"redis://a?password={SECRET}"}, r"url=\*\*\*: write"),
        ({"url": [f"redis://:{SECRET}@a"]}, r"url=\[\*\*\*\]"),
        ({"password": SECRET}, r"tiers\[0\].password=\*\*\*: .*did you mean password_file"),
        ({"password_file": "secret"}, r"password_file=\*\*\*: not an absolute path"),
        ({"password_file": "/nowhere/secret"}, r"password_file='/nowhere/secret': there is no such file"),
        ({"username": "a b", "password_file": __file__}, r"username=\*\*\*: write the name"),
        ({"username": "u"}, r"username=\*\*\*: has no password; add password_file"),
        ({"ca_file": __file__}, r"ca_file=.*: is for TLS, .*begin the URL with rediss://"),
        ({"url": "rediss://a", "ca_file": __file__}, r"ca_file=.*: no certificates in PEM format"),
        ({"url": "rediss://a", "cert_file": __file__}, r"cert_file=.*: write both cert_file and key_file"),
        (
            {"url": "rediss://a", "cert_file": __file__, "key_file": __file__},
            r"cert_file=.*: it and key_file are no certificate",
        ),
        ({"ttl_s": 0}, r"ttl_s=0: must be a whole number"),
        ({"ttl_s": 1.5}, r"ttl_s=1.5: must be a whole number"),
        ({"prefix": "/kv"}, r"prefix='/kv'"),
        ({"hmac_key_file": "/nowhere"}, r"hmac_key_file='/nowhere': cannot be read"),
        ({"cluster": True}, "unknown key of a tier of kind redis"),
    ],
)
def test_mistakes_are_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_tiers([{"kind": "redis", **({"url": URL} if entry else {}), **entry}])
    assert SECRET not in f"{caught.value}{caught.value.__cause__}"


def test_blocks_must_fit_into_a_value() -> None:
    pool = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2, 512 << 20), (0, 0))
    with pytest.raises(ConfigError, match=r"kind='redis': a block has 512 MiB, and .* 512 MiB at most; use smaller"):
        RedisConfig(url=URL).open(TierContext([pool], "5e" * 32))


def test_settings_have_the_paths_of_secrets_only(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    config = RedisConfig(url=URL, username="kv", password_file=str(secret), ttl_s=60)
    assert config.settings()["password_file"] == str(secret)
    assert SECRET not in f"{config!r}{config.settings()}"


def test_an_engine_imports_no_client() -> None:
    code = (
        "import sys; from kvoffload.tiers.config import load_tiers\n"
        f"load_tiers([{{'kind': 'redis', 'url': '{URL}'}}])\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'redis' or name.endswith('redis.client')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
