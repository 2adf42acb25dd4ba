"""Formats amounts for people, and parses amounts that people write."""

from __future__ import annotations

import math
import re

from kvoffload.abc import ConfigError

MIN_BUDGET = 1 << 20
"""Bytes of the smallest budget of a server."""
_MAX_BYTES = 1 << 62
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)\s*", re.IGNORECASE)

# Formatting.


class Amount(int):
    """A number of bytes that reads "8589934592 (8 GiB)"."""

    def __repr__(self) -> str:
        return f"{int(self)} ({format_bytes(int(self))})"


def format_bytes(n: int) -> str:
    """Returns text such as "8 GiB", "1.5 MiB" or "12 bytes"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 1 << power:
            return f"{n / (1 << power):.1f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{n} bytes"


def compact(n: int) -> str:
    """Returns text such as "1,234", "123k" or "1.23G"."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if n >= 10 ** (power + 2) or n >= 10**power > 10**3:
            return f"{n / 10**power:,.{2 if n < 10 ** (power + 1) else 1 if n < 10 ** (power + 2) else 0}f}{unit}"
    return f"{n:,}"


def counted(number: int, noun: str) -> str:
    """Returns text such as "1 block" or "1,234 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """Returns text such as "90 s", "15 min", "3 h" or "2 d"."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


# Parsing.


def parse_bytes(setting: str, value: object, least: int = 1) -> int:
    """Returns the bytes in a number or in a string such as "8GiB", "512 MiB" or "1.5T". Units are powers of 1024,
    except that "GB" and the like are powers of 1000. Raises ConfigError that names ``setting``, also for less than
    ``least`` bytes: people write a number and mean GiB."""
    fix = f'write a number of bytes or a string such as {setting}="8GiB"'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(setting, value, "not an amount of memory", fix)
    amount = value
    if isinstance(amount, str):
        match = _BYTES.fullmatch(amount)
        if match is None:
            raise ConfigError(setting, value, "not an amount of memory", fix)
        number, prefix, binary, suffix = match.groups()
        base = 1000 if suffix and not binary else 1024
        amount = float(number) * (base ** _POWERS[prefix.lower()] if prefix else 1)
    elif isinstance(amount, float) and math.isfinite(amount) and not amount.is_integer():
        raise ConfigError(setting, value, "not a whole number of bytes", fix)
    if not 1 <= amount <= _MAX_BYTES:
        raise ConfigError(setting, value, f"must be 1 byte or more, and less than {_MAX_BYTES}", fix)
    if amount < least:
        meant = f' did you mean {setting}="{int(amount)}GiB"?' if str(value).strip().isdecimal() else ""
        raise ConfigError(setting, value, f"{counted(int(amount), 'byte')} are of no use", f"{fix};{meant}".rstrip(";"))
    return int(amount)
