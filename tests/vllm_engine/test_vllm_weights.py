"""Weights that change in a running engine: first the check itself with small models, then real engines."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_at_rest, differences, found, with_disk

from kvoffload.connector.adapters import DROPPED, UNREADABLE, Adapter, AdapterNeed
from tests.lazy import lazily
from tests.scale import SCALE

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")
adapters_module, weights = lazily("kvoffload.vllm.adapters"), lazily("kvoffload.vllm.weights")

pytestmark = pytest.mark.vllm


def model() -> torch.nn.Module:
    """Returns tensors of several types, sizes and layouts. One occurs twice, one is smaller than a word."""
    made = torch.nn.Module()
    for i in range(40):
        child = torch.nn.Linear(64, 32 + i, dtype=torch.bfloat16 if i % 2 else torch.float32)
        made.add_module(f"layer{i}", child)
    made.transposed = torch.nn.Parameter(torch.randn(16, 48).t(), requires_grad=False)
    made.every_other = torch.nn.Parameter(torch.randn(64, 8)[::2, ::2], requires_grad=False)
    made.integers = torch.nn.Parameter(torch.arange(999, dtype=torch.uint8)[1:], requires_grad=False)
    made.scalar = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16), requires_grad=False)
    made.empty = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    made.shared = made.layer0.weight
    return made


def changed(watch: Any) -> bool | None:
    watch.begin()
    has_changed: bool | None = watch.poll()
    return has_changed


def refill(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.data.copy_(torch.randint(1, 99, tensor.shape))


CHANGES: dict[str, Any] = {
    "every tensor in place": lambda m: refill(*m.parameters()),
    "one matrix": lambda m: refill(m.layer7.weight),
    "one bias": lambda m: refill(m.layer8.bias),
    "a transposed one": lambda m: refill(m.transposed),
    "one with gaps": lambda m: refill(m.every_other),
    "bytes": lambda m: refill(m.integers),
    "a parameter's data is another's": lambda m: setattr(m.layer3.weight, "data", m.layer3.weight.data.clone()),
    "a parameter is another": lambda m: setattr(m.layer3, "weight", torch.nn.Parameter(m.layer3.weight.clone())),
    "a parameter is gone": lambda m: delattr(m.layer3, "weight"),
    "a small step, in a few weights only": lambda m: small_step(m, 0.04),
}


def small_step(made: torch.nn.Module, share: float) -> None:
    for tensor in made.parameters():
        tensor.data[torch.rand(tensor.shape) < share] += 1


def test_a_parameter_whose_memory_was_freed_is_not_read() -> None:
    made = model()
    # A view that begins after the start of its memory has an address even after that is freed.
    made.freed = torch.nn.Parameter(torch.randn(100)[1:], requires_grad=False)
    made.freed.untyped_storage().resize_(0)
    watch = weights.ModelWeights(lambda: [made])
    assert not changed(watch)
    made.layer7.weight.untyped_storage().resize_(0)
    assert changed(watch)
    watch.accept()
    assert not changed(watch)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_it_is_accepted(change: str) -> None:
    made = model()
    watch = weights.ModelWeights(lambda: [made])
    assert changed(watch) is False
    with torch.inference_mode():
        CHANGES[change](made)
        assert changed(watch) is True
        assert changed(watch) is True
        watch.accept()
        assert changed(watch) is False
    refill(made.layer9.weight)
    assert changed(watch) is True


def test_another_model_is_a_change() -> None:
    models = [model()]
    watch = weights.ModelWeights(lambda: list(models))
    models[0] = model()
    assert changed(watch) is True
    watch.accept()
    assert changed(watch) is False


def pack(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    """Packs ``weight`` as vLLM does for a CPU: the parameter is empty afterwards."""
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    lazily("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


@pytest.mark.parametrize("reads_all", [False, True])
def test_packed_weights_that_were_loaded_again_have_changed(reads_all: bool) -> None:
    """Nothing can read what they hold."""
    made = model()
    pack(made.layer3, torch.randn(64, 64))
    watch = weights.ModelWeights(lambda: [made], reads_all=reads_all)
    assert changed(watch) is False
    assert watch.are_same() is reads_all
    pack(made.layer3, torch.randn(64, 64))
    assert made.layer3.weight.numel() == 0, "this CPU packs no weights: the test shows nothing"
    assert changed(watch) is True
    assert watch.are_same() is False
    watch.accept()
    assert changed(watch) is False
    assert watch.are_same() is reads_all


def test_every_tensor_of_a_large_model_is_looked_at() -> None:
    made = torch.nn.Module()
    for i in range(2 * weights.SAMPLED_WORDS["cpu"]):
        made.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(2 + i % 5), requires_grad=False))
    watch = weights.ModelWeights(lambda: [made])
    for i in range(0, 2 * weights.SAMPLED_WORDS["cpu"], 97):
        getattr(made, f"p{i}").data += 1
        assert changed(watch) is True
        watch.accept()


def test_experts_that_are_balanced_are_left_out() -> None:
    made = model()
    made.experts = torch.nn.Linear(8, 8)
    watch = weights.ModelWeights(lambda: [made], skipped=".experts")
    refill(made.experts.weight)
    assert changed(watch) is False
    refill(made.layer1.weight)
    assert changed(watch) is True


# All bytes, as after a sleep.


def flip(tensor: torch.Tensor, *bits: int) -> None:
    """Flips bits of ``tensor``, counted in the order of its indices."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    words = tensor.data.view(unsigned[tensor.element_size()]).numpy()
    for each in bits:
        place, bit = divmod(each, 8 * tensor.element_size())
        words[np.unravel_index(place, tensor.shape)] ^= words.dtype.type(1 << bit)


