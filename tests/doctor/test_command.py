"""The command: what it accepts, what it prints, and that it runs checks in a process that it can end."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvoffload.abc import ConfigError
from kvoffload.cli import group
from kvoffload.doctor import configuration, examine
from kvoffload.doctor.examine import Examination
from kvoffload.doctor.findings import AREAS, CHECKS, Area, Finding, Level, hide, secrets_in
from kvoffload.doctor.integrations import Integration
from kvoffload.doctor.report import show
from kvoffload.doctor.source import read_source
from kvoffload.tiers.remote.config import RemoteTierConfig
from tests.doctor.rig import QUICK, diagnose, findings_of, judge, model_file, needs_root
from tests.lab.traces import LLAMA

HERE = "tests.doctor.test_command"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config", "/no/such/file"],
        ["--config", "{}", "--model", "/no/such/model"],
        ["--config", "{}", "--nothing"],
    ],
)
def test_what_cannot_be_run_ends_with_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(group(), ["doctor", *arguments])
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""


def test_a_configuration_is_json_or_a_file_with_either_form(tmp_path: Path) -> None:
    options = {"host_bytes": "1GiB"}
    whole = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    path = tmp_path / "config"
    for content in (options, whole):
        path.write_text(json.dumps(content))
        for text in (json.dumps(content), f"  {json.dumps(content)}", str(path), f"@{path}"):
            source = read_source(text)
            assert source.options == options
            assert source.transfer == (whole if content is whole else None)
    path.write_text('{"host_bytes": "1GiB",}')
    with pytest.raises(ConfigError, match=rf"--config='{re.escape(str(path))}': not JSON .*line 1 column 2"):
        read_source(str(path))
    for wrong in ("{host_bytes: 1GiB}", "[]", '{"kv_connector_extra_config": 3}', str(tmp_path), "[" * 100_000):
        with pytest.raises(ConfigError, match=r"^--config"):
            read_source(wrong)


def test_of_several_connectors_the_entry_of_kvoffload_is_read() -> None:
    own = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": 1}}
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    outer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}

    def of(connectors: object) -> str:
        return json.dumps({**outer, "kv_connector_extra_config": {"connectors": connectors}})

    source = read_source(of([other, own]))
    assert (source.options, source.transfer) == ({"host_bytes": 1}, own)
    for wrong in ([other], [], [3]):
        with pytest.raises(ConfigError, match=r"none of the .connectors. of MultiConnector is KVOffloadConnector"):
            read_source(of(wrong))
    for no_list in (None, {"a": own}):
        with pytest.raises(ConfigError, match=r"the .connectors. of MultiConnector are not a list"):
            read_source(of(no_list))


def judged(transfer: dict[str, Any]) -> dict[str, Finding]:
    """Returns what is said about a ``--kv-transfer-config``, by id."""
    return findings_of(partial(configuration.check, read_source(json.dumps(transfer))))


def test_a_role_with_which_nothing_is_stored_or_loaded() -> None:
    found = judged({**OWN, "kv_role": "kv_consumer"})
    assert found["config.role"].level is Level.WARNING


def test_a_fix_stands_by_itself_and_a_separator_in_a_value_is_part_of_it() -> None:
    found = judge({"host_bytes": "64MiB", "store_threshold": 1})
    assert found["config.refused"].fix == "correct it, or leave it out"
    found = judge({"host_bytes": "64MiB", "disk_dir": "/tmp/a; b: c"})
    assert found["config.refused"].text == "disk_dir='/tmp/a; b: c': disk_bytes is not set"
    assert found["config.refused"].fix.startswith("say how much of that disk to use")


def test_an_error_of_each_entry_is_listed_and_the_right_ones_are_kept() -> None:
    right, wrong = {"kind": "redis", "url": "redis://h:6379"}, {"kind": "disk", "dir": "cache", "bytes": "1GiB"}
    options = {"host_bytes": "64MiB", "policy": "none", "tiers": [wrong, right, {"kind": "disc"}], "tenants": 3}
    config, tiers, errors = configuration.read_config(Integration.CONNECTOR, options)
    assert config is None
    assert [each.prefix for each in tiers] == ["tiers[1]."]
    assert [each.setting for each in errors] == ["tiers[0].dir", "tiers[2].kind", "policy"]
    config, tiers, errors = configuration.read_config(Integration.CONNECTOR, {"host_bytes": "64MiB", "tiers": [right]})
    assert (config is not None, len(tiers), errors) == (True, 1, [])


def test_a_directory_that_holds_more_than_its_budget(tmp_path: Path) -> None:
    """What is not kvoffload's counts against the budget, and is never removed."""
    tmp_path.chmod(0o700)
    (tmp_path / "other").write_bytes(bytes(2 << 20))
    for budget, level in (("1MiB", "warning"), ("32MiB", "ok")):
        options = {"host_bytes": "64MiB", "disk_dir": str(tmp_path), "disk_bytes": budget}
        assert diagnose(options).one("directory.space")["level"] == level


