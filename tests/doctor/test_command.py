"""The command: what it accepts, what it prints, and that it runs checks in a process that it can end."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvoffload.abc import ConfigError
from kvoffload.cli import group
from kvoffload.config import OffloadConfig
from kvoffload.doctor import configuration, directories
from kvoffload.doctor.configuration import PlannedTier
from kvoffload.doctor.examine import Examination
from kvoffload.doctor.findings import Finding, Hidden, Level
from kvoffload.doctor.process import CheckProcess, Ending, Outcome, Report, _Clock
from kvoffload.doctor.report import show, verdict
from kvoffload.doctor.source import read_source
from tests.doctor.rig import LLAMA, diagnose, findings_of, model_file, needs_root

HERE = "tests.doctor.test_command"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config", "/no/such/file"],
        ["--config", "{}", "--model", "/no/such/model"],
        ["--config", "{}", "--prefill-speed", "0"],
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
    with pytest.raises(ConfigError, match=r"vLLM takes one connector; write .* .MultiConnector."):
        read_source(json.dumps([own, other]))


@pytest.mark.parametrize("name", ["kv_transfer_config", "kv-transfer-config", "--kv-transfer-config"])
def test_a_level_too_many_is_named(name: str) -> None:
    """As in vLLM's own file of options, and with the options written twice."""
    with pytest.raises(ConfigError, match=rf"has the key .{name}. around it; give only the value of that key"):
        read_source(json.dumps({name: OWN}))
    twice = {**OWN, "kv_connector_extra_config": {"kv_connector_extra_config": {"host_bytes": "1GiB"}}}
    with pytest.raises(ConfigError, match="kv_connector_extra_config stands in itself; write it once"):
        read_source(json.dumps(twice))


@pytest.mark.parametrize(("role", "level"), [("both", Level.PROBLEM), ("kv_consumer", Level.WARNING)])
def test_a_role_that_vllm_refuses_is_a_problem(role: str, level: Level) -> None:
    found = findings_of(configuration.check, asdict(read_source(json.dumps({**OWN, "kv_role": role}))))
    assert found["config.role"].level is level
    assert found["config.role"].text.startswith(f"kv_role='{role}': ")


def test_a_fix_stands_by_itself() -> None:
    options = {"host_bytes": "64MiB", "store_threshold": 1}
    found = findings_of(configuration.check, {"options": options, "transfer": None})
    assert found["config.refused"].fix == "correct it, or leave it out"


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kv-transfer.json"
    path.write_text('{"host_bytes": "1GiB",}')
    with pytest.raises(ConfigError, match=rf"--config='{re.escape(str(path))}': not JSON .*line 1 column 2"):
        read_source(str(path))


@pytest.mark.parametrize("wrong", [{"disk_dir": "cache"}, {"disk_bytes": "much"}])
def test_one_wrong_setting_of_the_disk_is_one_error(wrong: dict[str, str]) -> None:
    options = {"host_bytes": "64MiB", "disk_dir": "/var/cache/kvoffload", "disk_bytes": "1GiB", **wrong}
    _, (error,) = configuration.read_config(OffloadConfig, options)
    assert error.setting == next(iter(wrong))
    both = {**options, "disk_dir": "cache", "policy": "none"}
    assert len(configuration.read_config(OffloadConfig, both)[1]) == 2


def test_a_key_that_looks_like_an_entry_is_an_unknown_key() -> None:
    _, (error,) = configuration.read_config(OffloadConfig, {"host_bytes": "64MiB", "tiers[3]": 1})
    assert str(error).startswith("tiers[3]=***: unknown option")


def test_a_directory_that_holds_more_than_its_budget(tmp_path: Path) -> None:
    """What is not kvoffload's counts against the budget, and is never removed."""
    tmp_path.chmod(0o700)
    (tmp_path / "other").write_bytes(bytes(2 << 20))
    for budget, level in (("1MiB", "warning"), ("32MiB", "ok")):
        options = {"host_bytes": "64MiB", "disk_dir": str(tmp_path), "disk_bytes": budget}
        assert diagnose(options).one("directory.space")["level"] == level


