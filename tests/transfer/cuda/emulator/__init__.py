"""A CUDA driver on the CPU, compiled from the C sources beside this file: see ``Emulator``."""

from __future__ import annotations

import ctypes
import enum
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCES = Path(__file__).parent


class Timing(enum.IntEnum):
    """When work runs that was issued on a stream."""

    EARLIEST = 0
    LATEST = 1
    """When a call waits for it. An event is reached after some queries."""
    RANDOM = 2
    """Beside calls, in any order that streams and events allow."""


class Memory(enum.IntEnum):
    """Kinds of memory that the device reaches."""

    DEVICE = 0
    PINNED = 1
    REGISTERED = 2


class Count(enum.IntEnum):
    COPIES = 0
    BATCHES = 1
    LAUNCHES = 2


@dataclass(frozen=True, slots=True)
class Profile:
    """A device and its driver, as far as the driver's answers differ."""

    version: int = 12080
    """CUDA 12.8 is 12080."""
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    host_pointers: bool = True
    """Whether the device copies to and from registered memory by the addresses of the host: not under WSL2."""
    registers: bool = True


PROFILES = {
    "A100": Profile(12040, (8, 0), 108),
    "H100": Profile(),
    "H100 MIG": Profile(13000, multiprocessors=16),
    "GH200": Profile(12090),
    "RTX 5090": Profile(13010, (12, 0), 170),
    "T4": Profile(12000, (7, 5), 40),
    "WSL2": Profile(12080, (8, 9), 76, host_pointers=False, registers=False),
}

_SIZE, _INT = ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "emu_reset": (ctypes.c_uint64, _INT, _SIZE, _INT),
    "emu_set_attribute": (_INT, _INT),
    "emu_capture": (_INT,),
    "emu_limit_registrations": (_SIZE, _SIZE),
    "emu_fail": (ctypes.c_char_p, _INT, _INT, _INT),
    "emu_fail_copy": (_INT,),
    "emu_tick": (_INT,),
}


class Emulator:
    """The library at ``path``, as new. One per process: another one starts the same library anew.

    Device memory is memory of this process, filled with 0xEE. Work on streams is deferred as ``timing`` says, torn into
    pieces, and done beside calls; ``queue_size`` operations fill the launch queue of a stream. ``seed`` chooses all
    orders. ``problems`` names what a caller did that a driver refuses, or punishes with the end of the context.
    """

    def __init__(
        self,
        path: Path,
        profile: Profile = PROFILES["H100"],
        *,
        seed: int = 0,
        timing: Timing = Timing.EARLIEST,
        queue_size: int = 1000,
    ) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        for name in ("emu_log", "emu_problems"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.emu_count.restype = ctypes.c_int64
        self._library.emu_bytes.restype = _SIZE
        self._library.emu_reset(seed, timing, queue_size, profile.version)
        for number, value in {
            16: profile.multiprocessors,
            20: 0,  # any number of processes may use the device
            41: 1,  # one address space
            75: profile.capability[0],
            76: profile.capability[1],
            91: profile.host_pointers,
            99: profile.registers,
        }.items():
            self._library.emu_set_attribute(number, value)

    @property
    def calls(self) -> list[str]:
        return str(self._library.emu_log().decode()).splitlines()

    @property
    def problems(self) -> list[str]:
        return str(self._library.emu_problems().decode()).splitlines()

    @property
    def has_ended(self) -> bool:
        """Whether an error has ended the context: every call fails from then on."""
        return ctypes.c_int.in_dll(self._library, "sticky").value != 0

    def count(self, which: Count) -> int:
        """Returns how many of these were issued."""
        return int(self._library.emu_count(which))

    def num_bytes(self, kind: Memory) -> int:
        """Returns how much memory of this kind there is now."""
        return int(self._library.emu_bytes(kind))

    def be_version(self, version: int) -> None:
        """Behaves like the driver of this CUDA version, such as 12080."""
        self._library.emu_set_version(version)

    def limit_registrations(self, each: int = 0, together: int = 0) -> None:
        """One registration of more than ``each`` bytes fails, and one that makes more than ``together`` bytes."""
        self._library.emu_limit_registrations(each, together)

    def fail(self, function: str, code: int, *, after: int = 0, is_sticky: bool = False) -> None:
        """Lets ``after`` calls of a function pass and fails all others, or all of any function if it is sticky."""
        self._library.emu_fail(function.encode(), code, after, is_sticky)

    def fail_copy(self, number: int) -> None:
        """Lets batches fail at this copy. -1: no more."""
        self._library.emu_fail_copy(number)

    def capture(self, captures: bool) -> None:
        """A thread of the engine begins or ends to capture a graph."""
        self._library.emu_capture(captures)

    def tick(self, steps: int = -1) -> None:
        """Runs so many pieces of work; -1: all."""
        self._library.emu_tick(steps)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory of a device, or any other, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def compile_emulator(folder: Path) -> Path | None:
    """Compiles the library into ``folder`` and returns its path; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = folder / "libcuda.so.1"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    # Bsymbolic: names of the emulator may be names of the C library, too.
    options = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic"]
    subprocess.run([compiler, *warnings, *options, *sorted(SOURCES.glob("*.c")), "-o", path], check=True)
    return path
