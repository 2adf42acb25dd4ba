"""Which versions of engines are served, and beside which connectors. Known without them, so that it can be said before
one is installed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffload.abc import NOT_SET, ConfigError

CONNECTOR = "KVOffloadConnector"
"""The name of kvoffload's connector in vLLM."""

TESTED = ("0.31", "0.32", "0.33")
"""The minor versions of vLLM that are tested. Those before the first are refused."""
TESTED_SGLANG = ("0.5",)

FIRST_BESIDE_OTHERS = "0.32"
"""The first version in whose MultiConnector kvoffload is tested."""
COMPANIONS = {"NixlPullConnector": "NixlConnector", "ExampleConnector": "ExampleConnector"}
"""Connectors beside which it is tested: the class in vLLM, and the name in a configuration."""


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the major and the minor number of a version such as "0.32.1", or None if it is not a number."""
    numbers = version.split(".")
    if len(numbers) < 2 or not all(each.isdecimal() for each in numbers[:2]):
        return None
    return int(numbers[0]), int(numbers[1])


def refuse_companions(role: object, connectors: Sequence[Collection[str]], has_plugin: bool) -> None:
    """Raises ConfigError if kvoffload cannot be one of ``connectors`` in a MultiConnector with this ``kv_role``. Each
    is the names of its class and of its base classes, or the name in a configuration. ``has_plugin``: whether vLLM
    loads kvoffload's plugin."""
    if role not in ("kv_both", "kv_consumer"):
        raise ConfigError(
            "kv_role",
            role,
            "with this role of the MultiConnector vLLM hands out device blocks that a step in flight still writes to, "
            "and loads would be overwritten",
            'write "kv_role": "kv_both" there',
        )
    served = {*COMPANIONS, *COMPANIONS.values(), CONNECTOR}
    for i, names in enumerate(connectors):
        if not served & set(names):
            raise ConfigError(
                f"connectors[{i}].kv_connector",
                next(iter(names), None),
                "kvoffload would keep what this connector loads, and is not tested with it: it may change KV",
                f"remove it ({' and '.join(COMPANIONS.values())} are served)",
            )
    num_own = sum(CONNECTOR in names for names in connectors)
    if num_own > 1:
        fault = f"{num_own} of them are kvoffload's, and each would keep the same blocks"
        raise ConfigError("connectors", NOT_SET, fault, "remove all but one")
    if not has_plugin:
        raise ConfigError(
            "connectors",
            NOT_SET,
            f"vLLM knows {CONNECTOR} only by kv_connector_module_path, and cannot show its metrics beside others'",
            "let vLLM load the plugin kvoffload (VLLM_PLUGINS must name it, or not be set)",
        )
