"""Reference model of the self-tuning policy without the rule ``gap``, in the plainest Python there is: lists, one block
at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import LoadStoreSpec, OffloadKey, ReqContext
from kvoffload.cache.keys import key_hashes
from kvoffload.cache.policies import tournament
from kvoffload.cache.policies.tournament import RULES, Rule, Tournament
from tests.suites.reference import BEING_WRITTEN, ReferenceManager, unique

TEXTBOOK = tuple(rule for rule in RULES if not rule.by_gap)


class TextbookTournament(Tournament):
    """Of the rules that the reference knows."""

    rules = TEXTBOOK
    first = 1


class Fixed(Tournament):
    """Follows one rule, whatever the scores are."""

    def __init__(self, capacity: int, rule: Rule) -> None:
        super().__init__(capacity)
        self._fixed = rule

    @property
    def rule(self) -> Rule:
        return self._fixed


class Ghosts:
    """The last ``limit`` names that entered, without those that were taken out since."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: list[tuple[object, int] | None] = []
        """Name and stamp; None: taken out."""

    def stamp(self, name: object) -> int:
        """Returns when ``name`` was last used; -1 if it is not here."""
        return next((entry[1] for entry in self.latest() if entry is not None and entry[0] == name), -1)

    def latest(self) -> list[tuple[object, int] | None]:
        return self.entries[-self.limit :]

    def take_out(self, name: object) -> None:
        self.entries = [None if entry is not None and entry[0] == name else entry for entry in self.latest()]

    def enter(self, name: object, stamp: int) -> None:
        self.take_out(name)
        self.entries.append((name, stamp))


class ReferenceShadows:
    """Names on a device, and those that have left it in one shadow per rule, as ``policies.tournament.PlainShadows``
    has them; and what ``AutoPolicy`` holds if every request is served at once and there is no device."""

    def __init__(self, host: int, device: int, rules: Sequence[Rule]) -> None:
        self.host, self.device, self.rules = host, device, rules
        self.on_device: list[int] = []
        self.off_device: list[int] = []
        self.once: list[list[int]] = [[] for _ in rules]
        self.again: list[list[int]] = [[] for _ in rules]
        self.was_used_again: dict[int, bool] = {}
        """Of each known name."""

    def access(self, names: Sequence[int]) -> list[int]:
        """Returns how many leading names each shadow had beyond the device."""
        on_device = leading(names, self.on_device)
        found = [
            leading(names, [*self.on_device, *once, *again]) - on_device
            for once, again in zip(self.once, self.again, strict=True)
        ]
        for name in reversed(names):
            self.was_used_again[name] = name in self.was_used_again
            for members in (self.on_device, self.off_device, *self.once, *self.again):
                if name in members:
                    members.remove(name)
            self.on_device.append(name)
        while len(self.on_device) > self.device:
            left = self.on_device.pop(0)
            self.off_device.append(left)
            for members in self.again if self.was_used_again[left] else self.once:
                members.append(left)
        for rule, once, again in zip(self.rules, self.once, self.again, strict=True):
            while len(once) + len(again) > self.host:
                self.make_room(rule, once, again)
        most = max(0, tournament.SHADOW_NAMES * (self.host + self.device) - len(self.on_device))
        for _ in range(len(self.off_device) - most):
            name = self.off_device.pop(0)
            if any(name in members for members in (*self.once, *self.again)):
                self.off_device.append(name)
            else:
                del self.was_used_again[name]
        return found

    def make_room(self, rule: Rule, once: list[int], again: list[int]) -> None:
        if rule.share is None:
            oldest = next(name for name in self.off_device if name in once or name in again)
            (once if oldest in once else again).remove(oldest)
        elif len(once) > max(1, int(rule.share * self.host)) or not again:
            once.pop(0)
        else:
            again.pop(0)


def leading(names: Sequence[int], members: Sequence[int]) -> int:
    return next((n for n, name in enumerate(names) if name not in members), len(names))


