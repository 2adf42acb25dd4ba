"""Modules import only from their own or lower layers, and only some of them import torch, Triton, vLLM and SGLang."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvoffload

PACKAGE = Path(kvoffload.__file__).parent

LAYERS = [
    {"abc"},
    {"units", "printable", "locks", "deadlines", "digests", "settings", "native", "supported"},
    {"host", "transfer", "observe", "fingerprints"},
    {"cache"},
    {"config", "tiers"},
    {"tiering"},
    {"connector"},
    {"lab"},
    {"doctor"},
    {"cli", "vllm", "sglang", "testing"},
]
"""Lowest first. A room may import from its own layer and those below, but rooms must not form a cycle. ``testing`` may
import anything, and only the top layer may import it."""

ENGINE_MODULES = {
    "vllm": ("kvoffload.vllm",),
    "sglang": ("kvoffload.sglang",),
    "torch": ("kvoffload.vllm", "kvoffload.sglang"),
    "opentelemetry": ("kvoffload.observe.spans",),
}
"""The modules, or rooms of modules, that may import each package of an engine, or of its tracing."""


def modules() -> dict[str, str]:
    """Returns the source of every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["kvoffload", *path.relative_to(PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            del parts[-1]
        found[".".join(parts)] = path.read_text()
    return found


def imported_modules(name: str, source: str) -> Iterator[str]:
    """Yields the absolute dotted names that ``source`` imports anywhere: inside functions, and by a string, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import: write the whole name"
            assert node.module is not None
            if node.module == "kvoffload":
                yield from (f"kvoffload.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))


def room(name: str) -> str:
    """Returns the part of the package that contains a module."""
    return name.split(".")[1] if "." in name else ""


def layer_of(room_name: str) -> int:
    for height, rooms in enumerate(LAYERS):
        if room_name in rooms:
            return height
    raise AssertionError(f"kvoffload.{room_name} has no layer: give it one in LAYERS")


def faults(sources: dict[str, str]) -> list[str]:
    """Returns every import in ``sources`` that breaks a rule."""
    found = []
    for name, source in sources.items():
        here = room(name)
        for imported in imported_modules(name, source):
            package = imported.split(".")[0]
            if package in ENGINE_MODULES and not name.startswith(ENGINE_MODULES[package]):
                found.append(f"{name} imports {imported}")
            if package != "kvoffload" or here in ("", "testing") or room(imported) == here:
                continue
            if imported == "kvoffload" or layer_of(room(imported)) > layer_of(here):
                found.append(f"{name} imports {imported}, which is above it")
            elif room(imported) == "testing" and layer_of(here) < len(LAYERS) - 1:
                found.append(f"{name} imports {imported}, which is for tests")
    return found


def test_modules_import_only_from_their_own_or_lower_layers() -> None:
    sources = modules()
    assert len(sources) > 10
    assert faults(sources) == []
    # Every room has a layer.
    assert all(layer_of(room(name)) >= 0 for name in sources if room(name))


def test_rooms_do_not_import_each_other_in_a_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for name, source in modules().items():
        if room(name) in ("", "testing"):
            continue
        targets = {room(each) for each in imported_modules(name, source) if each.startswith("kvoffload.")}
        graph.setdefault(room(name), set()).update(targets - {room(name)})
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")


def test_wrong_imports_are_found_and_right_ones_accepted() -> None:
    wrong = [
        ("kvoffload.cache.table", "import kvoffload.tiering.manager"),
        ("kvoffload.cache.policies.lru", "from kvoffload import tiers"),
        ("kvoffload.abc.types", "def f():\n    from kvoffload.config import Config"),
        ("kvoffload.abc.types", "import kvoffload"),
        ("kvoffload.connector.scheduler", "if True:\n    import vllm.config"),
        ("kvoffload.tiering.bridge", "from sglang.srt.mem_cache import hicache_storage"),
        ("kvoffload.vllm.connector", "import sglang"),
        ("kvoffload.transfer.cuda.driver", "import torch.cuda"),
        ("tests.sim.engine", "import torch"),
        ("kvoffload.connector.observer", "from opentelemetry import trace"),
        ("kvoffload.cache.manager", "from kvoffload.testing.conformance import keys"),
        ("kvoffload.lab.replay", 'def f():\n    run = importlib.import_module("kvoffload.vllm.replay").VLLMRun'),
    ]
    right = [
        ("kvoffload", "from kvoffload.vllm import plugin"),
        ("kvoffload.cache.keys", "from kvoffload.abc import OffloadKey"),
        ("kvoffload.cache.manager", "from kvoffload.cache.table import BlockTable\nimport numpy"),
        ("kvoffload.vllm.connector", "import torch\nfrom vllm.config import VllmConfig"),
        ("kvoffload.lab.replay", 'import_module("numpy")\nimport_module(name)'),
        ("kvoffload.testing.conformance", "from kvoffload.connector.scheduler import OffloadingConnectorScheduler"),
    ]
    for name, source in wrong:
        assert faults({name: source}) != [], (name, source)
    for name, source in right:
        assert faults({name: source}) == [], (name, source)


def test_no_table_is_trimmed_by_deleting_the_first_key_of_a_dict() -> None:
    """In a plain dict that walks all entries that were deleted before: OrderedDict.popitem does not."""
    assert [name for name, source in modules().items() if re.search(r"^\s*del .*\[next\(iter\(", source, re.M)] == []


def repeated_classes(sources: dict[str, str]) -> list[str]:
    """Returns the names of classes that stand more than once, without ``native``, whose reference has the names of what
    is compiled."""
    names = Counter(
        node.name
        for name, source in sources.items()
        if room(name) != "native"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    )
    return [name for name, count in names.items() if count > 1]


def test_no_thread_keeps_a_process_from_ending() -> None:
    threads, others = 0, list[str]()
    for name, source in modules().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread":
                threads += 1
                if "daemon=True" not in map(ast.unparse, node.keywords):
                    others.append(f"{name}:{node.lineno}")
    assert threads > 10
    assert others == []


def test_a_class_name_stands_once_in_the_package() -> None:
    assert repeated_classes(modules()) == []
    planted = modules() | {"kvoffload.cache.planted": "class WritePlan: ..."}
    assert repeated_classes(planted) == ["WritePlan"]


def loaded_by(statement: str) -> set[str]:
    """Returns the top-level modules that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_library_loads_no_optional_package() -> None:
    optional = {"torch", "triton", "vllm", "sglang", "pytest", "hypothesis", "click", "rich", "matplotlib", "jinja2"}
    library = "cache.admission connector.scheduler connector.worker transfer.cuda.transfer transfer.cuda.driver testing"
    modules = ", ".join(f"kvoffload.{module}" for module in library.split())
    assert loaded_by(f"import kvoffload, {modules}") & (optional | {"opentelemetry"}) == set()
    assert "hypothesis" in loaded_by("import hypothesis")
