"""Beside other connectors in vLLM's MultiConnector: does what that does not do for each of its connectors.

MultiConnector passes on the handshake metadata of one connector only, and vLLM reads ``kv_load_failure_policy`` from
the outer configuration, which no inner connector is given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorHandshakeMetadata

from kvoffload.abc import ConfigError
from kvoffload.supported import CONNECTOR, FIRST_BESIDE_OTHERS, refuse_companions
from kvoffload.vllm import versions

MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
"""vLLM imports this module only if it is used."""
LAYOUT = "LBHNC"
"""The KV cache layout to ask for beside others: MultiConnector refuses answers that are not the same word, and this is
what NixlConnector asks for."""

ByRank: TypeAlias = Mapping[tuple[int, int], KVConnectorHandshakeMetadata]


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker sends at start: the metadata of kvoffload, and that of the first other connector with some."""

    own: KVConnectorHandshakeMetadata | None
    others: KVConnectorHandshakeMetadata | None


def join(connector: KVConnectorBase_V1) -> KVTransferConfig | None:
    """Returns the outer configuration if ``connector``, whose constructor calls this, is one of several; else None.

    From then on the outer connector exchanges the handshake metadata of all. Raises ConfigError if the configuration
    cannot be served.
    """
    module = sys.modules.get(MULTI_CONNECTOR)
    called = None if module is None else versions.caller_locals(module.MultiConnector.__init__)
    if called is None:
        return None
    outer, config = called["self"], called["vllm_config"].kv_transfer_config
    _refuse(config)
    for name in ("get_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "sub_connectors"):
        if not hasattr(type(outer), name):
            raise ConfigError(
                fault=f"{versions.NAME} has no MultiConnector.{name}, which kvoffload needs beside other connectors",
                fix="name KVOffloadConnector as kv_connector",
            )

    def others() -> list[KVConnectorBase_V1]:
        return [each for each in outer.sub_connectors if each is not connector]

    def get() -> Handshake:
        found = (each.get_handshake_metadata() for each in others())
        return Handshake(connector.get_handshake_metadata(), next((each for each in found if each is not None), None))

    def take(metadata: ByRank) -> None:
        sent = {rank: each for rank, each in metadata.items() if isinstance(each, Handshake)}
        connector.set_xfer_handshake_metadata_pp_aware(
            {rank: each.own for rank, each in sent.items() if each.own is not None}
        )
        of_others = {rank: each.others for rank, each in sent.items() if each.others is not None}
        for each in others():
            each.set_xfer_handshake_metadata_pp_aware(of_others)

    outer.get_handshake_metadata, outer.set_xfer_handshake_metadata_pp_aware = get, take
    return config


def _refuse(config: KVTransferConfig) -> None:
    """Raises ConfigError if kvoffload cannot be one of the connectors in ``config``, that of a MultiConnector."""
    if not versions.is_since(FIRST_BESIDE_OTHERS):
        raise ConfigError(
            "kv_connector",
            "MultiConnector",
            f"beside others kvoffload needs vLLM {FIRST_BESIDE_OTHERS} or later, and this is {versions.NAME}",
            f"upgrade it, or name {CONNECTOR} as kv_connector",
        )
    entries = (KVTransferConfig(**entry) for entry in config.kv_connector_extra_config["connectors"])
    classes = [KVConnectorFactory.get_connector_class(entry).__mro__ for entry in entries]
    try:
        has_plugin = KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is not None
    except ValueError:
        has_plugin = False
    refuse_companions(config.kv_role, [[each.__name__ for each in found] for found in classes], has_plugin)


def are_asked_together() -> bool:
    """Whether MultiConnector asks all of its connectors for the KV cache layout that they need."""
    module: Any = sys.modules.get(MULTI_CONNECTOR)
    return module is not None and (
        versions.caller_locals(module.MultiConnector.get_required_kvcache_layout) is not None
    )