def test_what_belongs_to_vllm_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = judge({}, {"kv_connector": "NixlConnector"})
    assert set(found) == {"config.connector", "config.plugin", "config.refused"}
    assert all(each.level is Level.PROBLEM and each.fix for each in found.values())
    assert "host_bytes is not set" in found["config.refused"].text
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvoffload")
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
    assert set(judge({"host_bytes": "64MiB"}, transfer)) == {"config.valid"}


@pytest.mark.parametrize(("amount", "is_refused"), [("8", True), ("8MiB", False)])
def test_a_share_without_room_for_a_block(tmp_path: Path, amount: str, is_refused: bool) -> None:
    options = {"host_bytes": "64MiB", "tenants": {"a": {"guaranteed": {"host": amount}}, "b": {}}}
    found = diagnose(options, "--model", model_file(tmp_path, LLAMA))
    assert found.one("config.valid")["text"].endswith("tenants: a, b")
    assert ("model.shares" in found.ids("problem")) == is_refused
    assert not is_refused or found.one("model.shares")["text"].startswith("tenants.a.guaranteed.host=8 (8 bytes): has")


def test_contents_that_a_server_would_refuse(tmp_path: Path) -> None:
    options = {"host_bytes": "64MiB", "host_contents": "exclusive"}
    (tmp_path / "windows").mkdir()
    windows = model_file(tmp_path / "windows", LLAMA | {"sliding_window": 64})
    found = diagnose(options, "--model", windows).one("model.contents")
    assert (found["level"], found["fix"]) == ("problem", "leave it out")
    assert found["text"] == "host_contents='exclusive': the model has layers other than full attention"
    for allowed, model in ((options, model_file(tmp_path, LLAMA)), ({"host_bytes": "64MiB"}, windows)):
        assert "model.contents" not in diagnose(allowed, "--model", model).ids()
    assert (
        "host_contents='exclusive': a block has several"
        in judge(options | {"block_size_factor": 2})["config.refused"].text
    )


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "is_open"), [(0, 0o600, False), (0, 0o440, True), (2000, 0o440, False), (2000, 0o444, True)]
)
def test_a_key_that_others_may_read(tmp_path: Path, owner: int, mode: int, is_open: bool) -> None:
    """A file of another user that is readable for a group is a secret that Kubernetes has mounted."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(mode)
    os.chown(key, owner, -1)
    tier = {"kind": "redis", "url": "redis://localhost:6379", "hmac_key_file": str(key)}
    options = {"host_bytes": "64MiB", "tiers": [tier]}
    assert ("config.key_file_open" in judge(options)) == is_open


# Output.


def printed(findings: list[Finding], width: int, encoding: str = "utf-8") -> str:
    with open(os.devnull, "w", encoding=encoding) as sink:
        console = Console(file=sink, width=width, record=True)
        show(console, Examination(findings))
        return console.export_text()


FOUND = [
    Finding("memory.b", Level.OK, Area.MACHINE, "", "all is well"),
    Finding(
        "memory.c", Level.PROBLEM, Area.MACHINE, "", "a long sentence that must be wrapped " * 4, "run /a/long-path"
    ),
    Finding("tier.d", Level.WARNING, Area.TIER, "disk", "slow", "faster"),
]


def test_findings_are_grouped_and_fixes_stand_below() -> None:
    lines = printed(FOUND, 60).splitlines()
    assert lines[0] == "This machine"
    assert lines[1] == "  ✓ all is well"
    assert lines[2].startswith("  ✗ a long sentence")
    assert "    → run /a/long-path" in lines
    assert lines[-1] == "1 problem and 1 warning: fix the problem before you deploy."
    assert max(map(len, lines)) <= 60
    assert "Tier disk" in lines
    assert printed(FOUND, 60, "ascii").isascii()


def test_secrets_are_hidden() -> None:
    options = {"tiers": [{"passe": "sesame", "url": "rediss://user:pa%20ss@host:1/0", "hmac_key_file": "/a/key"}]}
    text = "sesame rediss://user:pa%20ss@host:1/0 /a/key rediss://host"
    found = {"text": text, "figures": {"x": "sesame!", "y": 1}}
    hidden = {"text": "*** *** /a/key rediss://host", "figures": {"x": "***!", "y": 1}}
    assert hide(found, secrets_in(options)) == hidden


# Checks run in a process of their own.


@dataclass(frozen=True, kw_only=True)
class OddConfig(RemoteTierConfig):
    """A store in whose check something goes wrong."""

    kind = "odd"
    connect = f"{HERE}:connect"
    address = "odd:1"
    fault: str

    def settings(self, engines: int = 1) -> Mapping[str, Any]:
        if self.fault == "raises":
            raise ValueError("no such luck")
        return super().settings(engines)


def connect(settings: Mapping[str, Any]) -> None:
    if settings["fault"] == "hangs":
        time.sleep(1000)
    os.write(2, b"the last words\n")
    os._exit(7)


def with_tiers(*faults: str) -> dict[str, Any]:
    return {"host_bytes": "64MiB", "tiers": [{"kind": f"{HERE}:OddConfig", "fault": each} for each in faults]}


def test_a_check_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    found = diagnose(with_tiers("raises", "hangs"), effort=replace(QUICK, deadline_s=2.0))
    assert time.monotonic() - begun < 60.0
    assert found.one("doctor.failed", "odd")["text"] == "the check failed: ValueError: no such luck"
    assert found.one("doctor.hung", "odd-2")["text"].startswith("no answer within 2 s while the doctor connects to odd")


def test_a_check_whose_process_ends() -> None:
    text = diagnose(with_tiers("crashes")).one("doctor.failed", "odd")["text"]
    assert text.endswith("connects to odd:1: its process has ended (exit status 7: the last words)")


def test_time_that_a_check_waits_for_a_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit. The control is the test of a check that hangs."""
    waits: list[float] = []

    def waited_s(pid: int) -> float:
        waits.append(time.monotonic())
        return 1000.0

    monkeypatch.setattr(examine, "_waited_s", waited_s)
    diagnose(with_tiers("hangs"), effort=replace(QUICK, deadline_s=1.0)).one("doctor.hung", "odd")
    assert waits[-1] - waits[0] > 2.0


