"""The control of the faults: kvoffload with verification taken out."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.tiers.disk import blockio
from kvoffload.vllm.connector import KVOffloadConnector


class UnverifiedConnector(KVOffloadConnector):
    """Accepts blocks from disk without comparing their checksums. With flipped bits, answers must be wrong."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        vars(blockio)["are_damaged"] = lambda header, keys, blocks, checksums: np.zeros(len(keys), bool)
        super().set_xfer_handshake_metadata_pp_aware(metadata)
