"""The requests and jobs of vLLM's own offloading as one of its tiers sees them: chains, what was found, and records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvoffload.abc import ByteArray, KVGroup, Miss, OffloadKey
from kvoffload.cache.keys import key_group_idx
from kvoffload.observe.metrics import Metrics
from kvoffload.observe.records import RECORD_RING_SIZE, RequestRecord
from kvoffload.observe.server import RecordServer, log_record
from kvoffload.tiering.bridge import JobEnd

MAX_LOADS = 3
"""How often a block is loaded for one request. vLLM may evict it before the request can use it."""


@dataclass(slots=True)
class TierRequest:
    """A request that has not ended."""

    chain: list[OffloadKey] = field(default_factory=list)
    """The keys of all whole chunks so far, head first, those of all groups merged by the position at which they end."""
    places: dict[OffloadKey, tuple[int, int]] = field(default_factory=dict)
    """By key of the chain, its group and its place among the keys of this group."""
    of_group: list[list[OffloadKey]] = field(default_factory=list)
    num_seen: int = 0
    """How many of vLLM's keys were looked at."""
    answers: dict[OffloadKey, int] = field(default_factory=dict)
    """States of keys that were asked for in this step."""
    answered_in: int = -1
    """The step of ``answers``."""
    batch: int = 0
    """How many keys were last asked for at once."""
    loads: dict[OffloadKey, int] = field(default_factory=dict)
    """How often each key was loaded for this request, MAX_LOADS for one that did not arrive."""
    loaded: set[OffloadKey] = field(default_factory=set)
    missed: tuple[OffloadKey, Miss] | None = None
    """The first missing chunk, when the tier was last asked."""
    was_asked: bool = False
    is_recorded: bool = False
    is_stale: bool = False
    """vLLM has reset its caches since the request began. What it stores now may have been computed with other weights,
    and with windows vLLM stores device blocks that other requests own by then."""

    def extend(self, positions: Mapping[OffloadKey, int], groups: Sequence[KVGroup]) -> None:
        """Takes in the keys that vLLM has added to ``positions``, by the position at which their tokens end. Those that
        end within a chunk are left out: they name a chunk that is not full."""
        if len(positions) == self.num_seen:
            return
        if not self.of_group:
            self.of_group = [[] for _ in groups]
        new = [
            (position, key)
            for key, position in islice(positions.items(), self.num_seen, None)
            if position % groups[key_group_idx(key)].block_tokens == 0
        ]
        self.num_seen = len(positions)
        # All of them end behind those that were known before.
        for _, key in sorted(new, key=lambda each: each[0]):
            g = key_group_idx(key)
            self.places[key] = (g, len(self.of_group[g]))
            self.of_group[g].append(key)
            self.chain.append(key)

    def note_loads(self, keys: Collection[OffloadKey], done: Collection[OffloadKey]) -> None:
        """Notes that ``done`` of ``keys`` have arrived."""
        for key in keys:
            self.loads[key] = self.loads.get(key, 0) + 1 if key in done else MAX_LOADS
        self.loaded.update(done)

    def wanted(self, key: OffloadKey, is_full: bool) -> list[OffloadKey]:
        """Returns ``key`` and those that vLLM looks up after it, if it goes on: towards the tail with full attention,
        towards the head otherwise. The further it has gone in this step, the more."""
        g, place = self.places[key]
        keys, n = self.of_group[g], self.batch
        near = keys[place : place + n] if is_full else keys[max(0, place + 1 - n) : place + 1]
        return [each for each in near if each not in self.answers]