def test_every_id_is_listed() -> None:
    room = Path(configuration.__file__).parent
    source = "".join(path.read_text() for path in room.glob("*.py") if path.name != "findings.py")
    areas = "|".join([*AREAS, "doctor"])
    used = set(re.findall(rf'"((?:{areas})\.[a-z_]+)"', source)) - {"config.json"}
    assert used <= set(CHECKS)
    # Those whose id is made of parts have these as strings of their own.
    made = {id.partition(".")[2].removesuffix("_fails") for id in set(CHECKS) - used}
    assert [part for part in made if f'"{part}"' not in source] == []
    listed = CliRunner().invoke(group(), ["doctor", "--list"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(CHECKS)


# Mistakes that a server refuses: the doctor asks the same function.

OWN = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": "64MiB"}}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("connectors", "change", "said"),
    [
        ([OWN, NIXL], {}, None),
        ([OWN, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}], {"kv_role": "kv_consumer"}, None),
        ([OWN, OWN], {}, "2 of them are kvoffload's"),
        (
            [OWN, {**NIXL, "kv_connector": "LMCacheConnectorV1"}],
            {},
            r"connectors\[1\].kv_connector='LMCacheConnectorV1'",
        ),
        ([NIXL, OWN], {"kv_role": "kv_producer"}, "kv_role='kv_producer': with this role of the MultiConnector"),
        ([OWN, {**NIXL, "kv_connector": "Mine", "kv_connector_module_path": "mine"}], {}, None),
    ],
)
def test_a_multi_connector_is_judged_as_a_server_does(
    connectors: list[dict[str, Any]], change: dict[str, Any], said: str | None
) -> None:
    outer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **change}
    found = judged({**outer, "kv_connector_extra_config": {"connectors": connectors}})
    assert ("config.valid" in found) == (said is None)
    assert ("config.several" in found) == (said is not None)
    if said is not None:
        assert re.search(said, found["config.several"].text)
        assert found["config.several"].fix


def test_a_plugin_that_vllm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path to the module helps kvoffload alone, not beside others."""
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    own = {**OWN, "kv_connector_module_path": "kvoffload.vllm"}
    assert "config.valid" in judged(own)
    found = judged({**NIXL, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [own]}})
    assert "only by kv_connector_module_path" in found["config.several"].text


def test_options_one_level_up() -> None:
    """vLLM refuses them there; what else is wrong with them is said too."""
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "host_bytes": 64}
    found = judged(transfer)
    assert "one level below" in found["config.misplaced"].fix
    assert found["config.refused"].text == "host_bytes=64: 64 bytes are of no use"
    assert 'did you mean host_bytes="64GiB"?' in found["config.refused"].fix
