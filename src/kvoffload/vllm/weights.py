"""Detects that the weights of a running vLLM worker are no longer those that its offloaded KV was computed with."""

from __future__ import annotations

import ctypes
import logging
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvoffload.connector.worker import WeightWatch
from kvoffload.vllm import versions
from kvoffload.vllm.engine_worker import calling_worker, models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SAMPLED_WORDS = {"cpu": 1024, "cuda": 16384}
"""Words of 32 bits that are compared per device type, at least one per tensor. A training step with a small learning
rate changes few bfloat16 weights. With 16384 words, a step that changes one weight in a thousand is missed once in
10^14 steps. A CPU needs about as long to read one word as a GPU needs for a thousand."""
PACKED = "cpu_linear"
"""The attribute of a linear layer with the function that has its weights, where vLLM packs them for a CPU. The layer's
parameter is empty then. vLLM makes another function whenever it loads weights."""
WORD_BYTES = 4
HASHED = frozenset({"cpu"})
"""Device types whose memory is hashed. Other devices sum words of their own memory, which takes a CPU much longer."""
DIGEST_CHUNK_BYTES = 8 << 20
"""Bytes that a digest reads at once. The copy of a tensor with gaps takes as much memory. The keys and products of sums
take six times as much device memory."""
DIGEST_SUMS = 1024
"""Number of sums that a digest keeps on the device before it reads them."""

Addresses = npt.NDArray[np.int64]


def watch_weights(vllm_config: VllmConfig) -> WeightWatch | None:
    """Returns a WeightWatch for the worker that calls this. It accepts the weights as they are now.

    Returns None, with a warning that says what the user must do, if the weights cannot be watched.
    """
    try:
        worker = calling_worker()
        offload = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
        if getattr(offload, "offload_group_size", 0):
            raise RuntimeError("prefetch offloading moves weights in every step")
        # Expert load balancing moves experts between slots. This does not change KV.
        skipped = ".experts" if vllm_config.parallel_config.enable_eplb else None
        return ModelWeights(lambda: models_of(worker), skipped, versions.keeps_over_pauses(vllm_config))
    except Exception as error:
        logger.warning(
            "kvoffload: the weights of this worker cannot be watched: %s. After every change of weights in the running "
            "engine call reset_prefix_cache(reset_connector=True); otherwise old KV is loaded with new weights",
            error,
        )
        return None


