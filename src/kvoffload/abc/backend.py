"""The contract of a backend, which hands out the slots of one medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvoffload.abc.types import (
    LoadStoreSpec,
    OffloadKey,
    Slots,
)


class Backend(ABC):
    """Hands out slots of one medium. Knows nothing of keys or order.

    Slots are integers in ``[0, num_blocks)``, so that other parts can keep arrays by slot.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Slots in all, free or not."""

    @property
    def num_existing_blocks(self) -> int:
        """Slots that exist now, free or not: all, unless the medium grows."""
        return self.num_blocks

    @abstractmethod
    def get_num_free_blocks(self) -> int: ...

    @abstractmethod
    def allocate_blocks(self, keys: Sequence[OffloadKey]) -> Slots:
        """One free slot a key. The caller has checked the room."""

    @abstractmethod
    def free(self, slots: Slots) -> None:
        """Takes slots back, each once per allocation."""

    def get_load_store_spec(self, keys: Sequence[OffloadKey], slots: Slots) -> LoadStoreSpec:
        """The spec that tells a worker where ``keys`` lie; ``slots`` has their places, in order."""
        return LoadStoreSpec(self.medium, slots)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books do not balance."""
