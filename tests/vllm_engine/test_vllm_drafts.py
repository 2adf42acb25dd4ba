"""A drafter whose KV depends on the token after its own, as in EAGLE and MTP. Every draft must be the one that is made
without kvoffload, also where a hit ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from driver import BLOCK_SIZE, NOT_OFFLOADED, Speculative, write_model
from vllm_harness import POOL, Run, Runner, assert_at_rest, check

from tests.deploy.service_links import manifests, variables

pytestmark = pytest.mark.vllm

PREFIX: list[int] = np.random.default_rng(3).integers(5, 500, 3 * BLOCK_SIZE).tolist()
"""Three blocks."""
PROMPTS = [[*PREFIX, 100], [*PREFIX, 101], [*PREFIX, 102], PREFIX, [*PREFIX, 101]]
"""The drafter's KV at the end of the prefix differs between them. Of the fourth, it depends on the first token of the
answer."""
ONE_BY_ONE: dict[str, Any] = {"asked": PROMPTS, "more": [7]}
ACTS: dict[str, dict[str, Any]] = {
    "one_by_one, computed": {"sampling": {"extra_args": NOT_OFFLOADED}},
    "one_by_one": {},
    "one_by_one, forgetful": {"forgets_following": True},
}
LOADED = [0, 2, 2, 2, 3]
"""Blocks that are found: the third one by those with the same token after it."""
THEN = [4] * len(PROMPTS)
"""The last blocks were completed by accepted drafts."""


def blocks_found(result: Run) -> list[int]:
    return [record["host_tokens"] // BLOCK_SIZE for record in result["records"]]


class TestEagle:
    """Row "draft models, EAGLE"."""

    @pytest.fixture(scope="class", params=[False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "asynchronous"])
    def acts(self, run: Runner, request: pytest.FixtureRequest) -> dict[str, Run]:
        """The scheduler of an asynchronous engine does not see drafts, and learns one step later what was accepted."""
        # The server has the variables of Kubernetes' service links.
        config: dict[str, Any] = {"environment": variables(manifests()), "patches": ["may forget following tokens"]}
        return run.play(ACTS, eagle=True, connector=POOL, force_async=request.param, **ONE_BY_ONE, **config)

    def test_drafts_are_the_same_with_and_without_offloading(self, acts: dict[str, Run]) -> None:
        computed, result = acts["one_by_one, computed"], acts["one_by_one"]
        assert computed["accepted"] > 100
        assert sum(blocks_found(computed)) == 0
        assert result["outputs"] == computed["outputs"]
        assert result["accepted"] == computed["accepted"]
        assert result["scheduler"] == "AsyncScheduler" or result["drafts"] == computed["drafts"]
        assert blocks_found(result) == LOADED + THEN
        assert_at_rest(result.result)

    def test_drafts_are_worse_if_blocks_are_found_that_have_another_token_after_them(
        self, acts: dict[str, Run]
    ) -> None:
        """The control."""
        computed, _, wrong = acts.values()
        assert blocks_found(wrong)[: len(PROMPTS)] == [0, 3, 3, 2, 3]
        assert wrong["outputs"] == computed["outputs"], "the model checks drafts"
        assert wrong["accepted"] < computed["accepted"]


@pytest.mark.soak
def test_all_drafts_of_a_right_draft_model_are_accepted(run: Runner, expected: list[Any]) -> None:
    """The model checks drafts, so wrong ones do not change outputs but are accepted less often, as the control shows.
    Here the model is its own draft model, so nearly all are accepted."""
    shares = []
    for changes in ({}, {"corrupt_drafts": True}):
        engine = {"num_gpu_blocks_override": 48}
        result = run("rounds", rounds=3, connector=POOL, draft=True, engine=engine, **changes)
        check(result, expected)
        assert result["metrics"]["host_hit_tokens"] > 0
        shares.append(result["accepted"] / result["drafted"])
    assert shares[0] > 0.95 > shares[1] > 0


@dataclass(eq=False)
class FakeRequest:
    """What vLLM hashes of a request."""

    all_token_ids: list[int]
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    _prompt_embeds_per_block_hashes: dict[Any, bytes] = field(default_factory=dict)


def image(name: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def test_tokens_are_described_by_all_that_stands_in_their_place() -> None:
    import torch

    from kvoffload.vllm.hints import following

    placeholder = 9
    tokens = [1, 2, placeholder, placeholder, 5]
    requests = [
        FakeRequest(tokens),
        FakeRequest([1, 2, 3, 4, 5]),
        FakeRequest(tokens, [image("cat", 2, 2)]),
        FakeRequest(tokens, [image("dog", 2, 2)]),
        FakeRequest(tokens, [image("cat", 1, 3)]),
        FakeRequest(tokens, prompt_embeds=torch.zeros(5, 4)),
        FakeRequest(tokens, prompt_embeds=torch.ones(5, 4)),
    ]
    assert len({following(request, 2, 1) for request in requests}) == len(requests)
    assert len({following(request, 2, 2) for request in requests}) == len(requests)
    assert len({following(request, 0, 1) for request in requests[:4]}) == 1, "these begin with the same token"
    assert following(FakeRequest([0, 0, *tokens]), 4, 2) == following(FakeRequest(tokens), 2, 2)


@pytest.mark.parametrize(
    ("speculative", "marked", "lookahead"),
    [
        (None, [], [0, 0]),
        (Speculative("draft_model"), [], [0, 0]),
        (Speculative("eagle"), [], [1, 1]),
        (Speculative("mtp"), [1], [0, 1]),
        (Speculative("mtp", modules=3), [0], [3, 0]),
        (Speculative("dflash"), [], [0, 0]),
        (Speculative("dspark"), [1], [0, 0]),
    ],
    ids=[
        "no drafter",
        "a draft model",
        "no group is marked",
        "a group is marked",
        "several modules",
        "dflash",
        "dspark",
    ],
)
def test_groups_of_a_drafter_look_ahead(
    tmp_path: Path, speculative: Speculative | None, marked: list[int], lookahead: list[int]
) -> None:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvoffload.vllm.layout import EngineLayout

    write_model(tmp_path / "model")
    connector = KVTransferConfig(
        kv_connector="KVOffloadConnector",
        kv_connector_module_path="kvoffload.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=POOL,
    )
    arguments = EngineArgs(str(tmp_path / "model"), skip_tokenizer_init=True, kv_transfer_config=connector)
    config: Any = arguments.create_engine_config()
    config.speculative_config = speculative
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer{g}"], spec, is_eagle_group=g in marked) for g in range(2)]
    layout = EngineLayout.from_vllm(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))
    assert [group.lookahead for group in layout.kv_groups] == lookahead


def test_every_drafter_that_reads_hidden_states_is_known() -> None:
    """The lookahead of each was derived from vLLM's source. A new one needs the same."""
    from vllm.config.speculative import SpeculativeMethod

    from kvoffload.vllm.versions import PROJECTING_DRAFTERS

    methods = {method for method in literals(SpeculativeMethod) if reads_hidden_states(method)}
    assert "eagle" in methods
    assert methods <= {"eagle", "eagle3", "mtp", *PROJECTING_DRAFTERS, "extract_hidden_states"}


def literals(kind: Any) -> set[str]:
    """The strings of a Literal, also of those nested in it."""
    args = get_args(kind)
    return {arg for arg in args if isinstance(arg, str)}.union(*(literals(arg) for arg in args))


def reads_hidden_states(method: str) -> bool:
    from vllm.config.speculative import SpeculativeConfig

    config = object.__new__(SpeculativeConfig)
    config.method = method
    return bool(config.use_eagle())
