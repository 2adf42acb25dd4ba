"""The LoRA adapters of a running vLLM worker: digests of the bytes that it computes with, whatever their names.

vLLM's block hashes name an adapter, in later versions with its path. The files there can be replaced, and vLLM reads
them again whenever it has dropped the adapter from host memory.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from kvoffload.connector.adapters import DROPPED, UNREADABLE, Adapter, AdapterNeed, AdapterOf
from kvoffload.digests import content_name, is_settled
from kvoffload.vllm.engine_worker import calling_worker
from kvoffload.vllm.weights import hash_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

MAX_READ = 4096
"""Adapters whose files were read and whose digests are remembered. When there are more, the oldest is forgotten."""
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files of an adapter that vLLM reads."""
NAMES = {"lora_name", "lora_int_id", "load_inplace"}
"""Fields of a LoRARequest that do not change what vLLM reads."""


def adapters_of(vllm_config: VllmConfig) -> AdapterOf | None:
    """Returns what finds the adapter of a request of vLLM, or None if it serves none."""
    config = vllm_config.lora_config
    if config is None:
        return None

    def adapter_of(request: Any) -> Adapter | None:
        lora = request.lora_request
        if lora is None:
            return None
        # vLLM keeps what such an adapter makes of an image under the adapter's name, whatever its bytes.
        has_images = config.enable_tower_connector_lora and bool(request.mm_features)
        return Adapter(lora.lora_int_id, lora, bool(lora.load_inplace), not has_images, str(_settings(lora)))

    return adapter_of


def watch_adapters(vllm_config: VllmConfig, rank: int) -> WorkerAdapters | None:
    """Returns an AdapterWatch for the worker that calls this, number ``rank`` of its engine. Returns None if it serves
    no adapters, and also, with a warning, if they cannot be watched: then no request with one loads or stores."""
    if vllm_config.lora_config is None:
        return None
    try:
        worker: Any = calling_worker()
        return WorkerAdapters(worker.model_runner.lora_manager, rank)
    except Exception as error:
        logger.warning(
            "kvoffload: the adapters of this worker cannot be read: %s. Requests with an adapter are not offloaded",
            error,
        )
        return None


class _Loaded(NamedTuple):
    """An adapter that vLLM has in host memory. vLLM never changes one, but replaces it by another object."""

    model: weakref.ref[Any]
    digest: bytes


class _Files(NamedTuple):
    """What was read of an adapter that vLLM has not loaded."""

    handle: Any
    state: str
    """Identifies the content of its files."""
    digest: bytes


