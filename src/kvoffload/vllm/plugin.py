"""The entry point for vLLM's plugins: registers ``KVOffloadConnector`` under its name."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

NAME = "KVOffloadConnector"
# vLLM shows what its own loggers say.
logger = logging.getLogger("vllm.kvoffload")


def register() -> None:
    """Registers the connector. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM refuses a name that is already registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(NAME, "kvoffload.vllm.connector", NAME)
        _say_if_replaced(VllmConfig)


def _say_if_replaced(config_class: Any) -> None:
    """Makes vLLM's configuration log it if ``--kv-offloading-size`` takes the connector away."""
    resolve = getattr(config_class, "_post_init_kv_transfer_config", None)
    if resolve is None:
        return

    @functools.wraps(resolve)
    def resolve_and_say(config: Any) -> None:
        asked = _connectors(config.kv_transfer_config)
        resolve(config)
        used = config.kv_transfer_config
        if NAME in asked and asked[0] != used.kv_connector:
            logger.error(
                "kvoffload: KVOFFLOAD IS NOT USED: --kv-offloading-size=%g makes vLLM put %s in the place of %s; "
                "leave out --kv-offloading-size: host_bytes says how much host memory kvoffload takes",
                config.cache_config.kv_offloading_size,
                used.kv_connector,
                asked[0],
            )

    config_class._post_init_kv_transfer_config = resolve_and_say


def _connectors(transfer: Any) -> list[str | None]:
    """Returns the name of the connector, and of those in a MultiConnector."""
    if transfer is None:
        return [None]
    return [
        transfer.kv_connector,
        *(each.get("kv_connector") for each in transfer.get_from_extra_config("connectors", [])),
    ]
