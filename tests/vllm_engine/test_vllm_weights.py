"""Weights that change in a running engine: first the check itself with small models, then real engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
import torch
from driver import SHORT
from test_vllm_disk import found, with_disk
from vllm_harness import POOL, Run, Runner, assert_at_rest, differences

from kvoffload.vllm import weights
from kvoffload.vllm.weights import ModelWeights, watch_weights

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


def changed(watch: ModelWeights) -> bool | None:
    watch.begin()
    return watch.poll()


def refill(tensor: torch.Tensor) -> None:
    tensor.data.copy_(torch.randint(1, 99, tensor.shape))


CHANGES: dict[str, Any] = {
    "every tensor in place": lambda m: [refill(tensor) for tensor in m.parameters()],
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
    watch = ModelWeights(lambda: [made])
    assert not changed(watch)
    made.layer7.weight.untyped_storage().resize_(0)
    assert changed(watch)
    watch.accept()
    assert not changed(watch)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_it_is_accepted(change: str) -> None:
    made = model()
    watch = ModelWeights(lambda: [made])
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
    watch = ModelWeights(lambda: list(models))
    models[0] = model()
    assert changed(watch) is True
    watch.accept()
    assert changed(watch) is False


def test_every_tensor_of_a_large_model_is_looked_at() -> None:
    made = torch.nn.Module()
    for i in range(2 * weights.SAMPLED_WORDS["cpu"]):
        made.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(2 + i % 5), requires_grad=False))
    watch = ModelWeights(lambda: [made])
    for i in range(0, 2 * weights.SAMPLED_WORDS["cpu"], 97):
        getattr(made, f"p{i}").data += 1
        assert changed(watch) is True
        watch.accept()


def test_experts_that_are_balanced_are_left_out() -> None:
    made = model()
    made.experts = torch.nn.Linear(8, 8)
    watch = ModelWeights(lambda: [made], skipped=".experts")
    refill(made.experts.weight)
    assert changed(watch) is False
    refill(made.layer1.weight)
    assert changed(watch) is True


class Adapter:
    """An adapter as in vLLM: its layers have one or more matrices, some of which may be missing."""

    def __init__(self, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        a, b = torch.randn(8, 32, generator=make), torch.randn(32, 8, generator=make)
        self.loras = {
            "plain": SimpleNamespace(lora_a=a, lora_b=b.bfloat16()),
            "packed": SimpleNamespace(lora_a=[a + 1, None], lora_b=[b + 1, None]),
        }


def test_an_adapter_has_changed_when_other_values_have_its_id() -> None:
    made = model()
    registered: dict[int, Adapter] = {}
    made.lora_manager = SimpleNamespace(list_adapters=lambda: dict(registered))
    watch = ModelWeights(lambda: [made])
    registered[1] = Adapter(1)
    assert changed(watch) is False, "new"
    del registered[1]
    registered[2] = Adapter(2)
    assert changed(watch) is False, "1 was dropped"
    registered[1] = Adapter(1)
    assert changed(watch) is False, "read again from the same files"
    del registered[1]
    watch.begin()
    registered[1] = Adapter(3)
    assert changed(watch) is True
    assert changed(watch) is True, "until it is accepted"
    watch.accept()
    assert changed(watch) is False
    # Adapters that a step has loaded are recorded at its end.
    registered[3] = Adapter(4)
    watch.note_new()
    registered[3] = Adapter(5)
    assert changed(watch) is True


def test_adapters_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_ADAPTERS", 3)
    made = model()
    made.lora_manager = SimpleNamespace(list_adapters=lambda: dict(registered))
    registered: dict[int, Adapter] = {}
    watch = ModelWeights(lambda: [made])
    for number in range(9):
        registered = {number: Adapter(number)}
        assert changed(watch) is False
    assert len(watch.adapters) == 3


# All bytes, as after a sleep.


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flips one bit of a dense ``tensor``, counted in memory order."""
    raw = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def swap_rows(tensor: torch.Tensor) -> None:
    tensor.data[[0, 1]] = tensor.data[[1, 0]]


