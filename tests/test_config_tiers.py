"""The option ``tiers``: entries become TierConfigs, and an error names the entry, the key, its value and the fix."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvoffload import ConfigError, OffloadConfig, Tier, TierConfig, TierContext
from kvoffload.config import IntegrationConfig
from kvoffload.tiers.config import BUILTIN
from kvoffload.tiers.disk.config import DiskConfig

GIB = 1 << 30
HERE = __name__
KINDS = f'write one of {", ".join(BUILTIN)}, or your own TierConfig as "package.module:Class"'
EXAMPLE = '{"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "500GiB"}'
KEYS = "Known: kind, dir, bytes, store_threshold, lookup_deadline_ms"


@dataclass(frozen=True)
class OwnConfig(TierConfig):
    """A stranger's tier."""

    kind = "own"

    blocks: int
    label: str = "none"

    def __post_init__(self) -> None:
        if self.label == "bad":
            raise ConfigError("label", self.label, "must not be bad", "write another")
        if self.label == "worse":
            raise ConfigError("label is worse: write another")
        if self.blocks < 1:
            raise ValueError("too few")

    def open(self, context: TierContext) -> Tier:
        raise NotImplementedError


@dataclass(frozen=True)
class PlainConfig(OwnConfig):
    blocks: int = 1


@dataclass(frozen=True)
class WithoutOpen(TierConfig):
    kind = "none"


@dataclass(frozen=True)
class WithoutName(TierConfig):
    def open(self, context: TierContext) -> Tier:
        raise NotImplementedError


def make(*tiers: Any, **options: Any) -> OffloadConfig:
    return OffloadConfig.from_mapping({"host_bytes": "1GiB", "tiers": list(tiers), **options})


def refused(*tiers: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*tiers, **options)
    return str(caught.value)


def disk(**keys: Any) -> dict[str, Any]:
    return {"kind": "disk", "dir": "/cache", "bytes": "1GiB", **keys}


def own(**keys: Any) -> dict[str, Any]:
    return {"kind": f"{HERE}:OwnConfig", "blocks": 3, **keys}


# Good entries.


def test_without_entries_there_is_no_tier() -> None:
    assert make().tiers == OffloadConfig(host_bytes=GIB).tiers == ()
    assert make().tier_entries == []
    assert OffloadConfig.from_mapping({"host_bytes": GIB, "tiers": None}).tiers == ()


def test_entries_become_tiers_in_their_order() -> None:
    config = make(own(label="x"), disk(store_threshold=2))
    assert config.tiers == (OwnConfig(3, "x"), DiskConfig("/cache", GIB, store_threshold=2))
    assert [entry.setting for entry in config.tier_entries] == [
        f"tiers[0].kind='{HERE}:OwnConfig'",
        "tiers[1].dir='/cache'",
    ]


def test_the_short_form_is_a_disk_in_front() -> None:
    config = make(disk(), disk_dir="/front", disk_bytes="2GiB")
    assert [entry.config for entry in config.tier_entries] == [DiskConfig("/front", 2 * GIB), DiskConfig("/cache", GIB)]
    assert [entry.setting for entry in config.tier_entries] == ["disk_dir='/front'", "tiers[0].dir='/cache'"]


def test_none_means_not_given() -> None:
    assert make(own(label=None, store_threshold=None)).tiers == (OwnConfig(3),)


def test_a_path_is_resolved_and_an_amount_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert make(disk(dir="~/kv/", bytes="1.5T")).tiers == (DiskConfig("/home/me/kv", 3 << 39),)


def test_tiers_may_be_objects_and_a_copy_of_a_configuration_keeps_them() -> None:
    config = make(DiskConfig("/cache", GIB), own())
    assert dataclasses.replace(config, policy="lru") == make(disk(), own(), policy="lru")
    assert hash(config) == hash(make(disk(), own()))


