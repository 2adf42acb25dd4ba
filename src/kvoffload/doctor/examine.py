"""Runs all checks, one after the other, each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.doctor.configuration import Plan, PlannedTier
from kvoffload.doctor.directories import Space, space_findings
from kvoffload.doctor.doors import Door
from kvoffload.doctor.findings import Area, Finding, Hidden, Level
from kvoffload.doctor.process import CheckProcess, Ending, Outcome
from kvoffload.doctor.source import Source
from kvoffload.doctor.worth import HOST, Medium, worth_findings

PROBLEM_STATUS = 1
FIX_FOR_STARVING = "run it again while other processes use less of this machine, or raise the container's CPU limit"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the doctor may take."""

    measure_s: float = 1.0
    """Per measurement."""
    pool_bytes: int = 256 << 20
    """Of the host pool that is allocated to measure copies."""
    check_deadline_s: float = 10.0
    medium_deadline_s: float = 15.0
    """For a directory or a store, which may hang."""
    total_deadline_s: float = 180.0


@dataclass(slots=True)
class Examination:
    """All findings, in the order of the checks, the tiers by name, and the name of the engine."""

    findings: list[Finding] = field(default_factory=list)
    tiers: list[PlannedTier] = field(default_factory=list)
    engine: str = "vLLM"

    def count(self, level: Level) -> int:
        """Returns the number of findings of this level."""
        return sum(finding.level is level for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """1 if something stops or damages a deployment, otherwise 0."""
        return PROBLEM_STATUS if self.count(Level.PROBLEM) else 0


Progress = Callable[[str, int, int], None]
"""Gets the current step, the number of checks that ended, and the number of all checks."""


def examine(
    config: str,
    model: str | None = None,
    prefill_tokens_per_s: float | None = None,
    effort: Effort = Effort(),
    on_progress: Progress = lambda stage, done, total: None,
) -> Examination:
    """Runs all checks of the configuration in ``config``, JSON or the path of a file, and of ``model``, as
    ``find_config`` takes it.

    Does not hang: a check that does is ended at its deadline, and is a finding itself. Raises ConfigError if the
    configuration cannot be read, or the model cannot be found.
    """
    process = CheckProcess()
    try:
        inputs = _read_inputs(process, {"config": config, "model": model}, effort.check_deadline_s)
        return _Examiner(process, Source(**inputs["source"]), effort, on_progress).run(
            inputs.get("model"), prefill_tokens_per_s
        )
    finally:
        process.close()


def _read_inputs(process: CheckProcess, arguments: Mapping[str, Any], deadline_s: float) -> Mapping[str, Any]:
    """Returns the facts "source" and "model". Raises ConfigError."""
    outcome = process.run("kvoffload.doctor.source:read", arguments, deadline_s)
    stage = outcome.stage or "reads the options"
    if outcome.ending is Ending.HUNG:
        raise ConfigError(stage, NOT_SET, f"no answer within {deadline_s:.0f} s", "copy it to a local disk")
    if outcome.ending is Ending.STARVED:
        raise ConfigError(stage, NOT_SET, f"{_starved(outcome)}", FIX_FOR_STARVING)
    if "error" in outcome.facts or outcome.failure:
        raise ConfigError(outcome.facts.get("error", outcome.failure))
    return outcome.facts


class _Examiner:
    """Runs the checks and collects their findings."""

    def __init__(self, process: CheckProcess, source: Source, effort: Effort, on_progress: Progress) -> None:
        self._source = source
        self._effort = effort
        self._on_progress = on_progress
        self._hidden = Hidden(source.transfer or source.options)
        self._examination = Examination()
        self._deadline = time.monotonic() + effort.total_deadline_s
        self._process = process
        process.on_progress = self._show
        self._done, self._total = 0, 4

    def run(self, model: str | None, prefill_tokens_per_s: float | None) -> Examination:
        """Returns all findings. ``model``: the path of a config.json."""
        self._total += model is not None
        effort = self._effort
        found = self._check("configuration", Area.CONFIGURATION, asdict(self._source)).facts.get("plan")
        plan = Plan.from_dict(found) if found is not None else Plan()
        self._examination.tiers, self._examination.engine = plan.tiers, plan.engine
        self._total += len(plan.tiers)
        machine = self._check(
            "machine",
            Area.MACHINE,
            {"plan": plan.to_dict(), "seconds": effort.measure_s / 4, "pool_bytes": effort.pool_bytes},
        ).facts
        media = [Medium(HOST, machine["copy_bytes_per_s"])] if "copy_bytes_per_s" in machine else []
        offsets: dict[str, float] = {}
        spaces: list[tuple[PlannedTier, Space]] = []
        for tier in plan.tiers:
            facts = self._check_tier(tier)
            if "read_bytes_per_s" in facts:
                media.append(Medium(tier.name, facts["read_bytes_per_s"], tier.name))
            if "clock_offset_s" in facts:
                offsets[tier.name] = facts["clock_offset_s"]
            if "space" in facts:
                spaces.append((tier, Space(**facts["space"])))
        self._add(*space_findings(spaces))
        self._check("engine", Area.ENGINE, {"plan": plan.to_dict()})
        shape: Mapping[str, Any] = {}
        if model is not None:
            shape = self._check("model", Area.MODEL, {"path": model, "plan": plan.to_dict()}).facts
        self._check("clock", Area.CLOCK, {"plan": plan.to_dict(), "offsets": offsets})
        per_token, is_gated = shape.get("bytes_per_token"), plan.door is Door.CONNECTOR
        self._add(*worth_findings(media, per_token, prefill_tokens_per_s, model is not None, is_gated))
        return self._examination

    def _check_tier(self, tier: PlannedTier) -> Mapping[str, Any]:
        """Returns the facts about a tier."""
        arguments = {"tier": asdict(tier), "seconds": self._effort.measure_s}
        if tier.directory is not None:
            return self._check("directories", Area.TIER, arguments, tier).facts
        if tier.store is not None:
            return self._check("stores", Area.TIER, arguments, tier).facts
        text = "a tier of your own, which the doctor does not know: nothing was measured"
        self._add(Finding("tier.unknown", Level.NOTE, text, tier=tier.name))
        self._done += 1
        return {}

    def _check(self, module: str, area: Area, arguments: Mapping[str, Any], tier: PlannedTier | None = None) -> Outcome:
        """Runs the function ``check`` of a module of the doctor, and adds its findings."""
        usual = self._effort.check_deadline_s if tier is None else self._effort.medium_deadline_s
        deadline_s = min(usual, self._deadline - time.monotonic())
        name = tier.name if tier is not None else ""
        if deadline_s <= 0:
            outcome = Outcome()
            text = f"not checked: the doctor has taken {self._effort.total_deadline_s:.0f} s already"
            fix = "fix what hangs, or wait until the machine is less busy, then run it again"
            self._add(Finding("doctor.skipped", Level.WARNING, text, fix, name, check=area))
        else:
            outcome = self._process.run(f"kvoffload.doctor.{module}:check", arguments, deadline_s)
        self._add(*outcome.findings)
        doing = f" while the doctor {outcome.stage}" if outcome.stage else ""
        if outcome.ending is Ending.HUNG:
            text = f"no answer within {deadline_s:.0f} s{doing}"
            self._add(Finding("doctor.hung", Level.PROBLEM, text, _fix_for_hanging(tier), name, check=area))
        elif outcome.ending is Ending.STARVED:
            text = f"not checked{doing}: {_starved(outcome)}"
            self._add(Finding("doctor.starved", Level.WARNING, text, FIX_FOR_STARVING, name, check=area))
        elif outcome.ending is Ending.FAILED:
            text = f"the check failed{doing}: {outcome.failure}"
            fix = "look at the medium's own log" if tier is not None else "report this as a bug of kvoffload"
            self._add(Finding("doctor.failed", Level.PROBLEM, text, fix, name, check=area))
        self._done += 1
        return outcome

    def _add(self, *findings: Finding) -> None:
        self._examination.findings += map(self._hidden.hide_in, findings)

    def _show(self, stage: str) -> None:
        self._on_progress(self._hidden.hide(stage) or "starts", self._done, self._total)


def _starved(outcome: Outcome) -> str:
    return f"this machine is busy: the check waited {outcome.waited_s:.0f} s for a processor, and was ended"


def _fix_for_hanging(tier: PlannedTier | None) -> str:
    if tier is not None and tier.store is not None:
        return f"see that {tier.store.address} is the store, and that no firewall drops packets to it"
    if tier is not None:
        return f"see that the file system of {tier.directory} answers: ls it; mount it again if that hangs too"
    return "look for a mount that does not answer: df; mount it again or take it out of the configuration"