class WorkerAdapters:
    """Implements ``kvoffload.connector.adapters.AdapterWatch`` for vLLM's ``manager`` of adapters.

    The digest of an adapter covers every byte that vLLM has made of its files: both matrices of each layer with their
    scale, on this rank. vLLM loads an adapter in the first step that uses it, which is too late for a lookup. So one
    that is not loaded is read by a thread, as vLLM would read it. That is not done again while its files stay as they
    are. One whose files are not in a directory of this machine is known while it is loaded only: nothing would show
    that they change between this thread's reading and vLLM's.
    """

    def __init__(self, manager: Any, rank: int = 0, max_read: int = MAX_READ) -> None:
        self._manager = manager
        self._rank = rank
        self._max_read = max_read
        self._loaded: dict[int, _Loaded] = {}
        self._files: OrderedDict[int, _Files] = OrderedDict()
        """What was read last of the adapters, by their numbers."""
        self._read: OrderedDict[str, bytes] = OrderedDict()
        """Digests by the state of files. Only the thread uses it."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What reads files, for the thread."""
        self._answers: queue.SimpleQueue[tuple[int, Adapter, _Files | None]] = queue.SimpleQueue()
        self._num_open = 0
        self._thread: threading.Thread | None = None

    def changes(self) -> Mapping[int, bytes]:
        changes: dict[int, bytes] = {}
        present = self._manager._adapter_manager.list_adapters()
        for number in self._loaded.keys() - present.keys():
            del self._loaded[number]
            changes[number] = DROPPED
        for number, model in present.items():
            known = self._loaded.get(number)
            if known is None or known.model() is not model:
                try:
                    digest = digest_of(model, self._rank)
                except Exception:
                    logger.exception(
                        "kvoffload: loaded adapter %d cannot be read. Its requests are not offloaded", number
                    )
                    digest = UNREADABLE
                self._loaded[number] = _Loaded(weakref.ref(model), digest)
                changes[number] = digest
        return changes

    def digest(self, number: int) -> bytes:
        loaded = self._loaded.get(number)
        return DROPPED if loaded is None else loaded.digest

    def ask(self, question: int, adapter: Adapter) -> None:
        self._num_open += 1
        if adapter.is_reread or adapter.number not in self._loaded:
            self._begin(partial(self._answer, question, adapter))
        else:
            self._answers.put((question, adapter, None))

    def answers(self, wait_s: float = 0.0) -> Mapping[int, bytes]:
        found: dict[int, bytes] = {}
        while self._num_open:
            try:
                question, adapter, files = self._answers.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                break
            self._num_open, wait_s = self._num_open - 1, 0.0
            if files is not None:
                self._files[adapter.number] = files
                if len(self._files) > self._max_read:
                    self._files.popitem(last=False)
            # It may have been loaded, or dropped, since the question.
            if not adapter.is_reread and adapter.number in self._loaded:
                found[question] = self._loaded[adapter.number].digest
            else:
                found[question] = UNREADABLE if files is None else files.digest
        return found

    def check(self, need: AdapterNeed) -> Future[bool]:
        result: Future[bool] = Future()
        files = self._files.get(need.adapter)
        if not need.is_reread and need.adapter in self._loaded:
            result.set_result(self._loaded[need.adapter].digest in need.digests)
        elif files is None or files.digest not in need.digests:
            result.set_result(False)
        else:
            self._begin(lambda: result.set_result(state_of(files.handle) == files.state))
        return result

    def _begin(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvoffload-adapters", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            try:
                self._tasks.get()()
            except Exception:
                logger.exception("kvoffload: the files of an adapter cannot be checked; its request is computed")

    def _answer(self, question: int, adapter: Adapter) -> None:
        files = None
        try:
            files = self._read_files(adapter.handle)
        except Exception as error:
            logger.warning(
                "kvoffload: adapter %s cannot be read from %s: %s. Its requests are computed",
                adapter.handle.lora_name,
                adapter.handle.lora_path,
                error,
            )
        self._answers.put((question, adapter, files))

    def _read_files(self, handle: Any) -> _Files | None:
        """Returns what vLLM would load for ``handle`` now; None if that may change unnoticed."""
        began, before = time.time_ns(), state_of(handle)
        if before is None:
            return None
        digest = self._read.pop(before, None)
        if digest is None:
            model = self._manager._load_adapter(handle)
            self._manager._adapter_manager._create_merged_loras_inplace(model)
            digest = digest_of(model, self._rank)
            if state_of(handle) != before:
                raise OSError("its files change")
        if all(state is None or is_settled(state, began) for state in _stats_of(handle) or ()):
            self._read[before] = digest
            if len(self._read) > self._max_read:
                self._read.popitem(last=False)
        return _Files(handle, before, digest)


def state_of(handle: Any) -> str | None:
    """Returns text that identifies the present content of an adapter's files, and how vLLM reads them. Returns None if
    they are not in a directory of this machine."""
    stats = _stats_of(handle)
    if stats is None:
        return None
    return f"{_settings(handle)} {[state and content_name(state) for state in stats]}"


def _settings(handle: Any) -> dict[str, Any]:
    """Returns what, besides the files, determines what vLLM makes of them."""
    return {name: getattr(handle, name) for name in handle.__struct_fields__ if name not in NAMES}


def _stats_of(handle: Any) -> list[os.stat_result | None] | None:
    folder = os.path.expanduser(handle.lora_path)
    if not os.path.isdir(folder) or getattr(handle, "tensorizer_config_dict", None):
        return None
    return [_stat(os.path.join(folder, name)) for name in FILES]


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def digest_of(model: Any, rank: int = 0) -> bytes:
    """Returns the digest of an adapter as vLLM keeps it in host memory: of each layer its matrices, which contain the
    scale, with their names, types and shapes. It differs between ranks also where their values are the same."""
    digest = xxhash.xxh3_128(f"rank {rank}\n".encode())
    for name, layer in sorted(model.loras.items()):
        for which, values in (("a", layer.lora_a), ("b", layer.lora_b)):
            for i, tensor in enumerate(values if isinstance(values, (list, tuple)) else [values]):
                if tensor is None:
                    continue
                described = f"{name}.{which}.{i} {tensor.dtype} {tuple(tensor.shape)} {layer.scaling}\n"
                digest.update(described.encode())
                if tensor.numel():
                    hash_bytes(digest, tensor.detach().cpu().contiguous())
    return digest.digest()
