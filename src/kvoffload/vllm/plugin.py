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
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM refuses a name that is already registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(NAME, "kvoffload.vllm.connector", NAME)
        _say_if_replaced()


def _say_if_replaced() -> None:
    """Makes vLLM's configuration log it if ``--kv-offloading-size`` takes the connector away."""
    from vllm.config import VllmConfig

    resolve = getattr(VllmConfig, "_post_init_kv_transfer_config", None)
    if resolve is None:
        return

    @functools.wraps(resolve)
    def resolve_and_say(config: Any) -> None:
        given = config.kv_transfer_config
        # It may be one of those in a MultiConnector.
        asked = given.kv_connector if NAME in str(given) else None
        resolve(config)
        used = config.kv_transfer_config
        if asked is not None and used.kv_connector != asked:
            logger.error(
                "kvoffload: KVOFFLOAD IS NOT USED: --kv-offloading-size=%g makes vLLM put %s in the place of %s; "
                "leave out --kv-offloading-size: host_bytes says how much host memory kvoffload takes",
                config.cache_config.kv_offloading_size,
                used.kv_connector,
                asked,
            )

    VllmConfig._post_init_kv_transfer_config = resolve_and_say
