"""Documents: from real files, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.process import DemoError
from demo.text import load_documents


def test_the_standard_library_has_enough_text() -> None:
    documents = load_documents(None, count=16, chars=2300, seed=0)
    assert [len(d.text) for d in documents] == [2300] * 16
    assert len({d.text for d in documents}) == 16
    assert all(d.name.endswith(".py") for d in documents)
    assert documents == load_documents(None, count=16, chars=2300, seed=0)
    assert documents != load_documents(None, count=16, chars=2300, seed=1)


def test_one_long_file_or_many_short_ones(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    (one / "long.txt").write_text("".join(f"{i:9}\n" for i in range(400)))
    for i in range(400):
        (many / f"{i}.txt").write_text(f"{i:9}\n")
    for directory in (one, many):
        documents = load_documents(directory, count=4, chars=1000, seed=0)
        assert [len(d.text) for d in documents] == [1000] * 4
        assert len({d.text for d in documents}) == 4


def test_files_that_are_not_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00" * 5000)
    (tmp_path / "zeros.bin").write_bytes(bytes(5000))
    (tmp_path / "good.txt").write_text("word " * 100)
    (document,) = load_documents(tmp_path, count=1, chars=500, seed=0)
    assert document.name == "good.txt"


def test_too_little_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(DemoError, match=r"has 5 characters .* needs 2,000"):
        load_documents(tmp_path, count=2, chars=1000, seed=0)
