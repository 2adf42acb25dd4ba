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

    report.stage("reads --config")
    try:
        source = read_source(config)
        if model_config is not None:
            report.stage("reads --model")
            with prefixed("--"):
                shape = ModelShape.from_config(model_config)
    except ConfigError as error:
        report.send(error=str(error))
        return
    report.send(hidden=secrets_in(source.transfer or source.options))
    _run(report, Area.CONFIGURATION, configure)
    places = {tier.name: tier.place for tier in plan.tiers}
    report.send(total=3 + len(plan.tiers) + (shape is not None), places=places, engine=plan.engine)
    _run(report, Area.MACHINE, partial(machine.check, plan))
    _run(report, Area.ENGINE, partial(engine.check, plan))
    if shape is not None:
        _run(report, Area.MODEL, partial(model.check, plan, shape))
    for tier in plan.tiers:
        report.tier = tier.name
        _run(report, Area.TIER, *_check_of(tier, seconds))
    report.send(done=True)


def _run(report: Report, area: Area, check: Callable[[Report], object], fix: str = FIX) -> None:
    """``fix``: if the check hangs."""
    report.send(begin=area, tier=report.tier, fix=fix)
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