class ModelWeights(WeightWatch):
    """Compares words at random places of all parameters.

    ``models`` returns the present models. Parameters whose name contains ``skipped`` are left out. Each process chooses
    other places at random. Parameters that were replaced or moved count as changed. Raises RuntimeError if no parameter
    can be read.

    With ``reads_all`` every byte of all parameters and buffers is read whenever weights are accepted, as ``are_same``
    needs. With ``skipped`` or without ``reads_all``, ``are_same`` returns False.
    """

    def __init__(
        self, models: Callable[[], list[torch.nn.Module]], skipped: str | None = None, reads_all: bool = False
    ) -> None:
        self._find_models = models
        self._skipped = skipped
        self._random = np.random.default_rng(secrets.randbits(128))
        self._digests = Digests(secrets.randbits(128)) if reads_all and not skipped else None
        self._digest: bytes | None = None
        self._has_moved = True
        self.accept()

    def accept(self) -> None:
        if self._has_moved or self._pointers != self._read_pointers():
            self._scan()
        self._has_moved = False
        for sample in self._samples:
            sample.accept()
        self._digest = self._read_all()

    def are_same(self) -> bool:
        if self._digest is None or self._is_packed_anew() or self._read_all() != self._digest:
            return False
        if self._pointers != self._read_pointers():
            self._scan()
            for sample in self._samples:
                sample.accept()
        self._has_moved = False
        return True

    def _read_all(self) -> bytes | None:
        """Returns the digest of all parameters and buffers, or None if there is none or some cannot be read."""
        if self._digests is None:
            return None
        try:
            return self._digests.of(_all_tensors(self._find_models()))
        except Exception as error:
            logger.warning(
                "kvoffload: some weights of this worker cannot be read: %s. All offloaded blocks will be dropped after "
                "a pause or sleep of the engine",
                error,
            )
            return None

    def begin(self) -> None:
        # Read only the memory of present parameters: memory that was freed may be unmapped.
        self._has_moved = self._pointers != self._read_pointers()
        if not self._has_moved:
            for sample in self._samples:
                sample.begin()

    def poll(self) -> bool | None:
        if self._has_moved:
            return True
        answers = [sample.poll() for sample in self._samples]
        if any(answers):
            return True
        return None if None in answers else False

    def _read_pointers(self) -> list[int] | None:
        """Returns the addresses of the parameters and of packed weights, or None if a parameter or model is gone."""
        if self._find_models() != self._models:
            return None
        try:
            # The subclasses of vLLM run a Python function at every call.
            with torch._C.DisableTorchFunctionSubclass():
                pointers = list(map(torch.Tensor.data_ptr, map(operator.getitem, self._homes, self._names)))
            return pointers + [id(home.get(PACKED)) for home, _ in self._packed]
        except (KeyError, TypeError, RuntimeError):
            return None

    def _is_packed_anew(self) -> bool:
        """Whether packed weights were replaced since the parameters were found: nothing can read what they hold."""
        if self._find_models() != self._models:
            return bool(self._packed)
        return any(home.get(PACKED) is not packed for home, packed in self._packed)

    def _scan(self) -> None:
        """Finds all parameters and draws the places that are compared."""
        self._models = self._find_models()
        homes = (vars(module) for model in self._models for module in model.modules())
        self._packed = [(home, home[PACKED]) for home in homes if home.get(PACKED) is not None]
        self._homes: list[dict[str, Any]] = []
        self._names: list[str] = []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for home, name, tensor in self._parameters():
            self._homes.append(home)
            self._names.append(name)
            by_device.setdefault(tensor.device, []).append(tensor)
        self._pointers = self._read_pointers()
        if self._pointers is None or not by_device:
            raise RuntimeError(f"no parameter of {[type(model).__name__ for model in self._models]} can be read")
        # vLLM runs its steps in inference mode. Tensors made in that mode could only be written to in that mode.
        with torch.inference_mode(False), torch.no_grad():
            self._samples = [Sample(device, tensors, self._random) for device, tensors in by_device.items()]

    def _parameters(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yields each parameter once: the dictionary that holds it, its key in it, and the tensor."""
        seen: set[int] = set()
        for model in self._models:
            for path, module in model.named_modules():
                for name, tensor in module._parameters.items():
                    if tensor is None or id(tensor) in seen or (self._skipped and self._skipped in f".{path}.{name}"):
                        continue
                    seen.add(id(tensor))
                    if tensor.device.type in SAMPLED_WORDS and tensor.numel() and _pointer(tensor):
                        yield module._parameters, name, tensor


def _all_tensors(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters and buffers with their names, in the order of the modules."""
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield f"{number}.{path}.{name}", tensor


def _pointer(tensor: torch.Tensor) -> int:
    """Returns the address of the first value, or 0 for a tensor without memory."""
    try:
        # For a view of freed memory ``data_ptr`` returns the offset.
        return int(tensor.data_ptr()) if tensor.untyped_storage().nbytes() else 0
    except RuntimeError:
        return 0


class Sample:
    """Words at random places of ``tensors``, which are on one device. One kernel reads all of them."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor], random: np.random.Generator) -> None:
        num_words = SAMPLED_WORDS[device.type]
        total = sum(tensor.numel() for tensor in tensors)
        shares = (max(1, num_words * tensor.numel() // total) for tensor in tensors)
        addresses = np.concatenate([_draw(tensor, n, random) for tensor, n in zip(tensors, shares, strict=True)])
        base = int(addresses.min()) if len(addresses) else 0
        size = int(addresses.max() - base) // WORD_BYTES + 1 if len(addresses) else 0
        self._memory = _memory(device, base, size)
        self._index = torch.from_numpy((addresses - base) // WORD_BYTES).to(device)
        self._words = torch.empty(len(addresses), dtype=torch.int32, device=device)
        self._reference = torch.empty_like(self._words)
        self._is_cuda = device.type == "cuda"
        self._differs = False
        if self._is_cuda:
            self._device = device
            self._flag = torch.zeros(1, dtype=torch.bool).pin_memory()
            self._event = torch.cuda.Event()

    def accept(self) -> None:
        torch.index_select(self._memory, 0, self._index, out=self._reference)

    def begin(self) -> None:
        torch.index_select(self._memory, 0, self._index, out=self._words)
        if self._is_cuda:
            self._flag.copy_((self._words != self._reference).any(), non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._device))
        else:
            self._differs = not torch.equal(self._words, self._reference)

    def poll(self) -> bool | None:
        if not self._is_cuda:
            return self._differs
        return bool(self._flag[0]) if self._event.query() else None


def _draw(tensor: torch.Tensor, n: int, random: np.random.Generator) -> Addresses:
    """Returns the addresses of ``n`` random words within ``tensor``; no address if it contains no whole word."""
    places = random.integers(0, tensor.numel(), n)
    if not tensor.is_contiguous():
        steps = np.array(tensor.stride(), dtype=np.int64)
        places = np.stack(np.unravel_index(places, tensor.shape), axis=1) @ steps
    start, item = tensor.data_ptr(), tensor.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, end = -(-start // WORD_BYTES) * WORD_BYTES, (start + span * item) // WORD_BYTES * WORD_BYTES
    if first >= end:
        return np.empty(0, np.int64)
    words = (start + places * item) // WORD_BYTES * WORD_BYTES
    drawn: Addresses = np.clip(words, first, end - WORD_BYTES).astype(np.int64)
    return drawn


class _CudaMemory:
    """Words of CUDA memory, in the form that torch takes for a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "<i4", "data": (address, False), "version": 3}


