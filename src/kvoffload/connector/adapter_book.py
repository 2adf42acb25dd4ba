"""What the scheduler half knows about the bytes of adapters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvoffload.abc import Request
from kvoffload.connector.adapters import DROPPED, UNREADABLE, Adapter, AdapterOf, Digests
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import RequestState

MAX_KNOWN = 4096
"""Adapters whose digests are remembered. When there are more, the one learned longest ago is forgotten."""
MAX_ASKED = 64
"""Adapters that the workers are asked about at the same time."""
ASK_AGAIN_S = 60.0
"""A question that has no answer after this time is asked again."""

_Key = tuple[int, str, bool]
"""Number, source and ``is_reread`` of an adapter. A request for which the files are read again may compute with other
bytes than one that uses what is loaded."""


@dataclass(slots=True)
class _Question:
    number: int
    asked_at: float
    answers: list[bytes] = field(default_factory=list)
    loaded: set[bytes] = field(default_factory=set)
    """Digests of what workers have loaded, or dropped, under the adapter's number since it was asked."""


class AdapterBook:
    """Digests of adapters, learned from the workers, which compute with them, by questions that travel with steps.

    A digest is valid until a worker drops the adapter, or loads other bytes under its number. A request waits for an
    answer. When a question has had no answer for ``deadline_s``, no other request waits for it.
    """

    def __init__(
        self,
        adapter_of: AdapterOf | None,
        jobs: JobTable,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._adapter_of = adapter_of
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._clock = clock
        self.max_known, self.max_asked = MAX_KNOWN, MAX_ASKED
        self._known: OrderedDict[_Key, Digests] = OrderedDict()
        self._asked: dict[_Key, _Question] = {}
        """Questions that were not answered by all workers yet, the oldest first."""
        self._unsent: dict[int, Adapter] = {}
        self._num_questions = 0

    @property
    def is_used(self) -> bool:
        """Whether the engine serves adapters."""
        return self._adapter_of is not None

    def begin(self, request: Request) -> Adapter | None:
        """Returns the adapter of a new request. If the engine reads it again for the request, or it could not be read
        before, the workers will be asked again."""
        adapter = None if self._adapter_of is None else self._adapter_of(request)
        if adapter is not None and (adapter.is_reread or not self._known.get(_key(adapter))):
            self._known.pop(_key(adapter), None)
        return adapter

    def digests(self, adapter: Adapter) -> Digests | None:
        """Returns the digests of ``adapter``, or None if the workers have not answered yet."""
        key, now = _key(adapter), self._clock()
        known = self._known.get(key) if adapter.shapes_all else frozenset()
        if known is not None:
            return known
        if key in self._asked and now - self._asked[key].asked_at >= ASK_AGAIN_S:
            self._forget(key)
        if key not in self._asked and len(self._asked) < self.max_asked:
            self._num_questions += 1
            self._asked[key] = _Question(self._num_questions, now)
            self._unsent[self._num_questions] = adapter
        oldest = next(iter(self._asked.values()))
        return frozenset() if self._is_overdue(self._asked.get(key, oldest)) else None

    def _is_overdue(self, question: _Question) -> bool:
        return self._clock() - question.asked_at >= self._deadline_s

    def take_questions(self) -> dict[int, Adapter]:
        """Returns the questions for the next step, by their numbers."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def computes_with(self, scheduled: Iterable[str], requests: Mapping[str, RequestState]) -> dict[int, set[Digests]]:
        """Returns, by the number of an adapter, the digests for which the keys of the scheduled requests stand."""
        expected: dict[int, set[Digests]] = {}
        for req_id in scheduled if self.is_used else ():
            state = requests.get(req_id)
            if state is not None and state.adapter is not None and state.digests is not None:
                expected.setdefault(state.adapter.number, set()).add(state.digests)
        return expected

    def take_report(self, report: WorkerReport, states: Iterable[RequestState]) -> Collection[Digests]:
        """Takes in what the workers say of adapters. Where one has changed under the same number, its requests among
        ``states`` store nothing more, and what they are storing is dropped: it may belong to either bytes. Returns the
        digests for which the keys of these requests stood."""
        self._learn_from(report)
        if not report.adapters:
            return ()
        stores = [job for job in self._jobs.jobs.values() if job.is_store]
        states = [*states, *(state for job in stores for state in job.states)]
        changed = {id(state): state for state in states if _has_changed(state, report)}
        for job in stores:
            job.failed |= any(id(state) in changed for state in job.states)
        origins = {state.digests for state in changed.values() if state.digests is not None}
        for state in changed.values():
            state.give_up()
        return origins

    def _learn_from(self, report: WorkerReport) -> None:
        for number, digests in report.adapters.items():
            for key, question in list(self._asked.items()):
                # What is read again for each request does not depend on what is loaded.
                if key[0] == number and not key[2]:
                    question.loaded |= digests
                    if self._is_overdue(question):
                        # The workers can answer now without reading files.
                        self._forget(key)
        for key, question in list(self._asked.items()) if report.answers else ():
            question.answers += report.answers.get(question.number, ())
            if len(question.answers) >= self._jobs.num_workers:
                answers = frozenset(question.answers)
                self._forget(key)
                if question.loaded <= answers:
                    self._learn(key, frozenset() if UNREADABLE in answers else answers)
        for number, digests in report.adapters.items():
            for key, known in list(self._known.items()):
                if key[0] == number and not digests <= known:
                    self._forget(key)

    def _learn(self, key: _Key, digests: Digests) -> None:
        self._known[key] = digests
        if len(self._known) > self.max_known:
            self._known.popitem(last=False)

    def _forget(self, key: _Key) -> None:
        """Forgets what is known or asked, and makes the requests that wait for it look again."""
        self._known.pop(key, None)
        question = self._asked.pop(key, None)
        if question is not None:
            self._unsent.pop(question.number, None)
        self._jobs.changes.contents += 1
        self._jobs.changes.loads += 1


def _has_changed(state: RequestState, report: WorkerReport) -> bool:
    """Whether a worker has computed, or may have computed, for this request with other bytes than those that its keys
    stand for."""
    if state.adapter is None or state.digests is None:
        return False
    return not report.adapters.get(state.adapter.number, set()) - {DROPPED} <= state.digests


def _key(adapter: Adapter) -> _Key:
    return adapter.number, adapter.source, adapter.is_reread
