"""Checks from source alone that a version of vLLM has what the adapter uses: ``python tools/interface.py 0.33.0``.

Parses the code of the adapter and of vLLM with ``ast``, and imports and runs neither. What is used is derived from the
adapter: what it imports, overrides and calls, and the attributes that it reads of objects whose class its annotations
name. The tables below hold what cannot be derived. ``SINCE`` in ``kvoffload/vllm/versions.py`` lists the names that
some versions do not have.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "src" / "kvoffload" / "vllm"
DEMO_ENGINE = ROOT / "demo" / "engine.py"
"""The only module outside the adapter that imports vLLM."""
ENGINES = ("vllm", "sglang")
"""Packages with an adapter: ``tools/interface_sglang.py`` checks SGLang's."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvoffload" / "wheels"
MAX_DEPTH = 20
"""How many imports of imports are followed."""

OWN = {"check_integrity", "close", "connector_scheduler", "connector_worker", "explain", "pool", "switch_off"}
"""Public names that an adapter adds to classes of its engine which it extends."""
SET = {"cache_hit_source", "locality"}
"""Attributes of vLLM's classes that the adapter's constructors set on purpose."""
PROTOCOLS = {"Request": "vllm.v1.request:Request", "KVBlocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks"}
"""Protocols in ``kvoffload/abc/engine.py``, and the classes of vLLM that stand for them."""
UNTYPED = {
    "vllm.v1.request:Request": ("lora_request", "mm_features", "all_token_ids", "block_hashes", "trace_headers"),
    "vllm.lora.request:LoRARequest": ("adapter_id", "name", "load_inplace", "lora_int_id", "lora_name", "lora_path"),
    "vllm.config.lora:LoRAConfig": ("enable_tower_connector_lora",),
    "vllm.lora.worker_manager:WorkerLoRAManager": ("_adapter_manager", "_load_adapter"),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ("fake_free_list_head",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "next_free_block"),
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": ("dst_block_id",),
    "vllm.v1.kv_cache_interface:KVCacheSpec": ("block_size", "page_size_bytes", "prefix_cacheable"),
    "vllm.v1.kv_cache_interface:AttentionSpec": ("max_tp_shards", "unpadded_page_size_bytes"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("non_causal",),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window", "extra_retained_tokens"),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "vllm.v1.kv_cache_interface:MambaSpec": (
        "dtypes",
        "mamba_cache_mode",
        "mamba_type",
        "shapes",
        "state_content_size_bytes",
        "tp_replicated",
    ),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": ("get_attn_backend", "get_kv_cache_spec"),
    "vllm.model_executor.layers.attention:Attention": ("num_kv_heads",),
    "vllm.model_executor.layers.linear:QKVParallelLinear": ("num_kv_heads", "num_kv_head_replicas", "tp_size"),
    "vllm.v1.attention.backend:AttentionBackend": ("get_name", "supported_kv_cache_layouts"),
    "vllm.config.compilation:CompilationConfig": ("static_forward_context",),
    "vllm.config.multimodal:MultiModalConfig": ("mm_processor_cache_gb",),
    "vllm.v1.engine.core:EngineCore": ("_reset_caches",),
    "vllm.v1.worker.worker_base:WorkerBase": ("get_model",),
    "vllm.v1.worker.gpu_worker:Worker": ("get_draft_model",),
    "vllm.lora.model_manager:LoRAModelManager": ("_create_merged_loras_inplace", "list_adapters"),
    "vllm.lora.lora_model:LoRAModel": ("loras",),
    "vllm.lora.lora_weights:LoRALayerWeights": ("lora_a", "lora_b", "scaling"),
}
"""Attributes that the adapter reads of objects whose class its annotations do not name."""
WORDS = {
    "vllm.config.speculative": ("draft_model", "extract_hidden_states"),
    "vllm.config.model": ("pooling",),
    "vllm.config.kv_transfer": ("recompute",),
}
"""Values of settings that the adapter sets or compares with."""
TEXTS = {
    "isa": ("vllm.v1.attention.backends.cpu_attn", "layer.isa = "),
    "lora_manager": ("vllm.lora.model_manager", "self.model.lora_manager = self"),
}
"""Attributes that code outside their class assigns: the module and the text of the assignment."""
FLAGS = ("enable_elastic_ep", "prefill_context_parallel_size", "mm_processor_cache_gb", "speculative_config")
"""Arguments of vLLM that the adapter refuses, besides those in ``test_vllm_refusals.py``."""
FIELD_MAKERS = {"_make"}
"""Functions that return an object of the class in their first argument, with fields given by keyword."""
ARGUMENTS = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler.__init__": (
        "spec",
        "vllm_config",
        "kv_cache_config",
    ),
}
"""Arguments that ``secondary_tier.py`` reads in the frame of the caller."""
CALLED_BY_VLLM = {
    "vllm.v1.kv_offload.tiering.factory:SecondaryTierFactory": ("create_secondary_tier", "get_tier_class"),
    "vllm.v1.kv_offload.factory:OffloadingSpecFactory": ("get_spec_cls",),
    "vllm.v1.kv_offload.cpu.policies.factory:CachePolicyFactory": ("get_cache_policy_cls",),
    "vllm.v1.kv_offload.file_mapper:FileMapper": ("from_offloading_spec",),
    "vllm.v1.kv_offload.base:ReqContext": ("_offload_key_positions",),
}
"""What finds kvoffload's classes, and what they read without importing it."""
KEYS_IN_CONFIGURATION = {
    "vllm.v1.kv_offload.tiering.spec": ("secondary_tiers",),
    "vllm.v1.kv_offload.cpu.spec": ("cpu_bytes_to_use", "eviction_policy", "cache_policy_module_path"),
    "vllm.v1.kv_offload.factory": ("spec_name", "spec_module_path", "TieringOffloadingSpec"),
    "vllm.v1.kv_offload.tiering.factory": ("type", "module_path"),
}
"""Keys of ``kv_connector_extra_config`` that the documentation and ``kvoffload doctor`` name."""
HOOKS = {"KVConnectorBase_V1", "SecondaryTierManager", "CachePolicy", "HiCacheStorage"}
"""Classes of which every public method that the adapter does not override is reported, except those in LEFT_ALONE."""
LEFT_ALONE = {
    "block_size_bytes",
    "bp_detector",
    "config_info",
    "config_info_keys",
    "serve_external_requests",
    "bind_connector_metadata",
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_external_cache_hit_sources",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "has_connector_metadata",
    "has_pending_block_frees",
    "on_new_request",
    "prefer_cross_layer_blocks",
    "register_cross_layers_kv_cache",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "supports_divergent_local_hybrid_hits",
    "supports_sleep_mode",
    "touch",
}
"""Methods of classes in HOOKS that the adapter does not override on purpose. All others are reported as new."""
REVIEWED = ROOT / "tools" / "reviewed.json"
"""The fields of vLLM's classes whose meaning for the adapter was reviewed, by class, and under SPECS the kinds of KV
cache. All others are reported as new: names that the adapter knows can get another meaning by them."""
SPECS = "vllm.v1.kv_cache_interface:KVCacheSpec"


