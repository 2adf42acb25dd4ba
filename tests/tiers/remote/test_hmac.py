"""With an HMAC key, what others have put into the store is never loaded, and servers with other keys do not meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from tests.tiers.remote.rig import FINGERPRINT, Server, content, store_in

KEYS = [bytes([i]) * 36 for i in range(4)]
SECRET = "0123456789abcdef" * 4


@pytest.fixture
def servers(tmp_path: Path) -> tuple[Server, Server, Server]:
    """Two servers with the same HMAC key, and one without."""
    secret, store = tmp_path / "secret", store_in(tmp_path / "store")
    secret.write_text(SECRET + "\n")
    options = {"hmac_key_file": str(secret)}
    made = Server(store, **options), Server(store, **options), Server(store)
    for each in made:
        each.connect()
    return made


def test_servers_with_the_same_key_share_blocks_and_others_do_not(servers: tuple[Server, Server, Server]) -> None:
    one, other, stranger = servers
    assert all(result.ok for result in one.write(KEYS).values())
    assert stranger.states(KEYS) == [MISS] * 4
    assert other.states(KEYS) == [HIT] * 4
    assert other.reads_all(KEYS)
    # Both write their own, and neither removes what the other has.
    assert all(result.nbytes for result in stranger.write(KEYS).values())
    assert other.states(KEYS) == stranger.states(KEYS) == [HIT] * 4


def test_forged_blocks_are_never_loaded(servers: tuple[Server, Server, Server]) -> None:
    one, other, stranger = servers
    forged = [content(b"forged", rank, pool.shape[1]) for rank, pool in enumerate(one.pools)]
    value = np.concatenate([ValueFormat(FINGERPRINT).record(KEYS[0], forged), *forged])
    names = [ValueFormat(FINGERPRINT, "kv", hmac_key).name(KEYS[0]) for hmac_key in (b"", SECRET.encode())]
    for name in names:
        value.tofile(one.store.path(name))
    taken = stranger.tier.read(KEYS[:1], np.array([16]))
    assert stranger.finish(taken)[KEYS[0]].ok, "without a key it is loaded: checksums find damage, not forgery"
    assert (stranger.pools[0][16] == forged[0]).all()
    assert other.read(KEYS[:1])[KEYS[0]].error is TierError.CORRUPT
    # The forged value is removed, and the right one takes its place.
    assert other.states(KEYS[:1]) == [MISS]
    other.until(lambda: not one.store.path(names[1]).exists(), "the forged block was never removed")
    assert one.write(KEYS[:1])[KEYS[0]].nbytes == RECORD_BYTES + sum(pool.shape[1] for pool in one.pools)
    other.until(lambda: other.states(KEYS[:1]) == [HIT], "the new block was never found")
    assert other.read(KEYS[:1])[KEYS[0]].ok