def _memory(device: torch.device, address: int, size: int) -> torch.Tensor:
    """Returns the ``size`` words from ``address`` on as one tensor. Only words of known tensors may be read."""
    if not size:
        return torch.empty(0, dtype=torch.int32, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaMemory(address, size), device=device)
    buffer = (ctypes.c_int32 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.int32)


class Digests:
    """Digests of all bytes of tensors, computed by the devices that hold them.

    Host memory is hashed with XXH3-128, as files are (see ``kvoffload.digests``). On other devices words of 32 bits are
    multiplied by odd random numbers of 64 bits, one per place in a chunk, and summed modulo 2^64. This is done twice,
    with different numbers. A change within one word is always detected. Any other change is missed with a probability
    of at most 2^-64, if it does not depend on the numbers. These follow from ``seed``.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
        """Returns the digest of ``tensors`` with their names, types, shapes, strides and devices. Raises RuntimeError
        if one has no memory."""
        digest = xxhash.xxh3_128()
        sums: dict[torch.device, _Sums] = {}
        tensors = list(tensors)
        longest = max((tensor.numel() * tensor.element_size() for _, tensor in tensors), default=0)
        num_words = -(-min(longest, DIGEST_CHUNK_BYTES) // WORD_BYTES)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, tensor in tensors:
                # Values are read in the order of memory, so the strides say which value has which place.
                layout = f"{tuple(tensor.shape)} {tensor.stride()}"
                digest.update(f"{name} {tensor.dtype} {layout} {tensor.device}\n".encode())
                if not tensor.numel():
                    continue
                if not _pointer(tensor):
                    raise RuntimeError(f"{name} has no memory of its own")
                if tensor.device.type in HASHED:
                    hash_bytes(digest, tensor.detach())
                    continue
                if tensor.device not in sums:
                    sums[tensor.device] = _Sums(self._seed, num_words, tensor.device)
                for chunk in chunks(tensor.detach()):
                    sums[tensor.device].add(chunk)
            for device_sums in sums.values():
                digest.update(device_sums.end())
        return digest.digest()


class _Sums:
    """Sums of the words of chunks on one device. A chunk has at most ``num_words`` words."""

    def __init__(self, seed: int, num_words: int, device: torch.device) -> None:
        self._digest = xxhash.xxh3_128()
        draw = np.random.default_rng(seed)
        keys = draw.integers(0, 1 << 64, (2, num_words), dtype=np.uint64) | np.uint64(1)
        self._keys = torch.from_numpy(keys.view(np.int64)).to(device)
        self._products = torch.empty(num_words, dtype=torch.int64, device=device)
        self._sums = torch.zeros((DIGEST_SUMS, 2), dtype=torch.int64, device=device)
        self._count = 0

    def add(self, raw: torch.Tensor) -> None:
        words = _words(raw)
        n = len(words)
        for keys, total in zip(self._keys, self._sums[self._count], strict=True):
            torch.mul(words, keys[:n], out=self._products[:n])
            torch.sum(self._products[:n], 0, out=total)
        self._count += 1
        if self._count == DIGEST_SUMS:
            self._read()

    def _read(self) -> None:
        self._digest.update(self._sums[: self._count].cpu().numpy().tobytes())
        self._count = 0

    def end(self) -> bytes:
        self._read()
        return self._digest.digest()


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Returns bytes as int32, padded with zeros to whole words."""
    if len(raw) % WORD_BYTES or raw.data_ptr() % WORD_BYTES or raw.storage_offset() % WORD_BYTES:
        padded = raw.new_zeros(-(-len(raw) // WORD_BYTES) * WORD_BYTES)
        padded[: len(raw)] = raw
        raw = padded
    return raw.view(torch.int32)


def hash_bytes(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    """Adds the bytes of ``tensor``, which must be in host memory and not be empty, in the order of ``chunks``."""
    for chunk in chunks(tensor):
        digest.update(chunk.numpy())


def chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the bytes of ``tensor``, which must not be empty, as uint8, at most DIGEST_CHUNK_BYTES at once.

    They are in the order of memory if it has no gaps, else in that of the indices.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if dense.is_contiguous():
        yield from dense.reshape(-1).view(torch.uint8).split(DIGEST_CHUNK_BYTES)
    elif tensor.numel() * tensor.element_size() <= DIGEST_CHUNK_BYTES:
        yield from chunks(tensor.contiguous())
    else:
        first = next(d for d in range(tensor.dim()) if tensor.shape[d] > 1)
        for half in tensor.chunk(2, first):
            yield from chunks(half)
