"""Whatever other processes leave in the files of a tier: no exception, no wrong bytes, nothing outside is touched, and
the budget holds."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np
import pytest

from kvoffload.abc import ConfigError, TierResult
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.checksum import sealed
from kvoffload.tiers.disk import offline
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import HEADER_BYTES, RECORD, RECORD_BYTES
from kvoffload.tiers.disk.journal import ENTRY, ENTRY_BYTES, JOURNAL_HEADER_BYTES, _checks
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.shared_dir.seats import BEAT_S, HEARTBEAT_NAME, SILENT_S
from kvoffload.tiers.shared_dir.writer import LOOK_AROUND_S
from tests.clock import Clock
from tests.scale import SCALE
from tests.sim.executor import SteppedExecutor
from tests.tiers.disk.rig import FINGERPRINT, PAGE, content, key
from tests.tiers.shared_dir.rig import Server, capacity

EXTREMES = (
    0,
    1,
    2,
    7,
    255,
    4096,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
NUMBERS = ("1e400", "-1e400", "NaN", "-1", "9" * 3000, "1e9", "null", '"x"', "[]", "true", "1.5")
NAMES = (
    "lock",
    "heartbeat",
    "index",
    "recency",
    "journal",
    "identity",
    "slab-00000",
    "slab-00001",
    "slab-99999",
    "clock",
)
NUM_SLOTS = 24
SLAB_BYTES = 8 * PAGE


class Vandal:
    """Changes files below ``root``. Links point to ``outside``, which must stay as it is."""

    def __init__(self, root: Path, outside: Path, rng: Random) -> None:
        self.root = root
        self.outside = outside
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.stray_bytes = 0
        outside.mkdir(exist_ok=True)
        (outside / "file").write_bytes(b"not ours")

    def strike(self) -> None:
        kinds = (
            self.seal,
            self.seal,
            self.spoil,
            self.resize,
            self.replace,
            self.replace,
            self.describe,
            self.disown,
            self.age,
        )
        kind = self.rng.choice(kinds)
        path = self.pick()
        try:
            self.done[kind.__name__ + ("" if kind(path) is None else " in vain")] += 1
        except OSError:
            self.done["failed"] += 1

    def pick(self) -> Path:
        """Returns a file or folder below the root, which need not exist."""
        if self.rng.random() < 0.1:
            folder = self.rng.choice([self.root, *(each.parent for each in self.find("*/*"))])
            return folder / self.rng.choice((*NAMES, f"writer-{self.rng.randrange(5)}", FINGERPRINT, "f" * 64))
        return self.rng.choice(self.find("*", "*/*", "*/*/*") or [self.root / "file"])

    def find(self, *patterns: str) -> list[Path]:
        found = (each for pattern in patterns for each in self.root.glob(pattern))
        return sorted(each for each in found if not each.parent.resolve().is_relative_to(self.outside.resolve()))

    def find_files(self, name: str) -> list[Path]:
        found = self.find(name, f"*/{name}", f"*/*/{name}")
        return [each for each in found if each.is_file() and not each.is_symlink()]

    def seal(self, path: Path) -> object:
        """Nonsense with right checksums."""
        if path.is_symlink() or not path.is_file() or path.name not in ("index", "journal"):
            path = self.rng.choice(self.find_files("index") or [path])
        if not path.is_file() or path.is_symlink() or path.stat().st_size < HEADER_BYTES:
            return "in vain"
        if self.rng.random() < 0.4 and (path.parent / "journal").is_file():
            path = path.parent / "journal"
        with path.open("r+b") as file:
            raw = bytearray(file.read(HEADER_BYTES))
            what = self.rng.random()
            if what < 0.5:
                offset = self.rng.choice((8, 12, 16, 24, 32, 80, 88, 96, 97, 105))
                size = self.rng.choice(("<Q", "<I", "<B"))
                value = self.rng.choice(EXTREMES) & (1 << 8 * struct.calcsize(size)) - 1
                struct.pack_into(size, raw, offset, value)
                file.seek(0)
                file.write(sealed(bytes(raw[:-8])).tobytes())
            elif path.name == "index":
                self._seal_record(file)
            else:
                self._seal_entry(file, raw)
        return None

    def _seal_record(self, file: BinaryIO) -> None:
        slot = self.rng.randrange(NUM_SLOTS)
        file.seek(HEADER_BYTES + slot * RECORD_BYTES)
        record = np.frombuffer(file.read(RECORD_BYTES).ljust(RECORD_BYTES, b"\0"), dtype=RECORD).copy()
        field = self.rng.choice(
            ("key_bytes", "sequence", "unused", "stored_at", "generation", "payload_checksum", "key")
        )
        if field == "key":
            record[field] = np.void(self.rng.randbytes(64))
        else:
            record[field] = self.rng.choice(EXTREMES) & (1 << 8 * record.dtype[field].itemsize) - 1
        file.seek(HEADER_BYTES + slot * RECORD_BYTES)
        file.write(sealed(record.tobytes()[:-8]).tobytes())

    def _seal_entry(self, file: BinaryIO, raw: bytearray) -> None:
        """An entry that follows the last one, and the header that counts it."""
        _, _, count, epoch, _, head = struct.unpack_from("<8sIIQQQ", raw)
        if not count:
            return
        entry = np.zeros(1, dtype=ENTRY)
        entry["number"], entry["has_block"] = head, self.rng.choice((0, 1, 7))
        entry["slot"] = self.rng.choice((0, 1, 5, NUM_SLOTS, 1 << 22, (1 << 32) - 1))
        entry["digest"] = self.rng.choice(EXTREMES)
        entry["check"] = _checks(entry, epoch)
        file.seek(JOURNAL_HEADER_BYTES + head % count * ENTRY_BYTES)
        file.write(entry.tobytes())
        struct.pack_into("<Q", raw, 32, (head + 1) & (1 << 64) - 1)
        file.seek(0)
        file.write(sealed(bytes(raw[:-8])).tobytes())

    def spoil(self, path: Path) -> object:
        if path.is_symlink() or not path.is_file():
            return "in vain"
        with path.open("r+b") as file:
            file.seek(self.rng.randrange(max(1, path.stat().st_size)))
            file.write(self.rng.randbytes(self.rng.choice((1, 8, 200))))
        return None

    def resize(self, path: Path) -> object:
        if path.is_symlink() or not path.is_file():
            return "in vain"
        size = path.stat().st_size
        os.truncate(path, self.rng.choice((0, size // 2, size - 1 if size else 0, size + 4096, 1 << 33, 1 << 43)))
        return None

    def replace(self, path: Path) -> object:
        what = self.rng.choice(
            ("nothing", "link", "link to folder", "dangling", "folder", "nested", "pipe", "socket", "file", "device")
        )
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
        if what.startswith("link"):
            path.symlink_to(self.outside / ("file" if what == "link" else ""))
        elif what == "dangling":
            path.symlink_to(self.outside / "absent")
        elif what == "folder":
            path.mkdir()
            (path / "file").write_bytes(b"mine")
        elif what == "nested":
            path.mkdir()
            nest(path, 1100)
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                os.chdir(path.parent)
                sock.bind(path.name)
                os.chdir("/")
        elif what == "file":
            path.write_bytes(self.rng.randbytes(self.rng.choice((0, 10, 5000))))
        elif what == "device" and os.geteuid() == 0:
            os.mknod(path, 0o20600, os.makedev(1, 5))
        self.done[f"replaced by {what}"] += 1
        return None

    def describe(self, path: Path) -> object:
        """JSON with nonsense."""
        files = self.find_files(HEARTBEAT_NAME) + self.find_files("identity")
        if not files:
            return "in vain"
        path = self.rng.choice(files)
        with path.open("rb") as file:
            text = file.read(4096).decode("utf-8", "replace").strip("\0 \n")
        what = self.rng.random()
        if what < 0.2:
            text = self.rng.choice(("[" * 4096, "{" * 4096, '{"a":' * 700, "", "\0" * 4096, "null", "9" * 4000))
        else:
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError):
                fields = {"version": 1}
            fields = fields if isinstance(fields, dict) and fields else {"version": 1}
            name = self.rng.choice(sorted(fields))
            rest = {each: value for each, value in fields.items() if each != name}
            text = json.dumps(rest)[:-1] + f', "{name}": {self.rng.choice(NUMBERS)}}}'
        path.write_bytes(text.encode("utf-8", "replace").ljust(4096))
        return None

    def disown(self, path: Path) -> object:
        if path.is_symlink() or not path.exists():
            return "in vain"
        if self.rng.random() < 0.5 and os.geteuid() == 0:
            os.chown(path, 4321, 4321)
        else:
            os.chmod(path, self.rng.choice((0, 0o777, 0o444, 0o700)))
        return None

    def age(self, path: Path) -> object:
        if path.is_symlink() or not path.exists():
            return "in vain"
        when = self.rng.choice((0, 1, 2**33, -(2**31)))
        os.utime(path, (when, when))
        return None

    def check(self) -> None:
        assert [each.name for each in self.outside.iterdir()] == ["file"], "something was made outside"
        assert (self.outside / "file").read_bytes() == b"not ours"


def nest(path: Path, depth: int) -> None:
    """Makes folders inside each other."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def remove_folder(path: Path) -> None:
    """Removes a folder, however deep it is."""
    subprocess.run(["rm", "-rf", path], check=True)