class ReferenceAutoManager(ReferenceManager):
    """Evicts by the self-tuning policy."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        assert num_blocks <= tournament.SHADOW_BLOCKS, "every block is sampled"
        self.order_clear()

    def order_clear(self) -> None:
        self.shadows = ReferenceShadows(self.capacity, 0, TEXTBOOK)
        self.scores = [0.0] * len(TEXTBOOK)
        self.rule = TEXTBOOK[TextbookTournament.first]
        self.once: set[OffloadKey] = set()
        self.again: set[OffloadKey] = set()
        self.stamp: dict[OffloadKey, int] = {}
        self.ghosts = Ghosts(tournament.GHOSTS * self.capacity)
        self.marked: dict[OffloadKey, bool] = {}
        self.skipped: set[OffloadKey] = set()
        """Busy blocks that an eviction has passed over: they are in no order until they are evictable."""
        self.clock = 0

    def tick(self, key: OffloadKey) -> None:
        self.skipped.discard(key)
        self.stamp[key] = self.clock
        self.clock += 1

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        names = [int(h) for h in key_hashes(unique(keys))]
        decay = 0.5 ** min(len(names) / (tournament.HALF_LIFE * self.capacity), 1 / tournament.HALF_LIFE_REQUESTS)
        if names:
            self.scores = [s * decay + n for s, n in zip(self.scores, self.shadows.access(names), strict=True)]
        best = self.scores.index(max(self.scores))
        if self.scores[best] > tournament.MARGIN * self.scores[TEXTBOOK.index(self.rule)]:
            self.rule = TEXTBOOK[best]
        for key in unique(keys):
            if key not in self.blocks:
                self.marked[key] = self.ghosts.stamp(key) >= 0
        for key in reversed(unique(keys)):
            if key in self.blocks:
                if key in self.once and self.blocks[key].ref_cnt != BEING_WRITTEN:
                    self.once.remove(key)
                    self.again.add(key)
                self.tick(key)

    def is_returning(self, key: OffloadKey) -> bool:
        return self.ghosts.stamp(key) >= 0 and self.marked.get(key, False)

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Returns those of ``keys`` that do not stay out. Room is made one by one, as if no block were busy."""
        if self.rule.share is None:
            return keys
        once, again = len(self.once), len(self.again)
        new_once = [key for key in keys if not self.is_returning(key)]
        new_again = [key for key in keys if self.is_returning(key)]
        quota = max(1, int(self.rule.share * self.capacity))
        out: list[OffloadKey] = []
        for _ in range(len(keys) - len(self.free_slots)):
            crowded = once + len(new_once) > quota
            if new_once and not (once if crowded else again):
                out.append(new_once.pop())
            elif crowded and once:
                once -= 1
            elif again:
                again -= 1
            elif once:
                once -= 1
            elif new_again:
                out.append(new_again.pop())
        return [key for key in keys if key not in out]

    def order_refuse(self, key: OffloadKey) -> None:
        if self.ghosts.stamp(key) < 0:
            self.marked.pop(key, None)
        self.ghosts.enter(key, self.clock)
        self.clock += 1

    def order_insert(self, key: OffloadKey) -> None:
        (self.again if self.is_returning(key) else self.once).add(key)
        self.ghosts.take_out(key)
        self.tick(key)

    def order_touch(self, key: OffloadKey) -> None:
        raise NotImplementedError("a whole chain is touched")

    def order_move(self, key: OffloadKey, new: bool) -> None:
        self.tick(key)

    def order_evict_all(self, n: int, evictable: set[OffloadKey], entering: list[OffloadKey]) -> list[OffloadKey]:
        self.num_entering_once = sum(not self.is_returning(key) for key in entering)
        return super().order_evict_all(n, evictable, entering)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        once = sorted((key for key in self.once if key in evictable), key=lambda key: self.stamp[key])
        again = sorted((key for key in self.again if key in evictable), key=lambda key: self.stamp[key])
        if self.rule.share is None:
            victim = min(once + again, key=lambda key: self.stamp[key])
            self.pass_over(self.stamp[victim])
        else:
            crowded = len(self.once) + self.num_entering_once > max(1, int(self.rule.share * self.capacity))
            victim = once[0] if once and (crowded or not again) else again[0]
            if victim in self.again or not crowded:
                self.pass_over(self.stamp[again[0]] if again else self.clock)
        self.once.discard(victim)
        self.again.discard(victim)
        self.ghosts.enter(victim, self.stamp[victim])
        self.marked.pop(victim, None)
        return victim

    def pass_over(self, before: int) -> None:
        busy = {key for key in self.again if self.blocks[key].ref_cnt != 0}
        self.skipped |= {key for key in busy if self.stamp[key] < before}

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        super().complete_store(blocks, req_context, success)
        self.mark_evictable()

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        super().complete_load(blocks, req_context)
        self.mark_evictable()

    def mark_evictable(self) -> None:
        self.skipped = {key for key in self.skipped if key in self.blocks and self.blocks[key].ref_cnt != 0}

    def order_remove(self, key: OffloadKey) -> None:
        self.once.discard(key)
        self.again.discard(key)
