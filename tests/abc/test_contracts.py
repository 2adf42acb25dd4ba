"""The contracts as code: what their value types and defaults promise."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload import abc as base
from kvoffload.abc import (
    Backend,
    BlockNotPinnedError,
    BlockNotReadyError,
    BlockStatus,
    CachePolicy,
    ConfigError,
    DeviceSpec,
    IntegrityError,
    KVOffloadError,
    LoadStoreSpec,
    LookupState,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    ReqContext,
    ScheduledStep,
)
from tests.suites.reference import ReferenceLRUManager


def test_every_error_is_one_of_ours_and_they_can_be_told_apart() -> None:
    errors = [ConfigError, BlockNotReadyError, BlockNotPinnedError, IntegrityError]
    for error in errors:
        assert issubclass(error, KVOffloadError)
        assert not any(issubclass(error, other) for other in errors if other is not error)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(KVOffloadError, ValueError)


def test_lookup_states_are_four_and_only_miss_is_false() -> None:
    assert [state.name for state in LookupState] == ["MISS", "HIT", "PENDING", "RETRY"]
    assert [state for state in LookupState if not state] == [LookupState.MISS]


@pytest.mark.parametrize(("ref_cnt", "ready"), [(-1, False), (0, True), (3, True)])
def test_a_block_is_ready_unless_it_is_being_written(ref_cnt: int, ready: bool) -> None:
    assert BlockStatus(0, ref_cnt).is_ready is ready


def test_a_context_needs_only_a_request_id() -> None:
    assert ReqContext("r") == ReqContext("r", None)
    assert ReqContext("r").kv_transfer_params is None


@pytest.mark.parametrize(
    ("thing", "attribute"),
    [
        (ReqContext("r"), "req_id"),
        (LoadStoreSpec("CPU", np.array([1])), "slots"),
        (DeviceSpec(np.array([1]), (1,), (0,)), "block_ids"),
        (OffloadingEvent([b"k"], "CPU", removed=True), "removed"),
    ],
)
def test_what_is_handed_over_cannot_be_rebound(thing: object, attribute: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, attribute, None)


def test_specs_name_their_medium() -> None:
    assert LoadStoreSpec("CPU", np.array([1])).medium() == "CPU"
    assert DeviceSpec(np.array([1]), (1,), (0,)).medium() == "device"


def test_a_step_has_no_shared_defaults() -> None:
    one, other = ScheduledStep({}), ScheduledStep({})
    assert one.block_ids is not other.block_ids
    assert (one.replaced, tuple(one.preempted)) == (frozenset(), ())


@pytest.mark.parametrize("contract", [Backend, CachePolicy, OffloadingManager])
def test_a_contract_cannot_be_made_without_being_kept(contract: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_every_manager_call_can_do_without_a_context() -> None:
    for name in ("lookup", "lookup_each", "prepare_load", "complete_load", "touch", "prepare_store"):
        assert inspect.signature(getattr(OffloadingManager, name)).parameters["req_context"].default is None
    parameters = inspect.signature(OffloadingManager.complete_store).parameters
    assert (parameters["req_context"].default, parameters["success"].default) == (None, True)


def test_a_manager_that_explains_nothing_says_never_stored() -> None:
    manager = ReferenceLRUManager(1)
    assert manager.explain_miss(b"k").reason is MissReason.NEVER_STORED
    assert manager.explain_miss(b"k").age_s is None


class TwoSlots(Backend):
    """The least a backend must say of itself."""

    num_blocks = 2

    def get_num_free_blocks(self) -> int:
        return 2

    def allocate_blocks(self, keys: object) -> base.Slots:
        return np.array([1, 0])

    def free(self, slots: base.Slots) -> None:
        pass


def test_a_backends_default_spec_is_its_medium_and_the_slots_in_order() -> None:
    backend = TwoSlots(16, "shelf")
    spec = backend.get_load_store_spec([b"a", b"b"], np.array([1, 0]))
    assert (spec.medium(), spec.slots.tolist()) == ("shelf", [1, 0])
    assert backend.block_size == 16
    backend.check_integrity()