def test_what_belongs_to_vllm_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    wrong = {"options": {}, "transfer": {"kv_connector": "NixlConnector"}}
    found = findings_of(configuration.check, wrong)
    assert set(found) == {"config.connector", "config.role", "config.plugin", "config.refused"}
    assert all(each.level is Level.PROBLEM and each.fix for each in found.values())
    assert "host_bytes is not set" in found["config.refused"].text
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvoffload")
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
    right = {"options": {"host_bytes": "64MiB"}, "transfer": transfer}
    assert set(findings_of(configuration.check, right)) == {"config.valid"}


@pytest.mark.parametrize(("amount", "is_refused"), [("8", True), ("8MiB", False)])
def test_a_share_without_room_for_a_block(tmp_path: Path, amount: str, is_refused: bool) -> None:
    options = {"host_bytes": "64MiB", "tenants": {"a": {"guaranteed": {"host": amount}}, "b": {}}}
    found = diagnose(options, "--model", model_file(tmp_path, LLAMA))
    assert found.one("config.valid")["text"].endswith("tenants: a, b")
    assert ("model.shares" in found.ids("problem")) == is_refused
    assert not is_refused or found.one("model.shares")["text"].startswith("tenants.a.guaranteed.host=8 (8 bytes): has")


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o644, True)])
def test_a_password_that_others_may_read(tmp_path: Path, mode: int, is_open: bool) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(mode)
    tier = {"kind": "redis", "url": "redis://localhost:6379", "password_file": str(password)}
    options = {"host_bytes": "64MiB", "tiers": [tier]}
    found = findings_of(configuration.check, {"options": options, "transfer": None})
    assert ("config.key_file_open" in found) == is_open
    assert found["config.valid"].text.endswith("tiers: redis")
    assert not is_open or f"password_file='{password}'" in found["config.key_file_open"].text


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
    assert (
        "config.key_file_open" in findings_of(configuration.check, {"options": options, "transfer": None})
    ) == is_open


# Output.


def printed(findings: list[Finding], width: int, encoding: str = "utf-8") -> str:
    with open(os.devnull, "w", encoding=encoding) as sink:
        console = Console(file=sink, width=width, record=True)
        show(console, Examination(findings))
        return console.export_text()


FOUND = [
    Finding("memory.b", Level.OK, "all is well"),
    Finding("memory.c", Level.PROBLEM, "a long sentence that must be wrapped " * 4, "run /a/path/that-is-long"),
    Finding("tier.d", Level.WARNING, "slow", "faster", "disk"),
]


def test_findings_are_grouped_and_fixes_stand_below() -> None:
    lines = printed(FOUND, 60).splitlines()
    assert lines[0] == "This machine"
    assert lines[1] == "  ✓ all is well"
    assert lines[2].startswith("  ✗ a long sentence")
    assert "    → run /a/path/that-is-long" in lines
    assert lines[-1] == "1 problem and 1 warning: fix the problem before you deploy."
    assert max(map(len, lines)) <= 60
    assert "Tier disk" in lines


def test_other_encodings_get_other_marks() -> None:
    assert printed(FOUND, 60, "ascii").isascii()


def test_the_verdict_says_what_counts() -> None:
    assert verdict(Examination(FOUND[:1])) == "Nothing stops or slows this deployment."
    assert verdict(Examination(FOUND[2:])) == "Nothing stops this deployment; 1 warning."
    assert verdict(Examination(FOUND[1:2])) == "1 problem: fix it before you deploy."


def test_secrets_are_hidden() -> None:
    options = {"tiers": [{"passe": "sesame", "url": "rediss://user:pa%20ss@host:1/0", "hmac_key_file": "/a/key"}]}
    texts = Hidden(options)
    text = "sesame rediss://user:pa%20ss@host:1/0 /a/key rediss://host"
    assert texts.hide(text) == "*** *** /a/key rediss://host"
    hidden = texts.hide_in(Finding("tier.a", Level.NOTE, "sesame", "sesame!", figures={"x": "sesame", "y": 1}))
    assert (hidden.text, hidden.fix, dict(hidden.figures)) == ("***", "***!", {"x": "***", "y": 1})


