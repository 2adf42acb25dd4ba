"""The contract of a backend, which hands out the slots of one medium."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvoffload.abc.types import Keys, LoadStoreSpec, Slots


class Backend(ABC):
    """Hands out the slots of one medium, independent of keys and eviction order.

    Slots are integers in ``[0, num_blocks)``, so that other parts can keep arrays indexed by slot.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of slots, free or not."""

    @property
    def num_existing_blocks(self) -> int:
        """Slots that exist now, free or not: all, unless the medium grows."""
        return self.num_blocks

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Returns the number of free slots."""

    @abstractmethod
    def allocate_blocks(self, keys: Keys) -> Slots:
        """Returns one free slot per key. The caller has checked that there are enough."""

    @abstractmethod
    def free(self, slots: Slots) -> None:
        """Takes back slots, each once per allocation."""

    def get_load_store_spec(self, keys: Keys, slots: Slots) -> LoadStoreSpec:
        """Returns the spec for a worker that finds ``keys[i]`` in ``slots[i]``."""
        return LoadStoreSpec(self.medium, slots)

    def check_integrity(self) -> None:
        """Raises IntegrityError if free and allocated slots do not add up."""
