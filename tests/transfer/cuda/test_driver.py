"""Calls of the CUDA driver, made to the emulator; none of them reaches a GPU here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload.transfer.cuda.driver import _SIGNATURES as SIGNATURES
from kvoffload.transfer.cuda.driver import MAX_COPIES_PER_CALL, Driver, DriverError
from tests.transfer.cuda.emulator import SOURCES, Emulator, bytes_at

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 1, 2, 712
STREAM = 0x5500


def driver_of(emulator: Emulator) -> Driver:
    driver = Driver(0, library=emulator.path)
    driver.enter_thread()
    assert driver.new_stream() == STREAM
    return driver


class Copies:
    """Copies of rows of 24 bytes in a random order, with the arrays of their addresses."""

    def __init__(self, driver: Driver, count: int) -> None:
        rng = np.random.default_rng(count)
        self.source = bytes_at(driver.allocate(24 * count + 1), 24 * count).reshape(count, 24)
        self.target = bytes_at(driver.allocate_host(40 * count + 1), 40 * count).reshape(count, 40)
        self.source[:] = rng.integers(1, 256, (count, 24), np.uint8)
        self.target[:] = 0
        self.order = rng.permutation(count)
        self.arrays = (
            self.target.ctypes.data + 40 * np.arange(count),
            self.source.ctypes.data + 24 * self.order,
            np.full(count, 24),
        )

    def are_done(self) -> bool:
        return np.array_equal(self.target[:, :24], self.source[self.order]) and not self.target[:, 24:].any()


def batches(emulator: Emulator) -> list[int]:
    return [int(call.split()[1]) for call in emulator.calls if call.startswith("batch")]


@pytest.mark.parametrize("count", [1, 7, MAX_COPIES_PER_CALL, MAX_COPIES_PER_CALL + 1, 2500])
def test_copies_go_to_the_driver_in_batches_of_limited_size(emulator: Emulator, count: int) -> None:
    driver = driver_of(emulator)
    copies = Copies(driver, count)
    driver.copy(STREAM, *copies.arrays)
    assert copies.are_done()
    assert sum(batches(emulator)) == count
    assert len(batches(emulator)) == -(-count // MAX_COPIES_PER_CALL)
    assert all("stream 0x5500 order 1 flags 1" in call for call in emulator.calls if call.startswith("batch"))


def test_a_newer_driver_is_called_with_the_arguments_of_12_8(emulator: Emulator) -> None:
    emulator.be_version(13010)
    driver = driver_of(emulator)
    copies = Copies(driver, 5)
    driver.copy(STREAM, *copies.arrays)
    assert copies.are_done()


def test_an_older_driver_copies_one_by_one(emulator: Emulator) -> None:
    emulator.be_version(12040)
    driver = driver_of(emulator)
    copies = Copies(driver, 5)
    assert not driver.copies_in_batches
    driver.copy(STREAM, *copies.arrays)
    assert copies.are_done()
    assert batches(emulator) == []
    assert emulator.calls.count("copy 24 stream 0x5500") == 5


def test_the_default_stream_is_refused(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    copies = Copies(driver, 1)
    for stream in (0, 1):
        with pytest.raises(ValueError, match="default stream"):
            driver.copy(stream, *copies.arrays)


def test_a_refused_batch_is_an_error_that_names_the_copy(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    emulator.fail_copy(3)
    copies = Copies(driver, 5)
    text = r"of 5 copies at copy 3 \(24 bytes from 0x\w+ to 0x\w+\) failed: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DriverError, match=text):
        driver.copy(STREAM, *copies.arrays)
    driver.stop_batches()
    driver.copy(STREAM, *copies.arrays)
    assert copies.are_done()
    assert not driver.copies_in_batches
    assert batches(emulator) == [5], "the driver was tried once"
    assert emulator.calls.count("copy 24 stream 0x5500") == 5


def test_a_thread_enters_before_it_calls(emulator: Emulator) -> None:
    """A context is current per thread."""
    driver = driver_of(emulator)
    copies = Copies(driver, 3)
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
    assert emulator.calls.count("capture mode 2") == 2


def test_host_memory_is_registered_for_all_contexts_and_unregistered(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    memory = np.zeros(1 << 21, np.uint8)
    driver.register(memory.ctypes.data, 1 << 20)
    driver.register(memory.ctypes.data + (1 << 20), 1 << 20)
    assert emulator.calls[-1] == "register 1048576 flags 1"
    with pytest.raises(DriverError, match="ALREADY_REGISTERED") as error:
        driver.register(memory.ctypes.data + 5, 8)
    assert error.value.code == ALREADY_REGISTERED
    driver.unregister(memory.ctypes.data)
    with pytest.raises(DriverError, match="cuMemHostUnregister failed: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister(memory.ctypes.data)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_numa_node_is_the_one_in_sysfs(
    emulator: Emulator, tmp_path: Path, text: str | None, node: int | None
) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert driver_of(emulator).numa_node(tmp_path) == node


def test_the_context_is_given_back_once(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    driver.close()
    driver.close()
    assert emulator.calls.count("retain") == emulator.calls.count("release 100") == 1


def test_no_context_is_created_before_a_thread_enters(emulator: Emulator) -> None:
    driver = Driver(0, library=emulator.path)
    driver.numa_node(Path("/nowhere"))
    assert "retain" not in emulator.calls
    driver.enter_thread()
    assert "retain" in emulator.calls


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_does_not_start_is_an_error_with_a_name(emulator: Emulator, function: str) -> None:
    emulator.fail(function, INVALID_VALUE)
    with pytest.raises(DriverError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        driver_of(emulator)


def test_a_machine_without_a_driver_is_an_error_that_names_the_library() -> None:
    with pytest.raises(RuntimeError, match=r"libno-such-cuda\.so cannot be loaded"):
        Driver(0, library="libno-such-cuda.so")


@pytest.fixture
def compiles(tmp_path: Path) -> Callable[[str], bool]:
    """Returns a function that says whether NVIDIA's cuda.h agrees with a source like header_check.c."""
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
        options = ["-fsyntax-only", "-Werror=incompatible-pointer-types", f"-I{include}", f"-I{SOURCES}"]
        return subprocess.run([compiler, *options, file], capture_output=True).returncode == 0

    return compiles


def test_the_emulator_declares_what_cuda_h_declares(compiles: Callable[[str], bool]) -> None:
    source, ours = (SOURCES / "header" / "check.c").read_text(), (SOURCES / "emulator.h").read_text()
    assert compiles(source)
    planted = {
        "size_t, size_t *, CUstream": "size_t, CUstream",
        '"cuMemHostRegister_v2"': '"cuMemHostRegister"',
        "SAME(NOT_READY, CUDA_ERROR_NOT_READY)": "SAME(NOT_READY, CUDA_ERROR_NOT_FOUND)",
    }
    for right, wrong in planted.items():
        assert right in source
        assert not compiles(source.replace(right, wrong)), f"{wrong} was accepted"
    for right, wrong in {"int id;": "long id;", "PORTABLE = 1": "PORTABLE = 2"}.items():
        assert right in ours
        planted_header = source.replace('#include "emulator.h"', ours.replace(right, wrong))
        assert not compiles(planted_header), f"{wrong} was accepted"


def test_every_function_of_the_driver_that_is_called_is_checked_with_its_header() -> None:
    checked = (SOURCES / "header" / "check.c").read_text()
    for name in SIGNATURES:
        assert f"{name.removesuffix('_v2')};" in checked, name
