"""OffloadConfig: wrong values are refused at once, by an error that names the setting, its value and the fix."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kvoffload import config as config_module
from kvoffload.abc import CachePolicy, ConfigError
from kvoffload.cache.policies import BUILTIN, make_policy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.config import LARGE_BLOCKS, HostContents, OffloadConfig, contents_of
from kvoffload.units import parse_bytes

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
NAN, INFINITY = float("nan"), float("inf")


class OwnPolicy(LRUPolicy):
    """A user's own policy, given by its import path."""


class NoPolicy:
    pass


def make(**options: Any) -> OffloadConfig:
    return OffloadConfig.from_mapping({"host_bytes": "1GiB", **options})


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    return str(caught.value)


# Amounts of memory.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        (4096.0, 4096),
        ("4096", 4096),
        ("4096b", 4096),
        ("4096 B", 4096),
        ("8KiB", 8 * KIB),
        ("8k", 8 * KIB),
        ("8K", 8 * KIB),
        ("8ki", 8 * KIB),
        ("512 MiB", 512 * MIB),
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        (" 8 GiB ", 8 * GIB),
        ("8G", 8 * GIB),
        ("1.5T", 3 * TIB // 2),
        ("0.5 TiB", TIB // 2),
        ("8KB", 8 * 1000),
        ("8MB", 8 * 1000**2),
        ("8GB", 8 * 1000**3),
        ("8 tb", 8 * 1000**4),
    ],
)
def test_amounts(value: object, expected: int) -> None:
    assert parse_bytes("host_bytes", value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "yes", "GiB", "-1", "-8GiB", "8 XiB", "8GiBs", "1e9", "1,5GiB", "0x10", "1.GiB", "8GiB 4MiB"]
    + [
        0,
        -1,
        0.0,
        -0.5,
        0.5,
        "0",
        "0GiB",
        "0.5",
        "0.0001k",
        NAN,
        INFINITY,
        -INFINITY,
        True,
        False,
        None,
        b"8GiB",
        ["8GiB"],
        {},
    ],
    ids=repr,
)
def test_a_wrong_amount_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("host_bytes", value)
    message = str(caught.value)
    assert message.startswith(f"host_bytes={value!r}: ")
    assert 'host_bytes="8GiB"' in message


def test_an_absurd_number_is_an_amount_beyond_memory_or_refused() -> None:
    with pytest.raises(ConfigError, match="host_bytes="):
        OffloadConfig.from_mapping({"host_bytes": 10**400})


# Good configurations.


def test_only_the_memory_must_be_given() -> None:
    assert make() == OffloadConfig(host_bytes=GIB)
    assert make().factor(16) == 1


def test_none_means_not_given() -> None:
    assert make(policy=None, block_size=None, load_deadline_ms=None) == OffloadConfig(host_bytes=GIB)


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
        "lookup_deadline_ms": 0,
        "load_only_if_faster": False,
        "engines_per_node": 2,
        "record_trace": "/var/tmp/trace.jsonl",
        "model_fingerprint": "v7",
    }
    config = make(**options)
    assert {name: getattr(config, name) for name in options} == options
    assert config.factor(16) == 4


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().host_bytes = 5  # type: ignore[misc]


@pytest.mark.parametrize(("block_size", "factor"), [(16, 1), (32, 2), (256, 16)])
def test_the_block_size_may_be_given_in_tokens(block_size: int, factor: int) -> None:
    assert make(block_size=block_size).factor(16) == factor


def test_a_policy_of_the_user() -> None:
    name = f"{__name__}:OwnPolicy"
    assert make(policy=name).policy == name
    assert issubclass(OwnPolicy, CachePolicy)


