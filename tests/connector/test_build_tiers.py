"""build_scheduler with tiers: order, names, what they are opened with, and what happens if one cannot be opened."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload import OffloadConfig, TierConfig, TierContext
from kvoffload.abc import ConfigError, ReqContext, Tier
from kvoffload.cache.admission import tracker_size
from kvoffload.cache.keys import make_offload_key
from kvoffload.connector import build
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager
from kvoffload.tiers.disk.layout import slot_cost
from tests.connector import test_build as half_builder
from tests.connector.test_build import pool
from tests.sim.memory_tier import MemoryTier

SLOT, BLOCKS, MIB = 4096, 8, 1 << 20
HERE = __name__
CONTEXTS: list[TierContext] = []
"""What the tiers of a test were opened with."""
OPENED: list[MemoryTier] = []


@dataclass(frozen=True)
class OwnConfig(TierConfig):
    """A tier in memory, which can be opened or not. ``fails``: how."""

    kind = "own"

    blocks: int = 4
    fails: str = ""

    @property
    def capacity_bytes(self) -> int:
        return self.blocks * SLOT

    def open(self, context: TierContext) -> Tier:
        CONTEXTS.append(context)
        if self.fails == "setting":
            raise ConfigError("blocks", self.blocks, "too few", "set more")
        if self.fails == "medium":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fails == "bug":
            raise KeyError("x")
        if self.fails == "nothing":
            return None  # type: ignore[return-value]
        OPENED.append(MemoryTier(context.pools, self.blocks))
        return OPENED[-1]


@pytest.fixture(autouse=True)
def nothing_opened() -> None:
    CONTEXTS.clear()
    OPENED.clear()


def own(**keys: Any) -> dict[str, Any]:
    return {"kind": f"{HERE}:OwnConfig", **keys}


def disk(path: Path, **keys: Any) -> dict[str, Any]:
    return {"kind": "disk", "dir": str(path), "bytes": 64 * MIB, **keys}


class Builder(half_builder.Builder):
    def __call__(self, *entries: Any, options: Any = None, **changes: Any) -> list[str]:  # type: ignore[override]
        """Returns the names of the tiers that a server with these ``entries`` has, the fastest first."""
        config = OffloadConfig.from_mapping({"host_bytes": MIB, "tiers": list(entries), **(options or {})})
        manager = super().__call__(config, **changes).manager
        return [state.tier.name for state in manager.tiers] if isinstance(manager, TieredOffloadingManager) else []


@pytest.fixture
def make() -> Iterator[Builder]:
    builder = Builder()
    yield builder
    builder.close()


def refused(make: Builder, *entries: Any, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*entries, **changes)
    return str(caught.value)


# What is built.


def test_every_tier_has_a_name_of_its_own(make: Builder, tmp_path: Path) -> None:
    short = {"disk_dir": str(tmp_path / "a"), "disk_bytes": 64 * MIB}
    further = [MemoryTier([pool()], 2) for _ in range(2)]
    names = make(own(), disk(tmp_path / "b"), own(blocks=5), options=short, tiers=further)
    assert names == ["disk", "own", "disk-2", "own-2", "memory", "memory-2"]
    assert [tier.name for tier in [*OPENED, *further]] == ["own", "own-2", "memory", "memory-2"]


def test_a_tier_learns_what_it_serves(make: Builder) -> None:
    real = HostPool(BLOCKS, SLOT)
    try:
        handle = real.handle()
        make(own(), options={"policy": "arc"}, pools=[pool(), handle], engine=1, engines=2, identity={"dtype": "half"})
        (context,) = CONTEXTS
        assert [each.shape for each in context.pools] == [(BLOCKS, SLOT)] * 2
        assert context.handles == [None, handle]
        real.data[3] = 7
        assert np.array_equal(context.pools[1], real.data)
        assert (context.fingerprint, context.identity) == ("ab" * 32, {"dtype": "half"})
        assert (context.policy, context.engine, context.engines) == ("arc", 1, 2)
        assert context.num_tokens(3) == 48
        make.close()
    finally:
        real.close()


def test_the_reuse_filter_remembers_as_much_as_all_tiers_hold(
    make: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def note(blocks: int) -> int:
        sizes.append(blocks)
        return tracker_size(blocks)

    monkeypatch.setattr(build, "tracker_size", note)
    threshold = {"store_threshold": 2}
    make(options=threshold)
    make(own(blocks=100), disk(tmp_path / "disk", bytes=1000 * SLOT), options=threshold)
    make(own(blocks=100), own(blocks=200), options=threshold, engines=2)
    assert sizes == [BLOCKS, BLOCKS + 1100, BLOCKS + 150]
    sizes.clear()
    make(own(blocks=100, store_threshold=2), own(blocks=200))
    assert sizes == [BLOCKS + 100]


def test_a_threshold_of_a_tier_keeps_blocks_from_that_tier_alone(make: Builder) -> None:
    make(own(store_threshold=2), own(blocks=3))
    manager, keys = make.built[0].manager, [make_offload_key(b"k" * 32, 0)]
    for request, is_admitted in (("a", False), ("b", True)):
        context = ReqContext(request)
        manager.touch(keys, context)
        output = manager.prepare_store(keys)
        assert output is not None
        manager.complete_store(output.store_spec)
        manager.end_chain(keys, [], context)
        for _ in range(100):
            manager.poll()
            for tier in OPENED:
                tier.executor.wait(0.0)
        assert [tier.stats().num_blocks for tier in OPENED] == [int(is_admitted), 1]


def test_the_log_says_what_is_on_a_disk(make: Builder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make(disk(tmp_path / "a"))
    (line,) = [message for message in caplog.messages if "disk tier in" in message]
    most = slot_cost(SLOT)
    assert 0.99 * (64 * MIB // most) < int(line.split(" = ")[1].split()[0].replace(",", "")) / 16 < 64 * MIB // most
    assert line.startswith(f"kvoffload: disk tier in {tmp_path / 'a'} of 64 MiB = ")
    assert line.endswith(" tokens; found 0 blocks of this model there")


# What cannot be opened.


def test_a_medium_that_fails_at_the_start_leaves_the_others(make: Builder, caplog: pytest.LogCaptureFixture) -> None:
    assert make(own(fails="medium"), own()) == ["own", "own-2"]
    manager = make.built[0].manager
    assert isinstance(manager, TieredOffloadingManager)
    assert [state.tier.stats().is_connected for state in manager.tiers] == [False, True]
    (message,) = caplog.messages
    assert message == (
        f"kvoffload: tiers[0].kind='{HERE}:OwnConfig': THERE IS NO OWN TIER: Input/output error; the server continues "
        "without it, and tries again every 60 s"
    )


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("setting", "tiers[1].blocks=4: too few; set more"),
        (
            "bug",
            f"tiers[1].kind='{HERE}:OwnConfig': the tier cannot be opened (KeyError: 'x'); correct its class, or "
            "remove the entry",
        ),
        ("nothing", f"tiers[1].kind='{HERE}:OwnConfig': open() returned a NoneType; it must return a kvoffload.Tier"),
    ],
)
def test_what_is_open_is_closed_if_another_tier_is_wrong(make: Builder, tmp_path: Path, fails: str, said: str) -> None:
    short = {"disk_dir": str(tmp_path / "disk"), "disk_bytes": 64 * MIB}
    assert refused(make, own(), own(fails=fails), options=short) == said
    assert OPENED[0].is_closed
    assert len(make(own(), options=short)) == 2


def test_what_is_open_is_closed_if_the_scheduler_cannot_be_made(make: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(build, "OffloadingConnectorScheduler", fail)
    with pytest.raises(RuntimeError):
        make(own())
    assert OPENED[0].is_closed


def in_both_forms(make: Builder, path: Path, nbytes: int = 64 * MIB) -> Sequence[str]:
    """Returns the errors of a disk that is given in the short form and as an entry, without the name of the setting."""
    short = refused(make, options={"disk_dir": str(path), "disk_bytes": nbytes})
    entry = refused(make, own(), disk(path, bytes=nbytes))
    assert short.startswith("disk_")
    assert entry.startswith("tiers[1].")
    # Others write to the same disk, so the free space may differ.
    one, other = (re.sub(r"[\d.]+ [KMGT]iB", "", each) for each in (short, entry))
    assert one.removeprefix("disk_") == other.removeprefix("tiers[1].")
    return [short, entry]


def test_errors_of_a_disk_name_the_setting_in_both_forms(make: Builder, tmp_path: Path) -> None:
    make(disk(tmp_path / "used"))
    short, entry = in_both_forms(make, tmp_path / "used")
    assert short.startswith(f"disk_dir={str(tmp_path / 'used')!r}: in use by process {os.getpid()} since ")
    assert entry.endswith("; give each server its own directory")

    (tmp_path / "link").symlink_to(tmp_path / "used")
    assert in_both_forms(make, tmp_path / "link")[0] == (
        f"disk_dir={str(tmp_path / 'link')!r}: is a symbolic link; name its target, {str(tmp_path / 'used')!r}"
    )
    (tmp_path / "file").touch()
    assert in_both_forms(make, tmp_path / "file")[0] == (
        f"disk_dir={str(tmp_path / 'file')!r}: is not a directory; name a directory"
    )
    large = in_both_forms(make, tmp_path / "large", 1 << 60)[0]
    assert large.startswith(f"disk_bytes={1 << 60} (1048576 TiB): the file system of the directory can give only ")


def test_an_error_about_no_key_names_the_tier(make: Builder, tmp_path: Path) -> None:
    pools = [np.zeros((BLOCKS, 1000), dtype=np.uint8)]
    said = "slot_bytes=[1000]: with a disk tier, slots of host pools must be multiples of 4096 bytes; make each with "
    for entries, options, setting in (
        ([], {"disk_dir": str(tmp_path), "disk_bytes": MIB}, "disk_dir"),
        ([disk(tmp_path)], {}, "tiers[0].dir"),
    ):
        message = refused(make, *entries, options=options, pools=pools)
        assert message.startswith(f"{setting}={str(tmp_path)!r}: {said}")


def test_a_disk_with_more_slabs_than_files_may_be_open(
    make: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    said = in_both_forms(make, tmp_path / "disk")[0]
    assert said.startswith(f"disk_bytes={64 * MIB}: this process may have 100 files open and needs ")
    assert ", one per GiB on disk and 512 to spare; raise the limit (ulimit -n " in said
    assert said.endswith("), or give the tier fewer bytes")


def test_each_engine_of_a_node_opens_every_tier(make: Builder, tmp_path: Path) -> None:
    for engine in range(2):
        assert len(make(disk(tmp_path / "disk"), own(), engine=engine, engines=2)) == 2
    assert {path.name for path in (tmp_path / "disk").glob("engine-*")} == {"engine-0", "engine-1"}
    assert [context.engine for context in CONTEXTS] == [0, 1]


@pytest.mark.parametrize(
    "tenants",
    [
        {"a": {"retain": {"disk": "32MiB"}}},
        {"a": {"retain": {"disk": "16MiB"}}, "b": {"retain": {"disk": "16MiB"}}},
        {"a": {"guaranteed": {"disk": "64MiB"}}},
        {"a": {"guaranteed": {"disk": "32MiB"}, "retain": {"disk": "32MiB"}}, "b": {"guaranteed": {"disk": "32MiB"}}},
    ],
)
def test_what_may_be_promised_of_the_whole_budget_is_promised_of_the_blocks_that_fit(
    make: Builder, tmp_path: Path, tenants: dict[str, Any]
) -> None:
    """An index and spare room are in the budget too, so fewer blocks fit than it has bytes for."""
    assert make(options={"disk_dir": str(tmp_path), "disk_bytes": 64 * MIB, "tenants": tenants}) == ["disk"]
    over = {"a": {"retain": {"disk": 32 * MIB + 1}}}
    assert "more than half of its budget" in refused(
        make, options={"disk_dir": str(tmp_path), "disk_bytes": 64 * MIB, "tenants": over}
    )
