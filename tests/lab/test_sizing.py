"""Sizing: compared with replays of the same settings, and its sentences."""

from __future__ import annotations

import dataclasses
import random
from decimal import Decimal

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.abc import ConfigError
from kvoffload.config import HostContents
from kvoffload.lab.latency import Speeds, ttft_seconds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.sizing import Choices, Goal, Setting, Sizing, footnote, size
from kvoffload.lab.trace import Trace

GIB = 1 << 30
MODEL = ModelShape("model", bytes_per_token=GIB / 256, linear_flops_per_token=1e10, attention_flops_per_pair=0.0)
"""A block of 256 tokens takes 1 GiB."""
SPEEDS = Speeds(prefill_tokens_per_s=1000.0, host_bytes_per_s=100e9, disk_bytes_per_s=20e9)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", 400)


@pytest.fixture(scope="module")
def answer(chat: Trace) -> Sizing:
    return size(chat, MODEL, speeds=SPEEDS)


def test_parts_are_rounded_so_that_they_add_up() -> None:
    rng = random.Random(1)
    for _ in range(500):
        device, ram, disk = rng.uniform(0, 40), rng.choice((0.0, 0.05, rng.uniform(0, 30))), rng.choice((0.0, 12.345))
        served = device + ram + disk + rng.uniform(-1e-12, 1e-12)
        setting = Setting(1, 1, served, device, ram, 0.0, 0.0, 0.0, 0.0)
        parts = {name: Decimal(f"{share:.1f}") for name, share in setting.parts.items()}
        assert sum(parts.values()) == Decimal(f"{served:.1f}")
        for found, exact in zip(parts.values(), (device, ram, disk), strict=True):
            assert not found.is_signed()
            assert abs(float(found) - exact) < 0.1001
        assert disk or not parts["disk"]
        assert setting.disk_pct >= 0


def test_without_a_disk_the_result_equals_a_replay(chat: Trace) -> None:
    (setting,) = size(chat, MODEL, Choices(ram=[200 * GIB]), speeds=SPEEDS).settings
    result = replay(chat, ReplayConfig("lru", 200), model=MODEL, speeds=SPEEDS)
    assert setting.served_pct == setting.ram_pct == pytest.approx(result.prefix_hit_tokens_pct)
    assert setting.disk_pct == 0.0
    nothing = np.zeros_like(result.host_tokens)
    seconds = ttft_seconds(MODEL, SPEEDS, chat.input_tokens, nothing, result.host_tokens, nothing)
    assert setting.ttft_p95_s == pytest.approx(float(np.percentile(seconds, 95)))
    assert setting.price == 200 * Goal().ram_per_gib


@pytest.mark.parametrize(("ram", "disk"), [(100, 400), (200, 800), (40, 600)])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_with_a_disk_the_result_is_close_to_a_replay(chat: Trace, policy: str, ram: int, disk: int) -> None:
    found = size(chat, MODEL, Choices(policy=policy, ram=[ram * GIB], disk=[disk * GIB]), processes=1)
    (setting,) = found.settings
    result = replay(chat, ReplayConfig(policy, ram, disk_blocks=disk))
    assert setting.served_pct == pytest.approx(result.prefix_hit_tokens_pct, abs=1.5)
    # The disk adds more than this tolerance.
    assert setting.served_pct > setting.ram_pct + 3.0


@pytest.mark.parametrize("ram", [120, 240, 400])
def test_ram_adds_to_the_device_as_in_a_replay(chat: Trace, ram: int) -> None:
    """One cache of both sizes finds nearly what device and RAM do that do not repeat each other. A block of the default
    model is so small that no load loses any."""
    sizing = size(chat, MODEL, Choices(ram=[ram * GIB], device=60 * GIB), speeds=SPEEDS)
    (setting,) = sizing.settings
    result = replay(chat, ReplayConfig("lru", ram, 60), speeds=SPEEDS)
    assert setting.served_pct == pytest.approx(result.prefix_hit_tokens_pct, abs=2.0)
    alone = size(chat, MODEL, Choices(ram=[ram * GIB]), speeds=SPEEDS).settings[0]
    assert setting.served_pct > alone.served_pct + 1.0
    assert setting.device_pct == pytest.approx(size(chat, MODEL, Choices(ram=[60 * GIB])).settings[0].served_pct)
    assert "% from the device, " in sizing.answer
    assert "RAM does not repeat what the device holds" in footnote(SPEEDS, sizing)


