"""One S3 server for all tests of the room: it needs seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.object_store.rig import Moto


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    made = Moto()
    yield made
    made.kill()
