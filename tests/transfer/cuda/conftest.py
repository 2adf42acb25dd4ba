"""A CUDA driver for tests on machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transfer.cuda.emulator import Emulator, compile_emulator


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = compile_emulator(tmp_path_factory.mktemp("emulator"))
    if path is None:
        pytest.skip("needs a C compiler")
    return path


@pytest.fixture
def emulator(emulator_library: Path) -> Emulator:
    return Emulator(emulator_library)
