"""Adapters of a model, such as LoRA: KV that was computed with one belongs to its bytes, whatever its name."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from kvoffload.abc import Request
from kvoffload.cache.keys import ADAPTER_BYTES, root_hash

if TYPE_CHECKING:
    from kvoffload.connector.jobs import JobTable
    from kvoffload.connector.messages import StepMeta, WorkerReport
    from kvoffload.connector.request import RequestState

logger = logging.getLogger(__name__)

T = TypeVar("T")

Digests: TypeAlias = frozenset[bytes]
"""An adapter's digests, one per rank, all different: a mixture of two adapters fits neither. Empty: unreadable."""
DROPPED = b""
"""Stands for the digest of an adapter that is not loaded any more."""
UNREADABLE = b"unreadable"
"""Stands for the digest of an adapter that cannot be read."""
NO_ADAPTER = bytes(ADAPTER_BYTES)
"""Stands in keys for the model alone, where there are adapters."""
MAX_KNOWN = 4096
"""Adapters whose digests are remembered. When there are more, the one learned longest ago is forgotten."""
MAX_ASKED = 64
"""Adapters that the workers are asked about at the same time."""
ASK_AGAIN_S = 60.0
"""A question that has no answer after this time is asked again."""
UNREADABLE_NOW = "kvoffload: adapters cannot be read any more. Requests with an adapter are not offloaded"
CHECK_DEADLINE_S = 1.0
"""How long a load that has ended waits for the check of its adapter. After that it counts as failed."""


class Adapter(NamedTuple):
    """What a request adds to the weights of the model."""

    number: int
    """By which the engine knows it. Other bytes may have the same number later."""
    handle: Any
    """By which the engine's workers load it."""
    is_reread: bool = False
    """Whether the engine reads its files again for this request."""
    shapes_all: bool = True
    """Whether its bytes, with the block hashes, determine the KV of this request."""
    source: str = ""
    """Where and how the engine reads it. Other bytes may be there later."""

    @property
    def key(self) -> Adapter:
        """What has one digest. A request for which files are read again may use other bytes than are loaded."""
        return self._replace(handle=None, shapes_all=True)


AdapterOf: TypeAlias = Callable[[Request], Adapter | None]


class AdapterNeed(NamedTuple):
    """The bytes with which the blocks of a load were computed."""

    adapter: int
    digests: Digests
    is_reread: bool = False


class AdapterWatch(Protocol):
    """Knows the bytes of the adapters that one rank has loaded, or would load."""

    def changes(self) -> Mapping[int, bytes]:
        """Returns, by number, the digests of adapters loaded since the last call; DROPPED for those not loaded now."""

    def ask(self, question: int, adapter: Adapter) -> None:
        """Asks for the digest of the bytes that the next step with ``adapter`` uses. Does not wait for files."""

    def answers(self, wait_s: float = 0.0) -> Mapping[int, bytes]:
        """Returns the new digests by question, UNREADABLE if there is none. Waits at most ``wait_s`` for an answer."""

    def digest(self, number: int) -> bytes:
        """Returns the digest of a loaded adapter as of the last call of ``changes``; DROPPED if it is not loaded."""

    def check(self, need: AdapterNeed) -> Future[bool]:
        """Finds out, as far as is known, if an adapter's next step uses bytes of these digests. Waits for no file."""


def variant(digests: Digests) -> bytes:
    """Returns what stands for an adapter in keys."""
    return root_hash(*sorted(digests))[:ADAPTER_BYTES]


@dataclass(slots=True)
class _Question:
    number: int
    asked_at: float
    answers: list[bytes] = field(default_factory=list)
    loaded: set[bytes] = field(default_factory=set)
    """Digests of what workers have loaded, or dropped, under the adapter's number since it was asked."""


