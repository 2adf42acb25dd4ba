"""``kvoffload disk`` on directories that a disk tier has written: intact, damaged and in use."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload import cli
from kvoffload.abc import LookupState
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk import offline as tools
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import HEADER_BYTES, IDENTITY_NAME, INDEX_NAME, RECORD_BYTES, record_offset, slab_name
from kvoffload.tiers.disk.identities import write_identity
from kvoffload.tiers.disk.offline import FolderReport, Progress
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.shared_dir.seats import CLOCK_NAME, HEARTBEAT_NAME, SILENT_S
from tests.tiers.disk.rig import FINGERPRINT, Rig, key
from tests.tiers.shared_dir.rig import Server

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")

OTHER = "cd" * 32
NUM_BLOCKS = 20
SLOT_BYTES = 4096
BLOCK_BYTES = 2 * SLOT_BYTES
"""Two ranks."""
SLOTS_PER_SLAB = 8
SLAB_BYTES = SLOTS_PER_SLAB * BLOCK_BYTES
DEADLINE_S = 60.0


def fill(path: Path, fingerprint: str = FINGERPRINT) -> Rig:
    """Returns a server whose disk tier in ``path`` has written blocks 0, 1 and so on."""
    rig = Rig(path, SLOT_BYTES, SLOT_BYTES, fingerprint=fingerprint, capacity_bytes=4 << 20, slab_bytes=SLAB_BYTES)
    rig.open()
    rig.write(*range(NUM_BLOCKS))
    return rig


@pytest.fixture(scope="module")
def left_by_a_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "cache"
    fill(path).tier.close()
    return path


@pytest.fixture
def directory(left_by_a_server: Path, tmp_path: Path) -> Path:
    """The directory of a server that has ended."""
    return shutil.copytree(left_by_a_server, tmp_path / "cache")


def invoke(*args: object, answer: str | None = None) -> Any:
    return testing.CliRunner().invoke(cli.group(), ["disk", *map(str, args)], input=answer)


def as_json(*args: object, status: int = 0) -> Any:
    result = invoke(*args, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def only_folder(path: Path) -> FolderReport:
    ((folder,),) = [part.folders for part in tools.inspect(path)]
    return folder


def verified(path: Path, progress: Progress = lambda done, total: None) -> FolderReport:
    ((folder,),) = [part.folders for part in tools.inspect(path, progress)]
    return folder


def at_first(change: Callable[[], object]) -> Progress:
    """Returns what changes the directory when its indexes were read and before the first block is."""

    def progress(done: int, total: int) -> None:
        if not done:
            change()

    return progress


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def slot_of(path: Path, name: int) -> int:
    """Returns the slot of a block according to its record."""
    index = (path / FINGERPRINT / INDEX_NAME).read_bytes()
    return (index.index(key(name), HEADER_BYTES) - HEADER_BYTES) // RECORD_BYTES


def spoil(path: Path, name: int) -> int:
    """Flips a bit of a block's second rank. Returns the slot."""
    slot = slot_of(path, name)
    slab, at = divmod(slot, SLOTS_PER_SLAB)
    flip(path / FINGERPRINT / slab_name(slab), at * BLOCK_BYTES + SLOT_BYTES + 17)
    return slot


def contents(path: Path) -> dict[str, object]:
    """Returns modification time and bytes of everything below ``path``."""
    return {
        str(file.relative_to(path)): (file.lstat().st_mtime_ns, file.read_bytes() if file.is_file() else None)
        for file in path.rglob("*")
    }


# inspect


def test_inspect_shows_the_blocks_of_a_server(directory: Path) -> None:
    (part,) = as_json("inspect", directory)["parts"]
    assert (part["path"], part["in_use"], part["pid"], part["findings"]) == ("", False, None, [])
    (folder,) = part["folders"]
    files = list((directory / FINGERPRINT).iterdir())
    assert folder["fingerprint"] == folder["path"] == FINGERPRINT
    assert (folder["num_blocks"], folder["block_bytes"]) == (NUM_BLOCKS, BLOCK_BYTES)
    assert folder["allocated_bytes"] == sum(512 * file.stat().st_blocks for file in files)
    assert time.time() - DEADLINE_S < folder["oldest"] <= folder["newest"] <= time.time()
    assert (folder["transient"], folder["findings"]) == (False, [])
    output = " ".join(invoke("inspect", directory).stdout.split())
    assert f"{directory.name}: 20 blocks (" in output
    for words in ("No server uses it.", "5a5a5a5a5a5a 20", "Nothing is wrong."):
        assert words in output


