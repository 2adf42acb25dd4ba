"""Calls of the CUDA driver, made to a stub that is built with gcc; none of them reaches a GPU here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload.transfer.cuda.driver import MAX_COPIES_PER_CALL, Driver, DriverError
from tests.transfer.cuda.conftest import STUB, StubDriver

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 1, 2, 712
STREAM = 0x5500


def driver_of(stub: StubDriver) -> Driver:
    driver = Driver(0, library=stub.path)
    driver.enter_thread()
    return driver


class Copies:
    """Copies of rows of 24 bytes in a random order, with the arrays of their addresses: keep it while they are used."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(count)
        self.source = rng.integers(1, 256, (count, 24), np.uint8)
        self.target = np.zeros((count, 40), np.uint8)
        self.order = rng.permutation(count)
        self.arrays = (
            self.target.ctypes.data + 40 * np.arange(count),
            self.source.ctypes.data + 24 * self.order,
            np.full(count, 24),
        )

    def are_done(self) -> bool:
        return np.array_equal(self.target[:, :24], self.source[self.order]) and not self.target[:, 24:].any()


def batches(stub: StubDriver) -> list[int]:
    return [int(call.split()[1]) for call in stub.calls if call.startswith("batch")]


@pytest.mark.parametrize("count", [1, 7, MAX_COPIES_PER_CALL, MAX_COPIES_PER_CALL + 1, 2500])
def test_copies_go_to_the_driver_in_batches_of_limited_size(stub: StubDriver, count: int) -> None:
    copies = Copies(count)
    driver_of(stub).copy(STREAM, *copies.arrays)
    assert copies.are_done()
    assert sum(batches(stub)) == count
    assert len(batches(stub)) == -(-count // MAX_COPIES_PER_CALL)
    assert all("stream 0x5500 order 1 flags 1" in call for call in stub.calls if call.startswith("batch"))


def test_no_copies_make_no_call(stub: StubDriver) -> None:
    driver_of(stub).copy(STREAM, *Copies(0).arrays)
    assert batches(stub) == []


def test_a_newer_driver_is_called_with_the_arguments_of_12_8(stub: StubDriver) -> None:
    stub.be_version(13010)
    copies = Copies(5)
    driver_of(stub).copy(STREAM, *copies.arrays)
    assert copies.are_done()


def test_an_older_driver_copies_one_by_one(stub: StubDriver) -> None:
    stub.be_version(12040)
    copies = Copies(5)
    driver = driver_of(stub)
    assert not driver.copies_in_batches
    driver.copy(STREAM, *copies.arrays)
    assert copies.are_done()
    assert batches(stub) == []
    assert stub.calls.count("copy 24 stream 0x5500") == 5


def test_arrays_that_are_not_contiguous_are_copied_first(stub: StubDriver) -> None:
    copies = Copies(6)
    table = np.stack(copies.arrays, axis=1)
    driver_of(stub).copy(STREAM, *(table[:, column] for column in range(3)))
    assert copies.are_done()


def test_the_default_stream_is_refused(stub: StubDriver) -> None:
    driver, copies = driver_of(stub), Copies(1)
    for stream in (0, 1):
        with pytest.raises(ValueError, match="default stream"):
            driver.copy(stream, *copies.arrays)


def test_arrays_of_different_lengths_are_refused(stub: StubDriver) -> None:
    copies = Copies(4)
    targets, sources, sizes = copies.arrays
    with pytest.raises(ValueError, match="shapes"):
        driver_of(stub).copy(STREAM, targets, sources, sizes[:3])


def test_a_refused_batch_is_copied_one_by_one_and_none_is_tried_again(
    stub: StubDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver = driver_of(stub)
    stub.fail_copy(3)
    for _ in range(2):
        copies = Copies(5)
        driver.copy(STREAM, *copies.arrays)
        assert copies.are_done()
    assert not driver.copies_in_batches
    assert batches(stub) == [5], "the driver was tried once"
    assert stub.calls.count("copy 24 stream 0x5500") == 10
    (warning,) = caplog.messages
    assert re.search(
        r"of 5 copies at copy 3 \(24 bytes from 0x\w+ to 0x\w+\) failed: CUDA_ERROR_INVALID_VALUE", warning
    )
    assert "this one has CUDA 12.8" in warning


def test_an_error_of_the_whole_batch_names_no_copy(stub: StubDriver) -> None:
    driver = driver_of(stub)
    stub.fail("cuMemcpyBatchAsync", 719, after=1)
    copies = Copies(MAX_COPIES_PER_CALL + 1)
    with pytest.raises(DriverError, match=r"of 1 copies failed: unknown error \(719\)") as error:
        driver.copy(STREAM, *copies.arrays)
    assert error.value.code == 719


def test_an_error_of_an_older_driver_is_raised_too(stub: StubDriver) -> None:
    stub.be_version(12040)
    stub.fail("cuMemcpyAsync", INVALID_VALUE, after=2)
    copies = Copies(5)
    with pytest.raises(DriverError, match="cuMemcpyAsync failed: CUDA_ERROR_INVALID_VALUE"):
        driver_of(stub).copy(STREAM, *copies.arrays)


def test_a_thread_enters_before_it_calls(stub: StubDriver) -> None:
    """The stub's context is current per thread, as in CUDA."""
    driver = driver_of(stub)
    copies = Copies(3)
    errors: list[int] = []

    def run(enter: bool) -> None:
        try:
            if enter:
                driver.enter_thread()
            driver.copy(STREAM, *copies.arrays)
        except DriverError as error:
            errors.append(error.code)

    for enter in (False, True):
        thread = threading.Thread(target=run, args=(enter,))
        thread.start()
        thread.join()
        assert errors == [201], "invalid context, and only in the thread that did not enter"
    assert copies.are_done()
    assert stub.calls.count("capture mode 2") == 2


def test_device_memory_is_allocated_and_freed(stub: StubDriver) -> None:
    driver = driver_of(stub)
    address = driver.allocate(1000)
    assert address % 256 == 0
    assert stub.num_allocated == 1
    driver.free(address)
    assert stub.num_allocated == 0
    stub.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(DriverError, match="cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.allocate(1000)


def test_host_memory_is_registered_for_all_contexts_and_unregistered(stub: StubDriver) -> None:
    driver = driver_of(stub)
    memory = np.zeros(1 << 21, np.uint8)
    driver.register(memory.ctypes.data, 1 << 20)
    driver.register(memory.ctypes.data + (1 << 20), 1 << 20)
    assert stub.calls[-1] == "register 1048576 flags 1"
    with pytest.raises(DriverError, match="ALREADY_REGISTERED") as error:
        driver.register(memory.ctypes.data + 5, 8)
    assert error.value.code == ALREADY_REGISTERED
    driver.unregister(memory.ctypes.data)
    with pytest.raises(DriverError, match="cuMemHostUnregister failed: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister(memory.ctypes.data)


def test_a_registration_that_is_too_large_can_be_halved(stub: StubDriver) -> None:
    driver = driver_of(stub)
    memory = np.zeros(4 << 20, np.uint8)
    stub.limit_registrations(2)
    with pytest.raises(DriverError) as error:
        driver.register(memory.ctypes.data, 4 << 20)
    assert error.value.code == OUT_OF_MEMORY
    for half in range(2):
        driver.register(memory.ctypes.data + half * (2 << 20), 2 << 20)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_numa_node_is_the_one_in_sysfs(
    stub: StubDriver, tmp_path: Path, text: str | None, node: int | None
) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert driver_of(stub).numa_node(tmp_path) == node


def test_the_context_is_given_back_once(stub: StubDriver) -> None:
    driver = driver_of(stub)
    driver.close()
    driver.close()
    assert stub.calls.count("retain") == stub.calls.count("release 100") == 1


def test_no_context_is_created_before_a_thread_enters(stub: StubDriver) -> None:
    driver = Driver(0, library=stub.path)
    driver.numa_node(Path("/nowhere"))
    assert "retain" not in stub.calls
    driver.enter_thread()
    assert "retain" in stub.calls


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_does_not_start_is_an_error_with_a_name(stub: StubDriver, function: str) -> None:
    stub.fail(function, INVALID_VALUE)
    with pytest.raises(DriverError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        driver_of(stub)


def test_a_machine_without_a_driver_is_an_error_that_names_the_library() -> None:
    with pytest.raises(RuntimeError, match=r"libno-such-cuda\.so cannot be loaded"):
        Driver(0, library="libno-such-cuda.so")


@pytest.fixture
def compiles(tmp_path: Path) -> Callable[[str], bool]:
    """Returns a function that says whether NVIDIA's cuda.h agrees with a source like the stub's."""
    compiler = shutil.which("gcc")
    found = importlib.util.find_spec("triton")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs gcc and Triton, which brings cuda.h")
    include = Path(found.origin).parent / "backends" / "nvidia" / "include"
    if not (include / "cudaTypedefs.h").exists():
        pytest.skip(f"needs cudaTypedefs.h, which is not in {include}")

    def compiles(source: str) -> bool:
        file = tmp_path / "check.c"
        file.write_text(source)
        options = ["-DREAL_HEADER", "-fsyntax-only", "-Werror=incompatible-pointer-types"]
        return subprocess.run([compiler, *options, "-I", include, file], capture_output=True).returncode == 0

    return compiles


def test_the_stub_declares_what_cuda_h_declares(compiles: Callable[[str], bool]) -> None:
    source = STUB.read_text()
    assert compiles(source)
    planted = {
        "int id;": "long id;",
        "size_t, size_t *, CUstream": "size_t, CUstream",
        "PORTABLE = 1": "PORTABLE = 2",
        '"cuMemHostRegister_v2"': '"cuMemHostRegister"',
    }
    for right, wrong in planted.items():
        assert right in source
        assert not compiles(source.replace(right, wrong)), f"{wrong} was accepted"
