"""Text that another process, machine or user wrote, for a terminal or a log."""

from __future__ import annotations

MAX_PRINTED_CHARS = 4000
_CUT = "..."


def printable(text: str | bytes, limit: int = MAX_PRINTED_CHARS) -> str:
    """Returns ``text`` with all characters escaped that are not printable, such as those that control a terminal or end
    a line, and cut to ``limit`` characters, with "..." at its end, where it is longer."""
    head = text[: limit + 1]
    shown = head if isinstance(head, str) else head.decode(errors="replace")
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= limit else shown[: limit - len(_CUT)] + _CUT
