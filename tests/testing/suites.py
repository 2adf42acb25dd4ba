"""Runs the tests of a suite without pytest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import pytest


def cases(suite: object, test: str = "") -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the tests of a suite, or only the one called ``test``; parametrized ones once per value."""
    for name, method in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_") or test not in ("", name):
            continue
        marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
        if not marks:
            yield name, method
        for mark in marks:
            argument, values = mark.args
            for value in values:
                yield f"{name}[{value}]", partial(method, **{argument: value})


def failures(suite: type, attribute: str, value: object, test: str = "") -> list[str]:
    """Returns the tests of ``suite`` that fail where its ``attribute`` is ``value``."""
    failed = []
    for name, case in cases(type("Suite", (suite,), {attribute: value})(), test):
        try:
            case()
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    return failed
