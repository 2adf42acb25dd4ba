"""What keeps a server serving: offloading that switches itself off, and variables that Kubernetes sets."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_counted, check, differences

from tests.deploy.service_links import PORTS, manifests, variables

pytestmark = pytest.mark.vllm


def check_broken(result: Run, right: list[Any]) -> None:
    """Checks what the scenario ``broken`` has come to."""
    assert differences(result["outputs"][0], right) == []
    assert result["off"] is True
    assert (result["jobs"], result["requests"]) == (0, 0)
    assert result["free_device_blocks"] == result["usable_device_blocks"]
    assert result["prometheus"]["kvoffload:off"] == 1
    assert result.log.count("OFFLOADING IS OFF") == 1
    assert "planted: the table is broken" in result.log


@pytest.mark.soak
def test_a_reuse_filter_and_a_check_that_fails(run: Runner, expected: list[Any]) -> None:
    """test_vllm_versions.py has the same in other versions."""
    acts: dict[str, dict[str, Any]] = {"rounds": {"rounds": 3}, "broken": {}}
    played = run.play(acts, connector=POOL | {"store_threshold": 2})
    check(played["rounds"], expected)
    assert_counted(played["rounds"], "host_hit_tokens")
    assert "not_admitted" in {record["reason"] for record in played["rounds"]["records"]}
    check_broken(played["broken"], expected)


@pytest.mark.soak
def test_a_service_with_the_name_that_vllm_takes_keeps_a_server_from_starting(run: Runner) -> None:
    """The control of the server with service links in test_vllm_drafts.py."""
    objects = manifests()
    assert "LLM_SERVER_PORT" in variables(objects)
    renamed = copy.deepcopy(objects)
    for each in renamed:
        if each["metadata"]["name"] == "llm-server":
            each["metadata"]["name"] = "vllm"
    child, result = run.start("rounds", rounds=1, prompts=1, connector=POOL, environment=variables(renamed))
    assert child.wait(DEADLINE_S) != 0
    assert "appears to be a URI" in result.with_suffix(".log").read_text(errors="replace")


def test_the_ports_that_vllm_reads_are_known() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("envs.py").read_text()
    names = set(re.findall(r'^    "(VLLM_(?:\w+_)?PORT)":', source, re.MULTILINE))
    assert "VLLM_PORT" in names
    assert names <= set(PORTS)
