"""The doctor on configurations of the offloading that engines have themselves."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.doctor import integrations, machine
from kvoffload.doctor.configuration import PlannedServer
from kvoffload.doctor.engine import check_version
from kvoffload.doctor.findings import Level
from kvoffload.doctor.integrations import Integration
from tests.doctor.rig import diagnose, findings_of, judge, private

GIB = 1 << 30
TIERING, HOST_SPEC = '"TieringOffloadingSpec"', "kvoffload.vllm.host_spec"
POLICIES = {"cache_policy_module_path": "kvoffload.vllm.cache_policy"}
FIRST = "secondary_tiers[0]"
ON_REDIS, IN_A_FOLDER = {"kind": "redis", "url": "redis://a:1"}, {"kind": "disk", "dir": "/c", "bytes": 9 << 20}


def entry(folder: Path, **more: Any) -> dict[str, Any]:
    """An entry of ``secondary_tiers``; None removes a key."""
    tier = {"kind": "disk", "dir": str(folder / "disk"), "bytes": "32MiB"}
    given = {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", "tier": tier, **more}
    return {name: value for name, value in given.items() if value is not None}


def extra(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A ``kv_connector_extra_config`` of vLLM's connector; None removes a key."""
    given = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": GIB // 16,
        "secondary_tiers": list(entries),
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def transfer(options: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def sglang(folder: Path, **more: Any) -> dict[str, Any]:
    """The extra configuration of SGLang's storage backend; None removes a key."""
    given = {
        "backend_name": "kvoffload",
        "module_path": "kvoffload.sglang",
        "class_name": "KVOffloadStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "tier": {"kind": "disk", "dir": str(folder / "disk"), "bytes": "32MiB"},
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def test_right_configurations_are_valid(tmp_path: Path) -> None:
    """What vLLM and SGLang refuse themselves is not said."""
    policy = {"eviction_policy": "AutoCachePolicy", **POLICIES}
    for options in (extra(entry(tmp_path)), extra(entry(tmp_path), **policy), extra({"type": "fs"}, **policy)):
        for found in (judge(options), judge(options, transfer(options))):
            assert set(found) == {"config.valid"}
            assert found["config.valid"].text.startswith("every setting is valid: cpu_bytes_to_use 64 MiB")
    on_cpus = {"spec_name": "HostTieringSpec", "spec_module_path": HOST_SPEC}
    for options in (
        extra(entry(tmp_path), **on_cpus),
        extra(entry(tmp_path), cpu_bytes_to_use="64MiB"),
        sglang(tmp_path),
    ):
        assert set(judge(options)) == {"config.valid"}


def test_what_would_be_ignored_and_what_is_wrong_with_tiers(tmp_path: Path) -> None:
    """An entry's settings are named as they were written."""
    of_vllm: list[tuple[dict[str, Any], str, str, str]] = [
        ({"spec_name": None}, "spec", "ignores secondary_tiers without a word", TIERING),
        ({"spec_name": "CPUOffloadingSpec"}, "spec", "ignores secondary_tiers", TIERING),
        ({"spec_name": "HostMemorySpec", "spec_module_path": HOST_SPEC}, "spec", "ignores", '"HostTieringSpec"'),
        ({"disk_dir": "/cache"}, "ignored", "disk_dir: vLLM ignores it here", "secondary_tiers"),
        ({"secondary_tiers": []}, "connector", "nothing in it is kvoffload's", "KVOffloadTier"),
        ({"secondary_tiers": [{"type": "fs"}]}, "connector", "nothing in it is kvoffload's", "KVOffloadTier"),
        ({"eviction_policy": "arc", **POLICIES}, "policy", "vLLM's own policy", '"AutoCachePolicy"'),
    ]
    of_entries: list[tuple[dict[str, Any], str, str]] = [
        ({"tier": None}, ".tier is not set", '{"tier": {'),
        ({"tier": [{}]}, ".tier=[{}]", "must be a mapping"),
        ({"tiers": [IN_A_FOLDER]}, ".tier: tiers is set too", "into tiers"),
        ({"dir": "/cache"}, ".dir='/cache': unknown option", "Known: tier, tiers"),
        ({"lookup_deadline_ms": -1}, ".lookup_deadline_ms=-1", "must be"),
        ({"tier": {"kind": "dsk"}}, ".tier.kind='dsk'", "did you mean disk"),
        ({"tier": {"kind": "disk", "dir": "/c"}}, ".tier.bytes is not set", "500GiB"),
        ({"tier": None, "tiers": [ON_REDIS, {**IN_A_FOLDER, "dir": "c"}]}, ".tiers[1].dir='c'", "absolute path"),
    ]
    of_sglang: list[tuple[dict[str, Any], str, str, str]] = [
        ({"hicache_storage_pass_prefix_keys": None}, "interface", "what comes before a page", "true"),
        ({"teir": 3}, "refused", "teir=***: unknown option", "did you mean tier?"),
        ({"tier": {"kind": "disk", "dir": "c", "bytes": 1}}, "refused", "tier.dir='c'", "absolute path"),
    ]
    cases: list[Any] = [
        *((extra(entry(tmp_path), **change), *said) for change, *said in of_vllm),
        *((extra(entry(tmp_path, **change)), "refused", FIRST + text, fix) for change, text, fix in of_entries),
        *((sglang(tmp_path, **change), *said) for change, *said in of_sglang),
        (extra(entry(tmp_path), entry(tmp_path)), "refused", "secondary_tiers[0].tier.dir=", ""),
    ]
    for options, id, text, fix in cases:
        found = [each for each in judge(options).values() if each.level is Level.PROBLEM]
        said = {each.id: each.text + each.fix for each in found}
        assert text in said[f"config.{id}"], said
        assert fix in said[f"config.{id}"], said


def test_tiers_behind_a_door_are_checked_like_all_others(tmp_path: Path) -> None:
    """Directories, space, memory with what is staged, and the room in /dev/shm."""
    private(tmp_path / "disk")
    large = {"kind": "disk", "dir": str(private(tmp_path / "large")), "bytes": "4000TiB"}
    found = diagnose(transfer(extra(entry(tmp_path), entry(tmp_path, tier=large))))
    assert found.one("directory.private", "disk")["level"] == "ok"
    assert found.one("directory.space", "disk-2")["level"] == "problem"
    assert found.one("directory.space", "disk-2")["text"].startswith("secondary_tiers[1].tier.bytes=")
    fits = found.one("memory.fits")
    assert fits["text"].startswith("cpu_bytes_to_use with kvoffload's staging memory is")
    assert fits["figures"]["needed_bytes"] > GIB // 16
    assert found.one("memory.shm_fits")["figures"]["needed_bytes"] == GIB // 16
    assert "engine.plugin" not in found.ids()


def test_a_container_with_little_shared_memory(tmp_path: Path) -> None:
    """vLLM puts its host memory into a file there, and ends if it does not fit."""
    plan = PlannedServer(Integration.VLLM, 1 << 60, shared_memory_bytes=1 << 60)
    assert "--shm-size" in findings_of(partial(machine.check, plan))["memory.shm_small"].fix
    assert findings_of(lambda report: machine.check_shared_memory(plan, report, tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("version", "integration", "id"),
    [
        ("0.30.0", Integration.VLLM, "engine.too_old"),
        ("0.31.0", Integration.VLLM, "engine.tested"),
        ("0.34.0", Integration.VLLM, "engine.untested"),
        (None, Integration.SGLANG, "engine.missing"),
        ("0.6.0", Integration.SGLANG, "engine.untested"),
    ],
)
def test_versions_of_engines(version: str | None, integration: Integration, id: str) -> None:
    (found,) = findings_of(partial(check_version, version, PlannedServer(integration))).values()
    assert found.id == id
    assert "SGLang" in found.text if integration is Integration.SGLANG else "vLLM" in found.text


def test_the_names_are_those_of_the_classes() -> None:
    source = Path(integrations.__file__).parents[1]
    for module, names in (
        (integrations.TIER_MODULE, (integrations.TIER,)),
        ("kvoffload.vllm.cache_policy", (integrations.POLICY,)),
        (HOST_SPEC, (integrations.TIERING_SPEC_ON_CPUS, integrations.SPEC_ON_CPUS)),
    ):
        text = source.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        assert [
            name for name in names if not re.search(rf"^(class {name}\b|from .* import .*\b{name}\b)", text, re.M)
        ] == []
