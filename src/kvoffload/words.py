"""Numbers as people write them, and text that a terminal can show."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Such as "1 block" or "1,234 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """Such as "90 s", "15 min", "3 h" or "2 d"."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def printable(text: str) -> str:
    """``text`` with everything escaped that is no printable character, such as what would move a terminal's cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
