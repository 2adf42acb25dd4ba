"""OffloadConfig: right values are converted, and wrong ones are refused at once: ``config_errors`` has them all."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload import config as config_module
from kvoffload import units
from kvoffload.abc import ConfigError
from kvoffload.cache.policies import make_policy
from kvoffload.cache.tenants import TenantConfig
from kvoffload.config import LARGE_BLOCKS, HostContents, IntegrationConfig, OffloadConfig, contents_of
from kvoffload.printable import MAX_PRINTED_CHARS, printable
from kvoffload.tiers.config import load_tiers
from kvoffload.tiers.disk.config import DiskConfig
from kvoffload.tiers.mooncake import config as mooncake
from kvoffload.tiers.object_store import config as object_store
from kvoffload.tiers.redis.location import Address, Location, parse_url
from kvoffload.tiers.remote.config import read_hmac_key
from kvoffload.units import parse_bytes
from tests.config_errors import HERE, NEEDED, SECRET, WRONG, OwnConfig, Wrong

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
DISK = {"kind": "disk", **NEEDED["disk"]}
OWN = {"kind": f"{HERE}:OwnConfig", "blocks": 3}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of all stores count as installed."""
    monkeypatch.setattr(mooncake, "check_installed", lambda: None)
    monkeypatch.setattr(object_store, "check_installed", lambda: None)


def make(**options: Any) -> OffloadConfig:
    return OffloadConfig.from_mapping({"host_bytes": "1GiB", **options})


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    return str(caught.value)


@pytest.mark.usefixtures("_installed")
def test_every_wrong_setting_is_named_with_its_value_and_the_fix() -> None:
    for options, said, fix in WRONG:
        with pytest.raises(ConfigError) as caught:
            make(**options)
        error = caught.value
        assert str(error).startswith(said), options
        assert fix in error.fix, options
        assert SECRET not in f"{error}{error!r}{error.__cause__}", options
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("wrong", [each for each in WRONG if each.options.keys() == {"tiers"}][::9])
@pytest.mark.usefixtures("_installed")
def test_an_error_of_a_tier_names_its_place(wrong: Wrong) -> None:
    tiers = wrong.options["tiers"]
    if isinstance(tiers, list) and len(tiers) == 1:
        first = {"kind": "disk", "dir": "/other", "bytes": GIB}
        assert refused(tiers=[first, *tiers]).startswith(wrong.said.replace("tiers[0]", "tiers[1]", 1))


# Right values.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        (4096.0, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("8KiB", 8 * KIB),
        ("8k", 8 * KIB),
        ("8ki", 8 * KIB),
        ("512 MiB", 512 * MIB),
        (" 8 gib ", 8 * GIB),
        ("8G", 8 * GIB),
        ("1.5T", 3 * TIB // 2),
        ("8KB", 8 * 1000),
        ("8MB", 8 * 1000**2),
        ("8GB", 8 * 1000**3),
        ("8 tb", 8 * 1000**4),
    ],
)
def test_amounts(value: object, expected: int) -> None:
    assert parse_bytes("host_bytes", value) == expected


def test_only_the_memory_must_be_given_and_none_means_not_given() -> None:
    assert make() == OffloadConfig(host_bytes=GIB) == make(policy=None, block_size=None, tiers=None)
    assert make().factor(16) == 1
    assert make().tier_entries == []
    assert make(tiers=[{**OWN, "label": None, "store_threshold": None}]).tiers == (OwnConfig(3),)


def test_everything_may_be_given() -> None:
    options: dict[str, Any] = {
        "host_bytes": GIB,
        "policy": "arc",
        "host_contents": "inclusive",
        "block_size_factor": 4,
        "store_threshold": 2,
        "disk_dir": "/var/cache/kvoffload",
        "disk_bytes": 3 * GIB,
        "load_deadline_ms": 0,
        "lookup_deadline_ms": 3_600_000,
        "load_only_if_faster": False,
        "engines_per_node": 1 << 30,
        "record_trace": "/var/tmp/trace.jsonl",
        "model_fingerprint": "v7",
    }
    config = make(**options)
    assert {name: getattr(config, name) for name in options} == options
    assert config.factor(16) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host_bytes = 5  # type: ignore[misc]


