"""The order of tests among several processes, and fixtures of many directories."""

from __future__ import annotations

import contextlib
import gc
import logging
import os

import pytest

from kvoffload.tiers.disk import directory
from tests.scale import SCALE, scaled

LONGEST = (
    "test_vllm_versions.py",
    "test_vllm_serve.py",
    "test_vllm_outputs.py",
    "test_vllm_groups.py",
    "test_vllm_ranks.py",
    "test_vllm_weights.py",
    "test_vllm_hybrids.py",
    "test_vllm_secondary_tiers.py",
    "test_engine_model.py",
    "test_tier_conformance.py",
    "test_simulation.py",
    "test_process.py",
    "test_explain.py",
    "test_policies.py",
    "test_bounds.py",
    "test_servers.py",
    "test_store.py",
)
"""The files that take longest, which begin first, so that one process does not wait for another at the end."""

# Tests on a GPU run without Hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None, max_examples=scaled(50))
    settings.load_profile("tests")

# Where these say that it runs unattended, pytest describes each failed comparison in full. For long lists that takes
# minutes, and tests with planted bugs expect such failures. Hypothesis, above, must know.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real vLLM come early: those in LONGEST first, of the rest those of the same process together."""
    if SCALE <= 1:
        for item in items:
            if item.get_closest_marker("soak") is not None:
                item.add_marker(pytest.mark.skip(reason="make soak runs it: set KVOFFLOAD_TEST_SCALE above 1"))

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.get_closest_marker("vllm") is None

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Garbage collection need not visit what was imported and collected: with vLLM that takes a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_log_of_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an import of vLLM's adapter kvoffload's log has vLLM's level. Tests without vLLM expect Python's."""
    if request.node.get_closest_marker("vllm") is None:
        logger = logging.getLogger("kvoffload")
        monkeypatch.setattr(logger, "parent", logging.getLogger())
        logger.setLevel(logger.level)  # Forgets which levels the former parent has enabled.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a locked directory fail at once, for tests in which it stays locked."""
    monkeypatch.setattr(directory, "LOCK_DEADLINE_S", 0.0)
