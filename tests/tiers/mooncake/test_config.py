"""The entry of a Mooncake Store: each mistake is named with its key, its value and the fix."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext, load_tiers
from kvoffload.tiers.mooncake import config as module
from kvoffload.tiers.mooncake.config import MooncakeConfig, check_installed

MASTER = "10.0.0.5:50051"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client counts as installed."""
    monkeypatch.setattr(module, "check_installed", lambda: None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("master", [MASTER, "store.local:1", "[fd00::1]:50051"])
def test_an_address_is_enough(master: str) -> None:
    (config,) = load_tiers([{"kind": "mooncake", "master": master}])
    assert isinstance(config, MooncakeConfig)
    assert (config.protocol, config.segment_bytes, config.capacity_bytes) == ("tcp", 0, None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "master is not set"),
        ({"master": "10.0.0.5"}, r"tiers\[0\].master='10.0.0.5': .*HOST:PORT"),
        ({"master": "fd00::1:50051"}, r"tiers\[0\].master=\*\*\*: write"),
        ({"master": "a:99999"}, r"tiers\[0\].master='a:99999'"),
        ({"master": 7}, r"tiers\[0\].master=7"),
        ({"protocol": "udp"}, r"tiers\[0\].protocol='udp': must be one of tcp, rdma"),
        ({"metadata": ""}, r"tiers\[0\].metadata='': .*P2PHANDSHAKE"),
        ({"devices": 3}, r"tiers\[0\].devices=3: .*mlx5_0"),
        ({"host": "a b"}, r"tiers\[0\].host=\*\*\*: write"),
        ({"prefix": "/kv"}, r"tiers\[0\].prefix='/kv'"),
        ({"prefix": "k" * 200}, r"tiers\[0\].prefix='k"),
        ({"segment_bytes": "4 apples"}, r"tiers\[0\].segment_bytes='4 apples'"),
        ({"segment_bytes": -1}, r"tiers\[0\].segment_bytes=-1"),
        ({"segment": "4GiB"}, "did you mean segment_bytes"),
    ],
)
def test_mistakes_are_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tiers([{"kind": "mooncake", **({"master": MASTER} if entry else {}), **entry}])


@pytest.mark.usefixtures("installed")
def test_memory_for_the_store_must_exist() -> None:
    config = MooncakeConfig(master=MASTER, segment_bytes="900TiB")  # type: ignore[arg-type]
    host = HostPool(2, 4096)
    with pytest.raises(ConfigError, match=r"segment_bytes=.*\(900 TiB\): only .* available beside the host pools"):
        config.open(TierContext([host.data], "5e" * 32, [host.handle()]))
    host.close()


@pytest.mark.usefixtures("installed")
def test_pools_must_be_reachable() -> None:
    with pytest.raises(ConfigError, match=r"HostPool\.handle"):
        MooncakeConfig(master=MASTER).open(TierContext([np.zeros((2, 4096), dtype=np.uint8)], "5e" * 32))


def test_a_missing_client_is_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install mooncake-transfer-engine-non-cuda"):
        load_tiers([{"kind": "mooncake", "master": MASTER}])


def test_missing_libraries_are_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "LIBRARIES", {"libc.so.6": "libc6", "libmissing.so.1": "libmissing1"})
    with pytest.raises(ConfigError, match="apt-get install libmissing1,"):
        check_installed()
