"""Servers that share a directory of a simulated network file system, see ``shared_storage`` and ``servers``.

Beside the laws of ``servers`` these must hold:

- each seat stays within the budget of its server, and all of them within seats x budget;
- no server takes the seat of one that lives;
- no server removes a file from a seat that another one has;
- where nothing has failed, no block is found bad, whatever the caches of the clients show;
- the seats of servers that are gone are emptied, so that their budget returns.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from kvoffload.abc import ByteArray, ConfigError, Tier
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.format import is_block_file
from kvoffload.tiers.disk.journal import num_entries_for
from kvoffload.tiers.disk.layout import SlotLayout
from kvoffload.tiers.late import LateTier, Opener
from kvoffload.tiers.shared_dir.background import Repeating
from kvoffload.tiers.shared_dir.seats import HEARTBEAT_BYTES, HEARTBEAT_NAME, SILENT_S, Machine, seat_number
from kvoffload.tiers.shared_dir.tier import STOP_S, SharedDirTier, Surroundings
from tests.sim.engine import Leak
from tests.sim.executor import Killed, SteppedExecutor
from tests.sim.life import FalseAlarm
from tests.sim.servers import Connection, DeletedOthers, Servers, SharedMedium, SharingServer
from tests.sim.shared_storage import LOCK_NAME, Folder, Inode, Mount, NfsClient, NfsServer
from tests.sim.simulation import OverBudget
from tests.sim.storage import PAGE, os_error

GONE_AFTER_S = 200.0
"""Seats are emptied after this long."""
REOPEN_S = 5.0
"""Time between two attempts to open a tier in place of a lost one."""
STALL_S = 10.0
"""After so long, a stalled access looks whether it may go on. Longer than a shutdown waits."""
OTHER_BYTES = 64 << 10
"""For everything in the directory that is not in a seat."""


class SeatTaken(AssertionError):
    """A server has taken the seat of another one that lives."""


class SharedFolderMedium(SharedMedium):
    """A directory on a network file system that stalls, fails, is full, loses files and bytes, and cuts clients off."""

    kind = "shared_dir"

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__()
        rng = self.random = Random(f"folder {seed}")
        self.is_calm = is_calm
        self.num_blocks = rng.choice((3, 6, 40, 100))
        """The budget of each server."""
        self.keeps_enough = self.num_blocks >= 40
        self.has_real_intervals = False
        """Whether the threads of servers rest as long as real ones."""
        self.slab_blocks = rng.choice((2, 10, 100))
        self.capacity_bytes = 0
        """The same in bytes, known when the first server has connected."""
        self.server = NfsServer(1 << 40, seed, clock=self._clock)
        self.server.on_remove = self._removed
        self.connections: list[FolderConnection] = []
        self.has_zombies = False
        """Whether a server may have lost its seat without noticing."""
        self.deleted = ""
        kinds = ("stalls", "fails", "spoils", "loses", "fills", "cuts")
        chosen = [] if is_calm else rng.sample(kinds, rng.choice((1, 1, 2, 3)))
        self.rates = {kind: rng.choice((0.002, 0.01, 0.05)) if kind in chosen else 0.0 for kind in kinds}
        self.stall_s = rng.choice((0.005, 0.05, 30.0))
        self.cut_s = rng.choice((0.01, 30.0, 100.0))

    def _clock(self) -> float:
        """Returns the latest time of any machine."""
        alive = (connection.server.clock.now for connection in self.connections if not connection.is_dead)
        self.now = max(self.now, *alive, 0.0)
        return self.now

    def connect(self, server: SharingServer) -> Connection:
        connection = FolderConnection(self, server)
        self.connections.append(connection)
        return connection

    # Faults.

    def tick(self) -> None:
        for kind, rate in self.rates.items():
            if rate and self.random.random() < rate:
                getattr(self, f"_{kind}")()

    def _stalls(self) -> None:
        self.server.stalled_until = self.now + self.stall_s
        self.injected["stalls"] += 1

    def _fails(self) -> None:
        """Single accesses fail in ``FolderConnection.before_access``."""

    def _spoils(self) -> None:
        """Changes a bit of a file, but not in a header: only the next process makes a new one."""
        inode = self._any_file()
        if inode is not None and inode.size > PAGE:
            inode.data[self.random.randrange(PAGE, inode.size)] ^= 1 << self.random.randrange(8)
            self.injected["spoiled"] += 1

    def _loses(self) -> None:
        """Somebody removes all files of a folder, or one file of a server that is gone."""
        owned = [self._seats().get(connection.seat) for connection in self.connections if connection.has_seat]
        folder = self._any_folder(self.server.root)
        if folder is None:
            return
        is_owned = any(seat and folder in (seat, *seat.entries.values()) for seat in owned)
        names = [name for name, node in folder.entries.items() if isinstance(node, Inode) and name != LOCK_NAME]
        if names and not is_owned and self.random.random() < 0.3:
            names = [self.random.choice(names)]
        for name in names:
            inode = folder.entries.pop(name)
            assert isinstance(inode, Inode)
            self.server.remove(inode)
            self.injected["lost files"] += 1

    def _fills(self) -> None:
        self.server.capacity_bytes = self.server.used_bytes
        self.injected["full"] += 1

    def _cuts(self) -> None:
        alive = [connection for connection in self.connections if not connection.is_dead]
        if alive:
            self.random.choice(alive).client.cut_off(self.cut_s)
            self.has_zombies = True
            self.injected["cut off"] += 1

    def _any_folder(self, folder: Folder) -> Folder | None:
        """Returns a folder below ``folder`` that has files, or None."""
        found = [folder] if any(isinstance(node, Inode) for node in folder.entries.values()) else []
        for node in folder.entries.values():
            inner = self._any_folder(node) if isinstance(node, Folder) else None
            found += [inner] if inner is not None else []
        return self.random.choice(found) if found else None

    def _any_file(self) -> Inode | None:
        folder = self._any_folder(self.server.root)
        files = [node for node in folder.entries.values() if isinstance(node, Inode)] if folder else []
        return self.random.choice(files) if files else None

    def end_faults(self) -> None:
        self.rates = dict.fromkeys(self.rates, 0.0)
        self.server.stalled_until = float("-inf")
        self.server.capacity_bytes = 1 << 40
        for connection in self.connections:
            connection.end_faults()

    def begin_outage(self) -> bool:
        self.server.stalled_until = float("inf")
        return True

    # Laws.

    def _removed(self, client: object, folder: Folder, name: str) -> None:
        """A client removes a file."""
        if not self.has_zombies and self._owner(folder) not in (None, client):
            self.deleted = name

    def _owner(self, folder: Folder) -> NfsClient | None:
        """Returns the client that has the seat in which ``folder`` is, as the locks say, None if there is none."""
        seat = next((seat for seat in self._seats().values() if folder in (seat, *seat.entries.values())), None)
        lock = seat.entries.get(LOCK_NAME) if seat is not None else None
        owner, until = self.server.locks.get(lock, (None, 0.0)) if isinstance(lock, Inode) else (None, 0.0)
        return owner if until == float("inf") else None

    def _seats(self) -> dict[str, Folder]:
        nodes = self.server.root.entries.items()
        return {name: node for name, node in nodes if isinstance(node, Folder) and seat_number(name) is not None}

    def check(self) -> None:
        if self.deleted:
            raise DeletedOthers(f"a server has removed {self.deleted} from the seat of another one")
        living = Counter(connection.seat for connection in self.connections if connection.has_seat)
        if living and max(living.values()) > 1 and not self.has_zombies:
            raise SeatTaken(f"servers per seat: {dict(living)}")
        seats = self._seats()
        for name, folder in seats.items():
            held = self.server.held_bytes(folder)
            if held > self.capacity_bytes:
                raise OverBudget(f"{name} has {held} bytes, {self.capacity_bytes} allowed")
        held = self.server.held_bytes()
        if held > len(seats) * self.capacity_bytes + OTHER_BYTES:
            raise OverBudget(f"{held} bytes in {len(seats)} seats of {self.capacity_bytes}")

    def check_bad_blocks(self, counts: Counter[str]) -> None:
        """Raises FalseAlarm if a block was found bad although nothing has failed."""
        bad = sum(n for name, n in counts.items() if name.startswith("reads: ") and name.endswith(("corrupt", "io")))
        if bad and self.is_calm:
            raise FalseAlarm(f"on a medium that never failed: {counts}")

    def afterwards(self, servers: Servers) -> None:
        """Raises Leak if seats of servers that are gone still have blocks after a while."""
        alive = [connection for connection in self.connections if not connection.is_dead and connection.tier]
        for connection in alive:
            watch = connection.server.shared_watch
            if watch is not None:
                self.check_bad_blocks(watch.counts)
        if not any(connection.has_seat for connection in alive):
            return
        servers.pass_time(2 * (GONE_AFTER_S + SILENT_S))
        # A living server keeps the lock of a seat that it has lost until it uses a new one.
        owned = {connection.seat for connection in alive}
        for name, seat in self._seats().items():
            if name in owned or self._beats(seat):
                continue
            folders = [node for node in seat.entries.values() if isinstance(node, Folder)]
            left = [file for folder in folders for file in folder.entries if is_block_file(file)]
            if left:
                raise Leak(f"{name} has no server any more, and still has {sorted(left)}")
            self.injected["seats that came back"] += 1

    def _beats(self, seat: Folder) -> bool:
        """Returns whether a server keeps the seat: the one that it uses, or one that it will use from the next request
        on."""
        heartbeat = seat.entries.get(HEARTBEAT_NAME)
        return isinstance(heartbeat, Inode) and self._clock() - heartbeat.modified < SILENT_S

    def counts(self) -> Counter[str]:
        return self.injected + Counter({"seats": len(self._seats())})


class SteppedRepeating(Repeating):
    """The thread of a simulated server, which runs whoever calls ``run``."""

    def __init__(
        self, do: Callable[[], None], interval_s: float, finish: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._do = do
        self._interval_s = interval_s
        self._finish = finish
        self._clock = clock
        self._next = 0.0
        self.is_running = False

    def wait_for_first(self, timeout_s: float) -> None:
        pass

    def wake(self) -> None:
        self._next = 0.0

    def stop(self, timeout_s: float) -> None:
        self._finish()

    @property
    def is_due(self) -> bool:
        """Whether it is to run. Returns False until it has run then."""
        if self.is_running or self._clock() < self._next:
            return False
        self.is_running = True
        return True

    def run(self) -> None:
        self._next = math.inf
        try:
            self._do()
        finally:
            self.is_running = False
            self._next = min(self._next, self._clock() + self._interval_s)


class SteppedOpener(Opener):
    """Opens another tier in place of a lost one in ``step``, instead of on its thread."""

    def __init__(self, open_tier: Callable[[], Tier], clock: Callable[[], float]) -> None:
        super().__init__(open_tier, None, "shared_dir", "tiers[0]")
        self._clock = clock
        self._next = math.inf
        """When a tier is to be opened."""

    def _run(self) -> None:
        pass

    def offer(self) -> None:
        """Opens a tier. Raises ConfigError and OSError."""
        self._offered, self._next = self._open_tier(), math.inf

    def close_left(self) -> None:
        """Closes a tier that was left. Another one may be opened then."""
        if self._left is not None:
            self._left.close()
            self._left, self._next = None, self._clock()

    def step(self) -> None:
        """Opens a tier when it is time."""
        if self._clock() >= self._next:
            try:
                self.offer()
            except (OSError, ConfigError):
                self._next = self._clock() + REOPEN_S


class FolderConnection(Connection):
    """A server's mount of the directory and its tier there. ``client`` is killed with the server."""

    def __init__(self, medium: SharedFolderMedium, server: SharingServer) -> None:
        rng = self.random = Random(f"mount {server.life.scenario.seed}")
        self.medium = medium
        self.server = server
        self.is_dead = self.is_closed = False
        self.tier: SharedDirTier | None = None
        """The latest one."""
        self._opener: SteppedOpener | None = None
        mount = Mount(
            attributes_s=rng.choice((0.0, 0.003, 0.05, 3.0, 60.0)),
            entries_s=rng.choice((0.0, 0.01, 3.0, 60.0)),
            flush_s=rng.choice((0.002, 0.05, 30.0)),
            lease_s=rng.choice((0.0, 0.05, 90.0)),
            is_direct=rng.random() < 0.7,
            transfer_bytes=rng.choice((PAGE, 4 * PAGE, 1 << 20)),
            skew_s=rng.choice((0.0, -1e6, 1e5, 3.0)),
        )
        self.client = medium.server.connect(mount, rng.randrange(1 << 30), pause=self._before_access, stall=self._stall)
        self.background = SteppedExecutor(rng.randrange(1 << 30), 2, 4, rng.choice((0.3, 0.6, 0.9)), clock=server.clock)
        self._is_same_kernel = rng.random() < 0.5
        """Whether the machine has not been started again since the server before."""
        self._kill_at = None if medium.is_calm or rng.random() < 0.8 else int(2 ** rng.uniform(3, 10))
        self._num_accesses = 0
        self._intervals = [rng.choice((0.002, 0.02)), rng.choice((0.002, 0.02, 0.2))]
        """Of keeper and follower, shorter than real ones."""
        self._repeated: list[SteppedRepeating] = []
        """The keeper and the follower of ``tier``."""

    @property
    def has_seat(self) -> bool:
        """Whether the server lives and believes that it has a seat."""
        return self.tier is not None and not (self.is_dead or self.is_closed or self.tier.seat.is_lost)

    @property
    def seat(self) -> str:
        assert self.tier is not None
        return self.tier.seat.name

    def open(self, pools: Sequence[ByteArray]) -> Tier | None:
        server, rng = self.server, Random(self.server.life.scenario.seed)
        boot = f"{server.number}" if self._is_same_kernel else f"{server.number} {rng.random()}"
        machine = Machine(f"host-{server.number}", rng.randrange(1 << 15), boot)
        self._opener = SteppedOpener(partial(self._open, pools, machine, rng), server.clock)
        try:
            self._opener.offer()
        except (OSError, ConfigError):
            if self.medium.is_calm:
                raise
            self.medium.injected["servers without the tier"] += 1
            return None
        opener = self._opener
        tier = LateTier(opener, sum(pool.shape[1] for pool in pools), is_shared=True)
        tier.join()
        close = tier.close

        def closing() -> None:
            self.background.close(STOP_S)
            # What hangs would hold the locks of this process.
            self.background.kill()
            opener.close_left()
            close()

        tier.close = closing  # type: ignore[method-assign]
        return tier

    def _open(self, pools: Sequence[ByteArray], machine: Machine, rng: Random) -> SharedDirTier:
        medium, server = self.medium, self.server
        is_first = self.tier is None
        if not is_first:
            server.executor = server.make_executor(rng.randrange(1 << 30), 0.6)
        block_bytes = sum(pool.shape[1] for pool in pools)
        layout = SlotLayout(block_bytes, medium.slab_blocks, num_entries_for(medium.num_blocks))
        capacity_bytes = layout.bytes_of(medium.num_blocks) + HEARTBEAT_BYTES
        # Servers with other ranks have larger blocks.
        medium.capacity_bytes = max(medium.capacity_bytes, capacity_bytes)
        self._repeated = []
        self.tier = SharedDirTier(
            self.client.storage(),
            TierContext(pools, server.fingerprint, policy=server.life.scenario.policy),
            capacity_bytes,
            GONE_AFTER_S,
            Surroundings(
                machine=machine,
                executor=server.executor,
                clock=server.clock,
                wall_clock=self.client.wall_clock,
                random=rng.randbytes,
                slab_bytes=medium.slab_blocks * block_bytes,
                job_bytes=rng.choice((1, 3, 1000)) * block_bytes,
                repeat=self._repeat,
            ),
        )
        medium.injected["tiers that opened anew"] += not is_first
        return self.tier

    def _renew(self) -> None:
        """Does what the opener's thread does."""
        assert self._opener is not None
        was_serving, self.server.is_serving = self.server.is_serving, False
        try:
            # A thread that hangs in the medium holds up no close for long. Here it does: it cannot be ended.
            if not any(each.is_running for each in self._repeated):
                self._opener.close_left()
            self._opener.step()
        finally:
            self.server.is_serving = was_serving

    def _before_access(self) -> None:
        self._num_accesses += 1
        if self._num_accesses == self._kill_at:
            raise Killed
        if self.background.in_job:
            self.background.pause()
        else:
            self.server.pause()
        medium = self.medium
        if medium.rates["fails"] and medium.random.random() < medium.rates["fails"]:
            medium.injected["failures"] += 1
            raise os_error(errno.EIO)

    def _stall(self, seconds: float) -> None:
        executor = self.background if self.background.in_job else self.server.executor
        while executor.in_job and self.client.is_stalled and seconds > 0.0:
            executor.stall(min(seconds, STALL_S))
            seconds -= STALL_S

    def _submit(self) -> None:
        """Submits what the tier's threads do again and again."""
        if self.tier is None or self.is_dead:
            return
        self.client.tick()
        self._renew()
        for each in self._repeated:
            if each.is_due:
                self.background.submit_read(each.run)

    def tick(self) -> None:
        self._submit()
        self.background.tick()

    def drain(self) -> None:
        self._submit()
        self.background.drain()

    def _repeat(self, name: str, do: Callable[[], None], interval_s: float, finish: Callable[[], None]) -> Repeating:
        if not self.medium.has_real_intervals:
            interval_s = self._intervals[len(self._repeated)]
        self._repeated.append(SteppedRepeating(do, interval_s, finish, self.server.clock))
        return self._repeated[-1]

    def end_faults(self) -> None:
        self._kill_at = None
        self.client.cut_off(float("-inf"))

    def closed(self) -> None:
        self.is_closed = True
        if self.server.executor.idle and self.client.handles:
            raise Leak(f"{len(self.client.handles)} files are open after the shutdown")

    def die(self) -> None:
        self.background.kill()
        self.client.kill()
        self.is_dead = True

    def counts(self) -> Counter[str]:
        if self.tier is None:
            return Counter()
        watch = self.server.shared_watch
        if watch is not None:
            self.medium.check_bad_blocks(watch.counts)
        return Counter({"servers that lost their seat": int(self.tier.seat.is_lost)})
