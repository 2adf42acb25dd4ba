"""Documents: from real files, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

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
