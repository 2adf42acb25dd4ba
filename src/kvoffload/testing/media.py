"""The kinds of media that simulated servers can share, by name."""

from __future__ import annotations

from kvoffload.testing.servers import SharedMedium
from kvoffload.testing.shared_folder import SharedFolderMedium
from kvoffload.testing.shared_memory import SharedMemoryMedium
from kvoffload.testing.store_medium import StoreMedium

KINDS: tuple[type[SharedMedium], ...] = (SharedFolderMedium, SharedMemoryMedium, StoreMedium)
MEDIA: dict[str, type[SharedMedium]] = {medium.kind: medium for medium in KINDS}