def test_the_constructor_checks_and_converts_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    amounts: dict[str, Any] = {"host_bytes": "1GiB", "disk_bytes": "2GiB"}
    made = OffloadConfig(**amounts, disk_dir="~/kv")
    assert made == make(disk_dir="/home/me/kv", disk_bytes=2 * GIB)
    assert dataclasses.replace(made, policy="lru") == make(disk_dir="/home/me/kv", disk_bytes=2 * GIB, policy="lru")
    for options in ({"host_bytes": 0}, {"store_threshold": 1}, {"policy": "none"}, {"disk_dir": "kv"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            OffloadConfig(**{"host_bytes": GIB, **options})  # type: ignore[arg-type]


# Wrong configurations.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("host_byte", "host_bytes"),
        ("hostbytes", "host_bytes"),
        ("polcy", "policy"),
        ("blocksize", "block_size"),
        ("load_deadline", "load_deadline_ms"),
        ("lookup_deadline", "lookup_deadline_ms"),
        ("disk_byte", "disk_bytes"),
        ("diskdir", "disk_dir"),
        ("store_treshold", "store_threshold"),
        ("max_local_cpu_size", "host_bytes"),
        ("local_disk", "disk_dir"),
        ("remote_url", "tiers"),
        ("chunk_size", "block_size"),
        ("cpu_bytes_to_use", "host_bytes"),
    ],
)
def test_an_error_proposes_the_option_that_was_meant(name: str, meant: str) -> None:
    message = refused(**{name: 17})
    assert message.startswith((f"{name}=17: unknown option", f"{name}=***: unknown option"))
    assert f"did you mean {meant}?" in message


def test_an_error_for_an_unknown_option_lists_all_options() -> None:
    message = refused(zzz="x")
    assert message.startswith("zzz=***: unknown option; remove it")
    for field in dataclasses.fields(OffloadConfig):
        assert field.name in message


@pytest.mark.parametrize("options", [{}, {"host_bytes": None}, {"policy": "arc"}])
@pytest.mark.parametrize("free", [3 * MIB, 700 * MIB, GIB, 7 * GIB, 62 * GIB + 12345, 2 * TIB])
def test_without_host_bytes_the_error_proposes_a_valid_amount(
    options: dict[str, Any], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: free)
    monkeypatch.setattr(config_module, "total_memory", lambda: free)
    with pytest.raises(ConfigError, match="host_bytes is not set") as caught:
        OffloadConfig.from_mapping(options)
    proposal = re.search(r'host_bytes="([^"]+)"', str(caught.value))
    assert proposal is not None
    proposed = OffloadConfig.from_mapping({**options, "host_bytes": proposal[1]})
    assert 0 < proposed.host_bytes <= free


def test_less_than_one_block() -> None:
    assert OffloadConfig(8192).num_blocks(4097) == 1
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(8191).num_blocks(4097)
    message = str(caught.value)
    assert "host_bytes=8191" in message
    assert "8192 bytes" in message
    assert "set host_bytes to many times that" in message


@pytest.mark.parametrize(("value", "meant"), [(64, 64), ("64", 64), ("64KiB", None), ((1 << 20) - 1, (1 << 20) - 1)])
@pytest.mark.parametrize("name", ["host_bytes", "disk_bytes"])
def test_a_number_that_was_meant_in_gib(name: str, value: object, meant: int | None) -> None:
    message = refused(**{"disk_dir": "/cache", "disk_bytes": "1GiB", name: value})
    assert message.startswith(f"{name}={value!r}: ")
    assert (f'did you mean {name}="{meant}GiB"?' in message) == (meant is not None)
    assert "did you mean" not in refused(host_bytes=0)
    assert make(disk_dir="/cache", disk_bytes=1 << 20).disk_bytes == 1 << 20


def test_padding_and_every_rank_are_counted() -> None:
    assert OffloadConfig(64 * KIB).num_blocks(4096) == 16
    assert OffloadConfig(64 * KIB).num_blocks(4097) == 8
    assert OffloadConfig(64 * KIB).num_blocks(4097, ranks=4) == 2


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("mru", "no policy has this name"),
        ("LRU", "no policy has this name"),
        ("sieve", "no policy has this name"),
        ("", "no policy has this name"),
        ("no.such.module:Policy", "cannot be imported"),
        ("kvoffload.cache.policies.lru:NoSuchPolicy", "cannot be imported"),
        ("json:JSONDecoder", "is not a subclass of"),
        ("json:dumps", "is not a subclass of"),
        (f"{__name__}:NoPolicy", "is not a subclass of"),
    ],
)
def test_a_policy_that_does_not_exist(policy: str, said: str) -> None:
    message = refused(policy=policy)
    assert message.startswith(f"policy={policy!r}: {said}")
    assert 'write one of arc, auto, lru, or a class of your own as "package.module:Class"' in message
    assert set(BUILTIN) == {"arc", "auto", "lru"}


def test_what_a_policy_does_not_define_is_named() -> None:
    assert "does not define clear, evict, insert, remove of" in refused(policy="kvoffload:CachePolicy")


