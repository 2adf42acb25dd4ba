"""What the scheduler half knows about the bytes of adapters."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvoffload.abc import Request
from kvoffload.connector.adapters import DROPPED, Adapter, AdapterOf, Digests
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import Changes, RequestState

MAX_KNOWN = 4096
"""Adapters whose digests are remembered. When there are more, the one learned longest ago is forgotten."""
MAX_ASKED = 64
"""Adapters that the workers are asked about at the same time."""


@dataclass(slots=True)
class _Question:
    number: int
    answers: list[bytes] = field(default_factory=list)


class AdapterBook:
    """Digests of adapters, learned from the workers, which compute with them, by questions that travel with steps.

    A digest is valid until a worker drops the adapter, or loads other bytes under its number.
    """

    def __init__(self, adapter_of: AdapterOf | None, num_workers: int, changes: Changes) -> None:
        self._adapter_of = adapter_of
        self._num_workers = num_workers
        self._changes = changes
        self._known: OrderedDict[int, Digests] = OrderedDict()
        self._asked: dict[int, _Question] = {}
        """Questions that were not answered by all workers yet, by the number of the adapter."""
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
        if adapter is not None and (adapter.is_reread or not self._known.get(adapter.number)):
            self._known.pop(adapter.number, None)
        return adapter

    def digests(self, adapter: Adapter) -> Digests | None:
        """Returns the digests of ``adapter``, or None if the workers have not answered yet."""
        known = self._known.get(adapter.number) if adapter.shapes_all else frozenset()
        if known is None and adapter.number not in self._asked and len(self._asked) < MAX_ASKED:
            self._num_questions += 1
            self._asked[adapter.number] = _Question(self._num_questions)
            self._unsent[self._num_questions] = adapter
        return known

    def take_questions(self) -> dict[int, Adapter]:
        """Returns the questions for the next step, by their numbers."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def take_report(self, report: WorkerReport) -> None:
        for number, question in list(self._asked.items()) if report.answers else ():
            question.answers += report.answers.get(question.number, ())
            if len(question.answers) >= self._num_workers:
                del self._asked[number]
                self._learn(number, frozenset(question.answers) if all(question.answers) else frozenset())
        # What a worker has answered may have changed in the same step.
        for number, digests in report.adapters.items():
            known = self._known.get(number)
            if known and not digests <= known:
                self._learn(number, None)

    def _learn(self, number: int, digests: Digests | None) -> None:
        self._known.pop(number, None)
        if digests is not None:
            self._known[number] = digests
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._changes.contents += 1
        self._changes.loads += 1

    def has_changed(self, state: RequestState, report: WorkerReport) -> bool:
        """Whether a worker has computed, or may have computed, for this request with other bytes than those that its
        keys stand for."""
        if state.adapter is None or state.digests is None:
            return False
        return not report.adapters.get(state.adapter.number, set()) - {DROPPED} <= state.digests