@pytest.mark.parametrize("disk", [0, 400], ids=["no disk", "disk"])
def test_each_tier_serves_what_it_does_in_a_server(chat: Trace, disk: int) -> None:
    """Nothing says what host memory holds, so it is what a server's does. The device of a replay needs room for outputs
    too, which moves up to 3 points from the device to RAM, and host memory less of what the device has lost."""
    choices = Choices(ram=[120 * GIB], disk=[disk * GIB] if disk else (), device=60 * GIB)
    sizing = size(chat, MODEL, choices, speeds=SPEEDS)
    (setting,) = sizing.settings
    config = ReplayConfig("lru", 120, 60, disk)
    assert config.host_contents is sizing.choices.host_contents is HostContents.EXCLUSIVE
    result = replay(chat, config)
    tokens = (result.device_hit_tokens, result.host_hit_tokens, result.disk_hit_tokens)
    shares = [100 * each / result.prompt_tokens for each in tokens]
    assert [setting.device_pct, setting.ram_pct, setting.disk_pct] == pytest.approx(shares, abs=3.0)
    assert setting.served_pct == pytest.approx(result.prefix_hit_tokens_pct, abs=2.0)
    # The control: with other contents RAM finds less, by more than the tolerance.
    inclusive = dataclasses.replace(choices, host_contents=HostContents.INCLUSIVE)
    other = size(chat, MODEL, inclusive, speeds=SPEEDS)
    assert "RAM repeats what the device holds" in footnote(SPEEDS, other)
    assert other.settings[0].ram_pct < setting.ram_pct - 6.0


def test_ram_limits_how_much_a_request_gets_from_disk(chat: Trace) -> None:
    small = size(chat, MODEL, Choices(ram=[4 * GIB], disk=[2048 * GIB])).settings[0]
    result = replay(chat, ReplayConfig("lru", 4, disk_blocks=2048))
    large = size(chat, MODEL, Choices(ram=[400 * GIB], disk=[2048 * GIB])).settings[0]
    assert small.served_pct == pytest.approx(result.prefix_hit_tokens_pct, abs=2.0)
    assert small.served_pct < large.served_pct - 20.0


def test_default_sizes_cover_small_to_nearly_complete_caches(answer: Sizing) -> None:
    assert len(answer.settings) >= 6
    served = [setting.served_pct for setting in answer.settings]
    assert min(served) < 0.6 * answer.ceiling.served_pct
    assert max(served) > 0.95 * answer.ceiling.served_pct
    assert {setting.disk_bytes > 0 for setting in answer.settings} == {False, True}
    assert all(setting.ram_bytes.bit_count() == 1 for setting in answer.settings)
    assert answer.warnings == ()


def test_the_answer_in_sentences(chat: Trace, answer: Sizing) -> None:
    best = answer.best
    assert answer.chosen is best
    assert answer.answer.startswith(f"{best} serve")
    assert f"{best.served_pct:.1f}% of prompt tokens" in answer.answer
    assert f"A cache that never evicts would serve {answer.ceiling.served_pct:.1f}%." in answer.answer
    found = size(chat, MODEL, Choices(ram=[256 * GIB]))
    more = size(chat, MODEL, Choices(ram=[512 * GIB])).settings[0].served_pct - found.settings[0].served_pct
    assert found.answer.startswith(f"256 GiB RAM serves {found.settings[0].served_pct:.1f}% of prompt tokens. ")
    assert f"The next 256 GiB of RAM would add {more:.1f} points." in found.answer


def test_the_chosen_setting_is_the_cheapest_that_saves_nearly_as_much_time_as_the_best(answer: Sizing) -> None:
    assert answer.chosen is not None

    def saved(mean: float) -> float:
        return answer.nothing.ttft_mean_s - mean

    most = max(saved(setting.ttft_mean_s) for setting in answer.settings)
    assert saved(answer.chosen.ttft_mean_s) >= 0.9 * most
    for setting in answer.settings:
        if setting.price < answer.chosen.price:
            assert saved(setting.ttft_mean_s) < 0.9 * most


def test_the_cheapest_setting_that_meets_a_target_is_chosen(chat: Trace, answer: Sizing) -> None:
    times = sorted(setting.ttft_p95_s for setting in answer.settings)
    target = times[len(times) // 2]
    found = size(chat, MODEL, speeds=SPEEDS, goal=Goal(target_p95_s=target))
    assert found.chosen is not None
    assert found.chosen.ttft_p95_s <= target
    cheaper = [setting for setting in found.settings if setting.price < found.chosen.price]
    assert cheaper
    assert all(setting.ttft_p95_s > target for setting in cheaper)
    assert f"{found.chosen} is the cheapest setting tried that meets a TTFT p95 of" in found.answer


def test_invalid_settings(chat: Trace) -> None:
    with pytest.raises(ConfigError, match=r"ram='1 MiB': too small for one block of 1 GiB .* give many times that"):
        size(chat, MODEL, Choices(ram=[1 << 20]))
    with pytest.raises(ConfigError, match="disk='1 MiB': too small for one block"):
        size(chat, MODEL, Choices(disk=[1 << 20]))
    with pytest.raises(ConfigError, match="combinations, but at most 1,000"):
        size(chat, MODEL, Choices(ram=[n * GIB for n in range(1, 41)], disk=[n * GIB for n in range(1, 41)]))