UNSEEN_BY_SAMPLES: dict[str, Any] = {
    "two rows change places": lambda m: swap_rows(m.layer2.weight),
    "a matrix is negated": lambda m: m.layer2.weight.data.neg_(),
    "two signs change": lambda m: (flip(m.layer2.weight, 31), flip(m.layer2.weight, 63)),
    "columns are permuted": lambda m: m.layer2.weight.data.copy_(m.layer2.weight.data.flip(1)),
    "two matrices change places": lambda m: swap_rows(m.stacked),
    "a transposed one is turned about": lambda m: m.transposed.data.copy_(m.transposed.data.flip(0)),
    "one element of one with gaps": lambda m: m.every_other.data[5, 2].add_(1),
    "the last byte of an odd number": lambda m: m.integers.data[-1].bitwise_xor_(1),
    "a scalar": lambda m: m.scalar.data.add_(1),
    "a buffer": lambda m: m.scale.add_(1),
    "a type": lambda m: setattr(m.layer2, "bias", torch.nn.Parameter(m.layer2.bias.data.view(torch.int32), False)),
    "a shape": lambda m: setattr(m, "stacked", torch.nn.Parameter(m.stacked.data.view(4, 4, 8))),
    "a name": lambda m: setattr(m, "other", m._parameters.pop("stacked")),
}


def readable(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, ModelWeights]:
    monkeypatch.setattr(weights, "DIGEST_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(weights, "DIGEST_SUMS", 8)
    made = model()
    made.stacked = torch.nn.Parameter(torch.randn(2, 8, 8))
    made.register_buffer("scale", torch.ones(3), persistent=False)
    return made, ModelWeights(lambda: [made], reads_all=True)


@pytest.mark.parametrize("chunk_bytes", [128, weights.DIGEST_CHUNK_BYTES])
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


def test_every_single_bit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "DIGEST_CHUNK_BYTES", 64)
    digests = weights.Digests(7)
    tensors = [torch.randn(5, 7), torch.randn(4, 6).t(), torch.arange(23, dtype=torch.uint8)[2:], torch.ones(())]
    seen = {right := digests.of((str(i), tensor) for i, tensor in enumerate(tensors))}
    for tensor in tensors:
        for bit in range(8 * tensor.numel() * tensor.element_size()):
            flip(tensor, bit)
            seen.add(digests.of((str(i), tensor) for i, tensor in enumerate(tensors)))
            flip(tensor, bit)
    assert len(seen) == 1 + 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert digests.of((str(i), tensor) for i, tensor in enumerate(tensors)) == right


def test_weights_that_moved_are_the_same_and_are_watched_where_they_are() -> None:
    made = model()
    watch = ModelWeights(lambda: [made], reads_all=True)
    made.layer3.weight.data = made.layer3.weight.data.clone()
    assert watch.are_same()
    assert changed(watch) is False
    refill(made.layer3.weight)
    assert changed(watch) is True


def test_what_is_watched_after_a_sleep_is_not_accepted_anew() -> None:
    made = model()
    watch = ModelWeights(lambda: [made], reads_all=True)
    assert watch.are_same()
    refill(made.layer3.weight)
    assert changed(watch) is True


def test_adapters_are_read_in_full_too() -> None:
    made = model()
    registered = {1: Adapter(1)}
    made.lora_manager = SimpleNamespace(list_adapters=lambda: dict(registered))
    watch = ModelWeights(lambda: [made], reads_all=True)
    assert watch.are_same()
    flip(registered[1].loras["packed"].lora_b[0], 77)
    assert not watch.are_same()


