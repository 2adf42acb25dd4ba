"""Stores: which blocks of which requests are stored in a step, and the jobs that copy them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.abc import (
    BoundaryState,
    DeviceSpec,
    IntegrityError,
    LoadStoreSpec,
    MissReason,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    Retained,
    TransferSpec,
)
from kvoffload.connector.device_blocks import DeviceBlocks, HeldBlock
from kvoffload.connector.due import DueList
from kvoffload.connector.handover import SERVER_CHARS, Handover, name_of
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import NULL_BLOCK, Block, KeyLayout
from kvoffload.connector.observer import RequestObserver
from kvoffload.connector.request import NEVER, Match, Phase, RequestState, Storing
from kvoffload.connector.states import StateKeeper

MAX_TOGETHER = 8
"""Blocks that decoding completes within so many steps are stored by one job. A job costs as much as several blocks."""
TOGETHER_SHARE = 1 / 8
"""A block waits for others for at most this share of its tokens."""
MAX_LEAVING = 1024
"""Blocks that are stored in the step in which they leave the device, before its forward pass. The others are lost."""
AHEAD_DECAY = 15 / 16
AHEAD_SHARE = 1 / 8
"""What the next device blocks hold is stored early: of as many as one of the latest steps has handed out, which counts
less with every further step, and at most of this share of all that are known."""
STORE_FAILED = "kvoffload: a store failed, or came too late for its blocks, and was dropped"
NO_ROOM = "kvoffload: no room in the host pool, every block is in use; stores wait"


@dataclass(slots=True, eq=False)
class Due:
    """Blocks of one request that are to be stored when ``num_computed`` of its tokens are computed, and its
    ``next_store`` after that."""

    state: RequestState
    num_computed: int
    blocks: list[Block]
    next_store: tuple[int, ...]


class StorePlanner:
    """Finds the blocks that are due in a step, asks ``manager`` for room, and makes the jobs.

    Blocks are due when their tokens are known and computed. If the manager has no room for them, they are offered again
    in the next step. If it has refused a block of a request, those after it are not stored either.

    With ``device``, host memory does not repeat the device: a block that is due is only noted there, unless the manager
    wants every block, and is stored when it leaves the device. Blocks of requests with hints are stored at once,
    because hints concern blocks in host memory. ``next_free`` returns device blocks that are handed out next, see
    EngineSpec.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: KeyLayout,
        jobs: JobTable,
        observer: RequestObserver,
        device: DeviceBlocks | None = None,
        next_free: Callable[[int], Iterable[int]] | None = None,
    ) -> None:
        self._manager = manager
        self._layout = layout
        self._jobs = jobs
        self._observer = observer
        self.device = device
        self._is_late = device is not None and not manager.wants_every_block
        self._next_free = next_free
        self._num_ahead = 0
        self._forgotten: dict[OffloadKey, None] = {}
        """Blocks on the device that requests need and the engine does not find there any more."""
        self._due = DueList(_together(layout))
        self._keeper = StateKeeper(layout) if layout.states else None
        self.server = secrets.token_hex(SERVER_CHARS // 2)
        """The name of this server in what it hands over."""

    def watch(self, req_id: str, has_new_table: bool) -> None:
        """Looks at a request that was given device blocks: if these are a whole new table, in its next step."""
        if has_new_table or req_id not in self._due:
            self._due.add(req_id, 1)

    def lose_blocks(self, state: RequestState) -> None:
        """Stops looking at a request that loses its device blocks."""
        self._due.remove(state.context.req_id)
        self._leave_if_other(state)

    def end(self, state: RequestState) -> None:
        """Forgets a request that has ended."""
        self.lose_blocks(state)
        if self._keeper is not None:
            state.state_ends = self._keeper.end(state.context.req_id)

    def retain(self, state: RequestState) -> tuple[Retained | None, int]:
        """Has the chain of a request that has ended retained, if it asks for that, or ends what its session has
        retained: what is stored of its first tokens, up to the last one at which a request can continue. Returns the
        answer, None if it says nothing about that, and their number."""
        hints = state.context.hints
        if hints is None or (not hints.drop and hints.retain_s is None):
            return None, 0
        keys, end = list[OffloadKey](), 0
        if state.may_store and state.touched and hints.retain_s:
            stored, layout = self._stored_in_the_end(state), self._layout
            end = layout.last_resumable(state.blocks.keys, frozenset(stored), state.request.num_tokens)
            within = zip(state.blocks.keys, layout.block_tokens, strict=True)
            before = {key for of_group, size in within for key in of_group[: end // size]}
            keys = [key for key in stored if key in before]
        return self._manager.retain(keys, state.context), end

    def _stored_in_the_end(self, state: RequestState) -> list[OffloadKey]:
        """Returns the blocks of a request that has ended which host memory has, or gets with its last ones."""
        blocks, num_computed = state.blocks, state.request.num_computed_tokens
        state.extend_keys()
        # What has left host memory since is stored again.
        blocks.restart_stores()
        blocks.loaded = None
        due = self.due_of(state, num_computed, num_computed)
        coming = set() if due is None or state.storing is Storing.REFUSED else {block.key for block in due.blocks}
        keys = blocks.computed_keys(state.state_ends)
        found = self._manager.lookup_each(keys, replace(state.context, may_wait=False))
        return [key for key, is_there in zip(keys, found.tolist(), strict=True) if is_there or key in coming]

    def hand_over(self, state: RequestState) -> Handover | None:
        """Has the chain of a request that has ended written first to the tiers that other servers use. Returns what is
        to be sent to the server that goes on; None if there is nothing."""
        if not (state.may_store and state.touched and state.record is not None):
            return None
        blocks, layout = state.blocks, self._layout
        stored = set(self._stored_in_the_end(state))
        # The other server knows the prompt only, and some blocks have a name when the tokens behind them are known.
        prompt = min(state.record.tokens_asked, state.request.num_computed_tokens, blocks.max_stored_tokens)
        ends = [layout.num_final(g, prompt) * size for g, size in enumerate(layout.block_tokens)]
        ends += [prompt - layout.groups[g].lookahead for g in layout.ahead]
        if layout.windows or layout.states:
            # The other server computes the last token of the prompt. What that needs is written for the ends of whole
            # blocks only.
            ends.append(state.record.tokens_asked - 1)
        tokens = min(ends)
        while tokens := layout.last_resumable(blocks.keys, stored, tokens):
            keys, name = layout.needed_keys(blocks.keys, tokens), name_of(layout, blocks.keys, tokens)
            places, num_blocks = self._manager.hand_over(keys)
            if name is not None and places:
                return Handover(tokens, name, places, self.server)
            # There is no room for the others.
            stored.difference_update(keys[num_blocks:])
        return None

    def end_job(self, job: Job) -> None:
        """Ends a store that all workers have reported."""
        self._manager.complete_store(job.lease, success=not job.failed)
        if not job.states:
            # Requests may wait for it, see ``bring_back``.
            self._jobs.changes.loads += 1
        if not job.failed:
            self._jobs.changes.contents += 1
            self._observer.stored(job)
            return
        keys = frozenset(job.keys)
        for state in job.states:
            state.discard_stored(keys)
            self._observer.count_stored(state)
        if self._jobs.is_current(job):
            self._observer.metrics.add("store_failures")
            self._observer.warn(STORE_FAILED)

    def reset(self) -> None:
        """Forgets which states are kept, and what the device holds."""
        if self._keeper is not None:
            self._keeper.clear()
        if self.device is not None:
            self._note_left(self.device.clear())

    def clear(self) -> None:
        self._due.clear()
        if self.device is not None:
            self.device.clear()

    def store_finished(self, finished: Sequence[tuple[RequestState, int]]) -> dict[int, TransferSpec]:
        """Returns the jobs for the last blocks of requests that have ended, each with its number of computed tokens.
        Then puts their whole chains in order, and offers them to lower tiers."""
        dues = [self.due_of(state, computed, computed) for state, computed in finished]
        specs = self._store([due for due in dues if due is not None])
        for state, _ in finished:
            if state.touched:
                blocks, chain = state.blocks, state.blocks.keys_in_order()
                used = blocks.used_keys(state.state_ends) if self._layout.states else chain
                self._manager.end_chain(used, blocks.stored, state.context, chain)
                if self.device is not None and state.context.hints is None:
                    self._manager.note_device(held=self.device.having(chain))
        return specs

    def store_leaving(
        self, device: DeviceBlocks, handed_out: Sequence[int], overwritten: Collection[int]
    ) -> dict[int, TransferSpec]:
        """Returns the jobs for blocks that leave the device because their device blocks are ``handed_out``, and for
        those that leave next. The first must be fenced. What may be ``overwritten`` before that is lost."""
        self._note_left(device.leave(overwritten))
        left = device.leave(handed_out)
        self._note_left(left)
        specs: dict[int, TransferSpec] = {}
        # Engines free a chain from its tail. If there is not room for all, its head is stored.
        self._store_held(left[: -MAX_LEAVING - 1 : -1], specs)
        if self._next_free is not None:
            self._num_ahead = max(len(handed_out), int(self._num_ahead * AHEAD_DECAY))
            most = max(1, int(len(device) * AHEAD_SHARE))
            self._store_held(device.soon(self._next_free(min(self._num_ahead, most)))[::-1], specs)
        return specs

    def bring_back(self, state: RequestState, end: int) -> bool:
        """Whether the device still holds the request's block behind token ``end``, which its engine does not find there
        any more: it has emptied its cache, or named another copy. The next step stores it, with those behind it, so
        that it can be loaded."""
        device, size = self.device, self._layout.block_tokens[0]
        if device is None or end + size >= state.request.num_tokens:
            return False
        keys = state.blocks.keys[0][end // size :]
        if not keys or keys[0] not in device:
            return False
        if state.was_brought_back:
            return self._manager.explain_miss(keys[0]).reason is MissReason.BEING_WRITTEN
        state.was_brought_back = True
        for g, of_group in enumerate(state.blocks.keys):
            self._forgotten |= dict.fromkeys(of_group[end // self._layout.block_tokens[g] :])
        return True

    def store_forgotten(self, device: DeviceBlocks, requests: Iterable[RequestState]) -> dict[int, TransferSpec]:
        """Returns the jobs for blocks that some of the ``requests`` wait for, see ``bring_back``."""
        specs: dict[int, TransferSpec] = {}
        if not self._forgotten:
            return specs
        for state in requests:
            self._leave_if_other(state)
        self._store_held(device.get(self._forgotten), specs)
        self._forgotten.clear()
        if not specs:
            self._jobs.changes.loads += 1
        return specs

    def _store_held(self, blocks: Sequence[HeldBlock], specs: dict[int, TransferSpec]) -> None:
        """Makes a job per tenant of those ``blocks``, the most valuable first, that host memory lacks."""
        by_namespace: dict[bytes, list[HeldBlock]] = {}
        for held in blocks:
            by_namespace.setdefault(held.namespace, []).append(held)
        for of_tenant in by_namespace.values():
            output = self._manager.store_leaving([held.block.key for held in of_tenant])
            if output is None:
                self._refused()
            while output is None and (of_tenant := of_tenant[: len(of_tenant) // 2]):
                output = self._manager.store_leaving([held.block.key for held in of_tenant])
            if output is not None:
                self._count_evicted(output)
                wanted = frozenset(output.keys_to_store)
                new = [(held.state, held.block) for held in of_tenant if held.block.key in wanted]
                self._add_job(new, [], output, specs)

    def store_running(
        self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState]
    ) -> dict[int, TransferSpec]:
        """Returns the jobs for blocks that are completed by a step which computes these numbers of tokens."""
        dues = []
        for req_id in self._due.take(scheduled):
            state, tokens = requests.get(req_id), scheduled.get(req_id)
            if state is None:
                continue
            if tokens is None or state.phase is Phase.LOADING:
                self._due.add(req_id, 1)
                continue
            before = state.request.num_computed_tokens
            due = self.due_of(state, before + tokens, before)
            if due is None:
                self._look_again(req_id, state, before + tokens)
            else:
                dues.append(due)
        if not dues:
            return {}
        specs = self._store(dues)
        for due in dues:
            self._look_again(due.state.context.req_id, due.state, due.num_computed)
        return specs

    def begin(self, state: RequestState, match: Match | None, num_loaded: int) -> None:
        """Takes note of a request that is given device blocks after the lookup ``match``, and loads ``num_loaded``
        tokens."""
        if self._keeper is not None and match is not None:
            self._keeper.begin(state, match.computed + num_loaded, match.junction)

    def store_states(
        self,
        boundary_states: Mapping[str, Sequence[BoundaryState]],
        preempted: Collection[str],
        requests: Mapping[str, RequestState],
    ) -> dict[int, TransferSpec]:
        """Returns the jobs for those states worth keeping that a step completes. A state for which there is no room is
        dropped, as are those of requests that have lost their blocks in this step."""
        specs: dict[int, TransferSpec] = {}
        for req_id, offered in boundary_states.items():
            state = requests.get(req_id)
            if state is None or req_id in preempted or self._keeper is None:
                continue
            blocks = self._states_of(state, offered, self._keeper)
            keys = [block.key for block in blocks]
            is_refused = state.storing is Storing.REFUSED
            output = self._manager.prepare_store(keys, state.context, is_refused) if keys else None
            if output is not None and not is_refused:
                self._start([Due(state, 0, blocks, state.blocks.next_store)], output, specs)
                # A state that was refused takes the place of no other.
                present = [block for block in blocks if block.key not in output.refused_keys]
                superseded = self._keeper.stored(state, present, frozenset(output.keys_to_store))
                if superseded:
                    self._manager.drop(superseded, only_host=True)
            elif keys and not is_refused:
                self._refused()
        return specs

    def _states_of(self, state: RequestState, offered: Sequence[BoundaryState], keeper: StateKeeper) -> list[Block]:
        """Returns those of the ``offered`` states of a request that are stored: all groups' or none at a position."""
        if state.phase is Phase.LOADING or not state.may_store:
            return []
        state.extend_keys()
        layout, keys = self._layout, state.blocks.keys
        found: dict[int, list[Block]] = {}
        for g, device_block, end in offered:
            ordinal = layout.last_within(g, end)
            if end % layout.align or end > state.blocks.max_stored_tokens or device_block == NULL_BLOCK:
                continue
            if 0 <= ordinal < len(keys[g]):
                found.setdefault(end, []).append(Block(g, ordinal, keys[g][ordinal], ordinal, [device_block]))
        whole = [end for end, blocks in found.items() if {block.group for block in blocks} == set(layout.states)]
        return [block for end in keeper.choose(state, whole) for block in found[end]]

    def _look_again(self, req_id: str, state: RequestState, num_computed: int) -> None:
        """Adds the request for the step in which its next block may be due."""
        store_at = state.blocks.store_at
        if store_at != NEVER and state.may_store:
            left = store_at - num_computed
            self._due.add(req_id, left if left > 1 else 1)

    def due_of(self, state: RequestState, num_computed: int, num_before: int) -> Due | None:
        """Returns the request's whole blocks of computed, known tokens that were not stored yet; None if it is too
        early for one, or if nothing of the request may be stored."""
        blocks = state.blocks
        if num_computed < blocks.store_at or state.request.num_tokens < blocks.store_at:
            return None
        if state.phase is Phase.LOADING or not state.may_store:
            return None
        self._extend_keys(state)
        found, next_store = blocks.due(num_computed, num_before, with_loaded=self.device is not None)
        return Due(state, num_computed, found, next_store)

    def _extend_keys(self, state: RequestState) -> None:
        if not state.extend_keys():
            self._leave_tables(state)

    def _leave_if_other(self, state: RequestState) -> None:
        """Forgets the device blocks of a request whose tokens are others than when its keys were made."""
        if self.device is not None and state.blocks.has_other_tokens():
            self._leave_tables(state)

    def _leave_tables(self, state: RequestState) -> None:
        """The engine has taken tokens back, and may have computed others in the same device blocks."""
        if self.device is not None:
            for table in state.blocks.tables:
                self._note_left(self.device.leave(table))

    def _note_left(self, blocks: Sequence[HeldBlock]) -> None:
        if blocks:
            self._manager.note_device(left=[held.block.key for held in blocks])

    def _store(self, dues: list[Due]) -> dict[int, TransferSpec]:
        """Makes the jobs for all blocks that there is room for. Single blocks, as decoding completes them, share one
        job if there is room for all. Each prompt's blocks are a job of their own, because policies judge a chain by its
        depth."""
        single: list[Due] = []
        chains: list[Due] = []
        factors = self._layout.factors
        for due in dues:
            if self.device is not None and due.state.context.hints is None:
                self._note_left(self.device.hold(due.state, due.blocks))
                if self._is_late and not due.state.options.remote_decode:
                    due.state.blocks.stored_up_to(due.next_store)
                    continue
            if due.blocks and due.state.storing is not Storing.REFUSED:
                # Only single blocks with all of their device blocks can share a job. What is to be retained, or handed
                # over, is stored whatever it seems to be worth.
                block, options = due.blocks[0], due.state.options
                is_promised = bool(options.retain_s) or options.remote_decode
                is_single = (
                    len(due.blocks) == 1 and len(block.device_blocks) == factors[block.group] and not is_promised
                )
                (single if is_single else chains).append(due)
                continue
            if due.blocks:
                self._manager.prepare_store([block.key for block in due.blocks], due.state.context, behind_refused=True)
            due.state.blocks.stored_up_to(due.next_store)
        specs: dict[int, TransferSpec] = {}
        if len(single) > 1:
            output = self._manager.prepare_store([due.blocks[0].key for due in single])
            if output is not None:
                self._start(single, output, specs)
                single = []
        for due in [*chains, *single]:
            output = self._manager.prepare_store([block.key for block in due.blocks], due.state.context)
            if output is None:
                self._refused()
            else:
                self._start([due], output, specs)
        return specs

    def _refused(self) -> None:
        self._observer.metrics.add("refused_stores")
        self._observer.warn(NO_ROOM)

    def _start(self, dues: list[Due], output: PrepareStoreOutput, specs: dict[int, TransferSpec]) -> None:
        """Makes one job of the blocks for which ``output`` has room."""
        self._count_evicted(output)
        refused = frozenset(output.refused_keys)
        new: list[tuple[RequestState | None, Block]] = []
        states: dict[int, RequestState] = {}
        # If two requests have the same block, the first one stores it.
        wanted = dict.fromkeys(output.keys_to_store)
        for due in dues:
            state = due.state
            state.blocks.stored_up_to(due.next_store)
            for block in due.blocks:
                key = block.key
                if key in wanted:
                    del wanted[key]
                    new.append((state, block))
                    states[id(state)] = state
                    state.blocks.stored.append(key)
                elif key in refused and block.group not in self._layout.states:
                    state.storing = Storing.REFUSED
        self._add_job(new, list(states.values()), output, specs)

    def _count_evicted(self, output: PrepareStoreOutput) -> None:
        if output.evicted_keys:
            self._observer.metrics.add("evicted_blocks", len(output.evicted_keys))

    def _add_job(
        self,
        new: list[tuple[RequestState | None, Block]],
        states: Sequence[RequestState],
        output: PrepareStoreOutput,
        specs: dict[int, TransferSpec],
    ) -> None:
        """Adds the job that stores ``new`` blocks, each with a request that can describe it, for ``states``."""
        # The slots of the lease stand in this order: with any other, blocks would be stored under wrong keys.
        if [block.key for _, block in new] != output.keys_to_store:
            raise IntegrityError("the manager has room for other blocks than it was offered, or in another order")
        if new:
            job_id, spec = self._new_job(new, states, output)
            specs[job_id] = spec

    def _new_job(
        self, new: list[tuple[RequestState | None, Block]], states: Sequence[RequestState], output: PrepareStoreOutput
    ) -> tuple[int, TransferSpec]:
        lease = output.store_spec
        num_groups, host = len(self._layout.groups), lease
        if num_groups > 1:
            order = sorted(range(len(new)), key=lambda i: new[i][1].group)
            new = [new[i] for i in order]
            host = LoadStoreSpec(lease.medium(), lease.slots[order])
        if num_groups == 1:
            ids = [device_block for _, block in new for device_block in block.device_blocks]
            sizes, firsts = [len(ids)], [new[0][1].first_device_block]
        else:
            ids = []
            sizes, firsts = [0] * num_groups, [0] * num_groups
            for _, block in new:
                if not sizes[block.group]:
                    firsts[block.group] = block.first_device_block
                sizes[block.group] += len(block.device_blocks)
                ids += block.device_blocks
        described = [(state, block) for state, block in new if state is not None]
        described = described if self._observer.describes_blocks else []
        job = Job(True, states, lease, output.keys_to_store, described, frozenset(ids))
        device = DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))
        return self._jobs.add(job), TransferSpec(states[0].context.req_id if states else "", host, device)


def _together(layout: KeyLayout) -> int:
    """Returns the number of steps whose blocks are stored together. In a window, what a block needs may be gone a step
    later."""
    if layout.windows or not layout.full:
        return 1
    fewest = min(layout.block_tokens[g] for g in layout.full)
    return max(1, min(MAX_TOGETHER, int(fewest * TOGETHER_SHARE)))
