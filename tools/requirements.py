"""Prints what an installed package requires, without some of it: ``python tools/requirements.py PACKAGE [WITHOUT...]``.

For pip, which cannot leave out a dependency that is not needed here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import requires


def selected(requirements: Iterable[str], without: Iterable[str]) -> list[str]:
    """Returns the requirements that belong to no extra and whose package is not in ``without``."""
    left_out = {name.lower() for name in without}
    mandatory = (line for line in requirements if "extra ==" not in line)
    return [line for line in mandatory if re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in left_out]


if __name__ == "__main__":
    print("\n".join(selected(requires(sys.argv[1]) or [], sys.argv[2:])))
