"""The control of the integrity board: kvoffload with verification taken out."""

from __future__ import annotations

import sys
from typing import Any

from kvoffload.vllm.connector import KVOffloadConnector


class UnverifiedKVOffloadConnector(KVOffloadConnector):
    """Accepts blocks from disk without comparing their checksum. With flipped bits, answers must be wrong."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("kvoffload.tiers.disk.") and hasattr(module, "payload_checksum"):
                vars(module)["payload_checksum"] = lambda header, key, buffers: _EqualToAny()
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class _EqualToAny(int):
    """A checksum that is always right."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__
