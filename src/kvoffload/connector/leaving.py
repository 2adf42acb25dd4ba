"""What is stored when it leaves the device, or shortly before, for host memory that does not repeat the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from kvoffload.abc import Keys, MissReason, Offer, OffloadKey, ReqContext, TieredManager
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.misses import MissMemory
from kvoffload.connector.device_blocks import REFUSED, DeviceBlocks, HeldBlock
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import Block
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import RequestState
from kvoffload.tiering.rates import MovingRate

MAX_LEAVING_BYTES = 8 << 30
MAX_LEAVING_S = 0.25
"""What is stored per rank in the step that computes in its device blocks: the step waits for it. The rest is lost."""
MIN_SPEED_SAMPLE = 64 << 20
"""Bytes. Smaller copies say little about how fast large ones are."""
PIECE_SHARE = 1 / 16
"""One piece of a load has at most this share of the host's blocks."""
LEAST_OFFERED = 64
"""Blocks that are offered to the manager at once, at least. It may have most of them."""
MAX_AHEAD = 8192
"""Device blocks at which one step looks because they are handed out next."""
TOGETHER = 64
"""Where steps hand out few device blocks, one looks at up to as many more: a job costs as much as several blocks."""
AHEAD_DECAY = 15 / 16
AHEAD_SHARE = 1 / 8
"""What the next device blocks hold is stored early: of as many as one of the latest steps has handed out, which counts
less with every further step, at most of this share of the device's blocks; or of as many as are offered for loads."""
AWAITED = ReqContext("", goes_on=True)
"""Blocks that requests wait for are stored, whatever they seem to be worth."""
NextFree: TypeAlias = Callable[[int], Iterable[int]]
LOST = (
    "kvoffload: more blocks left the device in one step than can be stored in it, and the others are lost (metric "
    "lost_blocks): requests that need them compute them again"
)


def most_leaving(block_bytes: float, seconds: float | None) -> int:
    """Returns how many blocks, of ``block_bytes`` on each rank, are stored in the step that computes in their device
    blocks. ``seconds``: how long the copy of one takes, if that is known."""
    most = MAX_LEAVING_BYTES if block_bytes <= 0 else MAX_LEAVING_BYTES / block_bytes
    return max(1, int(min(most, MAX_LEAVING_S / seconds) if seconds else most))


def piece_blocks(num_blocks: int) -> int:
    """Returns the number of blocks in one piece of a load, where host memory has ``num_blocks``."""
    return max(1, int(num_blocks * PIECE_SHARE))


