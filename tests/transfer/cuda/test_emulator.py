"""The real CudaTransfer, CudaDevice, Driver and kernels over the emulated driver, and faults planted in them."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffload.native import load
from kvoffload.transfer.cuda import cuda_device
from kvoffload.transfer.cuda.calls import Kernel
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.driver import Driver, DriverError
from kvoffload.transfer.cuda.kernels import kernel_code
from kvoffload.transfer.cuda.pages import PageTable
from tests.scale import SCALE
from tests.transfer.cuda import calls
from tests.transfer.cuda.emulator import PROFILES, Emulator, Timing, bytes_at
from tests.transfer.cuda.emulator.trials import Broken, Fault, MakeDevice, Plan, Trial, run_trial

pytestmark = pytest.mark.skipif(load("_transfer") is None, reason="needs native code")

NUM_TRIALS = 60
MOST_SEEDS = 150
"""How many trials a planted fault may survive. Each is found by one of the first 60."""


def test_trials(emulator_library: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(int(NUM_TRIALS * SCALE)):
        try:
            seen += run_trial(emulator_library, seed)
        except Exception as error:
            raise AssertionError(f"the trial of seed {seed} failed: {Plan.random(Random(seed))}") from error
    print(dict(seen))
    for what in (
        "loads",
        "stores",
        "blocks stored beside other ranks",
        "fences",
        "batches",
        "launches",
        "contexts that ended",
        "errors after which the engine has gone on",
    ):
        assert seen[what], f"no {what} in {seen}"


def plain_plan(seed: int) -> Plan:
    """Returns a plan without other faults than the planted one, where the kernel is used, without threads that copy."""
    return dataclasses.replace(
        Plan.random(Random(seed)),
        profile=PROFILES["H100"],
        fault=Fault.NONE,
        with_threads=False,
        registered=None,
        num_steps=8,
    )


class UncheckedDevice:
    """Makes devices that skip the check at the start, and whose kernels are changed."""

    def __init__(self, change: Callable[[Kernel], Kernel] = lambda kernel: kernel) -> None:
        self.change = change

    def __call__(self, tables: Sequence[PageTable], stream: Callable[[], int], library: str) -> CudaDevice:
        unchecked: type[CudaDevice] = type("Unchecked", (CudaDevice,), {"_check": lambda *arguments: None})
        device = unchecked(tables, 0, stream, library=library)
        device._kernels[:] = [kernel and self.change(kernel) for kernel in device._kernels]
        return device


def trials_until_caught(
    library: Path, make: MakeDevice, first: int = 0, kind: type[Trial] = Trial, says: str = "", **changes: Any
) -> None:
    """Runs trials, beginning with seed ``first``, until one finds the fault and ``says`` so."""
    for seed in range(first, first + MOST_SEEDS):
        trial = kind(library, seed, dataclasses.replace(plain_plan(seed), **changes), make)
        trial.wait_until_registered()
        try:
            trial.run()
        except Broken as broken:
            print(f"seed {seed}: {broken}")
            if says in str(broken):
                return
    raise AssertionError(f"{MOST_SEEDS} trials have not found the fault")


def test_trials_without_a_fault_pass_without_the_check_at_the_start(emulator_library: Path) -> None:
    """The control of the tests below."""
    for seed in range(10):
        Trial(emulator_library, seed, plain_plan(seed), UncheckedDevice()).run()


def code_with(right: str, wrong: str) -> Callable[[], bytes]:
    code = kernel_code().decode()
    assert right in code, right
    return lambda: code.replace(right, wrong).encode()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (", 32;\n\tadd.s64", ", 24;\n\tadd.s64"),  # the size of a piece
        ("+8];", "+16];"),  # stride and size are swapped
        ("+24];", "+16];"),  # the offset in the row
        ("ld.u8", "ld.u32"),  # misaligned
        ("setp.lt.u32", "setp.le.u32"),  # a word too many
        ("div.u32", "rem.u32"),
        ("and.b32  \t", "or.b32  \t"),
        ("%ctaid.x", "%tid.x"),
        ("shr.u32", "shl.b32"),
    ],
)
def test_faults_in_the_code_of_kernels_are_found(
    emulator_library: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    monkeypatch.setattr(cuda_device, "kernel_code", code_with(right, wrong))
    trials_until_caught(emulator_library, UncheckedDevice())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("st.v4.u32", "st.v2.u32"),
        ("div.u32", "divide.u32"),
        ("mul.lo.s32", "mul.s32"),
        ("[%rd9+8]", "[%rd9+8"),
        ("bra \t$L__BB0_2", "bra \t$L__BB0_99"),
        (".version 7.0", ".version 9.9"),
        (".target sm_75", ".target sm_130"),
    ],
)
def test_code_that_is_not_understood_is_refused(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    driver = Driver(0, emulator.path)
    driver.enter_thread()
    driver.load_module(kernel_code())
    with pytest.raises(DriverError, match="cuModuleLoadData failed"):
        driver.load_module(code_with(right, wrong)())


@pytest.mark.parametrize(
    "change",
    [
        lambda kernel: dataclasses.replace(kernel, num_pieces=kernel.num_pieces - 1),
        lambda kernel: dataclasses.replace(kernel, num_pieces=kernel.num_pieces + 1),
        lambda kernel: dataclasses.replace(kernel, pieces=kernel.pieces + 32),
        lambda kernel: dataclasses.replace(kernel, pieces=kernel.pieces + 8),
        lambda kernel: dataclasses.replace(kernel, gather=kernel.scatter, scatter=kernel.gather),
        lambda kernel: dataclasses.replace(kernel, threads=2 * kernel.threads),
    ],
)
def test_wrong_arguments_of_kernels_are_found(emulator_library: Path, change: Callable[[Kernel], Kernel]) -> None:
    trials_until_caught(emulator_library, UncheckedDevice(change))


def test_copies_by_addresses_of_the_host_are_found_where_the_device_has_others(
    emulator_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under WSL2, if the product did not ask for the attribute."""
    monkeypatch.setattr(Driver, "copies_registered_memory", True)
    profile = dataclasses.replace(PROFILES["WSL2"], registers=True)
    plan = dataclasses.replace(plain_plan(0), profile=profile)
    trial = Trial(emulator_library, 0, plan)
    trial.registration._thread.join()
    with pytest.raises(Broken, match="attribute 91"):
        trial.run()


