"""The contracts as code: what their value types and defaults promise."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.abc import (
    Backend,
    BlockNotPinnedError,
    BlockNotReadyError,
    CachePolicy,
    ConfigError,
    DeviceSpec,
    IntegrityError,
    KVOffloadError,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    ReqContext,
)


def test_every_error_is_one_of_ours_and_they_can_be_told_apart() -> None:
    errors = [ConfigError, BlockNotReadyError, BlockNotPinnedError, IntegrityError]
    for error in errors:
        assert issubclass(error, KVOffloadError)
        assert not any(issubclass(error, other) for other in errors if other is not error)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(KVOffloadError, ValueError)


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


@pytest.mark.parametrize("contract", [Backend, CachePolicy, OffloadingManager])
def test_a_contract_cannot_be_made_without_being_kept(contract: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_every_manager_call_can_do_without_a_context() -> None:
    for name in ("lookup", "lookup_each", "prepare_load", "complete_load", "touch", "prepare_store"):
        assert inspect.signature(getattr(OffloadingManager, name)).parameters["req_context"].default is None
    parameters = inspect.signature(OffloadingManager.complete_store).parameters
    assert (parameters["req_context"].default, parameters["success"].default) == (None, True)
