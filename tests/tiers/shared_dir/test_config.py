"""The entry "shared_dir" of the option tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext, load_tiers
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from kvoffload.tiers.shared_dir.tier import SharedDirTier
from tests.tiers.disk.rig import FINGERPRINT


def test_an_entry_opens_a_tier(tmp_path: Path) -> None:
    (config,) = load_tiers([{"kind": "shared_dir", "dir": str(tmp_path / "x"), "bytes": "8MiB", "gone_after_s": 90}])
    assert config == SharedDirConfig(dir=str(tmp_path / "x"), bytes=8 << 20, gone_after_s=90)
    tier = config.open(TierContext(make_pools(4, 4096), FINGERPRINT, engines=2))
    assert isinstance(tier, SharedDirTier)
    assert tier.is_shared
    assert config.capacity_bytes == 8 << 20
    assert tier.stats().capacity_bytes == 4 << 20
    tier.close()


def test_a_directory_that_had_to_be_made_is_named_with_its_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that is not mounted looks like a directory that does not exist."""
    config = SharedDirConfig(dir=str(tmp_path / "kv"), bytes=8 << 20)
    for warnings in (1, 0):
        caplog.clear()
        config.open(TierContext(make_pools(4, 4096), FINGERPRINT)).close()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == warnings
    config = SharedDirConfig(dir=str(tmp_path / "again" / "kv"), bytes=8 << 20)
    config.open(TierContext(make_pools(4, 4096), FINGERPRINT)).close()
    mounted = next(folder for folder in tmp_path.parents if folder.is_mount())
    assert f"kv did not exist and was made, on the file system that is mounted at {mounted}:" in caplog.text
