"""Stores: which requests may complete a block, which of their blocks are stored, and the jobs that copy them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvoffload.abc import BoundaryState, Offer, OffloadKey, PrepareStoreOutput, Retained, ScheduledStep, TieredManager
from kvoffload.connector.handover import SERVER_CHARS, Handover, name_of
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import NULL_BLOCK, Block
from kvoffload.connector.leaving import LeavingBlocks
from kvoffload.connector.options import NEVER
from kvoffload.connector.request import Match, Phase, RequestState, Storing
from kvoffload.connector.resets import BlockOrigins
from kvoffload.connector.states import StateKeeper

FEW_TOKENS = 16
"""A request that computes more tokens in a step is looked at in it; the others advance by at most that many."""
MAX_TOGETHER = 8
"""Blocks that decoding completes within so many steps are stored by one job."""
TOGETHER_SHARE = 1 / 8
"""A block waits for others for at most this share of its tokens."""


@dataclass(slots=True, eq=False)
class Due:
    """Blocks of a request to store, and its ``next_store`` after it."""

    state: RequestState
    blocks: list[Block]
    next_store: tuple[int, ...]


class DueList:
    """Requests, by the earliest step in which they may complete a block.

    The list counts tokens. In each step the count grows by the largest number of tokens that a request computes,
    ignoring requests that compute more than FEW_TOKENS. So a request that lacks n tokens cannot be due before the count
    has grown by n. If the engine takes tokens back, the request only becomes due later. It is in the list at most once.

    Requests that are due within ``together`` counts come out at the last of these: one job stores what they complete.
    """

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._count = 0
        self._by_count: dict[int, dict[str, None]] = {}
        """Ids of requests, in order of arrival, by the count at which to look at them."""
        self._count_of: dict[str, int] = {}

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._count_of

    def add(self, req_id: str, tokens: int) -> None:
        """Adds a request that cannot be due before it has computed ``tokens`` more. With one, it comes out next."""
        if req_id in self._count_of:
            self.remove(req_id)
        at = self._count + (tokens if tokens > 1 else 1)
        if tokens > 1:
            at += -at % self._together
        self._count_of[req_id] = at
        self._by_count.setdefault(at, {})[req_id] = None

    def remove(self, req_id: str) -> None:
        if (at := self._count_of.pop(req_id, None)) is not None:
            del self._by_count[at][req_id]

    def take(self, scheduled: Mapping[str, int]) -> list[str]:
        """Removes and returns requests, scheduled or not, that may be due in a step that computes so many tokens."""
        most = max(scheduled.values(), default=0)
        due: list[str] = []
        if most > FEW_TOKENS:
            due = [req_id for req_id, tokens in scheduled.items() if tokens > FEW_TOKENS]
            most = max([tokens for tokens in scheduled.values() if tokens <= FEW_TOKENS], default=0)
        for req_id in due:
            self.remove(req_id)
        # A request that is to be looked at again in the next step is taken out even if nothing is computed.
        for _ in range(max(most, 1)):
            self._count += 1
            requests = self._by_count.pop(self._count, ())
            for req_id in requests:
                del self._count_of[req_id]
            due += requests
        return due


class StorePlanner:
    """Finds the blocks that are due in a step, asks ``manager`` for room, and makes the jobs.

    Blocks are due when their tokens are known and computed. If the manager has no room for them, they are offered again
    in the next step. If it has refused a block of a request, those after it are not stored either.

    With ``leaving``, host memory does not repeat the device: a block that is due is only noted there, unless there
    are lower tiers, and is stored when it leaves the device. Blocks of requests with hints are stored at once, because
    hints concern blocks in host memory, as are those of remote decodes.
    """

    def __init__(self, jobs: JobTable, leaving: LeavingBlocks | None) -> None:
        self._manager, self._layout, self._jobs = jobs.manager, jobs.layout, jobs
        self.leaving = leaving
        self._is_late = leaving is not None and not isinstance(self._manager, TieredManager)
        # In a window, what a block needs may be gone a step later.
        full = () if self._layout.windows else self._layout.full
        fewest = min((self._layout.block_tokens[g] for g in full), default=0)
        self._due = DueList(max(1, min(MAX_TOGETHER, int(fewest * TOGETHER_SHARE))))
        self._keeper = StateKeeper(self._layout) if self._layout.states else None
        self.server = secrets.token_hex(SERVER_CHARS // 2)
        """The name of this server in what it hands over."""

    def take_tables(self, step: ScheduledStep, requests: Mapping[str, RequestState], sound: BlockOrigins) -> list[int]:
        """Takes in the device blocks that the step gives to requests, and returns those that they write to. A request
        with a whole new table is looked at in its next step."""
        handed_out: list[int] = []
        found: Sequence[Sequence[int]] = ()
        replaced, is_tracking = step.replaced, sound.origins is not None
        for req_id, new in step.block_ids.items():
            state, found = requests.get(req_id), ()
            if state is not None:
                if state.filled.of_others:
                    state.filled.of_others = frozenset()
                if req_id in replaced:
                    if is_tracking and state.has_copied_part:
                        state.blocks.storing = Storing.STALE
                    found, new = state.blocks.replace_tables(new)
                elif len(new) == 1:
                    state.blocks.tables[0].extend(new[0])
                else:
                    for table, more in zip(state.blocks.tables, new, strict=True):
                        table.extend(more)
                if req_id in replaced or req_id not in self._due:
                    self._due.add(req_id, 1)
            for of_group in new:
                handed_out += of_group
            if is_tracking:
                sound.trace(state, set().union(*new), set().union(*found))
        return handed_out

    def preempt(self, req_ids: Iterable[str], requests: Mapping[str, RequestState]) -> None:
        """Takes note of requests that lose their device blocks in this step."""
        for req_id in req_ids:
            if (state := requests.get(req_id)) is not None:
                self.lose_blocks(state)
                # It may have new blocks already, in the step that says that it lost the old ones.
                has_new_ones = req_id in self._jobs.allocated
                state.lose_blocks(has_new_ones)
                if not has_new_ones:
                    self._jobs.observer.prefilling.pop(req_id, None)

    def lose_blocks(self, state: RequestState) -> None:
        """Stops looking at a request that loses its device blocks."""
        self._due.remove(state.context.req_id)
        if self.leaving is not None:
            self.leaving.drop_if_other(state)

    def end(self, state: RequestState) -> None:
        """Forgets a request that has ended."""
        self.lose_blocks(state)
        if self.leaving is not None:
            self.leaving.expect(state.context.req_id, 0)
        if self._keeper is not None:
            state.blocks.state_ends = self._keeper.end(state.context.req_id)

    def retain(self, state: RequestState) -> tuple[Retained | None, int]:
        """Has the chain of a request that has ended retained, if it asks for that, or ends what its session has
        retained: what is stored of its first tokens, up to the last one at which a request can continue. Returns the
        answer, None if it says nothing about that, and their number."""
        hints = state.context.hints
        if hints is None or (not hints.drop and hints.retain_s is None):
            return None, 0
        keys, end = list[OffloadKey](), 0
        if state.may_store and state.lookup.was_touched and hints.retain_s:
            stored, layout = self._stored_in_the_end(state), self._layout
            end = layout.last_resumable(state.blocks.keys, frozenset(stored), state.request.num_tokens)
            within = zip(state.blocks.keys, layout.block_tokens, strict=True)
            before = {key for of_group, size in within for key in of_group[: end // size]}
            keys = [key for key in stored if key in before]
        return self._manager.retain(keys, state.context), end

    def _stored_in_the_end(self, state: RequestState) -> list[OffloadKey]:
        """Returns the blocks of a request that has ended which host memory has, or gets with its last ones."""
        blocks, num_computed = state.blocks, state.request.num_computed_tokens
        blocks.extend_keys()
        # What has left host memory since is stored again.
        blocks.restart_stores()
        blocks.loaded = None
        due = self.due_of(state, num_computed, num_computed)
        coming = set() if due is None or blocks.storing is Storing.REFUSED else {block.key for block in due.blocks}
        keys = blocks.computed_keys()
        found = self._manager.lookup_each(keys, replace(state.context, may_wait=False))
        return [key for key, is_there in zip(keys, found, strict=True) if is_there or key in coming]

    def hand_over(self, state: RequestState) -> Handover | None:
        """Has the chain of a request that has ended written first to the tiers that other servers use. Returns what is
        to be sent to the server that goes on; None if there is nothing."""
        if not (state.may_store and state.lookup.was_touched and state.observed.record is not None):
            return None
        blocks, layout = state.blocks, self._layout
        stored = set(self._stored_in_the_end(state))
        # The other server knows the prompt only, and some blocks have a name when the tokens behind them are known.
        prompt = min(state.observed.record.tokens_asked, state.request.num_computed_tokens, blocks.max_stored_tokens)
        ends = [layout.num_final(g, prompt) * size for g, size in enumerate(layout.block_tokens)]
        ends += [prompt - layout.groups[g].lookahead for g in layout.ahead]
        if layout.windows or layout.states:
            # The other server computes the last token. What that needs is written for the ends of whole blocks only.
            ends.append(state.observed.record.tokens_asked - 1)
        tokens = min(ends)
        while tokens := layout.last_resumable(blocks.keys, stored, tokens):
            keys, name = layout.needed_keys(blocks.keys, tokens), name_of(layout, blocks.keys, tokens)
            places, num_blocks = self._manager.hand_over(keys)
            if name is not None and places:
                return Handover(tokens, name, places, self.server)
            if num_blocks >= len(keys):
                return None
            # There is no room for the others.
            stored.difference_update(keys[num_blocks:])
        return None

    def reset(self) -> None:
        """Forgets which states are kept, and what the device holds."""
        if self._keeper is not None:
            self._keeper.clear()
        if self.leaving is not None:
            self.leaving.reset()

    def store_finished(self, finished: Mapping[RequestState, int]) -> None:
        """Makes the jobs for the last blocks of requests that have ended, each with its number of computed tokens.
        Then puts their whole chains in order, and offers them to lower tiers."""
        dues = [self.due_of(state, computed, computed) for state, computed in finished.items()]
        self._store([due for due in dues if due is not None])
        for state in finished:
            if state.lookup.was_touched:
                blocks, chain = state.blocks, state.blocks.keys_in_order()
                used = blocks.used_keys(blocks.state_ends) if self._layout.states else chain
                self._manager.end_chain(used, blocks.stored, state.context, chain)
                if self.leaving is not None and state.context.hints is None:
                    held = self.leaving.device.latest
                    self._manager.note_device(held=[key for key in chain if key in held])

    def store_running(self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState]) -> None:
        """Makes the jobs for blocks that are completed by a step which computes these numbers of tokens."""
        dues, looked_at = [], []
        for req_id in self._due.take(scheduled):
            state, tokens = requests.get(req_id), scheduled.get(req_id)
            if state is None:
                continue
            if tokens is None or state.phase is Phase.LOADING:
                self._due.add(req_id, 1)
                continue
            before = state.request.num_computed_tokens
            if (due := self.due_of(state, before + tokens, before)) is not None:
                dues.append(due)
            elif not state.may_store:
                continue
            looked_at.append((req_id, state, before + tokens))
        if dues:
            self._store(dues)
        for req_id, state, num_computed in looked_at:
            if (store_at := state.blocks.store_at) != NEVER:
                self._due.add(req_id, store_at - num_computed)

    def end_job(self, job: Job) -> bool:
        """Ends a store that all workers have reported."""
        self._manager.complete_store(job.lease, success=not job.failed)
        if not job.requests:
            # Requests may wait for it, see ``LeavingBlocks.bring_back``.
            self._jobs.changes.wakeups += 1
        if not job.failed:
            self._jobs.changes.contents += 1
            self._jobs.observer.stored(job)
            return True
        keys = frozenset(job.keys)
        for state in job.requests:
            state.blocks.stored = [key for key in state.blocks.stored if key not in keys]
        if self.leaving is not None:
            self.leaving.device.forget_early(job.device_blocks)
        if self._jobs.is_current(job):
            self._jobs.observer.metrics.add("store_failures")
            self._jobs.observer.warn("kvoffload: a store failed, or came too late for its blocks, and was dropped")
        return True

    def allocated(self, state: RequestState, match: Match | None, num_loaded: int) -> None:
        """Takes note of a request that is given device blocks after ``match``, and loads ``num_loaded`` tokens."""
        if self.leaving is not None:
            self.leaving.expect(state.context.req_id, 0)
        if self._keeper is not None and match is not None:
            self._keeper.begin(state, match.computed + num_loaded, match.hit.junction)

    def store_states(self, step: ScheduledStep, lost: Collection[str], requests: Mapping[str, RequestState]) -> None:
        """Makes the jobs for those states worth keeping that a step completes. A state for which there is no room is
        dropped, as are those of requests that have ``lost`` their blocks in this step."""
        for req_id, offered in step.boundary_states.items():
            if (state := requests.get(req_id)) is None or req_id in lost or self._keeper is None:
                continue
            if not (blocks := self._states_of(state, offered, self._keeper)):
                continue
            is_refused = state.blocks.storing is Storing.REFUSED
            output = self._offer([Due(state, blocks, state.blocks.next_store)])
            if output is not None and not is_refused:
                # A state that was refused takes the place of no other.
                present = [block for block in blocks if block.key not in output.refused_keys]
                if superseded := self._keeper.stored(state, present, frozenset(output.keys_to_store)):
                    self._manager.drop(superseded, only_host=True)

    def _states_of(self, state: RequestState, offered: Sequence[BoundaryState], keeper: StateKeeper) -> list[Block]:
        """Returns those of the ``offered`` states of a request that are stored: all groups' or none at a position."""
        if state.phase is Phase.LOADING or not state.may_store:
            return []
        state.blocks.extend_keys()
        layout, keys = self._layout, state.blocks.keys
        found: dict[int, list[Block]] = {}
        for g, device_block, end in offered:
            ordinal = layout.last_within(g, end)
            is_possible = not end % layout.align and end <= state.blocks.max_stored_tokens
            if is_possible and device_block != NULL_BLOCK and 0 <= ordinal < len(keys[g]):
                found.setdefault(end, []).append(Block(g, ordinal, keys[g][ordinal], ordinal, [device_block]))
        whole = [end for end, blocks in found.items() if {block.group for block in blocks} == set(layout.states)]
        return [block for end in keeper.choose(state, whole) for block in found[end]]

    def due_of(self, state: RequestState, num_computed: int, num_before: int) -> Due | None:
        """Returns what ``RequestBlocks.due`` finds; None if it is too early for a block, or none may be stored."""
        blocks = state.blocks
        is_early = num_computed < blocks.store_at or state.request.num_tokens < blocks.store_at
        if is_early or state.phase is Phase.LOADING or not state.may_store:
            return None
        if not state.blocks.extend_keys() and self.leaving is not None:
            self.leaving.drop_tables(state)
        found, next_store = blocks.due(num_computed, num_before)
        return Due(state, found, next_store)

    def _store(self, dues: list[Due]) -> None:
        """Makes the jobs for all blocks that there is room for. Single blocks, as decoding completes them, share one if
        it has room for all. Each prompt's blocks have one of their own, because policies judge a chain by its depth."""
        single: list[Due] = []
        chains: list[Due] = []
        groups, leaving = self._layout.groups, self.leaving
        for due in dues:
            if leaving is not None and due.state.context.hints is None:
                leaving.note_left(leaving.device.hold(due.state, due.blocks))
                if self._is_late and not due.state.options.remote_decode:
                    due.state.blocks.stored_up_to(due.next_store)
                    continue
            if not due.blocks:
                due.state.blocks.stored_up_to(due.next_store)
                continue
            # Only single blocks with all of their device blocks can share a job. What is to be retained, or handed
            # over, is stored whatever it seems to be worth.
            block, options = due.blocks[0], due.state.options
            is_whole = len(block.device_blocks) == groups[block.group].block_size_factor
            is_apart = options.retain_s or options.remote_decode or due.state.blocks.storing is Storing.REFUSED
            (single if len(due.blocks) == 1 and is_whole and not is_apart else chains).append(due)
        if len(single) > 1 and self._offer(single):
            single = []
        for due in [*chains, *single]:
            self._offer([due])

    def _offer(self, dues: list[Due]) -> PrepareStoreOutput | None:
        """Makes one job of the blocks that the manager takes. Returns None, and changes nothing, if it has no room."""
        keys, context = [block.key for due in dues for block in due.blocks], dues[0].state.context
        offer = Offer.BEHIND_REFUSED if dues[0].state.blocks.storing is Storing.REFUSED else Offer.COMPUTED
        output = self._manager.prepare_store(keys, context if len(dues) == 1 else None, offer)
        if output is None:
            # Those of several requests are offered one by one next.
            if len(dues) == 1:
                self._jobs.refuse_store()
            return None
        refused = frozenset(output.refused_keys)
        new: list[tuple[int, RequestState, Block]] = []
        states: dict[RequestState, None] = {}
        # If two requests have the same block, the first one stores it.
        wanted = set(output.keys_to_store)
        for due in dues:
            state, blocks, number = due.state, due.state.blocks, due.state.observed.number
            blocks.stored_up_to(due.next_store)
            for block in due.blocks:
                key = block.key
                if key in wanted:
                    wanted.remove(key)
                    new.append((number, state, block))
                    states[state] = None
                    blocks.stored.append(key)
                elif key in refused and block.group not in self._layout.states:
                    state.blocks.storing = Storing.REFUSED
        self._jobs.add_store(new, output, list(states))
        return output