@pytest.fixture
def driver(emulator: Emulator) -> Driver:
    driver = Driver(0, emulator.path)
    driver.enter_thread()
    return driver


def copy(driver: Driver, stream: int, target: int, source: int, nbytes: int) -> None:
    calls.copy(driver, stream, *(np.array([each]) for each in (target, source, nbytes)))


def test_work_runs_when_the_timing_says(emulator_library: Path) -> None:
    for timing in Timing:
        emulator = Emulator(emulator_library, timing=timing)
        driver = Driver(0, emulator.path)
        driver.enter_thread()
        stream, event = driver.new_stream(), driver.new_event()
        source, target = driver.allocate(64), driver.allocate_host(64)
        bytes_at(source, 64)[:] = 7
        copy(driver, stream, target, source, 64)
        calls.call(driver, "record", event, stream)
        is_done = bytes_at(target, 64).tolist() == [7] * 64
        assert is_done is (timing is Timing.EARLIEST) or timing is Timing.RANDOM
        for _ in range(1000):
            if calls.is_done(driver, event):
                break
        assert bytes_at(target, 64).tolist() == [7] * 64, "an event is reached after the work before it"


def test_one_copy_does_not_span_two_registrations(emulator: Emulator, driver: Driver) -> None:
    memory, stream = np.zeros(8192, np.uint8), driver.new_stream()
    source, start = driver.allocate(8192), int(memory.ctypes.data)
    driver.register(start, 4096)
    driver.register(start + 4096, 4096)
    copy(driver, stream, start + 4000, source, 96)
    assert not emulator.problems
    driver.stop_batches()
    with pytest.raises(DriverError, match=r"copy failed.*\(1\)"):
        copy(driver, stream, start + 4000, source, 97)
    assert "the target is not in one piece of memory" in emulator.problems[0]


def test_a_copy_that_runs_after_its_memory_is_unregistered_ends_the_context(emulator_library: Path) -> None:
    emulator = Emulator(emulator_library, timing=Timing.LATEST)
    driver = Driver(0, emulator.path)
    driver.enter_thread()
    memory = np.zeros(4096, np.uint8)
    driver.register(int(memory.ctypes.data), 4096)
    copy(driver, driver.new_stream(), int(memory.ctypes.data), driver.allocate(4096), 4096)
    driver.unregister(int(memory.ctypes.data))
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver.synchronize()
    assert emulator.has_ended
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver.new_stream()


def test_threads_that_did_not_enter_disturb_a_capture(emulator: Emulator, driver: Driver) -> None:
    emulator.capture(True)
    driver.allocate(16)
    errors: list[DriverError] = []

    def call_without_relaxing() -> None:
        driver.use_context()
        try:
            driver.allocate(16)
        except DriverError as error:
            errors.append(error)

    thread = threading.Thread(target=call_without_relaxing)
    thread.start()
    thread.join()
    assert [error.code for error in errors] == [900]


def test_the_batch_of_cuda_13_has_no_argument_for_the_failed_copy(emulator: Emulator, driver: Driver) -> None:
    emulator.be_version(13000)
    library, function, status = ctypes.CDLL(emulator.path), ctypes.c_void_p(), ctypes.c_int()
    for version, num_arguments in ((12080, 9), (13000, 8)):
        code = library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(function), version, ctypes.c_uint64(0), ctypes.byref(status)
        )
        assert code == 0
        assert function.value is not None
        source, target = driver.allocate(8), driver.allocate_host(8)
        bytes_at(source, 8)[:] = version % 251
        attributes, numbers = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 1), (ctypes.c_uint64 * 5)(target, source, 8, 0, 0)
        at = [ctypes.c_void_p(ctypes.addressof(numbers) + 8 * i) for i in range(5)]
        one = ctypes.c_size_t(1)
        arguments = [at[0], at[1], at[2], one, ctypes.byref(attributes), at[3], one, at[4]]
        call = ctypes.CFUNCTYPE(ctypes.c_int)(function.value)
        assert call(*arguments[: num_arguments - 1], ctypes.c_void_p(driver.new_stream())) == 0
        assert bytes_at(target, 8).tolist() == [version % 251] * 8
