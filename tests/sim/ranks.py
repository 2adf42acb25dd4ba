"""The workers of the model engine: each computes its share of the layers, checks every byte, and copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, KVGroup, PageGroup, Transfer
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import Finished, OffloadingConnectorWorker
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.transfer.follower import FollowerTransfer
from kvoffload.transfer.inline import InlineTransfer
from tests.sim.content import Access, Batch, EngineRequest, Words, digest, to_words
from tests.sim.faults import FailingTransfer, SlowTransfer
from tests.sim.scenario import Scenario


class WrongBytes(AssertionError):
    """A request has attended to KV that is not its own."""


class Rank(ABC):
    """One worker process: its share of the layers, its host pool and its half of the connector. ``tick`` lets time pass
    for its copies. A rank with a ``leader`` holds the same KV as that one, which stores for both. Ranks may share a
    pool."""

    def __init__(
        self, number: int, host: ByteArray, transfer: Transfer, tick: Callable[[], None], leader: Rank | None = None
    ) -> None:
        self.number = number
        self.host = host
        self.transfer = transfer
        self.leader = leader
        self.worker = OffloadingConnectorWorker(transfer if leader is None else FollowerTransfer(transfer))
        self.tick = tick
        self.loads = 0
        """Loads that went well here."""

    def step(self, meta: StepMeta, batch: Batch, loads_first: bool) -> tuple[Finished, WorkerReport | None]:
        self.worker.begin_step(meta)
        if loads_first:
            self.worker.start_loads(meta)
        for request, n in batch:
            self.tick()
            self.compute(request, request.num_computed_tokens - n, request.num_computed_tokens)
        if not loads_first:
            self.worker.start_loads(meta)
        self.worker.end_step(meta)
        finished = self.worker.get_finished(meta)
        self.loads += len(finished.loaded - finished.failed.keys())
        return finished, self.worker.take_report()

    @abstractmethod
    def compute(self, request: EngineRequest, start: int, end: int) -> None:
        """Checks every byte that the tokens from ``start`` to ``end`` attend to, and writes their own. Both may happen
        later, as on a device, but with the tokens and device blocks of now."""

    def finish(self) -> None:
        """Lets everything end that the rank has begun. Called when all requests have ended."""


class InlineRank(Rank):
    """A rank that computes and copies at once. All groups lie in the same memory, as an engine lays them out: a device
    block that goes from one group to another is overwritten. A page has the words of one head after the other.
    ``copy_chance`` is the chance that its transfer carries out a copy at each tick. ``others`` are the ranks before it.
    """

    def __init__(
        self, s: Scenario, groups: Sequence[KVGroup], number: int, copy_chance: float, others: Sequence[Rank]
    ) -> None:
        self._groups = groups
        layers = [[layers_of(s, len(groups), g, rank) for g in range(len(groups))] for rank in range(s.num_ranks)]
        names = [str(s.leader_of(number))] if s.heads is None else s.heads.salts(number)
        self._salts = [
            to_words([salt(name, g, layer) for layer in own for name in names]).reshape(len(own), len(names), 1)
            for g, own in enumerate(layers[number])
        ]
        row = len(names) * max(group.device_block_size for group in groups)
        memory: Words = np.zeros((max(map(len, layers[number])), s.num_device_blocks, row), np.uint64)
        pages = [
            memory[: len(own), :, : len(names) * group.device_block_size]
            for group, own in zip(groups, layers[number], strict=True)
        ]
        self._pages = [
            of_group.reshape(len(of_group), s.num_device_blocks, len(names), group.device_block_size).swapaxes(1, 2)
            for group, of_group in zip(groups, pages, strict=True)
        ]
        """By group, shape (layers, heads, device blocks, tokens)."""
        page_groups = [
            PageGroup(list(of_group.view(np.uint8)), group.block_size_factor)
            for group, of_group in zip(groups, pages, strict=True)
        ]
        if s.heads is not None:
            page_groups = s.heads.place(number, groups, layers, page_groups)
        page_groups = s.parts.page_groups(page_groups)
        slot_bytes = padded_slot_bytes(max(group.block_bytes for group in page_groups))
        leader = None if s.leader_of(number) == number else others[s.leader_of(number)]
        sharing = others[0] if s.heads is not None and others else leader
        host: ByteArray = sharing.host if sharing else np.zeros((s.num_host_blocks, slot_bytes), dtype=np.uint8)
        seed = s.seed + (number << 40)
        failing = FailingTransfer(InlineTransfer(page_groups, host), s.copy_failure_rate, seed)
        transfer = SlowTransfer(failing, seed + 1, copy_chance)
        super().__init__(number, host, transfer, transfer.tick, leader)

    def compute(self, request: EngineRequest, start: int, end: int) -> None:
        for g, (group, pages, salts) in enumerate(zip(self._groups, self._pages, self._salts, strict=True)):
            if not len(pages):
                continue
            blocks, offsets, words, n = Access.of(request, g, group, start, end)
            want = words ^ salts
            wrong = pages[:, :, blocks[:n], offsets[:n]] != want[:, :, :n]
            if wrong.any():
                first = int(np.argmax(wrong.any(axis=(0, 1))))
                position = start - 1 if group.state else start - n + first
                raise WrongBytes(
                    f"request {request.request_id} attends to wrong bytes at position {position} of group {g} "
                    f"({group}), device block {blocks[first]}, rank {self.number}"
                )
            pages[:, :, blocks[n:], offsets[n:]] = want[:, :, n:]


def layers_of(s: Scenario, num_groups: int, g: int, rank: int) -> list[int]:
    """Returns the layers of group ``g`` that ``rank`` holds: all, or those of its stretch of the model."""
    total, stages = s.num_layers * num_groups, s.num_stages
    if stages > total:
        raise ValueError(f"{total} layers are too few for {stages} ranks")
    stage = rank * stages // s.num_ranks
    depth = [layer * num_groups + g for layer in range(s.num_layers)]
    return [layer for layer in range(s.num_layers) if depth[layer] * stages // total == stage]


def salt(name: str, g: int, layer: int) -> int:
    """Returns what the words of a rank or a head in a layer differ in from all others."""
    return int.from_bytes(digest(f"{name}/{g}/{layer}".encode()), "little")


class ModelWatch:
    """A watch over the weights of one rank, whose version is ``version()``. Answers take their time. Some ranks
    overlook some changes, but the first one never does."""

    def __init__(self, version: Callable[[], int], rank: int, seed: int) -> None:
        self._version = version
        self._rank = rank
        self._random = Random(seed + (rank << 20))
        self._accepted = self._compared = version()

    def accept(self) -> None:
        self._accepted = self._compared = self._version()

    def begin(self) -> None:
        overlooks = self._rank > 0 and (self._version() + self._rank) % 3 == 0
        self._compared = self._accepted if overlooks else self._version()

    def poll(self) -> bool | None:
        return self._compared != self._accepted if self._random.random() < 0.5 else None

    def are_same(self) -> bool:
        return self._accepted == self._version()


class RankReports:
    """Counts what ``num_ranks`` ranks report of requests: the engine acts when all of them have."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loaded: dict[str, set[int]] = {}
        """Requests whose load has ended on some ranks, and on which."""
        self._failed: set[str] = set()
        """Those of them whose load failed on some rank."""
        self._released: dict[str, set[int]] = {}
        """Held requests that some ranks have released, and which."""

    def __len__(self) -> int:
        return len(self._loaded) + len(self._released)

    def add(self, rank: int, finished: Finished) -> None:
        for reported, req_ids in ((self._loaded, finished.loaded), (self._released, finished.released)):
            for req_id in sorted(req_ids):
                ranks = reported.setdefault(req_id, set())
                assert rank not in ranks, f"rank {rank} has reported {req_id} twice"
                ranks.add(rank)
        self._failed.update(finished.failed)

    def take_loaded(self) -> list[tuple[str, bool]]:
        """Requests whose load has ended on all ranks, and whether it failed on one."""
        loaded = [(req_id, req_id in self._failed) for req_id in self._take(self._loaded)]
        self._failed.difference_update(req_id for req_id, _ in loaded)
        return loaded

    def take_released(self) -> list[str]:
        """Held requests that all ranks have released."""
        return self._take(self._released)

    def _take(self, reported: dict[str, set[int]]) -> list[str]:
        complete = [req_id for req_id, ranks in reported.items() if len(ranks) == self._num_ranks]
        for req_id in complete:
            del reported[req_id]
        return complete