@dataclass(eq=False)
class AdapterDigests:
    """The scheduler half's digests of adapters, learned from the workers by questions that travel with steps.

    A digest is valid until a worker drops the adapter, or loads other bytes under its number. A request waits for an
    answer. When a question has had no answer for ``deadline_s``, no other request waits for it.
    """

    adapter_of: AdapterOf
    jobs: JobTable
    deadline_s: float
    _known: OrderedDict[Adapter, Digests] = field(default_factory=OrderedDict)
    _asked: dict[Adapter, _Question] = field(default_factory=dict)
    """Questions that were not answered by all workers yet, the oldest first."""
    _num_questions: int = 0

    def begin(self, request: Request) -> Adapter | None:
        """Returns the adapter of a new request. What the engine reads again, or could not read, is asked anew."""
        adapter = self.adapter_of(request)
        if adapter is not None and (adapter.is_reread or not self._known.get(adapter.key)):
            self._known.pop(adapter.key, None)
        return adapter

    def digests(self, adapter: Adapter) -> Digests | None:
        """Returns the digests of ``adapter``, or None if the workers have not answered yet."""
        key, now = adapter.key, self.jobs.observer.clock()
        known = self._known.get(key) if adapter.shapes_all else frozenset()
        if known is not None:
            return known
        if key in self._asked and now - self._asked[key].asked_at >= ASK_AGAIN_S:
            self._forget(key)
        if key not in self._asked and len(self._asked) < MAX_ASKED:
            self._num_questions += 1
            self._asked[key] = _Question(self._num_questions, now)
            self.jobs.meta.questions[self._num_questions] = adapter
        oldest = next(iter(self._asked.values()))
        return frozenset() if self._is_overdue(self._asked.get(key, oldest)) else None

    def _is_overdue(self, question: _Question) -> bool:
        return self.jobs.observer.clock() - question.asked_at >= self.deadline_s

    def begin_step(self, meta: StepMeta, scheduled: Iterable[str], requests: Mapping[str, RequestState]) -> None:
        """Adds to the step the digests for which the keys of its requests stand."""
        for req_id in scheduled:
            if (state := requests.get(req_id)) is not None and state.adapter is not None and state.origin is not None:
                meta.computes_with.setdefault(state.adapter.number, set()).add(state.origin)

    def take_report(self, report: WorkerReport, states: Iterable[RequestState]) -> Collection[Digests]:
        """Takes in what the workers say. Requests of an adapter that has changed under its number store nothing more,
        and what they are storing is dropped: it may be of either bytes. Returns the digests in their keys."""
        self._learn_from(report)
        if not report.adapters:
            return ()
        stores = [job for job in self.jobs.jobs.values() if job.is_store]
        computed = {*states, *(state for job in stores for state in job.requests)}
        changed = {state for state in computed if _has_changed(state, report)}
        origins = {state.origin for state in changed if state.origin is not None}
        for job in stores:
            job.failed |= not changed.isdisjoint(job.requests)
        for state in changed:
            state.give_up()
        return origins

    def _learn_from(self, report: WorkerReport) -> None:
        for key, question in list(self._asked.items()):
            # What is read again for each request does not depend on what is loaded.
            if not key.is_reread and key.number in report.adapters:
                question.loaded |= report.adapters[key.number]
                if self._is_overdue(question):
                    # The workers can answer now without reading files.
                    self._forget(key)
                    continue
            question.answers += report.answers.get(question.number, ())
            if len(question.answers) >= self.jobs.num_workers:
                answers = frozenset(question.answers)
                self._forget(key)
                if question.loaded <= answers:
                    self._known[key] = frozenset() if UNREADABLE in answers else answers
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        for key, known in list(self._known.items()) if report.adapters else ():
            if not report.adapters.get(key.number, known) <= known:
                self._forget(key)

    def _forget(self, key: Adapter) -> None:
        """Forgets what is known or asked, and makes the requests that wait for it look again."""
        self._known.pop(key, None)
        if (question := self._asked.pop(key, None)) is not None:
            self.jobs.meta.questions.pop(question.number, None)
        self.jobs.changes.contents += 1
        self.jobs.changes.wakeups += 1


def _has_changed(state: RequestState, report: WorkerReport) -> bool:
    """Whether a worker has computed, or may have, for this request with other bytes than those in its keys."""
    if state.adapter is None or state.origin is None:
        return False
    return not report.adapters.get(state.adapter.number, set()) - {DROPPED} <= state.origin


class AdapterChecks:
    """Reports which bytes one rank's adapters have. Without ``watch``, or after its error, loads that need one fail."""

    def __init__(self, watch: AdapterWatch | None) -> None:
        self.watch = watch

    def begin_step(self, questions: Mapping[int, Adapter], report: WorkerReport) -> None:
        """Reports what the engine has loaded, and passes the step's questions on."""
        self._note(report)
        self.use(lambda watch: [watch.ask(*each) for each in questions.items()])  # type: ignore[func-returns-value]
        if self.watch is None:
            report.answers.update({question: [UNREADABLE] for question in questions})

    def end_step(self, computes_with: Mapping[int, set[Digests]], report: WorkerReport) -> None:
        """Reports with which bytes the step has computed, where these are not those that it was planned with: vLLM
        loads one of the adapters that the requests of a batch name under one number, and not at every occasion."""
        self._note(report)
        for number, expected in computes_with.items():
            digest = DROPPED if self.watch is None else self.watch.digest(number)
            if any(digest not in digests for digests in expected):
                report.adapters.setdefault(number, set()).add(digest if digest != DROPPED else UNREADABLE)

    def _note(self, report: WorkerReport) -> None:
        """Reports which adapters the engine has loaded."""
        for number, digest in (self.use(lambda watch: watch.changes()) or {}).items():
            report.adapters.setdefault(number, set()).add(digest)

    def take_answers(self, report: WorkerReport, wait_s: float) -> None:
        """Reports the digests that were found. Waits at most ``wait_s`` for one if there are questions."""
        for question, digest in (self.use(lambda watch: watch.answers(wait_s)) or {}).items():
            report.answers[question] = [digest]

    def use(self, call: Callable[[AdapterWatch], T]) -> T | None:
        """Returns what ``call`` returns of the watch; None if there is an error, or was one."""
        if self.watch is not None:
            try:
                return call(self.watch)
            except Exception:
                logger.exception(UNREADABLE_NOW)
                self.watch = None
        return None

    def begin_check(self, need: AdapterNeed) -> Callable[[], bool | None]:
        """Begins to find out whether the request of a load will compute with the bytes with which its blocks were
        computed. Returns a function that says so; it returns None while that is not known."""
        result, until = self.use(lambda watch: watch.check(need)), time.monotonic() + CHECK_DEADLINE_S

        def has_passed() -> bool | None:
            if self.watch is None or result is None:
                return False
            if not result.done():
                return None if time.monotonic() < until else False
            # It may have been loaded during the check.
            known = {DROPPED, *need.digests}
            return result.result() and (need.is_reread or self.watch.digest(need.adapter) in known)

        return has_passed