def test_all_errors_of_tenants_are_listed() -> None:
    tenants = {
        "a.b": {"quota": {"host": "lots"}, "guaranted": {"host": "1MiB"}},
        "a": {"guaranteed": {"host": "2MiB", "tape": "1MiB"}, "quota": {"host": "1MiB"}, "salt_sha256": "x"},
        "bad name": {},
        "c": 3,
        "d": {"guaranteed": {"host": "1TiB"}},
    }
    config, errors = configuration.read_config(OffloadConfig, {"host_bytes": "64MiB", "tenants": tenants})
    assert sorted(error.setting for error in errors) == [
        "tenants",
        "tenants.a.b.guaranted",
        "tenants.a.b.quota.host",
        "tenants.a.guaranteed.tape",
        "tenants.a.quota.host",
        "tenants.a.salt_sha256",
        "tenants.bad name",
        "tenants.c",
    ]
    assert config is not None
    assert config.tenants == ()
    # What follows from another error is not one.
    _, (error,) = configuration.read_config(OffloadConfig, {"host_bytes": "lots", "tenants": {"d": tenants["d"]}})
    assert error.setting == "host_bytes"


# Checks run in a process of their own.


def hangs(arguments: dict[str, Any], report: Report) -> None:
    report.finding(FOUND[0])
    report.stage("waits for ever")
    time.sleep(1000)


def crashes(arguments: dict[str, Any], report: Report) -> None:
    os.write(2, b"the last words\n")
    os._exit(7)


def raises(arguments: dict[str, Any], report: Report) -> None:
    report.stage("raises")
    raise ValueError("no such luck")


def works(arguments: dict[str, Any], report: Report) -> None:
    report.fact("doubled", 2 * arguments["number"])
    report.fact("pid", os.getpid())


def test_a_check_that_hangs_is_ended_and_the_next_one_runs() -> None:
    stages: list[str] = []
    process = CheckProcess(stages.append)
    try:
        first = process.run(f"{HERE}:works", {"number": 3}, 60.0)
        assert (first.ending, first.facts["doubled"]) == (Ending.DONE, 6)
        assert process.run(f"{HERE}:works", {"number": 1}, 60.0).facts["pid"] == first.facts["pid"]
        hung = process.run(f"{HERE}:hangs", {}, 1.0)
        assert (hung.ending, hung.stage, hung.findings) == (Ending.HUNG, "waits for ever", FOUND[:1])
        assert "waits for ever" in stages
        with pytest.raises(ProcessLookupError):
            os.kill(first.facts["pid"], 0)
        crashed = process.run(f"{HERE}:crashes", {}, 60.0)
        assert crashed.ending is Ending.FAILED
        assert "exit status 7: the last words" in crashed.failure
        raised = process.run(f"{HERE}:raises", {}, 60.0)
        assert (raised.ending, raised.failure) == (Ending.FAILED, "ValueError: no such luck")
        assert process.run(f"{HERE}:works", {"number": 4}, 60.0).facts["doubled"] == 8
    finally:
        process.close()


def burn(processor: int) -> None:
    """Starts a process that uses all of a processor, beside this one: also the kernel's groups of processes that share
    one fairly are the same."""
    os.sched_setaffinity(0, {processor})
    if os.fork() == 0:
        while True:
            pass


def starves(arguments: dict[str, Any], report: Report) -> None:
    """Computes, but gets the processor only when no other process wants it."""
    report.stage("computes")
    burn(arguments["processor"])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def hangs_there(arguments: dict[str, Any], report: Report) -> None:
    burn(arguments["processor"])
    hangs(arguments, report)


def test_a_busy_machine_is_not_taken_for_a_medium_that_hangs() -> None:
    arguments = {"processor": min(os.sched_getaffinity(0))}
    process = CheckProcess()
    try:
        starved = process.run(f"{HERE}:starves", arguments, 0.5)
        hung = process.run(f"{HERE}:hangs_there", arguments, 0.5)
    finally:
        process.close()
    assert (starved.ending, starved.stage) == (Ending.STARVED, "computes")
    assert starved.waited_s > 0.5
    assert (hung.ending, hung.stage) == (Ending.HUNG, "waits for ever")


