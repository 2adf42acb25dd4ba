"""Host memory in front of tiers that does not repeat what the device holds."""

from __future__ import annotations

from kvoffload.abc import Hints, Offer, ReqContext
from kvoffload.cache.admission import ReuseFilter
from kvoffload.tiering.manager import TierSettings
from tests.tiering.rig import Rig, chain, in_tier


def present(rig: Rig, *chains: list[bytes]) -> list[int]:
    """Returns how many blocks of each chain are in the host."""
    return [sum(key in rig.host.table for key in keys) for keys in chains]


def a_full_host() -> tuple[Rig, list[bytes], list[bytes]]:
    """Two blocks that were written and are not on the device, and two that are on the device and not written."""
    rig = Rig(host_blocks=4, device_blocks=16, write_share=1.0)
    old, new = chain("old", 2), chain("new", 2)
    rig.store(old)
    rig.settle(3)
    rig.store(new)
    rig.manager.note_device(held=new)
    return rig, old, new


def test_a_block_leaves_first_only_when_the_tiers_have_it() -> None:
    rig, old, new = a_full_host()
    rig.store(chain("third", 1))
    assert present(rig, old, new) == [1, 2], "what the device holds is still to be written"
    rig.settle(3)
    assert in_tier(rig, new) == [0, 1]
    rig.manager.touch(new)
    rig.store(chain("fourth", 2))
    assert present(rig, old, new, chain("third", 1)) == [1, 0, 1], "now it leaves before older blocks"


def test_what_has_left_the_device_leaves_as_any_other_block() -> None:
    rig, old, new = a_full_host()
    rig.settle(3)
    rig.manager.note_device(left=new)
    rig.manager.touch(new)
    rig.store(chain("third", 2))
    assert present(rig, old, new) == [0, 2]


def test_a_block_on_the_device_that_the_tiers_hold_is_not_stored_until_it_leaves() -> None:
    rig = Rig(host_blocks=2, device_blocks=16, write_share=1.0)
    first, second = chain("first", 2), chain("second", 2)
    rig.store(first)
    rig.settle(3)
    rig.manager.note_device(held=first)
    rig.store(second)
    assert present(rig, first) == [0]
    rig.settle(3)
    output = rig.manager.prepare_store(first)
    assert output is not None
    assert (output.keys_to_store, output.refused_keys) == ([], [])
    rig.manager.note_device(left=first)
    output = rig.manager.prepare_store(first, offer=Offer.LEAVING)
    assert output is not None
    assert output.keys_to_store == first
    rig.manager.complete_store(output.store_spec)
    assert present(rig, first) == [2]
    rig.settle(3)


def leave(rig: Rig, keys: list[bytes]) -> None:
    """These blocks are stored because they leave the device."""
    rig.manager.note_device(left=keys)
    output = rig.manager.prepare_store(keys, offer=Offer.LEAVING)
    assert output is not None
    rig.manager.complete_store(output.store_spec)


def test_blocks_that_a_tier_does_not_want_are_stored_when_they_leave_the_device() -> None:
    tiers = [TierSettings(admission=ReuseFilter(2, 100))]
    rig = Rig(host_blocks=4, device_blocks=16, write_share=1.0, tiers=tiers)
    first = chain("first", 2)
    rig.store(first)
    assert present(rig, first) == [0]
    leave(rig, first)
    assert present(rig, first) == [2]


def test_two_tiers_must_both_have_it() -> None:
    rig = Rig(host_blocks=4, device_blocks=16, write_share=1.0, num_tiers=2)
    old, new = chain("old", 2), chain("new", 2)
    rig.store(old)
    rig.settle(3)
    rig.store(new)
    rig.settle(3)
    rig.tiers[1].delete(new)
    rig.manager.note_device(held=new)
    rig.store(chain("third", 2))
    assert present(rig, old, new) == [0, 2]


def test_what_is_to_be_retained_is_stored_although_the_tiers_have_it() -> None:
    """Otherwise it would be in the host only when it leaves the device."""
    rig = Rig(host_blocks=8, device_blocks=16, write_share=1.0)
    keys = chain("new", 2)
    rig.store_below(keys)
    for hints, expected in ((None, []), (Hints(7), []), (Hints(7, retain_s=60.0), keys)):
        output = rig.manager.prepare_store(keys, ReqContext("r", hints=hints))
        assert output is not None
        assert output.keys_to_store == expected
