"""What the checks say about facts that this machine does not have."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ConfigError
from kvoffload.doctor.clock import monotonic_finding, time_findings
from kvoffload.doctor.configuration import Plan, PlannedTier
from kvoffload.doctor.directories import Space, mount_of, space_findings
from kvoffload.doctor.engine import variable_findings, version_findings
from kvoffload.doctor.findings import Level
from kvoffload.doctor.machine import node_findings, node_sizes
from kvoffload.doctor.model import find_config, support_findings
from kvoffload.doctor.worth import Medium, worth_findings
from tests.doctor.rig import LLAMA

GIB = 1 << 30
DISK = Plan(host_bytes=GIB, tiers=[PlannedTier("disk", "disk", "disk_", 100.0)])


@pytest.mark.parametrize(
    ("version", "plan", "id", "level"),
    [
        (None, DISK, "engine.missing", Level.NOTE),
        ("0.32.0", DISK, "engine.tested", Level.OK),
        ("0.32.0+cpu", DISK, "engine.tested", Level.OK),
        ("0.30.1", Plan(), "engine.too_old", Level.PROBLEM),
        ("0.31.0", DISK, "engine.tested", Level.OK),
        ("0.33.0", DISK, "engine.tested", Level.OK),
        ("0.40.0", DISK, "engine.untested", Level.WARNING),
        ("dev", DISK, "engine.untested", Level.WARNING),
    ],
)
def test_versions_of_vllm(version: str | None, plan: Plan, id: str, level: Level) -> None:
    (found,) = version_findings(version, plan)
    assert (found.id, found.level) == (id, level)
    # zsh looks for files of that name if a star is not quoted.
    assert "*" not in re.sub("'[^']*'", "", found.fix)


@pytest.mark.parametrize(
    ("environment", "fixes"),
    [
        ({}, []),
        ({"VLLM_PORT": "8000", "VLLM_DP_MASTER_PORT": "29500"}, []),
        # Of a Service "vllm-pods": vLLM does not read it.
        ({"VLLM_PODS_PORT": "tcp://10.0.0.7:8000", "VLLM_SERVICE_PORT": "8000"}, []),
        ({"VLLM_PORT": "tcp://10.0.0.7:8000"}, ["enableServiceLinks: false"]),
        ({"VLLM_DP_MASTER_PORT": "tcp://10.0.0.7:1"}, ['rename the Service "vllm-dp-master"']),
        ({"VLLM_PORT": "http"}, ["set VLLM_PORT to a number"]),
    ],
)
def test_variables_that_vllm_cannot_read(environment: dict[str, str], fixes: list[str]) -> None:
    found = list(variable_findings(environment))
    assert [(each.id, each.level) for each in found] == [("engine.port_variable", Level.PROBLEM)] * len(fixes)
    assert all(fix in each.fix for fix, each in zip(fixes, found, strict=True))


HYBRID = {**LLAMA, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}
WINDOWS = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 512}
LATENT = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "id", "level"),
    [
        (LLAMA, "model.served", Level.OK),
        (WINDOWS, "model.served", Level.OK),
        (HYBRID, "model.states", Level.NOTE),
        (LATENT, "model.latent", Level.NOTE),
        ({**LLAMA, "is_encoder_decoder": True}, "model.cross_attention", Level.PROBLEM),
        ({"text_config": {**LLAMA, "cross_attention_layers": [3]}}, "model.cross_attention", Level.PROBLEM),
        ({**LLAMA, "model_type": "bert"}, "model.no_kv", Level.PROBLEM),
        ({**LLAMA, "canvas_length": 32}, "model.diffusion", Level.PROBLEM),
        ({**LLAMA, "use_bidirectional_attention": True}, "model.not_causal", Level.PROBLEM),
        ({**LLAMA, "param_sink_number": 4}, "model.untested_kind", Level.PROBLEM),
    ],
)
def test_models(config: dict[str, Any], id: str, level: Level) -> None:
    (found,) = support_findings(config)
    assert (found.id, found.level) == (id, level)
    assert found.fix or level in (Level.OK, Level.NOTE)


def test_a_model_is_found_in_a_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models--org--name"
    for revision in ("abc", "def"):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").write_text(json.dumps(LLAMA))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    wanted = model / "snapshots" / "abc" / "config.json"
    for name in ("org/name", str(model), str(wanted.parent), str(wanted)):
        assert find_config(name) == wanted
    for name in ("org/other", str(tmp_path)):
        with pytest.raises(ConfigError, match="--model="):
            find_config(name)


@pytest.mark.parametrize(
    ("sizes", "allowed", "host_bytes", "id"),
    [
        ({0: 64 * GIB}, {0}, 128 * GIB, None),
        ({0: 64 * GIB, 1: 0}, {0}, 128 * GIB, None),
        ({0: 64 * GIB, 1: 64 * GIB}, {0, 1}, 32 * GIB, "numa.nodes"),
        ({0: 64 * GIB, 1: 64 * GIB}, {0, 1}, 96 * GIB, "numa.spans"),
        ({0: 64 * GIB, 1: 64 * GIB}, {1}, 32 * GIB, "numa.cpuset"),
    ],
)
def test_numa_nodes(sizes: dict[int, int], allowed: set[int], host_bytes: int, id: str | None) -> None:
    found = node_findings(sizes, frozenset(allowed), Plan(host_bytes=host_bytes))
    assert [each.id for each in found] == ([id] if id else [])


def test_memory_of_a_gpu_is_no_numa_node_of_the_pool(tmp_path: Path) -> None:
    for node in (0, 2, 10):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(f"Node {node} MemTotal: {node + 1} kB\n")
    assert node_sizes(tmp_path, frozenset({2})) == {0: 1024, 10: 11 * 1024}


@pytest.mark.parametrize(
    ("offset", "needs", "levels"),
    [
        (2.0, ["s3"], []),
        (90.0, [], [Level.NOTE]),
        (-90.0, ["s3"], [Level.WARNING]),
        (3600.0, ["s3"], [Level.PROBLEM]),
    ],
)
def test_clocks_that_differ(offset: float, needs: list[str], levels: list[Level]) -> None:
    found = list(time_findings(True, {"s3": offset}, needs))
    assert [each.level for each in found if each.id == "clock.offset"] == levels
    assert found[-1].id == "clock.synchronized"


def test_a_clock_that_is_not_synchronized_matters_to_stores_that_sign() -> None:
    (alone,), (signing,) = time_findings(False, {}, []), time_findings(False, {}, ["s3"])
    assert (alone.level, signing.level) == (Level.NOTE, Level.WARNING)
    assert "s3" in signing.text
    assert alone.fix == signing.fix != ""


def test_a_clock_that_is_slow_to_read() -> None:
    assert monotonic_finding(50e-9).level is Level.OK
    assert monotonic_finding(5e-6).level is Level.WARNING


def test_worth_is_the_speed_of_the_medium_against_that_of_computing() -> None:
    media = [Medium("host memory", 10e9), Medium("disk", 1e9, "disk")]
    host, disk = worth_findings(media, 100_000.0, None, True)
    assert host.figures["break_even_tokens_per_s"] == 100_000
    assert "fewer than 10,000 tokens/s" in disk.text
    host, disk = worth_findings(media, 100_000.0, 20_000.0, True)
    assert (host.level, disk.level) == (Level.OK, Level.WARNING)
    assert (host.figures["speedup"], disk.figures["speedup"]) == (5.0, 0.5)
    assert "2.0 times slower" in disk.text
    (even,) = worth_findings(media[1:], 100_000.0, 9_000.0, True)
    assert (even.id, even.level) == ("worth.even", Level.NOTE)
    (unknown,) = worth_findings(media, None, 20_000.0, False)
    assert unknown.id == "worth.no_model"


def test_tiers_on_one_file_system_share_its_space() -> None:
    first, second = (PlannedTier(name, "disk", f"{name}.", 100.0) for name in ("disk", "disk-2"))
    fits = Space(1, 20 * GIB, 50 * GIB, 0)
    assert list(space_findings([(first, fits), (second, fits)])) == []
    assert list(space_findings([(first, replace(fits, free=30 * GIB)), (second, replace(fits, device=2))])) == []
    used = replace(fits, free=30 * GIB, held=10 * GIB)
    assert list(space_findings([(first, used), (second, replace(used, held=0))])) == []
    tight = replace(fits, free=30 * GIB)
    (found,) = space_findings([(first, tight), (second, tight)])
    assert (found.id, found.level, found.tier) == ("directory.space_together", Level.WARNING, "disk-2")
    assert "can give them 30 GiB, and they want 40 GiB" in found.text


def test_mounts_are_read() -> None:
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of("/").point == "/"
    assert mount_of(tempfile.gettempdir()).kind != "unknown"
