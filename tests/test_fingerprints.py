"""Fingerprints of models: they change with every file that may shape KV, and with nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload import fingerprints as module
from kvoffload.fingerprints import files_fingerprint, find_model_dir, fingerprint, has_weights, is_commit

EMBEDDING_BYTES = 1_000_003
"""Not a multiple of the size of a read."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A typical directory of a model: weights in several formats, configurations, code, an encoder."""
    directory = tmp_path / "model"
    (directory / "encoder").mkdir(parents=True)
    for name, content in {
        "config.json": b'{"hidden_size": 64}',
        "hf_quant_config.json": b'{"ignore": []}',
        "model.safetensors.index.json": b"{}",
        "modeling_own.py": b"scale = 1",
        "preprocessor_config.json": b"{}",
        "one.safetensors": bytes(EMBEDDING_BYTES),
        "two.safetensors": bytes(1000),
        "pytorch_model.bin": bytes(1000),
        "consolidated.00.pth": bytes(1000),
        "old.pt": bytes(1000),
        "encoder/model.safetensors": bytes(1000),
        "tokenizer.json": b"{}",
        "README.md": b"",
    }.items():
        (directory / name).write_bytes(content)
    return directory


def flip(path: Path, at: int) -> None:
    """Changes one byte of the file at offset ``at``, which counts from the end if it is negative."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda model: (model / "config.json").write_text('{"hidden_size": 65}'),
    "what is quantized": lambda model: (model / "hf_quant_config.json").write_text('{"ignore": ["lm_head"]}'),
    "which tensor lies where": lambda model: (model / "model.safetensors.index.json").write_text('{"a": 1}'),
    "code": lambda model: (model / "modeling_own.py").write_text("scale = 2"),
    "first byte": lambda model: flip(model / "one.safetensors", 0),
    "last byte": lambda model: flip(model / "one.safetensors", -1),
    "rows at the end of an embedding": lambda model: flip(model / "one.safetensors", -2048),
    ".bin beside .safetensors": lambda model: flip(model / "pytorch_model.bin", 500),
    ".pth": lambda model: flip(model / "consolidated.00.pth", 500),
    ".pt": lambda model: flip(model / "old.pt", 500),
    "an encoder's byte": lambda model: flip(model / "encoder" / "model.safetensors", 500),
    "file name": lambda model: (model / "one.safetensors").rename(model / "only.safetensors"),
    "file gone": lambda model: (model / "two.safetensors").unlink(),
    "one more file": lambda model: (model / "three.safetensors").write_bytes(b"x"),
    "a file of no known kind": lambda model: (model / "scales").write_bytes(b"x"),
    "two files change places": lambda model: (
        (model / "old.pt").write_bytes(b"new"),
        (model / "old.pt").rename(model / "x"),
        (model / "pytorch_model.bin").rename(model / "old.pt"),
        (model / "x").rename(model / "pytorch_model.bin"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_weights_changes_it(model: Path, change: str) -> None:
    before = files_fingerprint(model)
    CHANGES[change](model)
    assert files_fingerprint(model) != before


HARMLESS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda model: None,
    "times": lambda model: (model / "one.safetensors").touch(),
    "same bytes written anew": lambda model: (model / "config.json").write_text('{"hidden_size": 64}'),
    "how tokens are made": lambda model: (model / "tokenizer.json").write_text('{"x": 1}'),
    "how they are chosen": lambda model: (model / "generation_config.json").write_text('{"temperature": 1}'),
    "a chat template": lambda model: (model / "chat_template.jinja").write_text("{{ x }}"),
    "what people read": lambda model: (model / "README.md").write_text("x"),
    "what training goes on from": lambda model: (model / "optimizer.pt").write_bytes(b"x"),
    "attributes of files": lambda model: (model / ".gitattributes").write_text("x"),
    "checkpoints below it": lambda model: shutil.copytree(model / "encoder", model / "checkpoint-500"),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_other_changes_do_not(model: Path, change: str) -> None:
    before = files_fingerprint(model)
    assert len(before) == 64
    HARMLESS[change](model)
    assert files_fingerprint(model) == before


def test_targets_of_links_do_not_matter(model: Path, tmp_path: Path) -> None:
    """In Hugging Face's cache files are links into another folder, where their names are hashes."""
    before = files_fingerprint(model)
    (model / "one.safetensors").rename(tmp_path / "blob")
    (model / "one.safetensors").symlink_to(tmp_path / "blob")
    (model / "encoder").rename(tmp_path / "encoder")
    (model / "encoder").symlink_to(tmp_path / "encoder")
    assert files_fingerprint(model) == before
    flip(tmp_path / "blob", -1)
    assert files_fingerprint(model) != before


@pytest.mark.parametrize("spoil", ["a link that leads nowhere", "a pipe", "no directory"])
def test_weights_that_cannot_be_read_are_an_error(model: Path, spoil: str) -> None:
    if spoil == "a link that leads nowhere":
        (model / "three.safetensors").symlink_to(model / "nowhere")
    elif spoil == "a pipe":
        os.mkfifo(model / "three.safetensors")
    else:
        model = model / "nowhere"
    with pytest.raises(OSError):
        files_fingerprint(model)


@pytest.mark.parametrize("spoil", ["a link that leads nowhere", "a pipe", "a circle of folders", "another user's"])
def test_other_files_that_cannot_be_read_do_no_harm(model: Path, monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    before = files_fingerprint(model)
    if spoil == "a link that leads nowhere":
        (model / "x.json").symlink_to(model / "nowhere")
    elif spoil == "a pipe":
        os.mkfifo(model / "x.json")
    elif spoil == "a circle of folders":
        (model / "again").symlink_to(model)
    else:
        (model / "x.json").write_text("x")
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "x.json")
    assert files_fingerprint(model) == files_fingerprint(model) != before


def test_more_files_than_a_model_has_are_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 10)
    with pytest.raises(ValueError, match="more than 10 files"):
        files_fingerprint(model)


def test_a_model_may_be_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    stored = tmp_path / "models--some--model"
    snapshot = stored / "snapshots" / COMMIT
    for folder in (snapshot, stored / "refs", stored / "blobs"):
        folder.mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    (stored / "blobs" / "1").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "1"))
    for revision in (None, "main", COMMIT):
        found = find_model_dir("some/model", revision, str(tmp_path))
        assert found == snapshot
        assert has_weights(found)
    assert find_model_dir("some/model", "no-such-branch", str(tmp_path)) is None
    assert find_model_dir("some/other", None, str(tmp_path)) is None


def test_only_a_commit_always_means_the_same() -> None:
    assert is_commit(COMMIT)
    for revision in (None, "", "main", "v1.0", COMMIT[:-1], COMMIT + "0", COMMIT.upper()[:-1] + "G", COMMIT + "\n"):
        assert not is_commit(revision)


# The fingerprint of everything that shapes the bytes.

PARTS = {"weights": "w", "dtype": "bfloat16", "block_size": 16, "groups": [1, 2], "layout": {"x": 1, "y": 2}}


def test_our_own_format_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(PARTS)
    monkeypatch.setattr("kvoffload.fingerprints.FORMAT_VERSION", 3)
    assert fingerprint(PARTS) != before


def test_blocks_on_disk_survive_an_upgrade() -> None:
    """The same parts have had this fingerprint since the format of blocks was last changed."""
    parts = {"weights": "weights:['ab']", "dtype": "torch.bfloat16", "parallel": [2, 1], "draft": None}
    assert fingerprint(parts) == "30b696dabb0105765b6121cca1678434dd6f658979763f7e14ed2c55b9453593"
