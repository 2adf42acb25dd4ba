"""Identities: the causes of a fingerprint in words, stored beside blocks, so that a log can say why some are unusable.

An identity maps names such as "dtype" to values such as "bfloat16". A value that means nothing to people is a digest,
made by ``digest``; a value with commas is a set. The name MODEL is for people alone: it shows which fingerprints belong
to one model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from kvoffload.printable import printable

MODEL = "model"
VARIABLES = "variables set for vLLM"
SOFTWARE = "installed software"
VALUES = "values of vLLM's variables"
"""A digest. If it differs and VARIABLES does not, the difference is in the value of one of these."""
MAX_TEXT = 1 << 16
"""Characters of the longest text that is an identity."""
MAX_DESCRIPTION = 2000
"""Characters of a description."""
MAX_SHOWN = 80
"""Characters of a value that a description shows."""
_DIGEST = "digest:"
_SAME_MODEL = (MODEL, "weights", "model configuration")
"""Names of which one must have equal values in identities of one model."""


def digest(text: str) -> str:
    """Returns a value that stands for ``text``."""
    return _DIGEST + hashlib.sha256(text.encode()).hexdigest()[:16]


def identity_text(identity: Mapping[str, str]) -> str:
    """Returns ``identity`` as JSON, for storing it."""
    return json.dumps(dict(identity), indent=1)


def parse_identity(text: str) -> dict[str, str]:
    """Returns the identity in ``text``, which others may have written: nothing if it is none."""
    try:
        found = json.loads(text) if len(text) <= MAX_TEXT else None
    except Exception:
        # Numbers without bounds and deep nesting raise more than ValueError.
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def is_same_model(mine: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether both identities seem to be of one model."""
    return any(name in mine and mine[name] == other.get(name) for name in _SAME_MODEL)


def describe_difference(mine: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Returns the differences of the identity ``other`` from ``mine``, such as "dtype is float16 there, bfloat16
    here"."""
    names = [name for name in dict.fromkeys([*mine, *other]) if mine.get(name) != other.get(name)]
    said = [_difference(name, mine.get(name), other.get(name)) for name in names if name != MODEL]
    if VALUES in names and VARIABLES not in names and mine.get(VARIABLES):
        said.append(f"one of these has another value there: {printable(mine[VARIABLES])}")
    return "; ".join(said) or "something that the two descriptions leave out"


def describe(identity: Mapping[str, str]) -> str:
    """Returns the parts of an identity that people read, such as "model llama, dtype bfloat16": no digests, and
    no values that are not set or long."""
    said = [f"{_shown(name)} {_shown(value)}" for name, value in identity.items() if _says_something(name, value)]
    return printable(", ".join(said), MAX_DESCRIPTION)


def _says_something(name: str, value: str) -> bool:
    return name not in (VARIABLES, VALUES, SOFTWARE) and value not in ("", "None") and not value.startswith(_DIGEST)


def explain_unusable(fingerprint: str, mine: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Returns why blocks under ``fingerprint``, whose identity is ``other``, cannot be used here, in words for the log.
    Returns None if they seem to be of another model: then there is nothing to explain."""
    if not is_same_model(mine, other):
        return None
    return printable(
        f"blocks of model {_shown(other.get(MODEL, mine.get(MODEL, 'of this server')))} under fingerprint "
        f"{fingerprint[:16]} cannot be used here: {describe_difference(mine, other)}",
        MAX_DESCRIPTION,
    )


def _difference(name: str, mine: str | None, other: str | None) -> str:
    shown = _shown(name)
    if mine is None or other is None:
        return f"{shown} is {_shown(other)} there, {_shown(mine)} here"
    if mine.startswith(_DIGEST) and other.startswith(_DIGEST):
        return f"other {shown} there"
    if "," in mine + other:
        sets = [dict.fromkeys(each.strip() for each in value.split(",")) for value in (other, mine)]
        theirs, ours = (", ".join(x for x in one if x not in two) for one, two in (sets, sets[::-1]))
        return f"{shown}: {_shown(theirs or 'nothing more')} there, {_shown(ours or 'nothing more')} here"
    return f"{shown} is {_shown(other)} there, {_shown(mine)} here"


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    return printable(value, MAX_SHOWN)