def test_inspect_and_verify_change_nothing(directory: Path) -> None:
    spoil(directory, 5)
    before = contents(directory)
    invoke("inspect", directory)
    assert invoke("verify", directory).exit_code == 1
    assert contents(directory) == before


def test_a_directory_in_use_is_reported_and_can_be_inspected(tmp_path: Path) -> None:
    server = fill(tmp_path / "cache")
    (part,) = as_json("inspect", tmp_path / "cache")["parts"]
    assert (part["in_use"], part["pid"]) == (True, os.getpid())
    assert part["folders"][0]["num_blocks"] == NUM_BLOCKS
    assert f"In use by process {os.getpid()}" in invoke("inspect", tmp_path / "cache").stdout
    assert invoke("verify", tmp_path / "cache").exit_code == 0
    server.tier.close()
    assert not as_json("inspect", tmp_path / "cache")["parts"][0]["in_use"]


def test_blocks_of_changed_weights_are_marked_transient(tmp_path: Path) -> None:
    server = fill(tmp_path / "cache")
    server.tier.reset()
    server.write(0, 1)
    server.tier.close()
    folder = only_folder(tmp_path / "cache")
    assert folder.transient
    assert folder.num_blocks == 2, "blocks from before the reset are invalid"
    assert "transient" in invoke("inspect", tmp_path / "cache").stdout


def test_engines_of_one_server(tmp_path: Path) -> None:
    pools = make_pools(NUM_BLOCKS, SLOT_BYTES)
    tiers = [
        open_disk_tier(tmp_path / "cache", 8 << 20, TierContext(pools, FINGERPRINT, engine=i, engines=2))
        for i in range(2)
    ]
    for i, tier in enumerate(tiers):
        keys = [key(name) for name in range(3 + i)]
        while not (tier.contains(keys) == LookupState.HIT).all():
            # None is taken on before it has grown.
            tier.write(keys, np.arange(len(keys)))
            tier.wait(0.01)
            tier.poll()
    tiers[0].close()
    whole, *engines = tools.inspect(tmp_path / "cache")
    assert (whole.path, whole.folders, whole.findings) == ("", [], [])
    assert [part.path for part in engines] == ["engine-0", "engine-1"]
    assert [part.in_use for part in engines] == [False, True]
    assert [part.folders[0].num_blocks for part in engines] == [3, 4]
    assert [part.folders[0].path for part in engines] == [f"engine-{i}/{FINGERPRINT}" for i in range(2)]
    before = contents(tmp_path / "cache")
    refused = invoke("clear", tmp_path / "cache", "--yes")
    assert refused.exit_code == 2
    assert f"in use by process {os.getpid()}" in " ".join(refused.output.split())
    assert contents(tmp_path / "cache") == before, "nothing is removed"
    tiers[1].close()
    assert invoke("clear", tmp_path / "cache", "--yes").exit_code == 0
    assert list((tmp_path / "cache").glob("engine-*/*/*")) == []


# Damage


def test_a_damaged_record_is_no_block(directory: Path) -> None:
    flip(directory / FINGERPRINT / INDEX_NAME, record_offset(slot_of(directory, 7)))
    folder = only_folder(directory)
    assert folder.num_blocks == NUM_BLOCKS - 1
    assert folder.findings == ["1 damaged record in the index"]


def test_an_index_without_a_header(directory: Path) -> None:
    os.truncate(directory / FINGERPRINT / INDEX_NAME, HEADER_BYTES - 1)
    (finding,) = only_folder(directory).findings
    assert "its blocks are lost" in finding
    output = " ".join(invoke("verify", directory).stdout.split())
    assert finding in output
    assert "No other block is bad: 0 blocks read" in output
    assert as_json("verify", directory, status=1)["parts"][0]["folders"][0]["is_lost"]


