"""HostBackend against the backend contract."""

from __future__ import annotations

import pytest

from kvoffload.abc import Backend, ConfigError
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import BackendConformance, keys


class TestHostBackend(BackendConformance):
    def make_backend(self, num_blocks: int) -> Backend:
        return HostBackend(16, num_blocks)


def test_it_says_what_it_is() -> None:
    backend = HostBackend(16, 3)
    assert (backend.block_size, backend.num_blocks, backend.medium) == (16, 3, "CPU")
    assert backend.get_load_store_spec(keys("a"), backend.allocate_blocks(keys("a"))).medium() == "CPU"


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_no_room_at_all_is_an_error_that_names_the_setting(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks}"):
        HostBackend(16, num_blocks)
