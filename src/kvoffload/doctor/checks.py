"""The process that runs the checks: ``python -P -m kvoffload.doctor.checks DESCRIPTOR``.

It reads a line of JSON, the arguments of ``run``, and writes a line of JSON to DESCRIPTOR for each message.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.doctor import configuration, directories, engine, machine, model, stores
from kvoffload.doctor.configuration import PlannedServer, PlannedTier
from kvoffload.doctor.findings import Area, Level, Report, secrets_in
from kvoffload.doctor.source import read_source
from kvoffload.lab.model import ModelShape
from kvoffload.tiers.config import prefixed
from kvoffload.tiers.remote.child import end_with_parent

FIX = "look for a mount that does not answer: df; mount it again or take it out of the configuration"
"""For a check that hangs."""


def run(report: Report, config: str, model_config: str | None, seconds: float) -> None:
    """Runs all checks, those of media last. ``config`` and ``model_config`` are the options as typed; ``seconds``: per
    measurement, about. Sends an error if an option cannot be read."""
    plan, shape = PlannedServer(), None

    def configure(report: Report) -> None:
        nonlocal plan
        plan = configuration.check(source, report)

    report.send(begin=Area.CONFIGURATION, tier="", fix=FIX)
    try:
        report.stage("reads --config")
        source = read_source(config)
        if model_config is not None:
            report.stage("reads --model")
            with prefixed("--"):
                shape = ModelShape.from_config(model_config)
    except ConfigError as error:
        report.send(error=str(error))
        return
    report.send(hidden=secrets_in(source.transfer or source.options))
    _run(report, configure)
    places = {tier.name: tier.place for tier in plan.tiers}
    report.send(total=3 + len(plan.tiers) + (shape is not None), places=places, engine=plan.engine)
    for area, of_plan in ((Area.MACHINE, machine.check), (Area.ENGINE, engine.check)):
        report.send(begin=area, tier="", fix=FIX)
        _run(report, partial(of_plan, plan))
    if shape is not None:
        report.send(begin=Area.MODEL, tier="", fix=FIX)
        _run(report, partial(model.check, plan, shape))
    for tier in plan.tiers:
        check, fix = _check_of(tier, seconds)
        report.tier = tier.name
        report.send(begin=Area.TIER, tier=tier.name, fix=fix)
        _run(report, check)
    report.send(done=True)


def _run(report: Report, check: Callable[[Report], object]) -> None:
    try:
        check(report)
    except Exception as error:
        report.send(failed=f"{type(error).__name__}: {error}")


def _check_of(tier: PlannedTier, seconds: float) -> tuple[Callable[[Report], object], str]:
    """Returns the check of a tier, and the fix if it hangs."""
    if tier.config.directory is not None:
        fix = f"see that the file system of {tier.place} answers: ls it; mount it again if that hangs too"
        return partial(directories.check, tier, seconds), fix
    if tier.store is not None:
        fix = f"see that {tier.place} is the store, and that no firewall drops packets to it"
        return partial(stores.check, tier), fix
    text = "a tier of your own, which the doctor does not know: nothing was measured"
    return lambda report: report.found("tier.unknown", Level.NOTE, text), FIX


def main(descriptor: int) -> None:
    """Runs the checks that standard input asks for."""
    end_with_parent(os.getppid())
    os.set_inheritable(descriptor, False)

    def send(message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(descriptor, line) :]

    report = Report(send)
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(report, "is_ended", True))
    run(report, **json.loads(sys.stdin.buffer.readline()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Threads of a client may hang, and must not keep the process.
    os._exit(0)
