"""Formatting of amounts. Parsing is tested with the settings, in ``test_config``."""

from __future__ import annotations

from kvoffload import units
from kvoffload.printable import MAX_PRINTED_CHARS, printable

GIB = 1 << 30


def test_bytes_are_formatted_with_binary_units() -> None:
    amounts = [0, 1023, 1024, 1536, 1 << 20, 8 * GIB, 100 * GIB, int(2.5 * (1 << 40)), GIB + 1]
    texts = ["0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "1 MiB", "8 GiB", "100 GiB", "2.5 TiB", "1 GiB"]
    assert list(map(units.format_bytes, amounts)) == texts


def test_counts_have_a_plural_and_separators() -> None:
    assert [units.counted(n, "block") for n in (0, 1, 1234)] == ["0 blocks", "1 block", "1,234 blocks"]


def test_ages_are_in_the_largest_unit_of_which_there_are_two() -> None:
    ages = list(map(units.age, (-1.0, 90.0, 900.0, 10_800.0, 172_800.0)))
    assert ages == ["0 s", "90 s", "15 min", "3 h", "2 d"]


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\u202e") == "a\\x1b[2Jb\\u202e"
    assert printable("naïve 5×") == "naïve 5×"  # noqa: RUF001


def test_long_text_of_others_is_cut() -> None:
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "aaaaaaa..."
    assert printable("\x1b" * 10, 10) == "\\x1b\\x1..."
    assert len(printable("\U000e0001" * 10**6)) == MAX_PRINTED_CHARS
