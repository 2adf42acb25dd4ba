"""The option ``tenants``: every wrong value is an error that names it and says what to write."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvoffload import OffloadConfig
from kvoffload.abc import ConfigError
from kvoffload.cache.tenants import MAX_TENANTS, TenantConfig

MIB = 1 << 20


def config(tenants: Any, **options: Any) -> OffloadConfig:
    return OffloadConfig.from_mapping({"host_bytes": 64 * MIB, "tenants": tenants, **options})


def test_shares_of_the_host_and_of_tiers(tmp_path: Path) -> None:
    loaded = config(
        {
            "search": {"guaranteed": {"host": "8MiB", "disk": "1GiB"}, "quota": {"host": "16MiB"}},
            "chat": {"salt_sha256": "0" * 64},
            "other": {"quota": {"host": "32MiB"}},
        },
        disk_dir=str(tmp_path),
        disk_bytes="2GiB",
    )
    assert loaded.tenants == (
        TenantConfig("search", {"host": 8 * MIB, "disk": 1 << 30}, {"host": 16 * MIB}),
        TenantConfig("chat", salt_sha256="0" * 64),
        TenantConfig("other", quota={"host": 32 * MIB}),
    )
    assert OffloadConfig(64 * MIB, tenants=loaded.tenants[1:]).tenants == loaded.tenants[1:]
    assert config({}).tenants == ()


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        (["search"], r"tenants=\[\*\*\*\]: must be a mapping from names to shares, such as tenants={"),
        ({"a b": {}}, r"tenants.a b: cannot be the name of a tenant; use up to 63 letters, digits, '.', '_' and '-'"),
        ({"a,b": {}}, r"tenants.a,b: cannot be the name"),
        ({7: {}}, r"tenants.7: cannot be the name"),
        ({"a": 7}, r"tenants\.a=7: must be a mapping such as"),
        ({"a": {"quotas": {}}}, r"tenants\.a\.quotas={}: unknown key; did you mean quota\?"),
        ({"a": {"salt": "S3CRET"}}, r"tenants\.a\.salt=\*\*\*: unknown key; did you mean salt_sha256\?"),
        ({"a": {"cache_salt": "S3CRET"}}, r"tenants\.a\.cache_salt=\*\*\*: unknown key; "),
        ({"a": {"host": "8GiB"}}, r"tenants\.a\.host=\*\*\*: unknown key; write an entry such as {\"guaranteed\": {"),
        ({"a": {"quota": 7}}, r'tenants\.a\.quota=7: must map names of tiers to bytes, such as {"host": "8GiB"}'),
        ({"a": {"quota": {"host": -1}}}, r"tenants\.a\.quota\.host=-1: must be 1 byte or more"),
        ({"a": {"quota": {"host": "much"}}}, r"tenants\.a\.quota\.host='much': not an amount of memory"),
        (
            {"a": {"quota": {"disk": 7}}},
            r"tenants\.a\.quota\.disk=7 \(7 bytes\): this configuration has no tier disk; use one of host",
        ),
        (
            {"a": {"quota": {"host": 7}, "guaranteed": {"host": 8}}},
            r"tenants\.a\.quota\.host=7 \(7 bytes\): less than the 8 bytes that are guaranteed; raise it, or lower",
        ),
        (
            {"a": {"guaranteed": {"host": "40MiB"}}, "b": {"guaranteed": {"host": "30MiB"}}},
            "tenants: 70 MiB of host are guaranteed, more than the 64 MiB of its budget; lower some, or raise the",
        ),
        (
            {"a": {"quota": {"host": "16MiB"}, "retain": {"host": "9MiB"}}},
            r"tenants\.a\.retain\.host=9437184 \(9 MiB\): more than half of its quota of 16 MiB; lower it, or raise",
        ),
        (
            {"a": {"retain": {"host": "20MiB"}}, "b": {"retain": {"host": "20MiB"}}},
            "tenants: 40 MiB of host may be retained, more than half of its budget of 64 MiB; lower some, or raise",
        ),
        (
            {"a": {"retain": {"host": "20MiB"}}, "b": {"guaranteed": {"host": "60MiB"}}},
            "tenants: 80 MiB of host are guaranteed or may be retained, more than the 64 MiB of its budget; lower",
        ),
        ({"a": {"salt_sha256": "S3CRET"}}, r"tenants\.a\.salt_sha256: must be the SHA-256 of a cache_salt"),
        (
            {"other": {"salt_sha256": "0" * 64}},
            r'tenants\.other\.salt_sha256: "other" is every request without a configured tenant',
        ),
        ({"a": {"salt_sha256": "0" * 64}, "b": {"salt_sha256": "0" * 64}}, "give each tenant a salt of its own"),
        (
            {"a": {}, "b": {"salt_sha256": sha256(b"a").hexdigest()}},
            r"tenants\.b\.salt_sha256: .*of another tenant's salt or name",
        ),
        ({f"t{i}": {} for i in range(MAX_TENANTS + 1)}, "tenants: has 33 entries, at most 32 may be configured"),
    ],
)
def test_wrong_values_are_named(tenants: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config(tenants)
    assert "S3CRET" not in str(error.value)


def test_a_shared_directory_retains_nothing() -> None:
    shared = {"kind": "shared_dir", "dir": "/shared", "bytes": "1GiB"}
    with pytest.raises(ConfigError, match=r"tenants\.a\.retain\.shared_dir=7 .*nothing can be retained in this tier"):
        config({"a": {"retain": {"shared_dir": 7}}}, tiers=[shared])


def test_a_store_that_bounds_itself_has_no_shares() -> None:
    with pytest.raises(
        ConfigError, match=r"tenants\.a\.quota\.redis=7 \(7 bytes\): this tier bounds itself and has no"
    ):
        config({"a": {"quota": {"redis": 7}}}, tiers=[{"kind": "redis", "url": "redis://127.0.0.1:1"}])
