"""The self-tuning policy in the plainest Python there is: lists, one block at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cache.policies import tournament
from kvoffload.cache.policies.ghosts import key_hashes
from kvoffload.cache.policies.tournament import RULES, Rule
from kvoffload.testing.reference import BEING_WRITTEN, ReferenceManager, unique


class Ghosts:
    """The last ``limit`` that entered, and were not taken out since."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: list[tuple[object, int] | None] = []
        """Name and stamp; None: taken out."""

    def stamp(self, name: object) -> int:
        """When it was last used; -1 if it is not here."""
        return next((entry[1] for entry in self.latest() if entry is not None and entry[0] == name), -1)

    def latest(self) -> list[tuple[object, int] | None]:
        return self.entries[-self.limit :]

    def take_out(self, name: object) -> None:
        self.entries = [None if entry is not None and entry[0] == name else entry for entry in self.latest()]

    def enter(self, name: object, stamp: int) -> None:
        self.take_out(name)
        self.entries.append((name, stamp))


class ReferenceTwoLists:
    """Names in two lists, by one rule: what ``policies.tournament.Shadow`` is, and what ``AutoPolicy`` is when every
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
        """One name leaves, or stays out. False: there is none."""
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
    """Evicts by the self-tuning policy. Pinned blocks are in no order, but count in their list."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        assert num_blocks <= tournament.SHADOW_BLOCKS, "every block is sampled"
        self.order_clear()

    def order_clear(self) -> None:
        self.shadows = [ReferenceTwoLists(self.capacity, rule) for rule in RULES]
        self.scores = [0.0] * len(RULES)
        self.rule = RULES[tournament.FIRST]
        self.once: set[OffloadKey] = set()
        self.again: set[OffloadKey] = set()
        self.stamp: dict[OffloadKey, int] = {}
        self.ghosts = Ghosts(tournament.GHOSTS * self.capacity)
        self.marked: dict[OffloadKey, bool] = {}
        self.passed: set[OffloadKey] = set()
        """Being written, and passed over in an eviction: in no order until then."""
        self.clock = 0

    def tick(self, key: OffloadKey) -> None:
        self.passed.discard(key)
        self.stamp[key] = self.clock
        self.clock += 1

    def is_pinned(self, key: OffloadKey) -> bool:
        return self.blocks[key].ref_cnt > 0

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        names = [int(h) for h in key_hashes(unique(keys))]
        decay = 0.5 ** (len(names) / (tournament.HALF_LIFE * self.capacity))
        if names:
            self.scores = [
                s * decay + shadow.access(names) for s, shadow in zip(self.scores, self.shadows, strict=True)
            ]
        best = self.scores.index(max(self.scores))
        if self.scores[best] > tournament.MARGIN * self.scores[RULES.index(self.rule)]:
            self.rule = RULES[best]
        ordered = [self.stamp[key] for key in self.again if not self.is_pinned(key) and key not in self.passed]
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

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        new = [key for key in unique(keys) if self.held(key) is None]
        self.need = max(0, len(new) - len(self.free_slots))
        self.entering = [key for key in new if not self.is_returning(key)]
        refused = self.refused(new, self.need) if self.need and self.rule.share is not None else []
        self.entering = [key for key in self.entering if key not in refused]
        for key in reversed([key for key in new if key in refused]):
            self.ghosts.enter(key, self.clock)
            self.marked.pop(key, None)
            self.clock += 1
        return super().prepare_store([key for key in keys if key not in refused], req_context)

    def is_returning(self, key: OffloadKey) -> bool:
        return self.ghosts.stamp(key) >= 0 and self.marked.get(key, False)

    def refused(self, new: list[OffloadKey], need: int) -> list[OffloadKey]:
        """Those of ``new`` that stay out: room is made one by one, and nothing is in use."""
        once, again = len(self.once), len(self.again)
        new_once = [key for key in new if not self.is_returning(key)]
        new_again = [key for key in new if self.is_returning(key)]
        assert self.rule.share is not None
        quota = max(1, int(self.rule.share * self.capacity))
        out: list[OffloadKey] = []
        for _ in range(need):
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
        return out

    def order_insert(self, key: OffloadKey) -> None:
        (self.again if self.is_returning(key) else self.once).add(key)
        self.ghosts.take_out(key)
        self.entering = []
        self.tick(key)

    def order_touch(self, key: OffloadKey) -> None:
        raise NotImplementedError("a whole chain is touched")

    def order_unpin(self, key: OffloadKey) -> None:
        self.tick(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        once = sorted((key for key in self.once if key in evictable), key=lambda key: self.stamp[key])
        again = sorted((key for key in self.again if key in evictable), key=lambda key: self.stamp[key])
        if self.rule.share is None:
            victim = min(once + again, key=lambda key: self.stamp[key])
        else:
            crowded = len(self.once) + len(self.entering) > max(1, int(self.rule.share * self.capacity))
            victim = once[0] if once and (crowded or not again) else again[0]
            if victim in self.again or not crowded:
                self.pass_over(self.stamp[again[0]] if again else self.clock)
        if self.rule.share is None:
            self.pass_over(self.stamp[victim])
        self.once.discard(victim)
        self.again.discard(victim)
        self.ghosts.enter(victim, self.stamp[victim])
        self.marked.pop(victim, None)
        return victim

    def pass_over(self, before: int) -> None:
        writing = {key for key in self.again if self.blocks[key].ref_cnt == BEING_WRITTEN}
        self.passed |= {key for key in writing if self.stamp[key] < before}

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        super().complete_store(blocks, req_context, success)
        self.passed = {key for key in self.passed if key in self.blocks and not self.blocks[key].is_ready}

    def order_remove(self, key: OffloadKey) -> None:
        self.once.discard(key)
        self.again.discard(key)

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: object, req_context: ReqContext | None = None) -> None:
        for key in reversed(unique(keys)):
            if key in self.blocks and not self.is_pinned(key):
                self.tick(key)