def look_at(path: Path, rng: Random) -> None:
    """The offline tools end with a report or one line."""
    with suppress(offline.InspectError):
        offline.inspect(path, lambda done, total: None)
    if rng.random() < 0.1:
        with suppress(offline.InspectError):
            offline.clear(path)


def budget_of(folder: Path) -> int:
    """Returns the bytes that the tier's own files take in a seat."""
    return sum(
        each.lstat().st_blocks * 512
        for each in [folder, *folder.glob("*"), *folder.glob("*/*")]
        if each.is_file() and not each.is_symlink()
    )


@pytest.mark.parametrize("seed", range(int(4 * SCALE)))
def test_a_shared_directory_survives_what_others_leave_in_it(tmp_path: Path, seed: int) -> None:
    shared_fuzz(tmp_path, seed)


def shared_fuzz(tmp_path: Path, seed: int, num_strikes: int = 12) -> Counter[str]:
    rng, clock, path = Random(seed), Clock(1000.0), tmp_path / "shared"
    settings: dict[str, Any] = {
        "slab_bytes": SLAB_BYTES,
        "capacity_bytes": capacity(NUM_SLOTS, num_slabs=NUM_SLOTS // 8),
    }

    def serve() -> Server:
        server = Server(path, time=clock, seed=rng.randrange(1 << 30), boot=rng.choice("ab"), **settings)
        server.write(*rng.sample(range(80), 10))
        return server

    servers = [serve() for _ in range(3)]
    vandal = Vandal(path, tmp_path / "outside", rng)
    try:
        for _ in range(num_strikes):
            for _ in range(rng.choice((1, 1, 3))):
                vandal.strike()
            if rng.random() < 0.3:
                server = servers.pop(rng.randrange(len(servers)))
                if rng.random() < 0.5:
                    server.tier.close()
                else:
                    server.kill()
                    server.tier.others.follower.close()
                    age_all(path, SILENT_S)
                servers.append(serve())
                vandal.done["starts"] += 1
                seat = path / servers[-1].tier.seat.name
                assert budget_of(seat / FINGERPRINT) <= settings["capacity_bytes"]
            clock.now += rng.choice((BEAT_S, LOOK_AROUND_S))
            for server in servers:
                server.background()
                names = rng.sample(range(80), 20)
                errors = server.read(*names)
                vandal.done["reads"] += list(errors.values()).count(None)
                vandal.done["reads that failed"] += len(errors) - list(errors.values()).count(None)
                vandal.done["writes"] += len(server.write(*rng.sample(range(80), 5)))
            look_at(path, rng)
            vandal.check()
    finally:
        for server in servers:
            server.tier.close()
        remove_folder(path)
    return vandal.done


def age_all(path: Path, seconds: float) -> None:
    for each in path.glob(f"*/{HEARTBEAT_NAME}"):
        if not each.is_symlink():
            when = each.stat().st_mtime - seconds
            os.utime(each, (when, when))


@pytest.mark.parametrize("seed", range(int(4 * SCALE)))
def test_a_disk_tier_survives_what_others_leave_in_its_directory(tmp_path: Path, seed: int) -> None:
    disk_fuzz(tmp_path, seed)


def disk_fuzz(tmp_path: Path, seed: int, num_strikes: int = 20) -> Counter[str]:
    rng, path = Random(seed), tmp_path / "disk"
    whole = capacity(NUM_SLOTS, num_slabs=NUM_SLOTS // 8)
    pools = make_pools(64, PAGE)
    vandal: Vandal | None = None
    done: Counter[str] = Counter()
    try:
        for life in range(num_strikes // 4):
            budget = rng.choice((whole, whole, capacity(NUM_SLOTS // 2, num_slabs=2)))
            executor = SteppedExecutor(seed=seed)
            try:
                tier = DiskTier(
                    DirectoryStorage(path),
                    pools,
                    DiskSettings(FINGERPRINT, budget, slab_bytes=SLAB_BYTES),
                    executor=executor,
                )
            except (ConfigError, OSError) as error:
                done[f"starts refused: {type(error).__name__}"] += 1
                assert vandal is not None
                if rng.random() < 0.5 or life % 3 == 0:
                    remove_folder(path)
                else:
                    vandal.strike()
                continue
            done["starts"] += 1
            tier.check_integrity()
            assert du_of(path) <= tier.files.used_bytes <= budget
            vandal = vandal or Vandal(path, tmp_path / "outside", rng)
            try:
                for _ in range(4):
                    names = rng.sample(range(60), 20)
                    for i, name in enumerate(names):
                        pools[0][i] = content(name)
                    tier.write([key(name) for name in names], np.arange(20))
                    run(tier, executor)
                    vandal.strike()
                    names = rng.sample(range(60), 30)
                    tier.read([key(name) for name in names], 30 + np.arange(30))
                    good = [result.key for result in run(tier, executor) if result.ok]
                    for i, name in enumerate(names):
                        if key(name) in good:
                            assert np.array_equal(pools[0][30 + i], content(name)), "wrong bytes"
                    done["reads"] += len(good)
                    tier.touch([key(name) for name in names])
                    tier.check_integrity()
            finally:
                tier.close()
            look_at(path, rng)
            vandal.check()
    finally:
        remove_folder(path)
    return done + (vandal.done if vandal else Counter())


def run(tier: DiskTier, executor: SteppedExecutor) -> list[TierResult]:
    results = []
    while tier.has_jobs:
        executor.drain()
        results += tier.poll()
    return results


def du_of(path: Path) -> int:
    """Returns the bytes that all files take, however deep they are."""
    return sum(each.lstat().st_blocks * 512 for each in path.glob("*/*") if not each.is_dir())