def test_only_the_kinds_that_are_used_are_imported() -> None:
    entry = {"kind": "disk", "dir": "/c", "bytes": "1GiB"}
    code = (
        "import sys\nfrom kvoffload import OffloadConfig\n"
        f"OffloadConfig.from_mapping({{'host_bytes': '1GiB', 'tiers': [{entry}]}})\n"
        "print([name for name in sys.modules if 'mooncake' in name or 'shared_dir' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Wrong entries. Every message is here as a whole.


def test_tiers_must_be_a_list() -> None:
    for value, text in (("disk", "***"), ({"kind": "disk"}, "{***}"), (5, "5"), (True, "True")):
        with pytest.raises(ConfigError) as caught:
            OffloadConfig.from_mapping({"host_bytes": "1GiB", "tiers": value})
        assert str(caught.value) == (
            f"tiers={text}: must be a list of tiers, the fastest first, such as tiers=[{EXAMPLE}]"
        )


def test_what_is_shown_of_a_wrong_entry_is_short() -> None:
    message = refused({"kind": "x" * 1000})
    assert message.startswith(f"tiers[0].kind='{'x' * 196}...: no kind of tier")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("disk", f"=***: must be a mapping with the key kind, such as {EXAMPLE}"),
        (None, f"=None: must be a mapping with the key kind, such as {EXAMPLE}"),
        ([], f"=[]: must be a mapping with the key kind, such as {EXAMPLE}"),
        (
            {"dir": "/c"},
            f'={{***}}: no kind; add one, such as "kind": "disk". Known: {", ".join(BUILTIN)}',
        ),
        ({"kind": None}, f".kind=None: not a kind of tier; {KINDS}"),
        ({"kind": ["disk"]}, f".kind=['disk']: not a kind of tier; {KINDS}"),
        ({"kind": "Disk"}, f".kind='Disk': no kind of tier has this name; did you mean disk? Otherwise {KINDS}"),
        ({"kind": "tape"}, f".kind='tape': no kind of tier has this name; {KINDS}"),
        ({"kind": "no_such:X"}, f".kind='no_such:X': cannot be imported (No module named 'no_such'); {KINDS}"),
        ({"kind": "json:dumps"}, f".kind='json:dumps': is not a subclass of kvoffload.TierConfig; {KINDS}"),
        (
            {"kind": f"{HERE}:WithoutOpen"},
            f".kind='{HERE}:WithoutOpen': does not define open of kvoffload.TierConfig; add what is missing",
        ),
        (
            {"kind": f"{HERE}:WithoutName"},
            f".kind='{HERE}:WithoutName': has no name for logs and metrics; give the class a line such as "
            'kind = "withoutname"',
        ),
        ({"kind": "disk", "dir": "/c"}, f".bytes is not set, and a tier of kind disk needs it; write all of {EXAMPLE}"),
        ({"kind": "disk", "bytes": 1}, f".dir is not set, and a tier of kind disk needs it; write all of {EXAMPLE}"),
        ({"kind": f"{HERE}:OwnConfig"}, ".blocks is not set, and a tier of kind own needs it; add it"),
        (disk(byte=1), f".byte=***: unknown key of a tier of kind disk; did you mean bytes? {KEYS}"),
        (disk(password="x"), f".password=***: unknown key of a tier of kind disk; remove it. {KEYS}"),
        (disk(aws_secret="x"), f".aws_secret=***: unknown key of a tier of kind disk; remove it. {KEYS}"),
        (disk(zzz="x"), f".zzz=***: unknown key of a tier of kind disk; remove it. {KEYS}"),
        (
            disk(bytes="x"),
            ".bytes='x': not an amount of memory; write a number of bytes or a string such as bytes=\"8GiB\"",
        ),
        (
            disk(dir="cache"),
            ".dir='cache': not an absolute path; write an absolute path such as dir=\"/var/cache/kvoffload\". "
            "Variables are not expanded",
        ),
        (disk(dir=5), '.dir=5: not a path; write an absolute path such as dir="/var/cache/kvoffload"'),
        (disk(store_threshold=1), ".store_threshold=1: must be a whole number, 2 or more; or leave it out"),
        (
            disk(lookup_deadline_ms="2"),
            ".lookup_deadline_ms='2': must be a number of milliseconds, from 0 to 3600000 (an hour), without quotes",
        ),
        (disk(store_threshold="2"), ".store_threshold='2': must be a whole number, 2 or more; or leave it out"),
        (
            disk(store_threshold=1 << 40),
            ".store_threshold=1099511627776: must be a whole number, 1073741824 at most; or leave it out",
        ),
        (own(label="bad"), ".label=***: must not be bad; write another"),
        (own(label="worse"), ": label is worse: write another"),
        (
            own(blocks=0),
            ".kind='own': OwnConfig does not accept these values (ValueError); correct blocks",
        ),
        (
            own(blocks="many"),
            ".kind='own': OwnConfig does not accept these values (TypeError); correct blocks",
        ),
    ],
)
def test_a_wrong_entry(entry: object, said: str) -> None:
    assert refused(entry) == f"tiers[0]{said}"
    assert refused(disk(dir="/other"), entry) == f"tiers[1]{said}"