class LeavingBlocks:
    """Stores what leaves the device, and what leaves it next. ``misses``: where the manager looks up why a block is
    missing. ``slot_bytes``: the bytes of a block in each pool, if they are known."""

    def __init__(
        self, jobs: JobTable, misses: MissMemory, next_free: NextFree | None, slot_bytes: Sequence[int]
    ) -> None:
        self.device = DeviceBlocks(keeps_states=jobs.observer.descriptions is not None)
        self.piece_blocks = piece_blocks(jobs.manager.most_blocks())
        self._jobs = jobs
        self._misses = misses
        self._next_free = next_free
        self._slot_bytes = max(slot_bytes, default=0)
        self._speed = MovingRate()
        """Of stores, in bytes per second of one rank."""
        self._most = most_leaving(self._slot_bytes, None)
        """Blocks that are stored in the step that computes in their device blocks."""
        self._num_ahead = self._num_looked = 0
        self._expected: dict[str, int] = {}
        """Blocks that requests which wait, or were offered a load, will take on the device, by request."""
        self._looks_ahead = False
        """Whether the next step looks ahead although it hands out nothing."""
        self._forgotten: dict[OffloadKey, None] = {}
        """Blocks on the device that requests need and the engine does not find there any more."""

    def arrived(self, job: Job, first: int, at: slice) -> None:
        """Takes note of a piece of a load, from its request's block ``first`` on: the device has it now."""
        (state,), keys = job.requests, job.keys[at]
        if state.context.hints is None:
            places = enumerate(zip(keys, job.fills[at], strict=True), first)
            self.note_left(self.device.hold(state, (Block(0, i, key, i, [block]) for i, (key, block) in places)))
            self._jobs.manager.note_device(held=keys)

    def reset(self) -> None:
        """Forgets what the device holds: it is stored no more."""
        keys = self.device.clear()
        if not isinstance(self._jobs.manager, TieredManager):
            self._misses.record(keys, MissReason.RESET)
        self.note_left(keys)

    def note_left(self, keys: Keys) -> None:
        """Tells the manager that the device does not hold these blocks any more."""
        if keys:
            self._jobs.manager.note_device(left=keys)

    def measure(self, report: WorkerReport) -> None:
        """Measures how fast workers store."""
        if report.store_bytes >= MIN_SPEED_SAMPLE:
            self._speed.add(report.store_bytes, report.store_seconds)
            self._most = most_leaving(self._slot_bytes, self._speed.seconds_for(self._slot_bytes))

    def expect(self, req_id: str, num_tokens: int) -> None:
        """A request will be given device blocks for ``num_tokens`` tokens at once; 0: it will not, or it was."""
        num_blocks = sum(num_tokens // size for size in self._jobs.layout.block_tokens)
        if num_blocks and self._next_free is not None:
            self._looks_ahead |= self._expected.get(req_id) != num_blocks
            self._expected[req_id] = num_blocks
        else:
            self._expected.pop(req_id, None)

    def store(self, loading: Sequence[int], handed_out: Sequence[int], overwritten: Collection[int]) -> None:
        """Makes the jobs for blocks that leave the device because their device blocks are given to loads, which come
        after these jobs, or ``handed_out`` to requests that compute (these need a fence), and for those that leave
        next. What may be ``overwritten`` before that is lost."""
        if not loading and not handed_out and not overwritten and not self._looks_ahead:
            return
        lost = self.device.leave(overwritten) if overwritten else []
        loaded, left, num_stored = self.device.leave(loading), self.device.leave(handed_out), 0
        self.note_left([held[0] for held in lost + loaded + left])
        if loaded := self.device.not_early(loaded):
            self._store(loaded[::-1], len(loaded))
        if left := self.device.not_early(left):
            # Engines free a chain from its tail. If there is not room for all, its head is stored.
            num_stored, unstored = self._store(left[::-1], self._most)
            lost += unstored
        if lost:
            self._lose(lost)
        if self._next_free is not None:
            self._num_ahead = max(len(handed_out), int(self._num_ahead * AHEAD_DECAY))
            self._num_looked -= len(loading) + len(handed_out)
            self._look_ahead(self._next_free, max(1, self._most - num_stored))

    def _look_ahead(self, next_free: NextFree, most: int) -> None:
        """Makes the jobs for what leaves the device next, unless that was looked at."""
        share = max(1, int(len(self.device.latest) * AHEAD_SHARE))
        expected = min(sum(self._expected.values()), self.piece_blocks)
        if self._num_looked >= max(min(self._num_ahead, share), expected) and not self._looks_ahead:
            return
        if any(len(job.fills) > self.piece_blocks for job in self._jobs.jobs.values()):
            # What leaves for the pieces of a load needs the room.
            return
        ahead = max(min(max(self._num_ahead, min(8 * self._num_ahead, TOGETHER)), share), expected)
        self._num_looked = ahead = min(ahead, MAX_AHEAD)
        early = self.device.soon(next_free(ahead), most)
        self._looks_ahead = bool(early and self._expected)
        if early:
            self._store(early[::-1], len(early))

    def _lose(self, blocks: Sequence[HeldBlock]) -> None:
        """Counts blocks that have left the device and are not stored, unless host memory or a lower tier has them."""
        keys = []
        for key in (held[0] for held in blocks):
            miss = self._jobs.manager.explain_miss(key)
            if miss.tier is None and miss.reason is not MissReason.BEING_WRITTEN:
                keys.append(key)
        if keys:
            self._misses.record(keys, MissReason.LEFT_UNSTORED)
            self._jobs.observer.metrics.add("lost_blocks", len(keys))
            self._jobs.observer.warn(LOST)

    def bring_back(self, state: RequestState, end: int) -> bool:
        """Whether the device still holds the request's block behind token ``end``, which its engine does not find any
        more (its cache was emptied, or names another copy). The next step stores it and those behind it for a load."""
        sizes, keys = self._jobs.layout.block_tokens, state.blocks.keys
        behind = keys[0][end // sizes[0] :]
        if end + sizes[0] >= state.request.num_tokens or not behind or behind[0] not in self.device.latest:
            return False
        if state.lookup.brought_back == behind[0]:
            return self._jobs.manager.explain_miss(behind[0]).reason is MissReason.BEING_WRITTEN
        state.lookup.brought_back = behind[0]
        for size, of_group in zip(sizes, keys, strict=True):
            self._forgotten |= dict.fromkeys(of_group[end // size :])
        return True

    def store_forgotten(self, requests: Iterable[RequestState]) -> None:
        """Makes the jobs for blocks that some of the ``requests`` wait for, see ``bring_back``."""
        if not self._forgotten:
            return
        for state in requests:
            self.drop_if_other(state)
        blocks = self.device.get(self._forgotten)
        num_stored, _ = self._store(blocks, len(blocks), AWAITED)
        self._forgotten.clear()
        if not num_stored:
            self._jobs.changes.wakeups += 1

    def drop_if_other(self, state: RequestState) -> None:
        """Forgets the device blocks of a request whose tokens are others than when its keys were made."""
        if state.blocks.has_other_tokens():
            self.drop_tables(state)

    def drop_tables(self, state: RequestState) -> None:
        """Forgets what the device blocks of a request hold: the engine may have computed other tokens in them."""
        for table in state.blocks.tables:
            self.note_left([held[0] for held in self.device.leave(table)])

    def _store(
        self, blocks: Sequence[HeldBlock], most: int, context: ReqContext | None = None
    ) -> tuple[int, list[HeldBlock]]:
        """Makes jobs for those of ``blocks``, the most valuable first, that host memory lacks, each of one tenant.
        Returns how many these are, about ``most`` at most, and the blocks that were not offered because of that."""
        by_namespace: dict[bytes, list[HeldBlock]] = {}
        for held in blocks:
            by_namespace.setdefault(held[1], []).append(held)
        num_stored, left = 0, list[HeldBlock]()
        for of_tenant in by_namespace.values():
            while of_tenant and num_stored < most:
                n = max(most - num_stored, LEAST_OFFERED)
                num_stored += self._offer(of_tenant[:n], context)
                of_tenant = of_tenant[n:]
            left += of_tenant
        return num_stored, left

    def _offer(self, blocks: Sequence[HeldBlock], context: ReqContext | None) -> int:
        """Makes a job for those ``blocks`` of a tenant that host memory lacks and has room for; returns how many."""
        offered, manager = blocks, self._jobs.manager
        while (output := manager.prepare_store([held[0] for held in offered], context, Offer.LEAVING)) is None:
            if offered is blocks:
                self._jobs.refuse_store()
                self.device.forget_early(held[2] for held in blocks)
            if not (offered := offered[: len(offered) // 2]):
                return 0
        if output.refused_keys:
            refused = frozenset(output.refused_keys)
            self.device.forget_early((held[2] for held in offered if held[0] in refused), REFUSED)
        wanted, has_groups = frozenset(output.keys_to_store), len(self._jobs.layout.groups) > 1
        states, new = self.device.states, list[tuple[int, RequestState | None, Block]]()
        for key, _, at, i, number in offered:
            if key in wanted:
                block = Block._make((key_group_idx(key) if has_groups else 0, i, key, i, [at]))
                new.append((number, None if states is None else states[at], block))
        self._jobs.add_store(new, output)
        return len(new)
