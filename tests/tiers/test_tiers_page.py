"""The examples of docs/tiers.md are a tier and its entry in a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import ConfigError, OffloadConfig, build_scheduler
from kvoffload.abc import ByteArray, KVGroup, Tier
from kvoffload.connector.engine import EngineSpec
from kvoffload.testing.tier_conformance import TierConformance

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
