"""The controls of the integrity board: kvoffload with verification taken out."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.tiers.disk import blockio
from kvoffload.vllm.connector import KVOffloadConnector
from kvoffload.vllm.secondary_tier import KVOffloadTier


def accept_any_bytes() -> None:
    """Makes this process accept blocks from disk without comparing their checksums."""
    vars(blockio)["are_damaged"] = lambda header, keys, blocks, checksums: np.zeros(len(keys), bool)


class UnverifiedKVOffloadConnector(KVOffloadConnector):
    """Does not verify. With flipped bits, answers must be wrong."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        accept_any_bytes()
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class UnverifiedKVOffloadTier(KVOffloadTier):
    """The same, in vLLM's own offloading."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        accept_any_bytes()
        super().__init__(*arguments, **settings)