class TierRecords:
    """Makes one record per request that has asked the tier: see RequestRecord.

    A tier learns neither the length of a prompt nor what the device held. So ``tokens_asked`` counts whole chunks, and
    ``device_tokens`` is what was found above the tier: on the device and in vLLM's host memory.
    """

    def __init__(self, groups: Sequence[KVGroup], tier: str, metrics: Metrics, engine: str) -> None:
        """``tier``: the name of the tier, or of all of them. ``engine``: that of the RecordServer."""
        self.records: deque[RequestRecord] = deque(maxlen=RECORD_RING_SIZE)
        """The latest."""
        self._group = next((g for g, group in enumerate(groups) if group.is_full), 0)
        """The group whose chunks count."""
        self._tokens = groups[self._group].block_tokens
        self._tier, self._metrics = tier, metrics
        self._server = RecordServer(lambda: self.records, engine, metrics.totals)

    def close(self) -> None:
        self._server.close()

    def missed(self, request: TierRequest, key: OffloadKey, explain: Callable[[OffloadKey], Miss]) -> None:
        """Notes that a chunk is missing, if it is the first of its request."""
        g, place = request.places[key]
        if g != self._group:
            return
        if request.missed is None or place < request.places[request.missed[0]][1]:
            request.missed = key, explain(key)

    def scheduled(self, request_id: str, request: TierRequest) -> None:
        """Makes the record of a request that was given device blocks."""
        if request.is_recorded or not request.was_asked:
            return
        request.is_recorded = True
        keys = request.of_group[self._group]
        missed, miss = request.missed or (None, None)
        held = keys if missed is None else keys[: request.places[missed][1]]
        found = sum(key in request.loaded for key in held) * self._tokens
        record = RequestRecord(
            time.time(),
            request_id,
            len(keys) * self._tokens,
            len(held) * self._tokens - found,
            0,
            None if missed is None else missed.hex(),
            None if miss is None else miss.reason,
            None if miss is None else miss.age_s,
            found,
            tier_tokens={self._tier: found} if found else {},
            missed_in=None if miss is None else miss.tier,
            engine="vLLM",
        )
        self.records.append(record)
        log_record(record)
        self._metrics.add("asked_tokens", record.tokens_asked)
        self._metrics.add("device_hit_tokens", record.device_tokens)
        self._metrics.add("tier_hit_tokens", found, label=self._tier)
        if miss is not None:
            self._metrics.add("misses", label=miss.reason)


class TierJobs:
    """All jobs that were not reported yet. ``rows``: vLLM's host memory, a row per chunk."""

    def __init__(self, rows: ByteArray) -> None:
        self._rows: ByteArray | None = rows
        self._jobs: dict[int, TransferJob] = {}
        self._refused: list[JobEnd] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: TransferJob) -> None:
        self._jobs[job.job_id] = job

    def refuse(self, job: TransferJob) -> None:
        """Ends a job without doing it: the next ``report`` has it as failed."""
        self._refused.append(JobEnd(job.job_id, False, frozenset(), False, 0, 0.0))

    def chunks(self, job: TransferJob, request: TierRequest) -> tuple[list[OffloadKey], list[Sequence[ByteArray]]]:
        """Returns the keys of the whole chunks of ``job``, the head of the chain first, and the memory of each."""
        rows = self._rows
        assert rows is not None
        row_of = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        keys = [key for key in row_of if key in request.places]
        keys.sort(key=lambda key: job.req_context.get_offload_key_position(key) or 0)
        return keys, [(rows[row_of[key]],) for key in keys]

    def report(self, ended: Iterable[JobEnd], requests: Mapping[str, TierRequest]) -> list[JobResult]:
        """Returns the results of jobs that have ended, and of those that were refused. ``requests``: by id."""
        ended = [*self._refused, *ended]
        results = [self._result(end, requests) for end in ended]
        # Only now: if something fails before, all open jobs are reported as failed.
        self._refused.clear()
        for end in ended:
            del self._jobs[end.job]
        return results

    def _result(self, end: JobEnd, requests: Mapping[str, TierRequest]) -> JobResult:
        job = self._jobs[end.job]
        is_whole = end.ok and len(end.done) == len(job.keys)
        request = requests.get(job.req_context.req_id)
        if end.is_load and request is not None:
            request.note_loads(job.keys, end.done)
        return JobResult(
            end.job,
            is_whole if end.is_load else end.ok,
            successful_keys=tuple(end.done) if end.is_load and end.done and not is_whole else None,
            transfer_time=end.seconds,
            transfer_bytes=end.nbytes,
        )

    def fail_all(self) -> list[JobResult]:
        """Reports all jobs as failed."""
        jobs, self._jobs = self._jobs, {}
        return [JobResult(job, False) for job in jobs]

    def close(self) -> None:
        """Lets go of vLLM's memory, which it cannot release while an array refers to it."""
        self._rows = None
        self._jobs.clear()
