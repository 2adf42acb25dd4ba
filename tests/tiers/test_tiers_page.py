"""The examples of docs/tiers.md are a tier and its entry, and the tables of docs/formats.md alone are
enough to read what the tiers write."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload import ConfigError, OffloadConfig, build_scheduler
from kvoffload.abc import ByteArray, KVGroup, Tier
from kvoffload.connector.engine import EngineSpec
from kvoffload.testing.tier_conformance import TierConformance
from kvoffload.tiers.disk.format import FACTS, FORMAT_VERSION, RECORD, Header, pack_records
from kvoffload.tiers.disk.journal import ENTRY, JOURNAL_VERSION, JournalHeader
from kvoffload.tiers.disk.recency import mark
from kvoffload.tiers.remote.record import FORMAT_VERSION as STORE_VERSION
from kvoffload.tiers.remote.record import ValueFormat

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
MAX_LINES = 65


def example(number: int = 0) -> str:
    """Returns a code block of the page, by default the first."""
    return PAGE.read_text().split("```python\n")[1 + number].split("```")[0]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The options that the page shows, with a directory and sizes for this test, and the module that they name."""
    module = ModuleType("my_package.my_module")
    monkeypatch.setitem(sys.modules, "my_package.my_module", module)
    exec(example(0), vars(module))
    exec(example(2), vars(module))
    text = next(part for part in PAGE.read_text().split("```\n") if '"tiers": [' in part)
    shown: dict[str, Any] = json.loads("{" + text + "}")["kv_connector_extra_config"]
    shown["tiers"][0] |= {"dir": str(tmp_path), "bytes": "32MiB"}
    return shown | {"host_bytes": "1MiB"}


def test_the_entry_names_the_tier(options: dict[str, Any]) -> None:
    config = OffloadConfig.from_mapping(options)
    pool = np.zeros((8, 4096), dtype=np.uint8)
    half = build_scheduler(config, EngineSpec([KVGroup(16)]), [pool], "ab" * 32)
    half.shutdown()
    assert type(config.tiers[1]).__name__ == "DictConfig"


@pytest.mark.parametrize("value", [0, "many", None])
def test_a_wrong_value_is_named(options: dict[str, Any], value: object) -> None:
    options["tiers"][1]["num_blocks"] = value
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.num_blocks(=| is not set)"):
        OffloadConfig.from_mapping(options)


class TestTheExample(TierConformance):
    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        names: dict[str, Any] = {}
        exec(example(), names)
        tier: Tier = names["DictTier"](pools, num_blocks)
        return tier

    def spoil(self, tier: Tier) -> bool:
        for block in vars(tier)["blocks"].values():
            block[0][7] ^= 1
        return True

    def test_it_is_as_short_as_the_page_says(self) -> None:
        lines = [line for line in example().splitlines() if line.strip()]
        assert 30 < len(lines) <= MAX_LINES
        assert f"{MAX_LINES} lines" in PAGE.read_text()


# Formats.

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
TABLES = [
    [(int(at), int(size), field) for at, size, field in re.findall(r"^\| (\d+) \| (\d+) \| (.*) \|$", table, re.M)]
    for table in re.findall(r"(?:^\|.*\n)+", FORMATS, re.M)
    if table.startswith("| at |")
]
FINGERPRINT = "5e" * 32
KEY = bytes(range(36))


def fields(table: int, data: bytes) -> dict[str, int | bytes]:
    """Returns the fields of ``data`` by the first word of their rows: numbers up to 8 bytes, else bytes."""
    found: dict[str, int | bytes] = {}
    for at, size, field in TABLES[table]:
        raw = data[at : at + size]
        assert len(raw) == size
        found[re.split(r"[ ,:]", field)[0]] = (
            raw if size > 8 or field.startswith("magic") else int.from_bytes(raw, "little")
        )
    return found


def is_sealed(data: bytes) -> bool:
    return xxh3_64_intdigest(data[:-8]) == int.from_bytes(data[-8:], "little")


def test_an_index_is_read_by_the_page() -> None:
    header = Header(FINGERPRINT, (4096, 8192), 7, 12345)
    raw = header.pack().tobytes()
    found = fields(0, raw)
    assert (found["magic"], found["version"], found["ranks"]) == (b"kvoffidx", FORMAT_VERSION, 2)
    assert (found["fingerprint"], found["slots"], found["generation"]) == (FINGERPRINT.encode(), 7, 12345)
    assert (found["1"], found["bytes"]) == (0, 4096)
    assert is_sealed(raw)
    facts = np.zeros(1, dtype=FACTS)
    facts["sequence"], facts["stored_at"], facts["payload_checksum"] = 11, 22, 33
    record = pack_records(header, [KEY], facts)[0].tobytes()
    found = fields(1, record)
    assert (found["magic"], found["version"], found["generation"]) == (b"kvob", FORMAT_VERSION, 12345)
    assert (found["sequence"], found["stored"], found["key"]) == (11, 22, KEY.ljust(64, b"\0"))
    assert record[112:120] == (33).to_bytes(8, "little")
    assert record[20:24] == (12288).to_bytes(4, "little")
    assert is_sealed(record)
    assert mark(KEY, 99.5) == 100 << 24 | xxh3_64_intdigest(KEY) & 0xFFFFFF


def test_a_journal_is_read_by_the_page() -> None:
    raw = JournalHeader(512, 5, 6, 7).pack().tobytes()
    found = fields(3, raw)
    assert (found["magic"], found["version"], found["entries"]) == (b"kvoffjnl", JOURNAL_VERSION, 512)
    assert (found["epoch"], found["generation"], found["head"]) == (5, 6, 7)
    assert is_sealed(raw)


def test_a_value_of_a_store_is_read_by_the_page() -> None:
    parts = [np.full(64, 3, dtype=np.uint8), np.full(32, 4, dtype=np.uint8)]
    raw = ValueFormat(FINGERPRINT, hmac_key=b"k" * 32).record(KEY, parts).tobytes()
    found = fields(5, raw)
    assert (found["magic"], found["version"], found["ranks"]) == (b"kvor", STORE_VERSION, 2)
    assert found["key"] == KEY.ljust(64, b"\0")
    assert raw[24:32] == (96).to_bytes(8, "little")
    seed = bytes.fromhex(FINGERPRINT) + bytes(8) + KEY
    checksum = xxh3_64_intdigest(seed)
    for part in parts:
        checksum = xxh3_64_intdigest(part.data, checksum)
    assert raw[96:104] == checksum.to_bytes(8, "little")
    assert found["with"] != bytes(16)
    assert is_sealed(raw)


@pytest.mark.parametrize(("table", "dtype"), [(1, RECORD), (4, ENTRY)])
def test_no_field_is_missing(table: int, dtype: np.dtype[np.void]) -> None:
    fields = dict(dtype.fields or {})
    fields.pop("unused", None)
    assert {at: size for at, size, _ in TABLES[table]} == {each[1]: each[0].itemsize for each in fields.values()}