def test_an_index_that_ends_early(directory: Path) -> None:
    os.truncate(directory / FINGERPRINT / INDEX_NAME, record_offset(11) + 50)
    assert only_folder(directory).num_blocks == 11
    assert invoke("verify", directory).exit_code == 0


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("slab-00000")])
def test_an_index_that_is_not_a_regular_file(directory: Path, make: Callable[[Path], None]) -> None:
    index = directory / FINGERPRINT / INDEX_NAME
    index.unlink()
    make(index)
    (finding,) = only_folder(directory).findings
    assert "its blocks are lost" in finding


def test_an_index_of_another_fingerprint(directory: Path) -> None:
    (directory / FINGERPRINT).rename(directory / OTHER)
    assert only_folder(directory).findings == ["its blocks are lost: the index belongs to another fingerprint"]


@pytest.mark.parametrize("seed", range(50))
def test_a_fuzzed_directory_never_gives_a_traceback(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 20)):
        path = directory / FINGERPRINT / rng.choice([INDEX_NAME, INDEX_NAME, slab_name(0), slab_name(1)])
        size = path.stat().st_size if path.exists() else 0
        what = rng.random()
        if what < 0.7 and size:
            flip(path, rng.randrange(size))
        elif what < 0.8:
            path.write_bytes(rng.randbytes(rng.randrange(20_000)))
        elif what < 0.9 and size:
            os.truncate(path, rng.randrange(2 * size))
        else:
            path.unlink(missing_ok=True)
    folder = verified(directory)
    assert len(folder.bad) <= folder.num_verified == folder.num_blocks <= NUM_BLOCKS
    is_wrong = bool(folder.bad or folder.is_lost)
    assert [invoke(command, directory).exit_code for command in ("inspect", "verify")] == [0, is_wrong]


@pytest.mark.parametrize("size", [None, 3 * BLOCK_BYTES + 1])
def test_blocks_past_the_end_of_the_slabs_are_lost_and_not_bad(directory: Path, size: int | None) -> None:
    slab = directory / FINGERPRINT / slab_name(1)
    slab.unlink() if size is None else os.truncate(slab, size)
    left = SLOTS_PER_SLAB + (0 if size is None else 3)
    folder = verified(directory)
    lost = NUM_BLOCKS - left
    assert folder.findings == [f"slab-00001 is missing or too short: {lost} blocks lost, in it or after it"]
    assert (folder.num_blocks, folder.num_verified, folder.bad) == (left, left, [])


def test_holes_of_a_sparse_index_are_skipped(directory: Path) -> None:
    """The index claims to be 1 TiB long."""
    os.truncate(directory / FINGERPRINT / INDEX_NAME, 1 << 40)
    folder = verified(directory)
    assert (folder.num_blocks, folder.num_verified, folder.findings) == (NUM_BLOCKS, NUM_BLOCKS, [])


# verify