@pytest.mark.parametrize("case", ["not asked for", "experts that are balanced", "no memory"])
def test_weights_that_are_not_all_read_are_never_the_same(case: str, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    if case == "no memory":
        made.far = torch.nn.Parameter(torch.empty(9, device="meta"))
    skipped = ".experts" if case == "experts that are balanced" else None
    watch = ModelWeights(lambda: [made], skipped, reads_all=case != "not asked for")
    assert not watch.are_same()
    assert ("some weights of this worker cannot be read" in caplog.text) is (case == "no memory")


def test_memory_that_a_digest_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes tensors with gaps, which are copied piece by piece."""
    monkeypatch.setattr(weights, "DIGEST_CHUNK_BYTES", 1 << 10)
    for tensor in (
        torch.randn(300, 70)[::2, ::3],
        torch.randn(1, 4000, 3).transpose(1, 2)[..., ::2],
        torch.randn(5000),
    ):
        chunks = list(weights.chunks(tensor))
        assert max(chunk.numel() for chunk in chunks) * weights.WORD_BYTES <= 1 << 10
        assert sum(chunk.numel() for chunk in chunks) == tensor.numel()


def test_without_a_worker_one_warning_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    assert watch_weights(SimpleNamespace(parallel_config=None)) is None
    (record,) = caplog.records
    assert "cannot be watched" in record.getMessage()
    assert "reset_prefix_cache(reset_connector=True)" in record.getMessage()


def test_cuda_tensors_would_be_read_by_their_addresses() -> None:
    """The test needs no GPU: it checks what is passed to torch."""
    given = weights._CudaMemory(0x1000, 7).__cuda_array_interface__
    assert given == {"shape": (7,), "typestr": "<i4", "data": (0x1000, False), "version": 3}


# Real engines.


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "disk"


@pytest.fixture(scope="module")
def updates(run: Runner, disk: Path) -> Run:
    """Weights 0, 1, 2 and 0 again, in one engine whose connector is never reset."""
    return run("updates", connector=with_disk(disk), force_async=True, steps=5)


def test_answers_after_an_update_are_those_of_the_new_weights(updates: Run, expected: list[Any]) -> None:
    answers, counts = updates["answers"], updates["counts"]
    right = [answers[f"right {number}"] for number in range(3)]
    assert differences(right[0], [[part[:SHORT] for part in answer] for answer in expected]) == []
    for name, number, changes in [
        ("first", 0, 0),
        ("again", 0, 0),
        ("updated", 1, 1),
        ("updated, again", 1, 0),
        ("late reset", 2, 0),
        ("late reset, again", 2, 0),
        ("under requests", 0, 0),
        ("under requests, again", 0, 0),
    ]:
        assert differences(answers[name], right[number]) == [], name
        assert counts[name]["weight_changes"] == changes, name
        if name.endswith("again"):
            assert counts[name]["host_hit_tokens"] > 0, "it is offloading as before"
            assert counts[name]["load_failures"] == 0
    assert counts["updated"]["load_failures"] > 0, "loads were promised before anybody knew"
    assert counts["not reset"]["weight_changes"] == 1
    assert updates["loading"], "no request was loading while the weights changed"
    assert updates["metrics"]["weight_changes"] == 3
    assert updates.log.count("THE WEIGHTS HAVE CHANGED") >= 1
    assert "cannot be watched" not in updates.log
    assert_at_rest(updates.result)


def test_unwatched_weights_give_old_answers(updates: Run) -> None:
    """The control."""
    answers = updates["answers"]
    assert updates["counts"]["unwatched"]["host_hit_tokens"] > 0
    assert len(differences(answers["unwatched"], answers["right 1"])) == len(answers["right 1"])
    for one, other in ((0, 1), (1, 2), (2, 0)):
        assert len(differences(answers[f"right {one}"], answers[f"right {other}"])) == len(answers["right 0"])


def test_a_restart_finds_nothing_of_an_engine_whose_weights_were_changed(
    updates: Run, run: Runner, disk: Path, expected: list[Any]
) -> None:
    """Not even blocks of the weights in its files, whether stored before or after the change."""
    assert updates["metrics"]["disk_write_blocks"] > 0
    result = run("rounds", rounds=1, connector=with_disk(disk))
    assert found(result) == 0
    assert differences(result["outputs"][0], expected) == []


@pytest.fixture(scope="module")
def adapters(run: Runner) -> Run:
    return run("adapters", connector=POOL)


def test_adapters_that_take_turns_change_nothing(adapters: Run) -> None:
    answers, counts = adapters["answers"], adapters["counts"]
    for number in (1, 2, 3):
        name = f"adapter {number}, again"
        assert differences(answers[name], answers[f"adapter {number}, first"]) == []
        assert counts[name]["host_hit_tokens"] > 0
        assert counts[name]["weight_changes"] == counts[name]["load_failures"] == 0
    assert len(differences(answers["adapter 1, first"], answers["adapter 2, first"])) == 2


def test_an_adapter_loaded_again_under_its_name_answers_anew(adapters: Run) -> None:
    answers, counts = adapters["answers"], adapters["counts"]
    assert len(differences(answers["adapter 1, first"], answers["right"])) == 2
    assert differences(answers["loaded again"], answers["right"]) == []
    assert differences(answers["loaded again, again"], answers["right"]) == []
    assert counts["loaded again"]["weight_changes"] == 1
    assert_at_rest(adapters.result)
    # The control: the weights are not watched.
    assert counts["unwatched"]["host_hit_tokens"] > 0
    assert len(differences(answers["unwatched"], answers["right, unwatched"])) == 2
