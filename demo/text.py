"""Loads real text for the conversations: Python's standard library, or a directory of the user."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.process import DemoError

MAX_CHARS = 8_000_000
MAX_FILE_BYTES = 1_000_000


LAST = "Say that in fewer words."
ABOUT = ("What is this text about?", "Who should read it?", LAST)
"""What is asked about any text: one question per turn, and the last at once after another answer."""
TOPICS = {
    "try": (ABOUT[0], "What does the finally clause do?", "What is an exception?", "What is the else clause for?"),
    "import": (ABOUT[0], "What is a package?", "What does it do?", "What happens if a module is not found?"),
    "typesseq": (ABOUT[0], "What is a mutable sequence?", "Which sequence types are there?", "What does slicing do?"),
    "naming": (ABOUT[0], "What is a block?", "What is a scope?", "What is a free variable?"),
}
"""Topics of Python's help, with questions of two users, two each."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text, the file in which it begins, and what each of its readers asks, by turn."""

    name: str
    text: str
    questions: Sequence[Sequence[str]] = ()


def help_topics() -> list[Document]:
    """Returns texts of Python's reference that ``help()`` shows, and questions about them. Raises DemoError if this
    Python lacks them."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError("this Python has no pydoc_data: name a directory of text files with --text") from error
    return [
        Document(f"help({name!r})", topics[name], [(*questions[:2], LAST), (*questions[2:], LAST)])
        for name, questions in TOPICS.items()
    ]


def load_documents(directory: Path | None, count: int, chars: int, seed: int) -> list[Document]:
    """Returns ``count`` documents of ``chars`` characters that do not overlap.

    The files of ``directory``, by default of the standard library, are joined in an order shuffled by ``seed``.
    Documents start at equal distances in the result, so one long file works as well as many short ones. Files that are
    not UTF-8 text are skipped. Raises DemoError if there is too little text.
    """
    if directory is None:
        root, files = _standard_library()
    else:
        root, files = directory, (path for path in directory.rglob("*") if path.is_file())
    ordered = sorted(files)
    random.Random(seed).shuffle(ordered)
    names, starts, texts, total = [], [], [], 0
    for path, text in _read_texts(ordered):
        names.append(path.relative_to(root).as_posix())
        starts.append(total)
        texts.append(text)
        total += len(text)
        if total >= MAX_CHARS or (directory is None and total >= 8 * count * chars):
            break
    if total < count * chars:
        raise DemoError(
            f"{root} has {total:,} characters of UTF-8 text, but the demo needs {count * chars:,}: "
            "add text files, or leave --text out to use Python's standard library"
        )
    joined = "".join(texts)
    documents = []
    for i in range(count):
        start = i * (total // count)
        owner = sum(1 for s in starts if s <= start) - 1
        documents.append(Document(names[owner], joined[start : start + chars]))
    return documents


def _standard_library() -> tuple[Path, Iterable[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    return root, (p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts))


def _read_texts(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        try:
            if 0 < path.stat().st_size <= MAX_FILE_BYTES:
                text = path.read_text(encoding="utf-8")
            else:
                continue
        except (OSError, UnicodeDecodeError):
            continue
        if "\0" not in text:
            yield path, text