def test_verify_reads_every_block(directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = verified(directory, lambda done, total: calls.append((done, total)))
    assert (folder.num_verified, folder.bad, folder.num_changed, folder.findings) == (NUM_BLOCKS, [], 0, [])
    assert calls == [(i * BLOCK_BYTES, NUM_BLOCKS * BLOCK_BYTES) for i in range(NUM_BLOCKS + 1)]
    assert "No block is bad: 20 blocks read." in invoke("verify", directory).stdout


def test_verify_names_the_bad_blocks(directory: Path) -> None:
    names = (4, 17)
    slots = [spoil(directory, name) for name in names]
    (folder,) = as_json("verify", directory, status=1)["parts"][0]["folders"]
    assert {(block["slot"], block["key"]) for block in folder["bad"]} == {
        (slot, key(name).hex()) for slot, name in zip(slots, names, strict=True)
    }
    done = invoke("verify", directory)
    assert done.exit_code == 1
    assert "2 blocks bad: 20 blocks read" in done.stdout
    assert f"slot {slots[0]}: its checksum is wrong; key {key(4).hex()}" in done.stdout


def test_a_block_in_the_slot_of_another_is_bad(directory: Path) -> None:
    slab = directory / FINGERPRINT / slab_name(0)
    data = slab.read_bytes()
    slab.write_bytes(data[BLOCK_BYTES : 2 * BLOCK_BYTES] + data[:BLOCK_BYTES] + data[2 * BLOCK_BYTES :])
    assert [block.slot for block in verified(directory).bad] == [0, 1]


def test_a_block_that_a_server_replaces_meanwhile_is_not_bad(tmp_path: Path) -> None:
    """The server replaces all blocks after the index was read and before the first payload is."""
    path = tmp_path / "cache"
    server = fill(path)
    room = server.tier.files.budget.num_slots
    server.write(*range(room))

    def payloads() -> list[bytes]:
        return [slab.read_bytes() for slab in sorted((path / FINGERPRINT).glob("slab-*"))]

    before = payloads()
    folder = verified(path, at_first(lambda: [server.write(*range(i * room, (i + 1) * room)) for i in (1, 2)]))
    assert payloads() != before
    assert folder.bad == []
    assert folder.num_changed > NUM_BLOCKS
    server.tier.close()


def test_blocks_that_a_server_removes_meanwhile_are_not_bad(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    server = fill(path)

    def change() -> None:
        for name in range(2, 7):
            spoil(path, name)
        server.tier.delete([key(name) for name in range(6)])
        server.tier.close()

    folder = verified(path, at_first(change))
    # Payloads of removed blocks are still intact unless they were spoiled.
    assert (folder.num_verified, folder.num_changed) == (NUM_BLOCKS - 4, 4)
    assert [block.key for block in folder.bad] == [key(6).hex()], "only the record of this block has not changed"


def test_blocks_of_a_slab_that_a_server_removes_meanwhile_are_not_bad(directory: Path) -> None:
    slab = directory / FINGERPRINT / slab_name(2)
    folder = verified(directory, at_first(slab.unlink))
    assert folder.bad == []
    assert (folder.num_verified, folder.num_changed) == (2 * SLOTS_PER_SLAB, NUM_BLOCKS - 2 * SLOTS_PER_SLAB)


# clear


def test_clear_removes_all_blocks_and_a_server_starts_anew(directory: Path) -> None:
    allocated = only_folder(directory).allocated_bytes
    result = as_json("clear", directory, "--yes")
    assert result["nbytes"] == allocated > 0
    assert (result["fingerprints"], result["left"]) == ([FINGERPRINT], [])
    assert [file.name for file in directory.iterdir()] == ["lock"]
    assert as_json("inspect", directory)["parts"][0]["folders"] == []
    fill(directory).tier.close()
    assert only_folder(directory).num_blocks == NUM_BLOCKS


def test_clear_asks_first(directory: Path) -> None:
    before = contents(directory)
    refused = invoke("clear", directory, answer="n\n")
    assert refused.exit_code == 1
    assert "Remove 20 blocks (" in refused.output
    assert invoke("clear", directory).exit_code == 1, "the question gets no answer"
    assert contents(directory) == before
    assert invoke("clear", directory, answer="y\n").exit_code == 0
    assert not (directory / FINGERPRINT).exists()


def test_clear_of_one_fingerprint(directory: Path) -> None:
    fill(directory, OTHER).tier.close()
    result = as_json("clear", directory, "--fingerprint", "CDCD", "--yes")
    assert result["fingerprints"] == [OTHER]
    assert only_folder(directory).fingerprint == FINGERPRINT
    assert verified(directory).num_verified == NUM_BLOCKS


@pytest.mark.parametrize("digits", ["ef", "", "abc"])
def test_clear_needs_the_beginning_of_exactly_one_fingerprint(directory: Path, digits: str) -> None:
    fill(directory, OTHER).tier.close()
    before = contents(directory)
    result = invoke("clear", directory, "--fingerprint", digits, "--yes")
    assert result.exit_code == 2
    assert OTHER in result.output
    assert contents(directory) == before


@pytest.mark.usefixtures("impatient")
def test_no_server_can_start_before_clear_has_ended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = []
    remove = os.unlink

    def start_a_server(name: str, **options: Any) -> None:
        with pytest.raises(ValueError, match="in use"):
            fill(directory)
        refusals.append(name)
        remove(name, **options)

    monkeypatch.setattr(os, "unlink", start_a_server)
    tools.clear(directory)
    assert len(refusals) > 1
    monkeypatch.undo()
    fill(directory).tier.close()


def test_clear_names_a_file_that_cannot_be_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    monkeypatch.setattr(os, "unlink", refuse)
    result = invoke("clear", directory, "--yes")
    assert result.exit_code == 2
    assert "Read-only file system (index)" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["\x1b[31mred\x1b]0;title\x07", "two\nlines", "\udcff", "\x9b2J"])
def test_names_of_files_reach_the_terminal_escaped(directory: Path, name: str) -> None:
    (directory / FINGERPRINT / name).touch()
    (directory / name).touch()
    output = invoke("clear", directory, "--yes").output
    assert output.isascii()
    assert all(line.isprintable() for line in output.splitlines())
    assert repr(name)[1:-1] in "".join(output.split("\n"))
    assert (directory / FINGERPRINT / name).exists()


def test_clear_leaves_files_that_are_not_the_tiers(directory: Path, tmp_path: Path) -> None:
    folder = directory / FINGERPRINT
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / INDEX_NAME).write_text("mine")
    (directory / OTHER).symlink_to(precious)
    (directory / "notes.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    (folder / slab_name(99)).symlink_to(precious / INDEX_NAME)
    (folder / slab_name(98)).mkdir()
    result = as_json("clear", directory, "--yes")
    assert result["left"] == [f"{FINGERPRINT}/{name}" for name in ("notes.txt", slab_name(98), slab_name(99))]
    assert (precious / INDEX_NAME).read_text() == (directory / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(folder)) == ["notes.txt", slab_name(98), slab_name(99)]
    assert sorted(os.listdir(directory)) == sorted([FINGERPRINT, OTHER, "lock", "notes.txt"])


# Directories of something else


@pytest.mark.parametrize("command", ["inspect", "verify", "clear"])
@pytest.mark.parametrize("kind", ["missing", "empty", "strange", "file", "link"])
def test_a_directory_that_is_not_a_disk_tiers_is_refused(
    directory: Path, tmp_path: Path, command: str, kind: str
) -> None:
    path = tmp_path / kind
    if kind in ("empty", "strange"):
        path.mkdir()
    if kind == "strange":
        (path / "slab-00000").touch()
    elif kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to(directory)
    result = invoke(command, path, *(["--yes"] if command == "clear" else []))
    assert result.exit_code == 2
    assert f"kvoffload disk {command}: " in result.output
    assert "name the directory of a disk tier or of a shared_dir tier" in " ".join(result.output.split())
    assert path.exists() is (kind != "missing")


def test_fingerprints_are_shown_in_words(tmp_path: Path) -> None:
    mine = {"model": "llama", "dtype": "bfloat16", "weights": "digest:1", "installed software": "torch=2"}
    for fingerprint, identity in ((FINGERPRINT, mine), ("ef" * 32, {})):
        fill(tmp_path / "cache", fingerprint).tier.close()
        write_identity(DirectoryStorage(tmp_path / "cache"), fingerprint, identity)
    found = invoke("inspect", tmp_path / "cache").stdout
    lines = [line for line in found.splitlines() if line[12:13] == ":"]
    assert lines == [f"{FINGERPRINT[:12]}: model llama, dtype bfloat16"]
    (part,) = as_json("inspect", tmp_path / "cache")["parts"]
    assert {folder["fingerprint"]: folder["identity"] for folder in part["folders"]}[FINGERPRINT] == mine


def test_an_identity_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    context = TierContext(make_pools(1, SLOT_BYTES), FINGERPRINT, identity={"model": "llama"})
    open_disk_tier(tmp_path / "cache", 8 << 20, context).close()
    path = tmp_path / "cache" / FINGERPRINT / IDENTITY_NAME
    for text in ('{"model": "\\u001b[2J"}', "[" * 10_000, "{"):
        path.write_text(text)
        result = invoke("inspect", tmp_path / "cache")
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout


# The directory of a shared_dir tier.

pytest.importorskip("rich")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def servers(path: Path) -> Iterator[list[Server]]:
    """Three servers: one is serving, one was killed on another machine long ago, one has ended."""
    found = [Server(path, boot=boot, seed=i) for i, boot in enumerate("abc")]
    found[0].write(1, 2, 3)
    found[1].write(4)
    for server in found:
        server.background()
    found[1].kill()
    silent = path / "writer-1" / HEARTBEAT_NAME
    os.utime(silent, (silent.stat().st_mtime - 2 * SILENT_S,) * 2)
    found[2].tier.close()
    yield found
    for server in found:
        server.tier.close()


def run(*arguments: str) -> Any:
    return testing.CliRunner(env={"COLUMNS": "140"}).invoke(cli.group(), ["disk", *arguments])


def test_inspect_shows_a_row_per_writer(path: Path, servers: list[Server]) -> None:
    result = run("inspect", str(path))
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if line.startswith("writer-")]
    assert [(row[0], *row[-2:]) for row in rows] == [
        (f"writer-0/{FINGERPRINT[:12]}", "host-a", "serving"),
        (f"writer-1/{FINGERPRINT[:12]}", "host-b", "silent"),
        (f"writer-2/{FINGERPRINT[:12]}", "host-c", "ended"),
    ]
    assert "4 blocks (" in result.output
    assert "In use by process 1 on host-a (writer-0)." in " ".join(result.output.split())
    assert "Nothing is wrong." in result.output
    report = json.loads(run("inspect", str(path), "--json").output)
    parts = {part["path"]: part for part in report["parts"]}
    assert [(part["host"], part["pid"], part["state"]) for part in parts.values()] == [
        ("", None, ""),
        ("host-a", 1, "serving"),
        ("host-b", 1, "silent"),
        ("host-c", None, "ended"),
    ]
    assert [part["in_use"] for part in parts.values()] == [False, True, False, False]
    assert [folder["fingerprint"] for folder in parts["writer-0"]["folders"]] == [FINGERPRINT]
    assert sum(folder["num_blocks"] for part in parts.values() for folder in part["folders"]) == 4


