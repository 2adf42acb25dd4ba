"""What the adapter says of a step, the order in which vLLM's model runners call it, and vLLM's own configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lazy import lazily

config, gpu_model_runner = lazily("vllm.config"), lazily("vllm.v1.worker.gpu_model_runner")
plugin, versions = lazily("kvoffload.vllm.plugin"), lazily("kvoffload.vllm.versions")

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("fences_first", [True, False])
def test_blocks_that_a_step_prepares_are_named(fences_first: bool) -> None:
    output = lazily("vllm.v1.core.sched.output").SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = [3, 4]
    copy: Any = SimpleNamespace(src_block_id=1, dst_block_id=7)
    output.kv_cache_block_copies = [copy]
    step = lazily("kvoffload.vllm.connector").scheduled_step(output, False, fences_first)
    assert set(step.written) == ({3, 4, 7} if fences_first else set())
    assert set(step.overwritten) == (set() if fences_first else {3, 4, 7})


@pytest.mark.parametrize(
    ("fields", "fences_first"),
    [({"use_v2_model_runner": False}, True), ({"use_v2_model_runner": True}, False), ({}, False)],
    ids=["older", "newer", "not known"],
)
def test_fences_come_first_with_the_older_model_runner_only(fields: dict[str, bool], fences_first: bool) -> None:
    vllm_config: Any = SimpleNamespace(**fields)
    assert versions.fences_first(vllm_config) is fences_first


class Reached(Exception):
    """The model runner prepares blocks now."""


def test_the_older_model_runner_calls_the_connector_before_it_prepares_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(config.VllmConfig, "use_v2_model_runner"):
        pytest.skip("this vLLM does not say which runner it has")
    called: list[str] = []

    def note(name: str, then: type[Exception] | None = None) -> Callable[..., None]:
        def call(*args: object) -> None:
            called.append(name)
            if then is not None:
                raise then

        return call

    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.has_kv_transfer_group", lambda: True)
    group = SimpleNamespace(handle_preemptions=note("fences"))
    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.get_kv_transfer_group", lambda: group)
    runner: Any = SimpleNamespace(
        execute_model_state=None,
        speculative_config=None,
        synchronize_input_prep=nullcontext,
        _update_states=note("blocks", Reached),
    )
    output: Any = SimpleNamespace(kv_connector_metadata=object(), total_num_scheduled_tokens=1)
    with pytest.raises(Reached):
        gpu_model_runner.GPUModelRunner.execute_model(runner, output)
    assert called == ["fences", "blocks"]


NAME = "KVOffloadConnector"
BESIDE_OTHERS = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": NAME}]},
}


@pytest.mark.parametrize(
    ("transfer", "size", "is_taken_away"),
    [
        ({"kv_connector": NAME}, 1.5, True),
        (BESIDE_OTHERS, 1.5, True),
        ({"kv_connector": NAME}, None, False),
        ({"kv_connector": "OffloadingConnector"}, 1.5, False),
        (None, 1.5, False),
    ],
    ids=["kvoffload", "beside others", "no size", "vLLM's own", "no flag"],
)
def test_the_log_says_if_a_flag_of_vllm_takes_the_connector_away(
    transfer: dict[str, Any] | None, size: float | None, is_taken_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    plugin.register()
    logged: list[str] = []
    monkeypatch.setattr(plugin.logger, "error", lambda text, *values: logged.append(text % values))
    given = None if transfer is None else config.KVTransferConfig(kv_role="kv_both", **transfer)
    cache = config.CacheConfig(kv_offloading_size=size)
    used = config.VllmConfig(cache_config=cache, kv_transfer_config=given).kv_transfer_config
    assert used is not None
    assert (used.kv_connector == "OffloadingConnector") is (size is not None)
    assert len(logged) == is_taken_away
    for text in logged:
        assert "KVOFFLOAD IS NOT USED: --kv-offloading-size=1.5" in text
        assert "in the place of " + str(transfer and transfer["kv_connector"]) in text
        assert "leave out --kv-offloading-size" in text