def test_threads_that_wait_side_by_side_do_not_hide_one_that_hangs(tmp_path: Path) -> None:
    """Two of three threads wait for a processor for 60% of the time."""
    now = [100.0]
    tasks = tmp_path / "tasks"

    def wait(seconds: float) -> None:
        now[0] += seconds
        for name, share in (("1", 0.0), ("2", 0.6), ("3", 0.6)):
            (tasks / name).mkdir(parents=True, exist_ok=True)
            (tasks / name / "schedstat").write_text(f"0 {int((now[0] - 100.0) * share * 1e9)} 1\n")
            (tasks / name / "stat").write_text(f"{name} (python) S 1")

    clock, outcome = _Clock(tasks, 1.0, lambda: now[0]), Outcome()
    wait(2.0)
    assert clock.ending(outcome) is None
    wait(1.0)
    assert clock.ending(outcome) is Ending.HUNG
    assert outcome.waited_s == pytest.approx(1.8)


def test_every_id_is_documented() -> None:
    room = Path(configuration.__file__).parent
    source = "".join(path.read_text() for path in room.glob("*.py"))
    machine = "memory|huge_pages|numa|processors|descriptors|copies"
    areas = f"config|{machine}|directory|store|tier|engine|model|clock|worth|doctor"
    used = set(re.findall(rf'"((?:{areas})\.[a-z_]+)"', source)) - {"config.json"}
    page = (room.parents[2] / "docs" / "doctor.md").read_text()
    documented = set(re.findall(rf"`((?:{areas})\.[a-z_]+)`", page)) - {"config.json"}
    assert used <= documented
    # Those whose id is made of parts have these as strings of their own.
    made = {id.partition(".")[2].removesuffix("_fails") for id in documented - used}
    assert [part for part in made if f'"{part}"' not in source] == []


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
    source = read_source(json.dumps({**outer, "kv_connector_extra_config": {"connectors": connectors}}))
    found = findings_of(configuration.check, asdict(source))
    assert ("config.valid" in found) == (said is None)
    assert ("config.several" in found) == (said is not None)
    if said is not None:
        assert re.search(said, found["config.several"].text)
        assert found["config.several"].fix


def test_a_plugin_that_vllm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path to the module helps kvoffload alone, not beside others."""
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    own = {**OWN, "kv_connector_module_path": "kvoffload.vllm"}
    assert "config.valid" in findings_of(configuration.check, asdict(read_source(json.dumps(own))))
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [own]},
    }
    found = findings_of(configuration.check, asdict(read_source(json.dumps(several))))
    assert "only by kv_connector_module_path" in found["config.several"].text


def test_options_one_level_up() -> None:
    """vLLM refuses them there; what else is wrong with them is said too."""
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "host_bytes": 64}
    found = findings_of(configuration.check, asdict(read_source(json.dumps(transfer))))
    assert "one level below" in found["config.misplaced"].fix
    assert found["config.refused"].text == "host_bytes=64: 64 bytes are of no use"
    assert 'did you mean host_bytes="64GiB"?' in found["config.refused"].fix


def test_an_option_of_another_door_is_one_error() -> None:
    tier = {"kind": "redis", "url": "redis://h:6379"}
    config, errors = configuration.read_config(OffloadConfig, {"host_bytes": "64MiB", "tier": tier})
    assert config is not None
    assert [error.setting for error in errors] == ["tier"]
    assert "did you mean tiers?" in errors[0].fix


def test_a_separator_in_a_value_is_part_of_it() -> None:
    options = {"host_bytes": "64MiB", "disk_dir": "/tmp/a; b: c"}
    found = findings_of(configuration.check, {"options": options, "transfer": None})["config.refused"]
    assert found.text == "disk_dir='/tmp/a; b: c': disk_bytes is not set"
    assert found.fix.startswith("say how much of that disk to use")


def test_a_disk_that_may_not_be_mounted(tmp_path: Path) -> None:
    def missing(path: Path) -> Finding:
        plan = PlannedTier("disk", "disk", "disk_", 100.0, directory=str(path), bytes=1 << 20)
        return findings_of(directories.check, {"tier": asdict(plan), "seconds": 0.0})["directory.missing"]

    assert missing(tmp_path / "kv").level is Level.NOTE
    found = missing(tmp_path / "nvme" / "kv")
    assert found.level is Level.WARNING
    assert "a disk may not be mounted" in found.text
    assert found.fix.startswith("mount the disk")