def test_verify_reads_the_blocks_of_all_writers(path: Path, servers: list[Server]) -> None:
    assert "No block is bad: 4 blocks read" in run("verify", str(path)).output
    slab = path / "writer-1" / FINGERPRINT / "slab-00000"
    slab.write_bytes(bytes(len(slab.read_bytes())))
    result = run("verify", str(path), "--json")
    assert result.exit_code == 1
    folders = [folder for part in json.loads(result.output)["parts"] for folder in part["folders"]]
    assert [folder["path"] for folder in folders if folder["bad"]] == [f"writer-1/{FINGERPRINT}"]


def test_clear_refuses_while_a_writer_serves_and_removes_all_afterwards(path: Path, servers: list[Server]) -> None:
    result = run("clear", str(path), "--yes")
    assert result.exit_code == 2
    assert "writer-0 is in use by process 1 on host-a" in " ".join(result.output.split())
    servers[0].tier.close()
    assert run("clear", str(path), "--yes").exit_code == 0
    assert {each.name for each in path.iterdir()} == {CLOCK_NAME, "writer-0", "writer-1", "writer-2"}
    assert not list(path.rglob("slab-*"))
    assert not list(path.rglob("journal"))


def test_a_server_that_is_alive_on_another_machine_is_in_use_without_a_lock(path: Path) -> None:
    server = Server(path)
    server.write(1)
    server.kill()
    output = " ".join(run("inspect", str(path)).output.split())
    assert "In use by process 1 on host-boot-a (writer-0)." in output
    assert run("clear", str(path), "--yes").exit_code == 2


@pytest.mark.parametrize("bad", [b"garbage", b"[" * 4096, b'{"version": 1, "pid": 1e400'.ljust(4096), None])
def test_a_bad_heartbeat_is_a_finding(path: Path, servers: list[Server], bad: bytes | None) -> None:
    file = path / "writer-1" / HEARTBEAT_NAME
    if bad is None:
        file.unlink()
        file.symlink_to("elsewhere")
    else:
        file.write_bytes(bad)
    output = " ".join(run("inspect", str(path)).output.split())
    assert "writer-1: the heartbeat cannot be read" in output
    assert run("verify", str(path)).exit_code == 0
