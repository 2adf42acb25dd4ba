"""What the pages of a rank of SGLang are found again under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang import parts
from tests.sglang.parts import mha_pool, mla_pool, storage_config

from kvoffload.abc import ConfigError  # isort: skip
from kvoffload.config import IntegrationConfig  # isort: skip
from kvoffload.fingerprints import fingerprint  # isort: skip
from kvoffload.sglang import engine  # isort: skip
from kvoffload.sglang.fingerprint import SETTINGS, describe_parts, fingerprint_parts  # isort: skip
from kvoffload.sglang.pools import HostPages, block_bytes_of  # isort: skip

TIER = {"kind": "disk", "dir": "/cache", "bytes": "1GiB"}
GIVEN = {"tier": TIER, "model_fingerprint": "1"}


def identity_of(
    pool: Any = None, arguments: dict[str, Any] | None = None, options: dict[str, Any] = GIVEN, **fields: Any
) -> tuple[str, dict[str, str]]:
    """Returns the fingerprint of a rank, and it in words."""
    given = arguments or {}
    kv = HostPages("kv", pool or mha_pool())
    made = fingerprint_parts(IntegrationConfig.from_mapping(options), storage_config(**fields), kv, kv.nbytes, given)
    return fingerprint(made), describe_parts(made, given, None)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "other",
    [
        {"pool": mha_pool("page_first_direct")},
        {"pool": mha_pool("layer_first")},
        {"pool": mha_pool(page_size=8)},
        {"pool": mha_pool(heads=1, dim=128)},
        {"pool": mha_pool(layers=4)},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"should_split_heads": True, "tp_lcm_size": 4},
        {"options": {"tier": TIER, "model_fingerprint": "2"}},
        *({"arguments": {name: "other"}} for name in SETTINGS),
    ],
    ids="-".join,
)
def test_what_shapes_pages_changes_the_fingerprint_and_its_words(other: dict[str, Any]) -> None:
    mine, said = identity_of()
    theirs, said_there = identity_of(**other)
    assert mine != theirs
    assert said != said_there


def test_what_does_not_shape_pages_is_left_out() -> None:
    mine, _ = identity_of(arguments={"dtype": "auto"})
    assert identity_of(arguments={"dtype": "auto", "port": 1, "mem_fraction_static": 0.5})[0] == mine
    assert identity_of(arguments={"dtype": "auto"}, pool=mha_pool(pages=9), dp_rank=3)[0] == mine


def test_ranks_with_replicated_kv_have_the_same_fingerprint() -> None:
    ranks = [
        identity_of(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=size)[0] for rank, size in ((0, 1), (3, 4))
    ]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize(
    "file", ["model/model.safetensors", "draft/model.safetensors", "scales.json"], ids=["weights", "draft", "scales"]
)
def test_every_byte_of_a_file_counts(file: str, model: Path) -> None:
    draft, scales = model.parent / "draft", model.parent / "scales.json"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(bytes(1000))
    scales.write_bytes(bytes(1000))
    arguments = {"model_path": str(model), "speculative_algorithm": "EAGLE", "quantization_param_path": str(scales)}
    arguments["speculative_draft_model_path"] = str(draft)

    def made() -> str:
        return identity_of(arguments=arguments, options={"tier": TIER})[0]

    mine = made()
    assert made() == mine
    (model.parent / file).write_bytes(bytes(999) + b"\1")
    assert made() != mine


def test_the_name_of_the_storage_is_the_model_where_there_is_no_server(model: Path) -> None:
    assert identity_of(options={"tier": TIER}, model_name=str(model))[1]["weights"].startswith("digest:")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "SGLang does not say where its files are"),
        ({"model_path": "/nonexistent"}, "not found"),
        ({"model_path": "/nonexistent", "load_format": "dummy"}, "load_format=dummy"),
    ],
)
def test_weights_that_nothing_identifies_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"model_fingerprint is not set.*{reason}.*extra-config"):
        identity_of(arguments=arguments, options={"tier": TIER})


def test_a_commit_identifies_weights_that_are_elsewhere() -> None:
    arguments = {"model_path": "nobody/nothing", "revision": "a" * 40}
    assert (
        identity_of(arguments=arguments, options={"tier": TIER})[1]["weights"] == f"revision:nobody/nothing@{'a' * 40}"
    )


def test_small_pages_beside_those_of_the_kv_waste_little() -> None:
    class Pages(HostPages):
        def __init__(self, name: str, nbytes: int) -> None:
            self.name, self.nbytes = name, nbytes

    kv, indexer, state = Pages("kv", 2_500_000), Pages("indexer", 515_000), Pages("mamba", 40_000_000)
    assert block_bytes_of([kv]) == 2_500_000
    assert block_bytes_of([kv, state]) == 2_500_000
    assert block_bytes_of([kv, indexer]) == 835_584


def test_a_rank_has_its_place_among_those_of_its_node() -> None:
    places = [
        engine.place_on_node(storage_config(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2), {}, per_node)
        for pp in range(2)
        for tp in range(2)
        for per_node in (None, 2)
    ]
    assert places == [(0, 4), (0, 2), (1, 4), (1, 2), (2, 4), (0, 2), (3, 4), (1, 2)]


def test_without_a_server_sglang_has_no_arguments() -> None:
    assert engine.arguments() == {}
    assert engine.weights() is None
    assert parts.storage_interface.STORAGE_BATCH_SIZE == 128
