"""Parsing of capacities."""

from __future__ import annotations

import pytest

from kvoffload.abc import ConfigError
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import ModelShape
from tests.lab.traces import make_trace

MODEL = ModelShape("small", 64.0, 1.0, 1.0)
TRACE = make_trace("made", 16, [0.0], [16 * 1999], [0], [range(1999)])
"""1,999 distinct blocks of 1 KiB."""


def test_valid_capacities() -> None:
    amounts = {"1%": 19, "0.001%": 1, "100%": 1999, " 12.5 % ": 249, "5859": 5859}
    amounts |= {"1KiB": 1, "2047 B": 1, "1.5MiB": 1536, "1MB": 976}
    assert {text: parse_capacity(text, TRACE, MODEL) for text in amounts} == amounts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0%", "more than 0%"),
        ("101%", "at most 100%"),
        ("0", "must be 1 to 1099511627776 blocks"),
        ("9" * 14, "must be 1 to 1099511627776 blocks"),
        ("1000B", "too small for one block of 1 KiB"),
        ("-1", "not a capacity"),
        ("1.5", "too small for one block"),
        ("", "not a capacity"),
        ("much", "not a capacity"),
    ],
)
def test_invalid_capacities(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^device='{text}': .*{match}.*; write a percentage of the trace"):
        parse_capacity(text, TRACE, MODEL, "device")