@pytest.mark.parametrize("policy", [":Policy", ".policy:Policy"])
def test_an_import_path_that_is_malformed(policy: str) -> None:
    refused(policy=policy)


@pytest.mark.parametrize("value", [0, -4, 1.5, 2.0, "yes", "2", True, NAN])
@pytest.mark.parametrize("name", ["block_size_factor", "block_size", "store_threshold"])
def test_numbers_must_be_whole_and_large_enough(name: str, value: object) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name}={value!r}: must be a whole number, ")
    assert "leave it out" in message


def test_a_threshold_of_one_is_no_filter() -> None:
    message = refused(store_threshold=1)
    assert message.startswith("store_threshold=1: must be a whole number, 2 or more; or leave it out")


def test_only_one_of_two_block_sizes() -> None:
    message = refused(block_size=32, block_size_factor=2)
    assert message == "block_size=32: block_size_factor sets the same; remove one of the two"


@pytest.mark.parametrize(("block_size", "fix"), [(24, 16), (8, 16), (17, 16), (50, 48)])
def test_a_block_size_that_is_no_multiple_of_the_engines(block_size: int, fix: int) -> None:
    with pytest.raises(ConfigError) as caught:
        make(block_size=block_size).factor(16)
    assert str(caught.value).startswith(f"block_size={block_size}: must be a multiple of ")
    assert f"set it to {fix} or leave it out" in str(caught.value)
    assert make(block_size=fix).factor(16) == fix // 16


