from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clock import Clock
from tests.tiers.shared_dir.rig import Serve, Server


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns where the shared directory will be."""
    return tmp_path / "shared"


@pytest.fixture
def serve(path: Path, clock: Clock) -> Iterator[Serve]:
    """Opens servers on one directory, and closes them after the test."""
    servers: list[Server] = []

    def open_server(num_slots: int = 8, **settings: Any) -> Server:
        servers.append(Server(path, num_slots, time=clock, seed=len(servers), **settings))
        return servers[-1]

    yield open_server
    for server in servers:
        server.tier.close()