@dataclass(frozen=True)
class Row:
    """One name that the adapter relies on. ``state``: "ok", "not yet" (by SINCE), "new" or "MISSING"."""

    kind: str
    name: str
    where: str
    state: str
    note: str = ""


@functools.cache
def parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a file, the same one whenever that file is looked at again."""
    return ast.parse(text)


class Source:
    """The Python files of vLLM, in a wheel or in a directory."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path) if path.is_file() else None
        self._path = path
        self._modules: dict[str, Module | None] = {}

    def text(self, file: str) -> str | None:
        try:
            data = self._zip.read(file) if self._zip else (self._path / file).read_bytes()
        except (KeyError, OSError):
            return None
        return data.decode()

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = name.replace(".", "/")
            self._modules[name] = None
            for file, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
                text = self.text(file)
                if text is not None:
                    self._modules[name] = Module(self, name, is_package, text)
                    break
        return self._modules[name]

    def find(self, path: str) -> Any:
        """Returns the class or function "module:name", or None."""
        module, _, name = path.partition(":")
        found = self.module(module)
        return found.resolve(name) if found else None


class Module:
    """The names that one module defines or imports."""

    def __init__(self, source: Source, name: str, is_package: bool, text: str) -> None:
        self.source, self.name, self.text = source, name, text
        self._package = name if is_package else name.rpartition(".")[0]
        self.names: dict[str, Any] = {}
        self._bind(parsed(text).body)

    def _bind(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.names[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = (self.absolute(node), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.split(".")[0]] = (alias.asname and alias.name, None)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for inner in ast.walk(target):
                        if isinstance(inner, ast.Name):
                            self.names[inner.id] = node
                self._bind_lazy(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.names[node.target.id] = node
                self._bind_lazy(node.value)
            for part in ("body", "orelse", "finalbody"):
                if isinstance(node, ast.If | ast.Try | ast.With):
                    self._bind(list(getattr(node, part, [])))
            for handler in getattr(node, "handlers", []):
                self._bind(handler.body)

    def _bind_lazy(self, value: ast.expr | None) -> None:
        """Adds names that a package imports on first access: {"LLM": ".entrypoints.llm:LLM"}."""
        if not isinstance(value, ast.Dict):
            return
        for key, path in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(path, ast.Constant) and isinstance(path.value, str):
                match = re.fullmatch(r"(\.?)([\w.]+):(\w+)", path.value)
                if match:
                    self.names.setdefault(
                        str(key.value), (f"{self.name}.{match[2]}" if match[1] else match[2], match[3])
                    )

    def absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self._package.split(".")
        return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))

    def resolve(self, name: str, depth: int = 0) -> Any:
        """Returns a Class, a Function, a Module, or True for another value; None if there is no such name."""
        found = self.names.get(name)
        if isinstance(found, tuple) and depth < MAX_DEPTH:
            module, original = found
            if original is None:
                return self.source.module(module or name) or True
            target = self.source.module(module)
            inner = target.resolve(original, depth + 1) if target else None
            return (
                inner
                or self.source.module(f"{module}.{original}")
                or (None if module.split(".")[0] in ENGINES else True)
            )
        if isinstance(found, ast.ClassDef):
            return Class(self, found)
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return Function(self, found)
        return True if found is not None else self.source.module(f"{self.name}.{name}")

    def type_of(self, annotation: ast.expr | None) -> Any:
        """Returns the type that an annotation names: a Class, a ListOf or a MapOf; None if it is not known."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(annotation, ast.Name):
            found = self.resolve(annotation.id)
            return found if isinstance(found, Class) else None
        if isinstance(annotation, ast.BinOp):
            return self.type_of(annotation.left) or self.type_of(annotation.right)
        if isinstance(annotation, ast.Subscript):
            outer = annotation.value.id if isinstance(annotation.value, ast.Name) else ""
            inner = annotation.slice
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer in ("list", "List", "Sequence", "Iterable", "tuple", "set", "frozenset", "deque"):
                item = self.type_of(items[0])
                return ListOf(item) if item else None
            if outer in ("dict", "Mapping"):
                value = self.type_of(items[-1])
                return MapOf(value) if value else None
            return self.type_of(items[0])
        return None


@dataclass(frozen=True)
class ListOf:
    item: Any


@dataclass(frozen=True)
class MapOf:
    item: Any


@dataclass(frozen=True)
class Words:
    """The strings that a loop variable takes."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    module: Module
    node: Any


@dataclass(frozen=True)
class Class:
    module: Module
    node: Any

    def mro(self, depth: int = 0) -> Iterator[Class]:
        yield self
        for base in self.node.bases:
            found = self.module.resolve(base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, Class) and depth < MAX_DEPTH:
                yield from found.mro(depth + 1)

    def fields(self) -> set[str]:
        """Returns the names of annotated fields, and of attributes that ``__init__`` sets."""
        names: set[str] = set()
        for cls in self.mro():
            for node in cls.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    stored = (
                        n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                    )
                    names |= {n.attr for n in stored if getattr(n.value, "id", "") == "self"}
        return names

    @property
    def is_dataclass(self) -> bool:
        decorators = (getattr(d, "func", d) for d in self.node.decorator_list)
        return any(getattr(d, "id", getattr(d, "attr", "")) == "dataclass" for d in decorators)

    def subclasses(self) -> set[str]:
        """Returns the names of the classes of the same module that extend this one."""
        classes = (Class(self.module, n) for n in self.module.names.values() if isinstance(n, ast.ClassDef))
        return {cls.node.name for cls in classes if any(base.node is self.node for base in list(cls.mro())[1:])}

    def member(self, name: str) -> tuple[Class, Any, Any] | None:
        """Returns the class that defines ``name``, its node, and the type of its value if that is known."""
        for cls in self.mro():
            for node in cls.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return cls, node, cls.module.type_of(node.returns)
                if name == "value" and any(getattr(base, "id", "").endswith("Enum") for base in cls.node.bases):
                    return cls, node, None
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return cls, node, cls.module.type_of(getattr(node, "annotation", None))
            for method in cls.node.body:
                if isinstance(method, ast.FunctionDef):
                    for node in ast.walk(method):
                        found = _sets(node, name)
                        if found:
                            value = getattr(node, "value", None)
                            known = {arg.arg: arg.annotation for arg in [*method.args.args, *method.args.kwonlyargs]}
                            annotation = getattr(node, "annotation", None) or known.get(getattr(value, "id", ""))
                            return cls, node, cls.module.type_of(annotation)
        return None


def _sets(node: ast.AST, name: str) -> bool:
    """Whether ``node`` assigns ``self.name``."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return False
    return any(
        isinstance(t, ast.Attribute) and t.attr == name and isinstance(t.value, ast.Name) and t.value.id == "self"
        for target in targets
        if target is not None
        for t in ast.walk(target)
    )


@dataclass
class Check:
    """Compares the adapter in the directory ``adapter`` with ``source``, which is vLLM ``version``. ``reviewed`` is the
    content of the file REVIEWED."""

    source: Source
    version: str
    adapter: Path = ADAPTER
    reviewed: dict[str, list[str]] = field(default_factory=lambda: reviewed_of("vllm"))
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions = self.adapter / "versions.py"
        self.since: dict[str, str] = constant(ast.parse(versions.read_text()), "SINCE") if versions.exists() else {}

    def add(self, kind: str, name: str, where: str, problem: str | None, key: str | None = None) -> None:
        """Adds a row. ``problem`` is None if there is none. ``key``: the name in SINCE."""
        since = self.since.get(name.rpartition(".")[2] if key is None else key)
        if since is not None and _numbers(self.version) < _numbers(since):
            state, note = (
                ("not yet", f"since {since}") if problem else ("MISSING", f"SINCE says {since}, but it is here")
            )
        else:
            state, note = ("MISSING", problem) if problem else ("ok", "")
        row = Row(kind, name, where, state, note)
        if not any((r.kind, r.name, r.state) == (kind, name, state) for r in self.rows):
            self.rows.append(row)

    def run(self) -> list[Row]:
        for path in [*sorted(self.adapter.glob("*.py")), *([DEMO_ENGINE] if self.adapter == ADAPTER else [])]:
            File(self, path).run()
        self.tables()
        self._new_names()
        return self.rows

    def has(self, owner: Any, name: str) -> bool:
        if isinstance(owner, Class):
            return owner.member(name) is not None
        return isinstance(owner, Module) and owner.resolve(name) is not None

    def tables(self) -> None:
        base = self.adapter.parent / "abc" / "engine.py"
        classes = (
            {n.name: n for n in ast.parse(base.read_text()).body if isinstance(n, ast.ClassDef)}
            if base.exists()
            else {}
        )
        for ours, theirs in PROTOCOLS.items():
            for node in classes[ours].body if ours in classes else ():
                name = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None)
                if name:
                    self.expect(theirs, name, "abc/engine.py")
        if self.adapter != ADAPTER:
            return
        for theirs, names in UNTYPED.items():
            for name in names:
                self.expect(theirs, name, "tools/interface.py")
        for path, words in WORDS.items():
            found = self.source.module(path)
            for word in words:
                there = found is not None and f'"{word}"' in found.text
                self.add("value", f"{path}: {word!r}", "tools/interface.py", None if there else "no such value", "")
        for name, (path, text) in TEXTS.items():
            found = self.source.module(path)
            self.add(
                "text", name, "tools/interface.py", None if found and text in found.text else f"not written in {path}"
            )
        tests = ast.parse((ROOT / "tests" / "vllm_engine" / "test_vllm_refusals.py").read_text())
        cases = constant(tests, "FLAGS")
        flags = {flag for case in cases.values() for flag in case}
        for flag in sorted({*FLAGS, *flags}):
            self.expect("vllm.engine.arg_utils:EngineArgs", flag, "test_vllm_refusals.py", "flag")
        self._own_offloading()
        refusals = ast.parse((self.adapter / "refusals.py").read_text())
        for spec in sorted({*constant(refusals, "SERVED"), *constant(refusals, "REFUSED")}):
            there = self.source.find(f"vllm.v1.kv_cache_interface:{spec}")
            self.add("class", spec, "refusals.py", None if there else "no such kind of KV cache")
        module = constant(ast.parse((self.adapter / "companions.py").read_text()), "MULTI_CONNECTOR")
        self.add("module", module, "companions.py", None if self.source.module(module) else "no such module", "")

    def _own_offloading(self) -> None:
        """Checks what vLLM's own connector does with the files of kvoffload behind it, and nothing in them names."""
        where = "tools/interface.py"
        for path, arguments in ARGUMENTS.items():
            found = self._function(path)
            label = path.rpartition(":")[2]
            for name in arguments:
                there = found is not None and name in _parameters(found)
                self.add("argument", f"{label}: {name}", where, None if there else "no such argument", "")
        for path, names in CALLED_BY_VLLM.items():
            for name in names:
                self.expect(path, name, where)
        for path, names in KEYS_IN_CONFIGURATION.items():
            module = self.source.module(path)
            for name in names:
                there = module is not None and f'"{name}"' in module.text
                self.add("key", f"{path}: {name!r}", where, None if there else "not read there", "")

    def _function(self, path: str) -> Any:
        """Returns the node of "module:Class.method", or None."""
        owner, _, name = path.rpartition(".")
        found = self.source.find(owner)
        member = found.member(name) if isinstance(found, Class) else None
        return member[1] if member else None

    def _new_names(self) -> None:
        """Reports fields, arguments and kinds of KV cache that nobody has reviewed."""
        for path, reviewed in self.reviewed.items():
            label = path.rpartition(":")[2]
            if path.endswith(".__init__"):
                method = self._function(path)
                self.add("method", label, REVIEWED.name, None if method else "no such method", "")
                for name in sorted(set(_parameters(method) if method else ()) - set(reviewed)):
                    self.rows.append(Row("argument", f"{label}: {name}", REVIEWED.name, "new", "not reviewed yet"))
                continue
            found = self.source.find(path)
            self.add("class", label, REVIEWED.name, None if found else f"not in {path.partition(':')[0]}")
            if found is not None:
                kind, names = ("class", found.subclasses()) if path == SPECS else ("field", found.fields())
                for name in sorted(names - set(reviewed)):
                    full = name if path == SPECS else f"{label}.{name}"
                    self.rows.append(Row(kind, full, REVIEWED.name, "new", "not reviewed yet"))

    def expect(self, theirs: str, name: str, where: str, kind: str = "attribute") -> None:
        owner = self.source.find(theirs)
        label = f"{theirs.rpartition(':')[2]}.{name}"
        self.add(kind, label, where, None if self.has(owner, name) else "no such attribute")


class File:
    """One file of the adapter."""

    def __init__(self, check: Check, path: Path) -> None:
        self.check, self.path = check, path
        self.tree = ast.parse(path.read_text())
        self.globals: dict[str, Any] = {}
        self.local_classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}

    def where(self, node: ast.AST) -> str:
        return f"{self.path.name}:{getattr(node, 'lineno', 0)}"

    def run(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ENGINES and not node.level:
                module = self.check.source.module(str(node.module))
                for alias in node.names:
                    found = module.resolve(alias.name) if module else None
                    problem = None if found else f"not in {node.module}" if module else f"no module {node.module}"
                    self.check.add("import", f"{node.module}.{alias.name}", self.where(node), problem)
                    self.globals[alias.asname or alias.name] = found
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.split(".")[0]
                    if package in ENGINES:
                        self.globals[alias.asname or package] = self.check.source.module(
                            alias.name if alias.asname else package
                        )
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
            elif isinstance(node, ast.FunctionDef):
                self._function(node, None)
            else:
                Walk(self, dict(self.globals)).visit(node)

    def _base(self, node: ast.ClassDef) -> Class | None:
        for base in node.bases:
            found = self.globals.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, Class):
                return found
        return None

    def _class(self, node: ast.ClassDef) -> None:
        base = self._base(node)
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        if base is not None:
            bases = [b for b in (self.globals.get(getattr(n, "id", "")) for n in node.bases) if isinstance(b, Class)]
            self._overrides(node, methods, bases)
        for method in methods:
            self._function(method, base, node)

    def _overrides(self, node: ast.ClassDef, methods: list[ast.FunctionDef], bases: list[Class]) -> None:
        ours = {method.name for method in methods}
        for method in methods:
            found = next((m for b in bases if (m := b.member(method.name))), None)
            label = f"{bases[0].node.name}.{method.name}"
            if found is None:
                if method.name not in OWN and not method.name.startswith("_"):
                    self.check.add("method", label, self.where(method), "no such method to override")
                continue
            theirs = found[1]
            problem = _differs(theirs, method) if isinstance(theirs, ast.FunctionDef) else None
            self.check.add("method", label, self.where(method), problem)
        for stmt in node.body:
            for target in stmt.targets if isinstance(stmt, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    there = any(b.member(target.id) for b in bases)
                    label = f"{bases[0].node.name}.{target.id}"
                    self.check.add("attribute", label, self.where(stmt), None if there else "no such attribute")
        own = {
            n.attr
            for m in methods
            if m.name == "__init__"
            for n in ast.walk(m)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and getattr(n.value, "id", "") == "self"
        }
        for name in sorted(own - SET):
            if any(b.member(name) for b in bases):
                label = f"{bases[0].node.name}.{name}"
                self.check.add("own name", label, self.where(node), "the base class has an attribute of this name", "")
        for base in bases:
            self._left_out(node, base, bases, ours)

    def _left_out(self, node: ast.ClassDef, base: Class, bases: list[Class], ours: set[str]) -> None:
        """Reports methods of ``base`` that the adapter does not define: abstract ones, and hooks that are new."""
        for cls in base.mro():
            for n in cls.node.body:
                if not isinstance(n, ast.FunctionDef) or n.name in ours:
                    continue
                label = f"{base.node.name}.{n.name}"
                decorators = {getattr(d, "id", getattr(d, "attr", "")) for d in n.decorator_list}
                members = [m for b in bases if (m := b.member(n.name))]
                if "abstractmethod" in decorators and all(member[1] is n for member in members):
                    self.check.add("method", label, self.where(node), "abstract, and not implemented", "")
                elif base.node.name in HOOKS and not n.name.startswith("_") and n.name not in LEFT_ALONE:
                    self.check.rows.append(Row("hook", label, self.path.name, "new", "not reviewed yet"))

    def _function(self, node: ast.FunctionDef, base: Class | None, cls: ast.ClassDef | None = None) -> None:
        env = dict(self.globals)
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            env[arg.arg] = self.type_of(arg.annotation)
        walk = Walk(self, env)
        if base is not None and cls is not None:
            walk.base = base
            walk.own = {getattr(n, "name", "") for n in cls.body}
            walk.own |= {n.attr for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
            walk.own |= {getattr(getattr(n, "target", None), "id", "") for n in cls.body}
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance":
                tested, kind = call.args
                walk.narrowed.setdefault(getattr(tested, "id", ""), []).append(env.get(getattr(kind, "id", "")))
        for stmt in node.body:
            walk.visit(stmt)

    def type_of(self, annotation: ast.expr | None) -> Any:
        fake = Module(self.check.source, "", False, "")
        fake.resolve = lambda name, depth=0: self.globals.get(name)  # type: ignore[method-assign]
        return fake.type_of(annotation)


class Walk(ast.NodeVisitor):
    """Infers the types of values in one function. Checks the attributes that it reads and the calls that it makes."""

    def __init__(self, file: File, env: dict[str, Any]) -> None:
        self.file, self.env = file, env
        self.base: Class | None = None
        self.own: set[str] = set()
        self.narrowed: dict[str, list[Any]] = {}
        """By variable, the classes that ``isinstance`` tests it for; None for a class of the adapter."""

    def visit_Assign(self, node: ast.Assign) -> None:
        found = self.infer(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self.bind(one, self.infer(value))
            else:
                self.bind(target, found)
                self.infer(target)

    def visit_For(self, node: ast.For) -> None:
        self.loop(node.target, node.iter)
        for stmt in [*node.body, *node.orelse]:
            self.visit(stmt)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for stmt in node.body:
            self.visit(stmt)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.infer(node)
        else:
            super().generic_visit(node)

    def bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, ast.Tuple):
            for one in target.elts:
                self.bind(one, None)

    def loop(self, target: ast.expr, values: ast.expr) -> None:
        counted = isinstance(values, ast.Call) and getattr(values.func, "id", "") == "enumerate"
        found = self.infer(values.args[0] if counted else values)  # type: ignore[attr-defined]
        if counted and isinstance(target, ast.Tuple):
            self.bind(target.elts[0], None)
            target = target.elts[1]
        self.bind(target, found.item if isinstance(found, ListOf) else found if isinstance(found, Words) else None)

    def infer(self, node: ast.expr) -> Any:
        """Returns the type of an expression's value, or the object that it names, if that is known."""
        if isinstance(node, ast.Name):
            return self.env.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.read(self.infer(node.value), node.attr, node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Tuple | ast.List) and node.elts:
            if all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in node.elts):
                return Words(tuple(e.value for e in node.elts))  # type: ignore[attr-defined]
            return ListOf(next(iter([self.infer(e) for e in node.elts])))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                self.loop(generator.target, generator.iter)
                for condition in generator.ifs:
                    self.infer(condition)
            if isinstance(node, ast.DictComp):
                self.infer(node.key)
                return self.infer(node.value)
            item = self.infer(node.elt)
            return ListOf(item) if item else None
        if isinstance(node, ast.IfExp):
            found = [self.infer(node.test), self.infer(node.body), self.infer(node.orelse)]
            return found[1] or found[2]
        if isinstance(node, ast.BoolOp):
            found = [self.infer(value) for value in node.values]
            return next((one for one in found if isinstance(one, Class | ListOf)), None)
        if isinstance(node, ast.Subscript):
            found = self.infer(node.value)
            self.infer(node.slice)
            return found.item if isinstance(found, ListOf | MapOf) else None
        if isinstance(node, ast.Lambda):
            return self.infer(node.body)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.infer(child)
            elif not isinstance(child, ast.expr_context):
                super().generic_visit(child)
        return None

    def read(self, owner: Any, name: str, node: ast.expr) -> Any:
        if owner is None and self.base is not None and getattr(getattr(node, "value", None), "id", "") == "self":
            if name in self.own:
                return None
            owner = self.base
        if not isinstance(owner, Class | Module):
            return None
        check = self.file.check
        label = owner.node.name if isinstance(owner, Class) else owner.name
        if isinstance(owner, Class) and (name.startswith("__") or self.is_narrowed(owner, name, node)):
            return None
        check.add(
            "attribute",
            f"{label}.{name}",
            self.file.where(node),
            None if check.has(owner, name) else "no such attribute",
        )
        if isinstance(owner, Module):
            return owner.resolve(name)
        found = owner.member(name)
        if found and isinstance(found[1], ast.FunctionDef) and not _is_property(found[1]):
            return Function(found[0].module, found[1])
        return found[2] if found else None

    def is_narrowed(self, owner: Class, name: str, node: ast.expr) -> bool:
        """Whether this function tests the object with ``isinstance`` for another class, which has ``name``."""
        of = getattr(getattr(node, "value", None), "id", "")
        return any(
            owner.member(name) is None and (c is None or self.file.check.has(c, name))
            for c in self.narrowed.get(of, ())
        )

    def call(self, node: ast.Call) -> Any:
        check, called = self.file.check, getattr(node.func, "id", getattr(node.func, "attr", ""))
        arguments = [self.infer(a) for a in node.args if not isinstance(a, ast.Starred)]
        for keyword in node.keywords:
            self.infer(keyword.value)
        if called in ("attribute", "getattr", "hasattr") and len(node.args) > 1:
            named = node.args[1]
            words = (str(named.value),) if isinstance(named, ast.Constant) else getattr(arguments[1], "words", ())
            found = None
            for word in words:
                found = self.read(arguments[0], word, node)
                if found is None and len(arguments) > 2 and not check.has(arguments[0], word):
                    found = arguments[2]
            return found
        function = self.infer(node.func)
        if called == "__init__" and self.base is not None:
            member = self.base.member("__init__")
            function = Function(member[0].module, member[1]) if member else None
        if called in FIELD_MAKERS and arguments and isinstance(arguments[0], Class):
            for keyword in node.keywords:
                self.read(arguments[0], str(keyword.arg), node)
            return arguments[0]
        if isinstance(function, Function):
            label = function.node.name if called != "__init__" else f"{self.base.node.name}.__init__"  # type: ignore[union-attr]
            check.add("call", label, self.file.where(node), _unfit(function.node, node), "")
            return function.module.type_of(function.node.returns)
        if isinstance(function, Class) and function.is_dataclass:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self.read(function, keyword.arg, node)
        if called in ("list", "sorted", "set", "tuple", "reversed") and arguments:
            return arguments[0]
        return function if isinstance(function, Class) else None


def constant(tree: ast.Module, name: str) -> Any:
    """Returns the value of a constant of a module."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(target, "id", "") == name and node.value:
            return ast.literal_eval(node.value)
    raise ValueError(f"no constant {name}")


def reviewed_of(package: str) -> dict[str, list[str]]:
    """Returns the content of the file REVIEWED for one engine."""
    found: dict[str, list[str]] = json.loads(REVIEWED.read_text())
    return {path: names for path, names in found.items() if path.startswith(f"{package}.")}


def _is_property(node: ast.FunctionDef) -> bool:
    return any(getattr(d, "id", getattr(d, "attr", "")).endswith("property") for d in node.decorator_list)


def _parameters(node: ast.FunctionDef) -> list[str]:
    names = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args]]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _differs(theirs: ast.FunctionDef, ours: ast.FunctionDef) -> str | None:
    """Returns why ``ours`` does not accept what vLLM passes to ``theirs``, or None."""
    if _is_property(theirs) != _is_property(ours):
        return "one is a property, the other a method"
    their, our = _parameters(theirs), _parameters(ours)
    if our[: len(their)] != their and not ours.args.vararg:
        return f"parameters ({', '.join(their)}), ours ({', '.join(our)})"
    if len(our) - len(their) > len(ours.args.defaults):
        return f"parameters ({', '.join(their)}), ours requires more ({', '.join(our)})"
    known = {arg.arg for arg in ours.args.kwonlyargs} | set(our)
    missing = [arg.arg for arg in theirs.args.kwonlyargs if arg.arg not in known]
    if (missing or theirs.args.kwarg) and not ours.args.kwarg:
        return f"ours does not take {', '.join(missing) or '**' + theirs.args.kwarg.arg}"  # type: ignore[union-attr]
    return None


def _unfit(function: ast.FunctionDef, call: ast.Call) -> str | None:
    """Returns why ``function`` does not accept the arguments of ``call``, or None."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None
    names, args = _parameters(function), function.args
    given = {str(k.arg) for k in call.keywords}
    if len(call.args) > len(names) and not args.vararg:
        return f"takes ({', '.join(names)})"
    unknown = given - set(names) - {a.arg for a in args.kwonlyargs}
    if unknown and not args.kwarg:
        return f"takes no {', '.join(sorted(unknown))}"
    required = names[: len(names) - len(args.defaults)][len(call.args) :]
    required += [a.arg for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    missing = [name for name in required if name not in given]
    return f"requires {', '.join(missing)} too" if missing else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def wheel(package: str, version: str) -> Path:
    """Returns the wheel of that version. Downloads it once."""
    folder = CACHE / f"{package}-{version}"
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
    return next(folder.glob("*.whl"))


def report(engine: str, package: str, make: Callable[[Source, str], Check]) -> int:
    """Checks the version of ``engine`` that the command line names. Returns the exit status of the program."""
    parser = argparse.ArgumentParser(
        description=f"Checks that a version of {engine} has every name that kvoffload uses."
    )
    parser.add_argument("version", help="such as 0.33.0, or PACKAGE==VERSION")
    parser.add_argument(
        "--source",
        type=Path,
        help=f"a wheel, or a directory that contains {package}; by default the wheel is downloaded",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    name, _, version = args.version.rpartition("==")
    rows = make(Source(args.source or wheel(name or package, version)), version).run()
    bad = [row for row in rows if row.state == "MISSING"]
    if args.json:
        print(json.dumps({"version": version, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        width = max(len(row.name) for row in rows)
        for row in sorted(rows, key=lambda row: (row.state, row.kind, row.name)):
            print(f"{row.state:8} {row.kind:10} {row.name:{width}} {row.where:28} {row.note}".rstrip())
        counts = {state: sum(row.state == state for row in rows) for state in sorted({row.state for row in rows})}
        print(f"{engine} {version}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    return 1 if bad else 0


def main() -> int:
    return report("vLLM", "vllm", Check)


if __name__ == "__main__":
    sys.exit(main())