def swap_rows(tensor: torch.Tensor) -> None:
    tensor.data[[0, 1]] = tensor.data[[1, 0]]


UNSEEN_BY_SAMPLES: dict[str, Any] = {
    "two rows change places": lambda m: swap_rows(m.layer2.weight),
    "a matrix is negated": lambda m: m.layer2.weight.data.neg_(),
    "two signs change": lambda m: flip(m.layer2.weight, 31, 63),
    "columns are permuted": lambda m: m.layer2.weight.data.copy_(m.layer2.weight.data.flip(1)),
    "two matrices change places": lambda m: swap_rows(m.stacked),
    "a transposed one is turned about": lambda m: m.transposed.data.copy_(m.transposed.data.flip(0)),
    "one element of one with gaps": lambda m: m.every_other.data[5, 2].add_(1),
    "the last byte of an odd number": lambda m: m.integers.data[-1].bitwise_xor_(1),
    "a square one is turned about, in its memory": lambda m: setattr(m.square, "data", m.square.data.t()),
    "a scalar": lambda m: m.scalar.data.add_(1),
    "a buffer": lambda m: m.scale.add_(1),
    "a type": lambda m: setattr(m.layer2, "bias", torch.nn.Parameter(m.layer2.bias.data.view(torch.int32), False)),
    "a shape": lambda m: setattr(m, "stacked", torch.nn.Parameter(m.stacked.data.view(4, 4, 8))),
    "a name": lambda m: setattr(m, "other", m._parameters.pop("stacked")),
}


