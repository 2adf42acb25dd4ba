"""How block hashes become keys."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.abc import ConfigError, KVGroup, OffloadingManager
from kvoffload.cache.keys import hash_blocks, make_offload_key
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.connector.rig import TOKENS, FakeRequest, SpyManager, make_half, prompt


def scheduler(manager: OffloadingManager, **options: Any) -> OffloadingConnectorScheduler:
    return make_half(manager, groups=[KVGroup(TOKENS)], **options)


def test_the_namespace_is_part_of_the_key() -> None:
    manager = SpyManager(4)
    found = {}
    for namespace in (b"one", b"two", b""):
        scheduler(manager, tenants=Tenants(namespace)).get_num_new_matched_tokens(FakeRequest("r", prompt(5)), 0)
        found[namespace] = manager.lookups[-1]
    (h,) = hash_blocks(prompt(4), TOKENS)
    assert found == {name: [make_offload_key(name + h, 0)] for name in found}


def test_a_blocks_key_has_the_hash_of_its_last_hash_block() -> None:
    manager = SpyManager(4)
    request = FakeRequest("r", prompt(20), hash_tokens=2)
    half = make_half(manager, groups=[KVGroup(TOKENS, 2)], hash_block_size=2)
    half.get_num_new_matched_tokens(request, 0)
    hashes = request.block_hashes
    assert manager.lookups == [[make_offload_key(hashes[3], 0), make_offload_key(hashes[7], 0)]]


@pytest.mark.parametrize("hash_block_size", [3, 8])
def test_block_sizes_that_do_not_divide_are_refused(hash_block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"hash_block_size={hash_block_size}: must divide the 4 tokens"):
        scheduler(SpyManager(4), hash_block_size=hash_block_size)


def test_keys_at_boundaries() -> None:
    layout = KeyLayout([KVGroup(16), KVGroup(8, state=True)], None)
    keys = [b"%d" % (8 * i + 8) for i in range(10)]
    assert list(layout.boundary_keys(1, keys, 0, 64)) == [b"16", b"32", b"48", b"64"]
    assert list(layout.boundary_keys(1, keys, 32, 64)) == [b"48", b"64"]
    assert list(layout.boundary_keys(1, keys, 64, 64)) == []