def test_an_object_with_a_wrong_key_that_every_tier_has() -> None:
    wrong = DiskConfig("/cache", GIB, store_threshold=1)
    assert refused(wrong) == "tiers[0].store_threshold=1: must be a whole number, 2 or more; or leave it out"


@pytest.mark.parametrize("other", ["/cache", "/cache/", "/cache/below", "/", "/cache/x/.."])
def test_two_tiers_with_a_directory_in_common(other: str) -> None:
    resolved = str(Path(other).resolve())
    said = "has the same directory or one inside the other; give each tier a directory of its own"
    assert refused(disk(), disk(dir=other)) == f"tiers[1].dir={resolved!r}: tiers[0].dir='/cache' {said}"
    short = {"disk_dir": "/cache", "disk_bytes": "1GiB"}
    assert refused(disk(dir=other), **short) == f"tiers[0].dir={resolved!r}: disk_dir='/cache' {said}"
    assert refused(own(), disk(dir=other), **short) == f"tiers[1].dir={resolved!r}: disk_dir='/cache' {said}"


def test_a_link_to_the_directory_of_another_tier(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    entries = [disk(dir=str(tmp_path / name)) for name in ("real", "link")]
    assert "has the same directory" in refused(*entries)
    assert len(make(entries[0], disk(dir=str(tmp_path / "realistic"))).tiers) == 2


def test_two_tiers_that_are_the_same() -> None:
    name = f"kind='{HERE}:OwnConfig'"
    assert refused(own(), own()) == f"tiers[1].{name}: the same tier as tiers[0].{name}; remove one of them"
    assert len(make(own(), own(label="another"), {"kind": f"{HERE}:PlainConfig"}).tiers) == 3


def test_one_tier_behind_another_engine_is_named_as_it_was_given() -> None:
    disk = {"kind": "disk", "dir": "/cache", "bytes": "1GiB"}
    single = IntegrationConfig.from_mapping({"tier": disk, "policy": None}, "secondary_tiers[2].")
    several = IntegrationConfig.from_mapping({"tiers": [disk]}, "secondary_tiers[2].")
    assert single.tiers == several.tiers == (DiskConfig("/cache", GIB),)
    assert [entry.setting for entry in single.tier_entries] == ["secondary_tiers[2].tier.dir='/cache'"]
    assert [entry.setting for entry in several.tier_entries] == ["secondary_tiers[2].tiers[0].dir='/cache'"]
    assert IntegrationConfig(several.tiers).names == ("tiers[0]",)
    for wrong, said in (
        ({"tier": disk | {"bytes": 0}}, "x.tier.bytes=0: "),
        ({"tiers": [disk, disk]}, "x.tiers[1].dir='/cache': x.tiers[0].dir='/cache' has the same directory"),
        ({"tier": disk, "engines_per_node": 0}, "x.engines_per_node=0: "),
        ({"tier": disk, "names": ["a"]}, "x.names=[***]: unknown option"),
        ({"tiers": []}, "x.tier is not set; add a tier"),
    ):
        with pytest.raises(ConfigError) as error:
            IntegrationConfig.from_mapping(wrong, "x.")
        assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("master_server_address", "master"), ("global_segment_size", "segment_bytes"), ("local_hostname", "host")],
)
def test_names_of_mooncake_are_translated(name: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refused({"kind": "mooncake", name: "x"})
