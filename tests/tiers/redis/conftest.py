"""No server outlives the tests of its module, also if one of them fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.redis.rig import kill_servers


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    kill_servers()
