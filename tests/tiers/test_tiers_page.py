"""The example of docs/tiers.md is a tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.tier_conformance import TierConformance

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
MAX_LINES = 60


def example() -> str:
    """Returns the first code block of the page."""
    return PAGE.read_text().split("```python\n")[1].split("```")[0]


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

    def test_it_has_at_most_sixty_lines(self) -> None:
        lines = [line for line in example().splitlines() if line.strip()]
        assert 30 < len(lines) <= MAX_LINES
        assert f"{MAX_LINES} lines" in PAGE.read_text()
