"""The check of vLLM's interface: it reports from source alone what a version lacks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "interface.py"

ADAPTER = {
    "connector.py": """
from typing import TYPE_CHECKING
from vllm.base import Base, Role
from vllm.blocks import hash_blocks
from acme.vllm import versions
if TYPE_CHECKING:
    from vllm import Config

class Ours(Base):
    def __init__(self, config: Config, role: Role) -> None:
        super().__init__(config, role)
        self._pool = None

    def register(self, caches: dict) -> None:
        parallel = self.config.parallel_config
        for group in self.config.groups:
            print(group.spec, parallel.world_size)

    def woken(self) -> None:
        if self.config.wants_everything:
            hash_blocks(self.config, size=4)

def refuse(config: Config) -> None:
    for name in ("context_size", "elastic"):
        if versions.attribute(config.parallel_config, name):
            raise ValueError(name)
""",
    "versions.py": 'SINCE = {"woken": "2.0"}\n',
}
VLLM = {
    "__init__.py": 'MODULE_ATTRS = {"Config": ".config:Config"}\n',
    "config.py": """
class Parallel:
    world_size: int = 1
    context_size: int = 1
    elastic: bool = False

class Group:
    def __init__(self, spec):
        self.spec = spec

class Config:
    parallel_config: Parallel
    groups: list["Group"]

    @property
    def wants_everything(self) -> bool:
        return False
""",
    "blocks.py": "def hash_blocks(config, size, seed=0): ...\n",
    "v1/__init__.py": "",
    "v1/kv_cache_interface.py": """
class KVCacheSpec: ...

class FullSpec(KVCacheSpec): ...
""",
    "base.py": """
from abc import ABC, abstractmethod
from vllm.config import Config

class Role: ...

class Base(ABC):
    def __init__(self, config: Config, role: Role) -> None:
        self.config = config

    @abstractmethod
    def register(self, caches: dict) -> None: ...

    def woken(self) -> None: ...
""",
}

REVIEWED = {
    "vllm.config:Parallel": ["world_size", "context_size", "elastic"],
    "vllm.config:Group": ["spec"],
    "vllm.v1.kv_cache_interface:KVCacheSpec": ["FullSpec"],
}


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("interface", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["interface"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def missing(tool: Any, tmp_path: Path) -> Any:
    """A function that applies changes to the files of VLLM and returns what is then in ``state``: [(name, note)]."""

    def check(*changes: tuple[str, str, str], version: str = "2.0", state: str = "MISSING") -> list[tuple[str, str]]:
        files = dict(VLLM)
        for file, old, new in changes:
            assert old in files[file]
            files[file] = files[file].replace(old, new)
        for folder, content in (("vllm", files), ("adapter", ADAPTER)):
            for name, text in content.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        rows = tool.Check(tool.Source(tmp_path), version, tmp_path / "adapter", REVIEWED).run()
        return [(row.name, row.note) for row in rows if row.state == state]

    return check


def test_nothing_is_missing_from_what_it_was_written_for(missing: Any) -> None:
    assert missing() == []


@pytest.mark.parametrize(
    ("change", "name", "note"),
    [
        (("base.py", "def woken", "def roused"), "Base.woken", "no such method"),
        (("base.py", "caches: dict", "tensors: dict"), "Base.register", "parameters (tensors), ours (caches)"),
        (("base.py", "(self, caches: dict)", "(self, caches: dict, *, copy)"), "Base.register", "does not take copy"),
        (("base.py", "def woken(self)", "@abstractmethod\n    def slept(self)"), "Base.slept", "not implemented"),
        (("base.py", "self.config = config", "self.config = config; self._pool = 1"), "Base._pool", "of this name"),
        (("base.py", "role: Role)", "role: Role, rank: int)"), "Base.__init__", "requires rank too"),
        (("config.py", "elastic: bool", "elastic_ep: bool"), "Parallel.elastic", "no such attribute"),
        (("config.py", "world_size: int", "size: int"), "Parallel.world_size", "no such attribute"),
        (("config.py", "self.spec = spec", "self.kind = spec"), "Group.spec", "no such attribute"),
        (("config.py", "wants_everything", "wants_all"), "Config.wants_everything", "no such attribute"),
        (("config.py", "parallel_config: Parallel", "parallel: Parallel"), "Config.parallel_config", "no such attr"),
        (("blocks.py", "size, ", "block_size, "), "hash_blocks", "takes no size"),
        (("blocks.py", "def hash_blocks", "def hash_all"), "vllm.blocks.hash_blocks", "not in vllm.blocks"),
        (("__init__.py", '"Config"', '"Settings"'), "vllm.Config", "not in vllm"),
    ],
)
def test_what_has_gone_or_changed_is_reported(missing: Any, change: tuple[str, str, str], name: str, note: str) -> None:
    found = missing(change)
    assert any(n == name and note in said for n, said in found), found


def test_what_a_version_does_not_have_yet_is_not_missing(missing: Any) -> None:
    gone = ("base.py", "def woken(self) -> None: ...", "")
    assert missing(gone, version="1.9") == []
    assert [name for name, _ in missing(gone)] == ["Base.woken"]


def test_what_nobody_has_reviewed_is_reported(missing: Any) -> None:
    """A new field or kind of KV cache has a name that nothing uses, and may change what the others mean."""
    assert missing(state="new") == []
    changes = (
        ("config.py", "elastic: bool", "speculates: bool = False\n    elastic: bool"),
        ("config.py", "self.spec = spec", "self.spec = spec; self.window: int = 0"),
        ("v1/kv_cache_interface.py", "class FullSpec", "class RingSpec(KVCacheSpec): ...\nclass FullSpec"),
    )
    new = [name for name, _ in missing(*changes, state="new")]
    assert new == ["Parallel.speculates", "Group.window", "RingSpec"]


def test_a_class_of_reviewed_fields_that_has_gone_is_reported(missing: Any) -> None:
    assert ("Group", "not in vllm.config") in missing(("config.py", "class Group", "class Set"))


def test_a_wrong_table_of_versions_is_reported(missing: Any) -> None:
    assert missing(version="1.9") == [("Base.woken", "SINCE says 2.0, but it is here")]
