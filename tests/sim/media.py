"""The kinds of media that simulated servers can share, by name."""

from __future__ import annotations

from tests.sim.object_store_medium import ObjectStoreMedium
from tests.sim.servers import SharedMedium
from tests.sim.shared_folder import SharedFolderMedium
from tests.sim.store_medium import StoreMedium

KINDS: tuple[type[SharedMedium], ...] = (SharedFolderMedium, StoreMedium, ObjectStoreMedium)
MEDIA: dict[str, type[SharedMedium]] = {medium.kind: medium for medium in KINDS}
