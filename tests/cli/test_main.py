"""The command line without any engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload import cli

testing = pytest.importorskip("click.testing")


def test_version() -> None:
    result = testing.CliRunner().invoke(cli.group(), ["--version"])
    assert result.exit_code == 0
    assert "kvoffload" in result.output


def test_help_names_every_option() -> None:
    result = testing.CliRunner().invoke(cli.group(), ["demo", "--help"])
    assert result.exit_code == 0
    for option in ("--out", "--text", "--model", "--json", "--seed"):
        assert option in result.output


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.setattr(sys, "argv", ["kvoffload", "--version"])
    monkeypatch.delitem(sys.modules, "kvoffload.cli.demo", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install 'kvoffload[cli]'" in err


def test_demo_without_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = testing.CliRunner().invoke(cli.group(), ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install vllm" in result.output
    assert not (tmp_path / "out").exists()
