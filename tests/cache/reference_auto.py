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


class ReferenceTwoLists:
    """Names in two lists that follow one rule, as ``policies.tournament.Shadow`` does, and ``AutoPolicy`` if every
    request is served at once."""

    def __init__(self, capacity: int, rule: Rule) -> None:
        self.capacity = capacity
        self.rule = rule
        self.once: list[int] = []
        self.again: list[int] = []
        self.ghosts: list[int] = []
        self.stamp: dict[int, int] = {}
        self.clock = 0

    def access(self, names: Sequence[int]) -> int:
        here = [name for name in names if name in self.once or name in self.again]
        found = next((n for n, name in enumerate(names) if name not in here), len(names))
        self.clock += len(names)
        share, capacity = self.rule.share, self.capacity
        floor = -1
        if share is not None and self.rule.tests_distance and self.again:
            is_full = len(self.again) >= capacity - max(1.0, min(share, 0.5) * capacity)
            floor = self.stamp[self.again[0]] if is_full else -1
        new_once: list[int] = []
        new_again: list[int] = []
        for i, name in reversed(list(enumerate(names))):
            known = self.stamp[name] if name in self.ghosts else -1
            self.stamp[name] = self.clock - i
            if name in here:
                (self.once if name in self.once else self.again).remove(name)
                self.again.append(name)
            elif known > floor:
                new_again.insert(0, name)
            else:
                new_once.insert(0, name)
        self.left_once: list[int] = []
        self.left_again: list[int] = []
        self.stayed_out: list[int] = []
        while len(self.once) + len(self.again) + len(new_once) + len(new_again) > capacity:
            if not self.make_room(here, new_once, new_again):
                break
        left = self.left_once + self.left_again
        if share is None:
            left.sort(key=lambda name: self.stamp[name])
        for name in sorted(self.stayed_out, key=lambda name: self.stamp[name]) + left:
            if name in self.ghosts:
                self.ghosts.remove(name)
            self.ghosts.append(name)
        self.ghosts = self.ghosts[-tournament.SHADOW_GHOSTS * capacity :]
        for new, members in ((new_once, self.once), (new_again, self.again)):
            for name in new:
                if name in self.ghosts:
                    self.ghosts.remove(name)
                members.append(name)
        for members in (self.once, self.again):
            members.sort(key=lambda name: self.stamp[name])
        return found

    def make_room(self, here: list[int], new_once: list[int], new_again: list[int]) -> bool:
        """Lets one name leave or stay out. Returns False if there is none."""
        idle_again = [name for name in self.again if name not in here]
        if self.rule.share is None:
            oldest = min(self.once + self.again + new_once + new_again, key=lambda name: self.stamp[name])
            new = new_once if oldest in new_once else new_again
            return self.stay_out(new) if oldest in new else self.leave(oldest)
        quota = max(1, int(self.rule.share * self.capacity))
        if len(self.once) + len(new_once) > quota:
            if self.rule.holds and len(self.once) > quota and new_once:
                return self.stay_out(new_once)
            return self.leave(self.once[0]) if self.once else self.stay_out(new_once)
        if idle_again:
            return self.leave(idle_again[0])
        return self.stay_out(new_once) or (bool(self.once) and self.leave(self.once[0])) or self.stay_out(new_again)

    def leave(self, name: int) -> bool:
        if name in self.once:
            self.once.remove(name)
            self.left_once.append(name)
        else:
            self.again.remove(name)
            self.left_again.append(name)
        return True

    def stay_out(self, new: list[int]) -> bool:
        if new:
            self.stayed_out.append(new.pop())
            return True
        return False


class ReferenceAutoManager(ReferenceManager):
    """Evicts by the self-tuning policy."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        assert num_blocks <= tournament.SHADOW_BLOCKS, "every block is sampled"
        self.order_clear()

    def order_clear(self) -> None:
        self.shadows = [ReferenceTwoLists(self.capacity, rule) for rule in TEXTBOOK]
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
            self.scores = [
                s * decay + shadow.access(names) for s, shadow in zip(self.scores, self.shadows, strict=True)
            ]
        best = self.scores.index(max(self.scores))
        if self.scores[best] > tournament.MARGIN * self.scores[TEXTBOOK.index(self.rule)]:
            self.rule = TEXTBOOK[best]
        ordered = [self.stamp[key] for key in self.again if key not in self.skipped]
        floor = min(ordered, default=-1) if self.rule.is_tested(self.capacity, len(self.again)) else -1
        for key in unique(keys):
            if key not in self.blocks:
                self.marked[key] = self.ghosts.stamp(key) > floor
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
            if new_once and ((crowded and ((self.rule.holds and once > quota) or not once)) or not (crowded or again)):
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
        self.ghosts.enter(key, self.clock)
        self.marked.pop(key, None)
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
