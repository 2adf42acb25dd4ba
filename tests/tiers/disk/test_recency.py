"""The recency file gets marks first, and every other page in turn, however many pages change meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Sequence, Set
from unittest.mock import Mock

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.recency import MAX_PAGES, PAGE_SLOTS, Recency
from kvoffload.tiers.disk.storage import StoredFile

NUM_PAGES = 2 * MAX_PAGES + 8
PAGE_BYTES = 4096
NUM_SLOTS = NUM_PAGES * PAGE_SLOTS
MARK = np.array([7], dtype=np.uint64)


class Pages(Mock):
    """A file that knows which pages were written. Pages in ``bad`` cannot be."""

    def __init__(self, bad: Set[int] = frozenset()) -> None:
        super().__init__(StoredFile)
        self.bad = bad
        self.marked: set[int] = set()
        self.written: set[int] = set()

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        page = offset // PAGE_BYTES
        if page in self.bad:
            raise OSError(errno.EIO, "Input/output error")
        self.written.add(page)
        if buffers[0].view("<u8")[1::2].any():
            self.marked.add(page)
        return buffers[0].size


@pytest.fixture
def file() -> Pages:
    return Pages()


@pytest.fixture
def recency(file: Pages) -> Recency:
    return Recency(NUM_SLOTS, file)


def use_all(recency: Recency) -> None:
    recency.note_use(np.arange(0, NUM_SLOTS, PAGE_SLOTS))


def test_marks_are_written_before_uses(recency: Recency, file: Pages) -> None:
    use_all(recency)
    recency.note_marks(np.array([NUM_SLOTS - 1]), MARK)
    recency.write(NUM_SLOTS, everything=False)
    assert NUM_PAGES - 1 in file.marked
    assert len(file.written) == MAX_PAGES
    assert (recency.is_urgent, recency.has_changes) == (False, True)


def test_it_is_urgent_until_all_marks_are_written(recency: Recency, file: Pages) -> None:
    slots = np.arange(0, NUM_SLOTS, PAGE_SLOTS)
    recency.note_marks(slots, np.repeat(MARK, len(slots)))
    num_calls = 0
    while recency.is_urgent:
        recency.write(NUM_SLOTS, everything=False)
        num_calls += 1
    assert len(file.marked) == NUM_PAGES
    assert num_calls == -(-NUM_PAGES // MAX_PAGES)
    assert not recency.has_changes


def test_every_page_has_its_turn_while_others_change(recency: Recency, file: Pages) -> None:
    for i in range(3):
        use_all(recency)
        recency.note_marks(np.array([i]), MARK)
        recency.write(NUM_SLOTS, everything=False)
    assert len(file.written) == NUM_PAGES


def test_a_page_that_cannot_be_written_holds_up_no_other() -> None:
    file = Pages(bad={3, 5, 900})
    recency = Recency(NUM_SLOTS, file)
    recency.note_marks(np.array([3, 5, 9]) * PAGE_SLOTS, np.repeat(MARK, 3))
    for _ in range(10):
        use_all(recency)
        try:
            recency.write(NUM_SLOTS, everything=False)
        except OSError:
            assert recency.has_changes
    assert file.written == set(range(NUM_PAGES)) - file.bad
    assert not recency.is_urgent
    file.bad = frozenset()
    recency.write(NUM_SLOTS, everything=True)
    assert file.marked == {3, 5, 9}
    assert not recency.has_changes
