"""The check of SGLang's interface, against the code that the tests run."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SOURCE = Path(os.environ.get("KVOFFLOAD_SGLANG", Path(sys.prefix, "sglang")))

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason=f"SGLang's code is not in {SOURCE}: make sglang")

STORAGE = "mem_cache/hicache_storage.py"
CONTROLLER = "managers/cache_controller.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        return importlib.import_module("interface_sglang")


def found(tool: Any, state: str, *changes: tuple[str, str, str]) -> list[str]:
    """Returns the names of the rows in ``state`` after ``changes`` of SGLang's files."""

    class Changed(tool.Source):  # type: ignore[misc]
        def text(self, file: str) -> str | None:
            text: str | None = super().text(file)
            for name, old, new in changes:
                if text is not None and file == f"sglang/srt/{name}":
                    assert old in text
                    text = text.replace(old, new)
            return text

    return [row.name for row in tool.SGLangCheck(Changed(SOURCE), "0.5.23").run() if row.state == state]


def test_nothing_is_missing_or_new(tool: Any) -> None:
    assert found(tool, "MISSING") == []
    assert found(tool, "new") == []
    assert len(found(tool, "ok")) > 150


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ((STORAGE, "def batch_get_v1", "def batch_get_v3"), "HiCacheStorage.batch_get_v1"),
        ((STORAGE, "attn_cp_rank: int", "cp_rank: int"), "HiCacheStorageConfig.attn_cp_rank"),
        ((STORAGE, "prefix_keys: Opt", "prefix: Opt"), "HiCacheStorageExtraInfo.prefix_keys"),
        ((STORAGE, "BLOCK_GROUPS = ", "GROUPS = "), "PoolHitPolicy.BLOCK_GROUPS"),
        ((CONTROLLER, '.get("interface_v1", 0)', '.get("interface", 0)'), "interface_v1"),
        (("mem_cache/pool_host/base.py", "self.mem_state", "self.state"), "HostKVCache.mem_state"),
        (
            ("mem_cache/pool_host/mha.py", "def get_page_buffer_meta", "def metas"),
            "MHATokenToKVPoolHost.get_page_buffer_meta",
        ),
        (
            ("mem_cache/unified_radix_cache.py", "mem_pool_host.clear()", "mem_pool_host.reset()"),
            "a flush clears the host pools",
        ),
        (("arg_groups/fields/model.py", "    quantization: A[", "    quantized: A["), "quantization"),
    ],
    ids=lambda change: change[1] if isinstance(change, tuple) else "",
)
def test_what_has_gone_is_reported(tool: Any, change: tuple[str, str, str], name: str) -> None:
    assert name in found(tool, "MISSING", change)


def test_what_nobody_has_reviewed_is_reported(tool: Any) -> None:
    changes = (
        (STORAGE, "    dcp_rank: int = 0\n", "    dcp_rank: int = 0\n    mirror: int = 0\n"),
        (STORAGE, "    def batch_set_v1(", "    def evict_v3(self): ...\n\n    def batch_set_v1("),
        ("arg_groups/fields/model.py", "    quantization: A[", "    rotation: str = ''\n    quantization: A["),
    )
    assert sorted(found(tool, "new", *changes)) == [
        "HiCacheStorage.evict_v3",
        "HiCacheStorageConfig.mirror",
        "Model.rotation",
    ]
