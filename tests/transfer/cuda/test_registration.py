"""A pool that is registered through the CUDA driver's functions, with a stand-in for the driver."""

from __future__ import annotations

import logging

import pytest

from kvoffload.host import registration as module
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration
from kvoffload.transfer.cuda.driver import Driver

from .conftest import StubDriver

MIB = 1 << 20


@pytest.fixture
def pool() -> HostPool:
    return HostPool(12, MIB)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * MIB)
    monkeypatch.setattr(module, "MIN_CHUNK_BYTES", 2 * MIB)


def register(pool: HostPool, stub: StubDriver) -> Registration:
    registration = Registration(pool.data, Driver(0, stub.path), pool.wait_until_touched)
    pool.before_close(registration.close)
    registration.wait_until_ended()
    return registration


def calls(stub: StubDriver) -> list[str]:
    return [call for call in stub.calls if "register" in call]


def test_a_pool_is_registered_in_chunks_and_unregistered_when_it_is_closed(pool: HostPool, stub: StubDriver) -> None:
    registration = register(pool, stub)
    assert registration.num_ready_slots == 12
    assert calls(stub) == [f"register {8 * MIB} flags 1", f"register {4 * MIB} flags 1"]
    registration.release()
    pool.close()
    assert calls(stub)[2:] == ["unregister", "unregister"]
    assert registration.close()


def test_smaller_chunks_are_registered_where_large_ones_fail(pool: HostPool, stub: StubDriver) -> None:
    stub.limit_registrations(4)
    registration = register(pool, stub)
    assert registration.num_ready_slots == 12
    assert calls(stub) == [f"register {size * MIB} flags 1" for size in (8, 4, 4, 4)]
    registration.release()
    pool.close()


def test_the_driver_s_error_is_in_the_warning(
    pool: HostPool, stub: StubDriver, caplog: pytest.LogCaptureFixture
) -> None:
    stub.limit_registrations(1)
    with caplog.at_level(logging.WARNING):
        registration = register(pool, stub)
    assert registration.num_ready_slots == 0
    assert "only 0 bytes of 12 MiB of the host pool (cuMemHostRegister_v2 failed: CUDA_ERROR_" in caplog.text
    registration.release()
    pool.close()
