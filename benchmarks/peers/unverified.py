"""The control of the faults: kvoffload with verification taken out."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.tiers.disk import blockio
from kvoffload.vllm.connector import KVOffloadConnector


class UnverifiedConnector(KVOffloadConnector):
    """Gives all blocks on disk the same checksum. With flipped bits, answers must be wrong."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert "payload_checksums" in vars(blockio)
        vars(blockio)["payload_checksums"] = lambda header, keys, blocks: np.zeros(len(keys), np.uint64)
        super().set_xfer_handshake_metadata_pp_aware(metadata)