@pytest.fixture(params=["hashed", "summed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How bytes are read: as in host memory, and as on a GPU."""
    if request.param == "summed":
        monkeypatch.setattr("kvoffload.vllm.weights.HASHED", frozenset())


def readable(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, Any]:
    monkeypatch.setattr("kvoffload.vllm.weights.DIGEST_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("kvoffload.vllm.weights.DIGEST_SUMS", 8)
    made = model()
    made.stacked = torch.nn.Parameter(torch.randn(2, 8, 8))
    made.square = torch.nn.Parameter(torch.randn(8, 8))
    made.register_buffer("scale", torch.ones(3), persistent=False)
    return made, weights.ModelWeights(lambda: [made], reads_all=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk_bytes", [256, 8 << 20])
@pytest.mark.parametrize("change", UNSEEN_BY_SAMPLES)
def test_any_change_is_seen_if_all_bytes_are_read(
    change: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, watch = readable(chunk_bytes, monkeypatch)
    assert watch.are_same()
    with torch.inference_mode():
        UNSEEN_BY_SAMPLES[change](made)
        assert not watch.are_same()
        watch.accept()
        assert watch.are_same()


@pytest.mark.usefixtures("way")
def test_every_single_bit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.vllm.weights.DIGEST_CHUNK_BYTES", 64)
    digests = weights.Digests(7)
    tensors = [
        torch.randn(5, 7),
        torch.randn(4, 6).t(),
        torch.randn(6, 6).bfloat16()[::2, ::3],
        torch.randn(9, 4, dtype=torch.float64)[1:, ::3],
        torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(9).to(torch.float8_e4m3fn)[1:],
        torch.arange(23, dtype=torch.uint8)[2:],
        torch.ones(()),
    ]
    for tensor in tensors:
        num_bits = 8 * tensor.numel() * tensor.element_size()
        seen = {right := digests.of([("", tensor)])}
        for bit in range(num_bits):
            flip(tensor, bit)
            seen.add(digests.of([("", tensor)]))
            flip(tensor, bit)
        assert len(seen) == 1 + num_bits
        assert digests.of([("", tensor)]) == right


def test_every_chunk_of_a_large_tensor_is_read() -> None:
    digests = weights.Digests(7)
    raw = torch.zeros(2 * weights.DIGEST_CHUNK_BYTES + 5, dtype=torch.uint8)
    for tensor in (raw, raw[1:], raw[::2], raw[:-1].view(4, -1).t(), raw[4:-1].view(torch.bfloat16)):
        last = tensor.numel() * tensor.element_size() - 1
        places = [0, 1, last // 2, min(last, weights.DIGEST_CHUNK_BYTES), last]
        seen = {digests.of([("", tensor)])}
        for place in places:
            flip(tensor, 8 * place)
            seen.add(digests.of([("", tensor)]))
            flip(tensor, 8 * place)
        assert len(seen) == 1 + len(set(places))


def test_weights_that_moved_are_the_same_and_are_watched_where_they_are() -> None:
    made = model()
    watch = weights.ModelWeights(lambda: [made], reads_all=True)
    made.layer3.weight.data = made.layer3.weight.data.clone()
    assert watch.are_same()
    assert changed(watch) is False
    refill(made.layer3.weight)
    assert changed(watch) is True


@pytest.mark.parametrize("case", ["not asked for", "experts that are balanced", "no memory", "sparse"])
def test_weights_that_are_not_all_read_are_never_the_same(case: str, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    if case == "no memory":
        made.far = torch.nn.Parameter(torch.empty(9, device="meta"))
    if case == "sparse":
        made.register_buffer("few", torch.eye(3).to_sparse())
    skipped = ".experts" if case == "experts that are balanced" else None
    watch = weights.ModelWeights(lambda: [made], skipped, reads_all=case != "not asked for")
    assert not watch.are_same()
    assert ("some weights of this worker cannot be read" in caplog.text) is (case in ("no memory", "sparse"))


def test_memory_that_a_digest_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes tensors with gaps, which are copied piece by piece."""
    monkeypatch.setattr("kvoffload.vllm.weights.DIGEST_CHUNK_BYTES", 1 << 10)
    for tensor in (
        torch.randn(300, 70)[::2, ::3],
        torch.randn(1, 4000, 3).transpose(1, 2)[..., ::2],
        torch.randn(5000),
    ):
        chunks = list(weights.chunks(tensor))
        assert max(chunk.nbytes for chunk in chunks) <= 1 << 10
        assert sum(chunk.nbytes for chunk in chunks) == tensor.nbytes


def test_without_a_worker_one_warning_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    assert weights.watch_weights(SimpleNamespace(parallel_config=None)) is None
    (record,) = caplog.records
    assert "cannot be watched" in record.getMessage()
    assert "reset_prefix_cache(reset_connector=True)" in record.getMessage()


def test_cuda_tensors_would_be_read_by_their_addresses() -> None:
    """The test needs no GPU: it checks what is passed to torch."""
    given = weights._CudaMemory(0x1000, 7).__cuda_array_interface__
    assert given == {"shape": (7,), "typestr": "<i4", "data": (0x1000, False), "version": 3}


# Adapters in a worker.


class Lora:
    """An adapter as in vLLM: its layers have one or more matrices, some of which may be missing."""

    def __init__(self, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        a, b = torch.randn(8, 32, generator=make), torch.randn(32, 8, generator=make)
        self.loras = {
            "plain": SimpleNamespace(lora_a=a, lora_b=b.bfloat16(), scaling=1),
            "packed": SimpleNamespace(lora_a=[a + 1, None], lora_b=[b + 1, None], scaling=[1, 1]),
        }


class Manager:
    """As much of vLLM's manager of adapters as is used. The file of an adapter holds its seed."""

    def __init__(self) -> None:
        self.loaded: dict[int, Lora] = {}
        self.num_read = 0
        self._adapter_manager = self

    def list_adapters(self) -> dict[int, Lora]:
        return dict(self.loaded)

    def _load_adapter(self, handle: Any) -> Lora:
        self.num_read += 1
        return Lora(int(Path(handle.lora_path, "adapter_model.bin").read_text()))

    def _create_merged_loras_inplace(self, model: Lora) -> None:
        pass


def lora_file(folder: Path, seed: int, number: int = 1, load_inplace: bool = False) -> Adapter:
    folder.mkdir(exist_ok=True)
    # A path of the same length, so that only the times and the inode of the file differ.
    folder.joinpath("new").write_text(str(seed))
    folder.joinpath("new").replace(folder / "adapter_model.bin")
    return Adapter(
        number,
        lazily("vllm.lora.request").LoRARequest("a", number, str(folder), load_inplace=load_inplace),
        load_inplace,
    )


def ask(watch: Any, adapter: Adapter) -> bytes:
    watch.ask(5, adapter)
    answers: Mapping[int, bytes] = {}
    while not answers:
        answers = watch.answers(wait_s=9.0)
    return answers[5]


def need(*seeds: int) -> AdapterNeed:
    return AdapterNeed(1, frozenset(adapters_module.digest_of(Lora(seed)) for seed in seeds))


def fits(watch: Any, wanted: AdapterNeed) -> bool:
    return bool(watch.check(wanted).result(timeout=DEADLINE_S))


def test_every_value_of_an_adapter_counts() -> None:
    adapter, seen = Lora(1), {right := adapters_module.digest_of(Lora(1)), adapters_module.digest_of(Lora(2))}
    for layer in adapter.loras.values():
        for tensor in (layer.lora_a, layer.lora_b):
            matrix = tensor[0] if isinstance(tensor, list) else tensor
            for bit in (0, 8 * matrix.numel() * matrix.element_size() - 1):
                flip(matrix, bit)
                seen.add(adapters_module.digest_of(adapter))
                flip(matrix, bit)
    adapter.loras["plain"].scaling = 2
    seen.add(adapters_module.digest_of(adapter))
    adapter.loras["plain"].scaling = 1
    adapter.loras["other"] = adapter.loras.pop("plain")
    seen.add(adapters_module.digest_of(adapter))
    assert len(seen) == 2 + 8 + 2
    assert adapters_module.digest_of(Lora(1)) == right != adapters_module.digest_of(Lora(1), 1), "another rank"


def test_adapters_are_those_that_are_loaded() -> None:
    manager = Manager()
    watch = adapters_module.WorkerAdapters(manager)
    manager.loaded = {1: Lora(1), 2: Lora(2)}
    assert watch.changes() == {1: adapters_module.digest_of(Lora(1)), 2: adapters_module.digest_of(Lora(2))}
    assert watch.changes() == {}
    manager.loaded = {1: Lora(3)}
    assert watch.changes() == {1: adapters_module.digest_of(Lora(3)), 2: DROPPED}
    assert fits(watch, need(3))
    assert fits(watch, need(1, 3))
    assert not fits(watch, need(1))


def test_an_adapter_that_is_not_loaded_is_read_while_its_files_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()
    watch = adapters_module.WorkerAdapters(manager)
    adapter = lora_file(tmp_path / "a", 1)
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(1))
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(1))
    assert manager.num_read == 2, "a file that was just written may be written again at the same time"
    monkeypatch.setattr("kvoffload.vllm.adapters.is_settled", lambda state, now: True)
    for _ in range(3):
        assert ask(watch, adapter) == adapters_module.digest_of(Lora(1))
    assert manager.num_read == 3
    assert fits(watch, need(1))
    lora_file(tmp_path / "a", 2)
    assert not fits(watch, need(1)), "the file is another"
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(2))
    assert fits(watch, need(2))
    manager.loaded = {1: Lora(3)}
    watch.changes()
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(3)), "vLLM does not read it again"
    assert ask(watch, lora_file(tmp_path / "a", 4, load_inplace=True)) == adapters_module.digest_of(Lora(4)), (
        "vLLM reads it again"
    )
    assert fits(watch, need(4)._replace(is_reread=True))
    assert not fits(watch, need(4)), "a request that does not read it again uses what is loaded"
    assert fits(watch, need(3))


def test_an_adapter_that_cannot_be_read_has_no_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = adapters_module.WorkerAdapters(Manager())
    adapter = lora_file(tmp_path / "a", 1)
    tmp_path.joinpath("a", "adapter_model.bin").unlink()
    assert ask(watch, adapter) == UNREADABLE
    assert not fits(watch, need(1))
    assert "adapter a cannot be read" in caplog.text
    lora_file(tmp_path / "a", 1)
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(1)), "the thread goes on"


def test_an_answer_is_what_was_loaded_since_the_question(tmp_path: Path) -> None:
    manager = Manager()
    watch = adapters_module.WorkerAdapters(manager)
    adapter = lora_file(tmp_path / "a", 1)
    watch.ask(5, adapter)
    manager.loaded = {1: Lora(2)}
    watch.changes()
    assert watch.digest(1) == adapters_module.digest_of(Lora(2))
    assert watch.answers(wait_s=DEADLINE_S) == {5: adapters_module.digest_of(Lora(2))}


def test_files_are_read_by_the_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = adapters_module.WorkerAdapters(Manager())
    threads = []
    stats_of = adapters_module._stats_of

    def seen(handle: Any) -> Any:
        threads.append(threading.current_thread())
        return stats_of(handle)

    monkeypatch.setattr("kvoffload.vllm.adapters._stats_of", seen)
    ask(watch, lora_file(tmp_path / "a", 1))
    assert fits(watch, need(1))
    assert threads
    assert threading.current_thread() not in threads


def test_an_adapter_outside_of_directories_is_known_while_it_is_loaded(tmp_path: Path) -> None:
    """Nothing would show that its files have changed between two reads."""
    manager = Manager()
    watch = adapters_module.WorkerAdapters(manager)
    adapter = Adapter(1, lazily("vllm.lora.request").LoRARequest("a", 1, str(tmp_path / "none")))
    assert ask(watch, adapter) == UNREADABLE
    assert manager.num_read == 0
    manager.loaded = {1: Lora(2)}
    watch.changes()
    assert ask(watch, adapter) == adapters_module.digest_of(Lora(2))


def test_a_loaded_adapter_that_cannot_be_read_concerns_no_other(caplog: pytest.LogCaptureFixture) -> None:
    manager = Manager()
    watch = adapters_module.WorkerAdapters(manager)
    manager.loaded = {1: Lora(1), 2: Lora(2)}
    manager.loaded[1].loras["plain"].lora_b = object()
    assert watch.changes() == {1: UNREADABLE, 2: adapters_module.digest_of(Lora(2))}
    assert watch.changes() == {}
    assert ask(watch, Adapter(1, None)) == UNREADABLE
    assert caplog.text.count("cannot be read") == 1


def test_adapters_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.vllm.adapters.is_settled", lambda state, now: True)
    watch = adapters_module.WorkerAdapters(Manager(), max_read=3)
    for number in range(1, 9):
        ask(watch, lora_file(tmp_path / str(number), number, number))
    assert len(watch._files) == len(watch._read) == 3


# Real engines.


@pytest.mark.soak
def test_weights_that_were_replaced_in_the_files_find_nothing(run: Runner, tmp_path: Path, expected: list[Any]) -> None:
    """They differ only in the last rows of the embedding. Every prompt has some of the changed tokens."""
    for config in ({}, {"model": str(tmp_path / "model"), "new_rows": 128}):
        result = run.play({"rounds": {"rounds": 1}, "computed": {}}, connector=with_disk(tmp_path / "disk"), **config)
        assert found(result["rounds"]) == 0
        (right,) = result["computed"]["outputs"]
        assert differences(result["rounds"]["outputs"][0], right) == []
        assert len(differences(right, expected)) == (len(expected) if config else 0)


PLAYS = [
    ("first", "a", 1, 1, "load"),
    ("first, again", "a", 1, 0, ""),
    ("new number", "a", 2, 2, "load"),
    ("new number, again", "a", 2, 0, ""),
    ("back", "a", 3, 1, "load"),
    # Two adapters push the third out, which is read again.
    ("other name", "b", 4, 1, ""),
    ("third name", "c", 5, 3, ""),
    ("read again", "a", 3, 2, ""),
    ("in place", "a", 3, 4, "reload"),
    ("in place, back", "a", 3, 1, "reload"),
    ("in place, once", "a", 3, 2, "reload once"),
]
"""Rounds of the scenario ``adapters``."""
NEW = {"first", "new number", "other name", "third name", "in place"}
"""The first rounds with these bytes under this name."""
NUM_PROMPTS = 40 if SCALE > 1 else 2
LORA: dict[str, Any] = {
    "prompts": NUM_PROMPTS,
    # One slot on the device and two places in host memory.
    "engine": {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8},
}


def wrong(run: Run) -> dict[str, int]:
    """Returns how many answers were wrong in each round of the scenario ``adapters``."""
    answers = run["answers"]
    return {
        name: len(differences(answer, answers[f"right {name}"]))
        for name, answer in answers.items()
        if not name.startswith("right ")
    }


@pytest.fixture(scope="module", params=["disk", pytest.param("shared_dir", marks=pytest.mark.soak)])
def adapter_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options with a store that the processes of a test have in common."""
    tier = {"kind": request.param, "dir": str(tmp_path_factory.mktemp("adapters") / "store"), "bytes": "256MiB"}
    patient = {"load_deadline_ms": 1000 * DEADLINE_S, "lookup_deadline_ms": 10_000, "load_only_if_faster": False}
    return {"host_bytes": "256MiB", "tiers": [tier], **patient}


@pytest.fixture(scope="module")
def adapters(run: Runner, adapter_store: dict[str, Any]) -> Run:
    return run("adapters", connector=adapter_store, plays=PLAYS, **LORA)


def test_kv_belongs_to_the_bytes_of_an_adapter(adapters: Run) -> None:
    """Row "LoRA": adapters replaced, pushed out and read again, loaded in place."""
    assert "; inclusive contents, because the engine serves adapters" in adapters.log
    answers, counts = adapters["answers"], adapters["counts"]
    assert set(wrong(adapters).values()) == {0}, wrong(adapters)
    for name, *_, how in PLAYS:
        assert counts[name]["weight_changes"] == 0
        # Where requests do not say that the adapter was loaded again, loads are promised before anybody knows.
        if how != "reload once":
            assert (counts[name]["host_hit_tokens"] > 0) is (name not in NEW), name
            assert counts[name]["load_failures"] == 0, name
    for one, other in itertools.combinations(("first", "new number", "third name", "in place"), 2):
        assert len(differences(answers[one], answers[other])) == NUM_PROMPTS
    assert differences(answers["first"], answers["in place, back"]) == []
    assert_at_rest(adapters.result)


@pytest.mark.soak
def test_a_restart_finds_the_blocks_of_the_same_bytes(
    adapters: Run, run: Runner, adapter_store: dict[str, Any]
) -> None:
    plays = [("second", "a", 1, 2, ""), ("never used", "a", 2, 9, "load"), ("first", "a", 3, 1, "load")]
    result = run("adapters", connector=adapter_store, plays=plays, **LORA)
    assert set(wrong(result).values()) == {0}, wrong(result)
    (name,) = (tier["kind"] for tier in adapter_store["tiers"])
    hits = {play: count.get(f"tier_hit_tokens:{name}", 0) > 0 for play, count in result["counts"].items()}
    assert name != "disk" or (hits["second"], hits["never used"], hits["first"]) == (True, False, True)
    assert differences(result["answers"]["first"], adapters["answers"]["first"]) == []


@pytest.mark.soak
def test_without_digests_answers_are_those_of_another_adapter(run: Runner) -> None:
    """The control."""
    plays = [play for play in PLAYS if play[0] in ("first", "new number", "in place")]
    patient = POOL | {"load_deadline_ms": 1000 * DEADLINE_S}
    result = run("adapters", connector=patient, plays=plays, patches=["blind to adapters"], **LORA)
    assert wrong(result) == {"first": 0, "new number": NUM_PROMPTS, "in place": NUM_PROMPTS}
