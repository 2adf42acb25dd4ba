"""What can go wrong before there is anything to compare."""

from __future__ import annotations


class DemoError(Exception):
    """The demo could not run. The message is for the user: what is wrong and what to do."""
