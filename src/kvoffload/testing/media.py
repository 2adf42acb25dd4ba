"""The kinds of media that simulated servers can share, by name."""

from __future__ import annotations

from kvoffload.testing.object_store_medium import ObjectStoreMedium
from kvoffload.testing.servers import SharedMedium
from kvoffload.testing.shared_folder import SharedFolderMedium
from kvoffload.testing.shared_memory import SharedMemoryMedium
from kvoffload.testing.store_medium import StoreMedium

KINDS: tuple[type[SharedMedium], ...] = (SharedFolderMedium, SharedMemoryMedium, StoreMedium, ObjectStoreMedium)
MEDIA: dict[str, type[SharedMedium]] = {medium.kind: medium for medium in KINDS}