@pytest.mark.parametrize(("block_size", "factor"), [(16, 1), (32, 2), (256, 16)])
def test_the_block_size_may_be_given_in_tokens(block_size: int, factor: int) -> None:
    assert make(block_size=block_size).factor(16) == factor


@pytest.mark.parametrize(("block_size", "fix"), [(24, 16), (8, 16), (17, 16), (50, 48)])
def test_a_block_size_that_is_no_multiple_of_the_engines(block_size: int, fix: int) -> None:
    with pytest.raises(ConfigError, match=rf"^block_size={block_size}: must be a multiple of .*set it to {fix} or"):
        make(block_size=block_size).factor(16)
    assert make(block_size=fix).factor(16) == fix // 16


def test_padding_and_every_rank_are_counted() -> None:
    assert OffloadConfig(64 * KIB).num_blocks(4096) == 16
    assert OffloadConfig(64 * KIB).num_blocks(4097) == 8
    assert OffloadConfig(64 * KIB).num_blocks(4097, ranks=4) == 2
    assert OffloadConfig(8192).num_blocks(4097) == 1
    with pytest.raises(ConfigError, match=r"host_bytes=8191.*8192 bytes\); set host_bytes to many times that"):
        OffloadConfig(8191).num_blocks(4097)


def test_the_constructor_checks_and_converts_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    amounts: dict[str, Any] = {"host_bytes": "1GiB", "disk_bytes": "2GiB"}
    made = OffloadConfig(**amounts, disk_dir="~/kv")
    assert made == make(disk_dir="/home/me/kv", disk_bytes=2 * GIB)
    assert dataclasses.replace(made, policy="lru") == make(disk_dir="~/kv", disk_bytes=2 * GIB, policy="lru")
    for written in ("/cache/kv/", "/cache//kv", "/cache/other/../kv"):
        assert make(disk_dir=written, disk_bytes="1.5T") == make(disk_dir="/cache/kv", disk_bytes=3 * TIB // 2)
    for options in ({"host_bytes": 0}, {"store_threshold": 1}, {"policy": "none"}, {"disk_dir": "kv"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            OffloadConfig(**{"host_bytes": GIB, **options})  # type: ignore[arg-type]


def test_an_error_for_an_unknown_option_lists_all_options() -> None:
    message = refused(zzz="x")
    assert all(field.name in message for field in dataclasses.fields(OffloadConfig))


@pytest.mark.parametrize("free", [3 * MIB, 700 * MIB, 62 * GIB + 12345, 2 * TIB])
def test_proposals_are_valid(free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: free)
    monkeypatch.setattr(config_module, "total_memory", lambda: free)

    def proposed(name: str, message: str) -> str:
        found = re.search(rf'{name}="([^"]+)"', message)
        assert found is not None
        return found[1]

    half = proposed("host_bytes", refused(host_bytes=None))
    assert 0 < OffloadConfig.from_mapping({"host_bytes": half}).host_bytes <= free
    monkeypatch.setattr(config_module, "total_memory", lambda: TIB)
    directory = str(tmp_path / "not" / "there yet")
    made = make(disk_dir=directory, disk_bytes=proposed("disk_bytes", refused(disk_dir=directory)))
    assert 0 < (made.disk_bytes or 0) <= shutil.disk_usage(tmp_path).free
    make(disk_bytes="1GiB", disk_dir=proposed("disk_dir", refused(disk_bytes="1GiB")))


def test_a_policy_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PolicyThatFails\(capacity=8\) failed \(RuntimeError: boom\)"):
        make_policy(f"{HERE}:PolicyThatFails", 8)
    make(policy=f"{HERE}:PolicyThatFails")


def test_contents_that_nobody_asks_for_are_exclusive_where_they_can_be() -> None:
    inclusive, exclusive = HostContents
    assert make(host_contents="exclusive", block_size_factor=1).host_contents is exclusive
    assert [contents_of(None, why) for why in (None, LARGE_BLOCKS)] == [exclusive, inclusive]
    assert [contents_of(inclusive, why) for why in (None, LARGE_BLOCKS)] == [inclusive] * 2
    assert contents_of(exclusive, None) is exclusive


def test_shares_of_the_host_and_of_tiers(tmp_path: Path) -> None:
    given = {
        "search": {"guaranteed": {"host": "8MiB", "disk": "1GiB"}, "quota": {"host": "16MiB"}},
        "chat": {"salt_sha256": "0" * 64},
        "other": {"quota": {"host": "32MiB"}},
    }
    loaded = make(tenants=given, disk_dir=str(tmp_path), disk_bytes="2GiB").tenants
    assert loaded == (
        TenantConfig("search", {"host": 8 * MIB, "disk": GIB}, {"host": 16 * MIB}),
        TenantConfig("chat", salt_sha256="0" * 64),
        TenantConfig("other", quota={"host": 32 * MIB}),
    )
    assert OffloadConfig(64 * MIB, tenants=loaded[1:]).tenants == loaded[1:]
    assert make(tenants={}).tenants == ()


# Tiers.


def test_entries_become_tiers_in_their_order_behind_the_short_form() -> None:
    config = make(tiers=[{**OWN, "label": "x"}, {**DISK, "store_threshold": 2}], disk_dir="/front", disk_bytes="2GiB")
    assert config.tiers == (OwnConfig(3, "x"), DiskConfig("/cache", GIB, store_threshold=2))
    assert config.tier_entries[0].config == DiskConfig("/front", 2 * GIB)
    settings = ["disk_dir='/front'", f"tiers[0].kind='{HERE}:OwnConfig'", "tiers[1].dir='/cache'"]
    assert [entry.setting for entry in config.tier_entries] == settings
    assert config.tier_names == ["disk", "own", "disk-2"]
    copied = make(tiers=config.tiers, disk_dir="/front", disk_bytes="2GiB", policy="lru")
    assert dataclasses.replace(config, policy="lru") == copied
    assert hash(dataclasses.replace(config, policy="lru")) == hash(copied)
    with pytest.raises(ConfigError, match=r"tiers\[0\].store_threshold=1: must be a whole number, 2 or more"):
        make(tiers=[DiskConfig("/cache", GIB, store_threshold=1)])


def test_a_link_to_the_directory_of_another_tier(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real, link, other = ({**DISK, "dir": str(tmp_path / name)} for name in ("real", "link", "realistic"))
    assert "has the same directory" in refused(tiers=[real, link])
    assert len(make(tiers=[real, other]).tiers) == 2


def test_only_what_is_used_is_imported() -> None:
    entries = [{"kind": "redis", **NEEDED["redis"]}, DISK]
    code = (
        "import sys\nfrom kvoffload import OffloadConfig\n"
        f"OffloadConfig.from_mapping({{'host_bytes': '1GiB', 'tiers': {entries}}})\n"
        "print([each for each in sys.modules if 'mooncake' in each or 'shared_dir' in each or 'redis.client' in each])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_tier_behind_another_engine_is_named_as_it_was_given() -> None:
    single = IntegrationConfig.from_mapping({"tier": DISK, "policy": None}, "secondary_tiers[2].")
    several = IntegrationConfig.from_mapping({"tiers": [DISK]}, "secondary_tiers[2].")
    assert single.tiers == several.tiers == (DiskConfig("/cache", GIB),)
    assert [entry.setting for entry in single.tier_entries] == ["secondary_tiers[2].tier.dir='/cache'"]
    assert [entry.setting for entry in several.tier_entries] == ["secondary_tiers[2].tiers[0].dir='/cache'"]
    assert IntegrationConfig(tiers=several.tiers).names == ("tiers[0]",)
    for wrong, said in (
        ({"tier": DISK | {"bytes": 0}}, "x.tier.bytes=0: "),
        ({"tiers": [DISK, DISK]}, "x.tiers[1].dir='/cache': x.tiers[0].dir='/cache' has the same directory"),
        ({"tier": DISK, "tiers": [DISK]}, "x.tier: tiers is set too"),
        ({"tier": DISK, "engines_per_node": 0}, "x.engines_per_node=0: "),
        ({"tier": DISK, "names": ["a"]}, "x.names=[***]: unknown option"),
        ({"tiers": []}, "x.tier is not set; add a tier"),
    ):
        with pytest.raises(ConfigError) as error:
            IntegrationConfig.from_mapping(wrong, "x.")
        assert str(error.value).startswith(said)


# Stores.


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("redis", "url", ["redis://a", "rediss://a,b:2", "unix:///run/redis/redis.sock"]),
        ("object_store", "url", ["s3://bucket", "s3://bucket/folder", "gs://bucket/a/b", "az://c00", "file:///tmp/b"]),
        ("mooncake", "master", ["10.0.0.5:50051", "store.local:1", "[fd00::1]:50051"]),
    ],
)
def test_an_address_is_enough(kind: str, key: str, values: list[str], tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f" {SECRET * 8}\n")
    assert read_hmac_key(str(path)) == (SECRET * 8).encode()
    assert read_hmac_key(None) == b""
    for value in values:
        (config,) = load_tiers([{"kind": kind, key: value, "hmac_key_file": str(path)}])
        assert (config.address, config.capacity_bytes) == (value, None)  # type: ignore[attr-defined]
        settings = json.dumps(config.settings())  # type: ignore[attr-defined]
        assert value in settings
        assert SECRET not in settings + repr(config), "a secret is named by its file"


def test_urls_of_redis() -> None:
    assert parse_url("redis://a") == Location((Address("a", 6379),), False, 0)
    assert parse_url("redis://a:1/3") == Location((Address("a", 1),), False, 3)
    assert parse_url("rediss://a.b-c_d:6380/") == Location((Address("a.b-c_d", 6380),), True, 0)
    several = Location((Address("fd00::1", 7), Address("::1", 6379)), False, 0)
    assert parse_url("redis://[fd00::1]:7,[::1]") == several
    assert parse_url("unix:///run/r.sock") == Location((Address("/run/r.sock", 0),), False, 0)


def test_a_client_that_is_not_installed_is_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "run pip install obstore" in refused(tiers=[{"kind": "object_store", **NEEDED["object_store"]}])
    assert "pip install mooncake-transfer-engine-non" in refused(tiers=[{"kind": "mooncake", **NEEDED["mooncake"]}])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mooncake, "LIBRARIES", {"libc.so.6": "libc6", "libmissing.so.1": "libmissing1"})
    with pytest.raises(ConfigError, match="apt-get install libmissing1,"):
        mooncake.check_installed()


# Amounts as text.


def test_bytes_are_formatted_with_binary_units() -> None:
    amounts = [0, 1023, 1024, 1536, 1 << 20, 8 * GIB, 100 * GIB, int(2.5 * (1 << 40)), GIB + 1]
    texts = ["0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "1 MiB", "8 GiB", "100 GiB", "2.5 TiB", "1 GiB"]
    assert list(map(units.format_bytes, amounts)) == texts


def test_counts_have_a_plural_and_separators() -> None:
    assert [units.counted(n, "block") for n in (0, 1, 1234)] == ["0 blocks", "1 block", "1,234 blocks"]


def test_ages_are_in_the_largest_unit_of_which_there_are_two() -> None:
    ages = list(map(units.age, (-1.0, 90.0, 900.0, 10_800.0, 172_800.0)))
    assert ages == ["0 s", "90 s", "15 min", "3 h", "2 d"]


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\u202e") == "a\\x1b[2Jb\\u202e"
    assert printable("naïve 5×") == "naïve 5×"  # noqa: RUF001


def test_long_text_of_others_is_cut() -> None:
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "aaaaaaa..."
    assert printable("\x1b" * 10, 10) == "\\x1b\\x1..."
    assert len(printable("\U000e0001" * 10**6)) == MAX_PRINTED_CHARS
