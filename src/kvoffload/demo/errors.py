"""The demo's error."""

from __future__ import annotations


class DemoError(Exception):
    """The demo could not run. The message tells the user why, and what to do."""