def cut(value: object) -> str:
    """Returns ``value`` as errors show it."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


@pytest.mark.parametrize(
    "value", [-1, -0.001, NAN, INFINITY, 1e300, pytest.param(10**400, id="10^400"), 3_600_001, "yes", "1000", [1], True]
)
@pytest.mark.parametrize("name", ["load_deadline_ms", "lookup_deadline_ms"])
def test_a_deadline_is_a_number_of_milliseconds(name: str, value: object) -> None:
    fix = "must be a number of milliseconds, from 0 to 3600000 (an hour), without quotes"
    assert refused(**{name: value}) == f"{name}={cut(value)}: {fix}"


@pytest.mark.parametrize("name", ["load_deadline_ms", "lookup_deadline_ms"])
def test_the_longest_deadline_can_be_waited_for(name: str) -> None:
    seconds = getattr(make(**{name: 3_600_000}), name) / 1000
    assert seconds < threading.TIMEOUT_MAX


@pytest.mark.parametrize("name", ["block_size_factor", "block_size", "store_threshold", "engines_per_node"])
def test_numbers_beyond_arithmetic_are_refused(name: str) -> None:
    for value in ((1 << 30) + 1, 10**400):
        assert refused(**{name: value}) == (
            f"{name}={cut(value)}: must be a whole number, 1073741824 at most; or leave it out"
        )
    assert getattr(make(**{name: 1 << 30}), name) == 1 << 30


@pytest.mark.parametrize("value", [0, 1, "false", "no", 1.0, []])
def test_a_boolean(value: object) -> None:
    assert refused(load_only_if_faster=value) == f"load_only_if_faster={value!r}: must be true or false, without quotes"


# The disk tier.


def test_an_amount_of_disk_has_the_same_forms_as_one_of_memory() -> None:
    assert make(disk_dir="/cache", disk_bytes="1.5T").disk_bytes == 3 * TIB // 2


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert make(disk_dir="~/kv", disk_bytes=GIB).disk_dir == "/home/me/kv"
    assert make(disk_dir="~", disk_bytes=GIB).disk_dir == "/home/me"


@pytest.mark.parametrize("written", ["/cache/kv", "/cache/kv/", "/cache//kv", "/cache/./kv", "/cache/other/../kv"])
def test_a_directory_is_normalized(written: str) -> None:
    assert make(disk_dir=written, disk_bytes=GIB).disk_dir == "/cache/kv"


@pytest.mark.parametrize("value", ["", "kv", "./kv", "../kv", "~no-such-user-here/kv", "$HOME/kv"])
def test_a_relative_directory(value: str) -> None:
    message = refused(disk_dir=value, disk_bytes=GIB)
    assert message.startswith(f"disk_dir={value!r}: not an absolute path; ")
    assert 'disk_dir="/var/cache/kvoffload"' in message


@pytest.mark.parametrize("value", [5, True, b"/kv", ["/kv"], "/k\0v"])
def test_a_directory_that_is_not_a_path(value: object) -> None:
    assert refused(disk_dir=value, disk_bytes=GIB).startswith(f"disk_dir={value!r}: not a path; ")


@pytest.mark.parametrize("value", ["much", 0, -1, True])
def test_a_wrong_amount_of_disk(value: object) -> None:
    assert refused(disk_dir="/cache", disk_bytes=value).startswith(f"disk_bytes={value!r}: ")


def test_an_amount_of_disk_without_a_directory() -> None:
    message = refused(disk_bytes="1GiB")
    assert message.startswith(f"disk_bytes={GIB} (1 GiB): disk_dir is not set; say where, such as disk_dir=")
    proposal = re.search(r'disk_dir="([^"]+)"', message)
    assert proposal is not None
    make(disk_bytes="1GiB", disk_dir=proposal[1])


def test_a_directory_without_an_amount_of_disk(tmp_path: Path) -> None:
    directory = str(tmp_path / "not" / "there yet")
    message = refused(disk_dir=directory)
    assert message.startswith(f"disk_dir={directory!r}: disk_bytes is not set; say how much of that disk to use")
    proposal = re.search(r'disk_bytes="([^"]+)"', message)
    assert proposal is not None
    proposed = make(disk_dir=directory, disk_bytes=proposal[1]).disk_bytes
    assert proposed is not None
    assert 0 < proposed <= shutil.disk_usage(tmp_path).free


# The recorded trace.


def test_the_example_of_a_trace_is_in_a_private_directory() -> None:
    example = re.search(r'record_trace="([^"]+)"', refused(record_trace="t.jsonl"))
    assert example is not None
    assert example[1] == "/var/log/kvoffload/trace.jsonl"


def test_a_trace_needs_a_writable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make(record_trace="~/t.jsonl").record_trace == str(tmp_path / "t.jsonl")
    assert refused(record_trace="t.jsonl").startswith("record_trace='t.jsonl': not an absolute path; write an absolute")
    assert refused(record_trace=5).startswith("record_trace=5: not a path; ")
    message = refused(record_trace=str(tmp_path))
    assert message.startswith(f"record_trace={str(tmp_path)!r}: a directory; name a file in it, such as record_trace=")
    proposal = re.search(r'such as record_trace="([^"]+)"', message)
    assert proposal is not None
    make(record_trace=proposal[1])
    assert f"there is no directory {tmp_path / 'none'}" in refused(record_trace=str(tmp_path / "none" / "t.jsonl"))


def test_a_directory_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"this user may not write to {tmp_path}; name a file elsewhere" in refused(record_trace=str(tmp_path / "t"))


@pytest.mark.parametrize("value", ["", 5, True, b"v7", ["v7"]])
def test_a_fingerprint_is_text(value: object) -> None:
    message = refused(model_fingerprint=value)
    assert message.startswith(f"model_fingerprint={value!r}: must be a string")
    assert "changes with the weights" in message


@pytest.mark.parametrize("value", [5, True, ["lru"], NAN])
def test_a_policy_is_a_name(value: object) -> None:
    assert refused(policy=value).startswith(f'policy={value!r}: write a name such as policy="lru"')


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        make(policy="mru")


class PolicyThatFails(LRUPolicy):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("boom")


def test_a_policy_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PolicyThatFails\(capacity=8\) failed \(RuntimeError: boom\)"):
        make_policy(f"{__name__}:PolicyThatFails", 8)


def test_host_contents() -> None:
    assert make().host_contents is None
    assert make(host_contents="exclusive").host_contents is HostContents.EXCLUSIVE
    for wrong in ("Exclusive", "", 1, True, ["exclusive"]):
        with pytest.raises(ConfigError, match=r"host_contents=.*leave it out"):
            make(host_contents=wrong)
    with pytest.raises(ConfigError, match=r"host_contents='exclusive': .*block_size_factor.*; leave it out"):
        make(host_contents="exclusive", block_size_factor=2)
    make(host_contents="exclusive", block_size_factor=1)


def test_contents_that_nobody_asks_for_are_exclusive_where_they_can_be() -> None:
    inclusive, exclusive = HostContents
    assert [contents_of(None, why) for why in (None, LARGE_BLOCKS)] == [exclusive, inclusive]
    assert [contents_of(inclusive, why) for why in (None, LARGE_BLOCKS)] == [inclusive] * 2
    assert contents_of(exclusive, None) is exclusive
