"""How vLLM lays its KV cache out in memory, and the layout that kvoffload asks for. Tensors are allocated by vLLM's own
functions, on a CPU and mostly without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from driver import write_model

from kvoffload.abc import ConfigError, PageGroup
from kvoffload.host.pool import HostPool
from kvoffload.transfer.cuda import native_loop
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.failed import FailedTransfer
from tests.lazy import lazily

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")
interface, nesting, vllm_pages = (
    lazily(name) for name in ("vllm.v1.kv_cache_interface", "kvoffload.vllm.nesting", "kvoffload.vllm.pages")
)

pytestmark = pytest.mark.vllm

TOKENS = 32
BLOCKS = 7
SERVED_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
Make = Callable[[], Any]
"""Returns the spec of a layer. Parameters of tests are made before vLLM is imported."""


def _spec(kind: str, dtype: str = "bfloat16", kv_quant_mode: str | None = None, **fields: Any) -> Any:
    if kv_quant_mode is not None:
        fields["kv_quant_mode"] = interface.KVQuantMode[kv_quant_mode]
    return getattr(interface, kind)(block_size=TOKENS, dtype=getattr(torch, dtype), **fields)


def full(heads: int = 2, head_size: int = 32, **changes: Any) -> Make:
    return partial(_spec, "FullAttentionSpec", num_kv_heads=heads, head_size=head_size, **changes)


def window(heads: int = 2, head_size: int = 32) -> Make:
    return partial(_spec, "SlidingWindowSpec", num_kv_heads=heads, head_size=head_size, sliding_window=64)


def latent(head_size: int = 576, **changes: Any) -> Make:
    return partial(_spec, "MLAAttentionSpec", num_kv_heads=1, head_size=head_size, **changes)


def packed(state_content_bytes: int) -> Make:
    """Keys and their scales in one state, as bytes."""
    return latent(state_content_bytes, dtype="uint8", state_content_bytes=state_content_bytes)


def chunked() -> Make:
    return partial(_spec, "ChunkedLocalAttentionSpec", num_kv_heads=2, head_size=32, attention_chunk_size=64)


def short_window() -> Make:
    return partial(_spec, "SlidingWindowMLASpec", num_kv_heads=1, head_size=576, sliding_window=64)


def ring() -> Make:
    return partial(_spec, "CircularBufferSpec", num_kv_heads=1, head_size=64)


def made(specs: Sequence[Make]) -> list[Any]:
    return [make() for make in specs]


MODELS: dict[str, list[Make]] = {
    "full attention": [full()] * 3,
    "one KV head": [full(heads=1)] * 3,
    "values of another size": [full(head_size_v=64)] * 3,
    "windows and full attention": [window(), full(), window(), full(), window()],
    "chunks and full attention": [chunked(), full()] * 2,
    "MLA": [latent()] * 3,
    "MLA in FP8 with scales": [packed(656)] * 3,
    "MLA with aligned pages": [latent(head_size=100, alignment=4096)] * 3,
    "MLA of compressed tokens": [latent(tokens_per_state=4)] * 3,
    "scales for each token and head": [
        full(dtype="int8", kv_quant_mode="INT8_PER_TOKEN_HEAD", state_content_bytes=2 * (32 + 4))
    ]
    * 3,
    "FP8 with one scale": [full(dtype="float8_e4m3fn", kv_quant_mode="FP8_PER_TENSOR")] * 3,
    "NVFP4 with block scales": [full(dtype="uint8", kv_quant_mode="NVFP4", num_head_slots=4, state_content_bytes=18)]
    * 3,
    "padded pages": [full(page_size_padded=12288)] * 3,
    "several sizes in one group": [full(), full(head_size=64), full()],
    "MLA with an index": [packed(656), packed(132)] * 2,
}
"""The layers of models whose layouts each of SERVED_LAYOUTS can be."""
BLOCKS_FIRST_ONLY: dict[str, list[Make]] = {
    "groups with pages of several sizes": [window(head_size=64), full(), window(head_size=64), full()],
    "MLA and its windows, compressed": [latent(tokens_per_state=4), short_window(), packed(132)],
}
"""Models for which vLLM needs blocks to be outermost, or joins layers into other groups if they are."""
LAYERS_FIRST_ONLY: dict[str, list[Make]] = {
    "blocks of several sizes": [window(head_size=64), full(), window(head_size=64), full()],
    "pages padded to a common size": [window(head_size=48), full(), window(head_size=48), full()],
}
"""Models whose pages vLLM makes equally large unless blocks are outermost."""
CASES = [
    *((name, specs, layout) for name, specs in MODELS.items() for layout in SERVED_LAYOUTS),
    *((name, specs, layout) for name, specs in BLOCKS_FIRST_ONLY.items() for layout in ("BLHNC", "BLNHC")),
    *((name, specs, layout) for name, specs in LAYERS_FIRST_ONLY.items() for layout in ("LBHNC", "LBNHC")),
    # With one head these do not cut pages.
    *(("one KV head", MODELS["one KV head"], layout) for layout in ("LHBNC", "BHLNC")),
]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a tiny model, whose layers each test replaces."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    pytest.importorskip("vllm.v1.kv_cache_layout")
    model = tmp_path_factory.mktemp("layouts") / "model"
    write_model(model)
    connector = KVTransferConfig(
        kv_connector="KVOffloadConnector",
        kv_connector_module_path="kvoffload.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"host_bytes": "64MiB"},
    )
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=TOKENS,
        num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=connector,
    ).create_engine_config()


class Caches:
    """The KV cache that vLLM allocates for layers with ``specs``."""

    def __init__(self, vllm_config: Any, specs: list[Make], layout: str, kernel_block_size: int | None = None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        from kvoffload.vllm.layout import EngineLayout

        vllm_config.cache_config.kv_cache_layout = layout
        named = {f"layer{i}": spec for i, spec in enumerate(made(specs))}
        with set_current_vllm_config(vllm_config):
            groups = get_kv_cache_groups(vllm_config, named)
            self.config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
            sizes = None if kernel_block_size is None else [kernel_block_size] * len(groups)
            self.tensors = allocate_kv_cache(self.config, torch.device("cpu"), KVCacheLayout[layout], sizes)
        self.layout = EngineLayout.from_vllm(vllm_config, self.config)
        self.groups = vllm_pages.page_groups(self.layout, self.tensors)
        tensor = next(iter(self.tensors.values()))
        self.memory: Any = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()

    def block(self, layer: str, block: int) -> bytes:
        """The bytes of a block in a layer, in the order in which vLLM's attention sees them."""
        parts = self.tensors[layer].shape[0] // self.config.num_blocks
        content = self.tensors[layer][block * parts : (block + 1) * parts].contiguous()
        return bytes(content.view(torch.uint8).numpy().tobytes())

    def rows(self, group: PageGroup, block: int) -> list[Any]:
        return [view[block].numpy() for view in group.views]

    def check(self, layer_names: Sequence[str], pages: PageGroup) -> None:
        """Moves a block by its pages, and checks that its layers see the same bytes and that no other byte changes."""
        self.memory[:] = np.random.default_rng(0).integers(0, 256, self.memory.size, dtype=np.uint8)
        before = {layer: self.block(layer, 2) for layer in layer_names}
        stored = [row.copy() for row in self.rows(pages, 2)]
        self.memory[:] = 0xEE
        for row, saved in zip(self.rows(pages, 5), stored, strict=True):
            row[:] = saved
        assert {layer: self.block(layer, 5) for layer in layer_names} == before, "other bytes"
        for layer in layer_names:
            parts = self.tensors[layer].shape[0] // BLOCKS
            self.tensors[layer].view(torch.uint8)[5 * parts : 6 * parts] = 0xEE
        assert (self.memory == 0xEE).all(), "no byte outside the pages of the block was written"


@pytest.mark.parametrize(("name", "specs", "layout"), CASES, ids=[f"{name}, {layout}" for name, _, layout in CASES])
def test_a_block_is_restored_elsewhere_and_nothing_else_is_touched(
    vllm_config: Any, name: str, specs: list[Any], layout: str
) -> None:
    caches = Caches(vllm_config, specs, layout)
    assert sorted(n for group in caches.config.kv_cache_groups for n in group.layer_names) == sorted(caches.tensors)
    for group, pages in zip(caches.layout.groups, caches.groups, strict=True):
        assert pages.device_block_bytes == group.device_block_bytes
        caches.check([layer.name for layer in group.layers], pages)


@pytest.mark.parametrize(
    ("shift", "more", "message"),
    [(0, -1, "other bytes"), (1, 0, "other bytes"), (0, 1, "no byte outside")],
    ids=["a byte is missing", "pages begin too late", "pages are too long"],
)
def test_wrong_pages_are_noticed(vllm_config: Any, shift: int, more: int, message: str) -> None:
    caches = Caches(vllm_config, MODELS["padded pages"], "BLHNC")
    layer, pages = caches.layout.groups[0].layers[0].name, caches.groups[0]
    wrong = pages.views[0].as_strided((BLOCKS, pages.views[0].shape[1] + more), pages.views[0].stride(), shift)
    with pytest.raises(AssertionError, match=message):
        caches.check([layer], PageGroup([wrong]))


@pytest.mark.parametrize("name", MODELS)
def test_pages_have_the_same_bytes_whether_layers_or_blocks_are_outermost(vllm_config: Any, name: str) -> None:
    """So that a restart with the other order finds its blocks on disk."""
    found: dict[str, list[bytes]] = {}
    for layout in SERVED_LAYOUTS:
        caches = Caches(vllm_config, MODELS[name], layout)
        for layer, tensor in caches.tensors.items():
            values = torch.arange(tensor[3].numel(), dtype=torch.int32) * (7 + int(layer[-1]))
            tensor[3] = values.view(tensor[3].shape).to(torch.uint8).view(tensor[3].shape).to(tensor.dtype)
        found[layout] = [row.tobytes() for pages in caches.groups for row in caches.rows(pages, 3)]
    assert found["LBHNC"] == found["BLHNC"]
    assert found["LBNHC"] == found["BLNHC"]
    heads = {spec.num_heads for spec in made(MODELS[name])}
    assert (found["LBHNC"] == found["LBNHC"]) == (heads == {1}), "the order of heads and tokens does change them"


@pytest.mark.parametrize("name", [name for name in MODELS if "padded" not in name and "aligned" not in name])
def test_with_blocks_outermost_a_block_is_one_piece_of_memory(
    vllm_config: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = {}
    for layout in ("BLHNC", "LBHNC"):
        groups = Caches(vllm_config, MODELS[name], layout).groups
        pieces[layout] = [len(page_table(group).runs) for group in groups]
        caplog.clear()
        with caplog.at_level("INFO", logger="kvoffload"):
            vllm_pages.log_layout(layout, groups)
        assert f"KV cache layout {layout}" in caplog.text
        assert ("is one piece of memory" in caplog.text) == (set(pieces[layout]) == {1})
    # vLLM sorts the layers of a group by their specs, and kvoffload keeps their order.
    is_sorted = len({spec.page_size_bytes for spec in made(MODELS[name])}) == 1
    assert (set(pieces["BLHNC"]) == {1}) == is_sorted
    assert max(pieces["LBHNC"]) > 1


def test_blocks_that_attention_splits_are_whole_pages(vllm_config: Any) -> None:
    caches = Caches(vllm_config, MODELS["full attention"], "LBHNC", kernel_block_size=16)
    assert caches.tensors["layer0"].shape[0] == 2 * BLOCKS
    caches.memory[:] = np.arange(caches.memory.size) % 251
    assert caches.rows(caches.groups[0], 4)[1].tobytes() == caches.block("layer1", 4)


def test_padding_takes_no_host_memory(vllm_config: Any) -> None:
    specs = MODELS["padded pages"]
    spec = specs[0]()
    assert spec.page_size_bytes > spec.unpadded_page_size_bytes
    for layout in SERVED_LAYOUTS:
        (group,) = Caches(vllm_config, specs, layout).layout.groups
        assert group.device_block_bytes == 3 * spec.unpadded_page_size_bytes


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_cut_pages_are_refused(vllm_config: Any, layout: str) -> None:
    with pytest.raises(ConfigError, match=r"layer layer0, shape .* unset VLLM_KV_CACHE_LAYOUT"):
        Caches(vllm_config, MODELS["full attention"], layout)


def test_a_page_that_is_not_what_the_spec_says_is_refused(vllm_config: Any) -> None:
    caches = Caches(vllm_config, MODELS["full attention"], "BLHNC")
    caches.tensors["layer1"] = caches.tensors["layer1"][:, :, : TOKENS // 2]
    with pytest.raises(ConfigError, match="layer layer1"):
        vllm_pages.page_groups(caches.layout, caches.tensors)


def test_a_ring_that_is_not_reused_is_refused_by_name(vllm_config: Any) -> None:
    with pytest.raises(ConfigError, match="KV cache of kind CircularBufferSpec"):
        Caches(vllm_config, [ring()] * 2, "BLHNC")


def fingerprint_of(vllm_config: Any, layout: str) -> dict[str, Any]:
    caches = Caches(vllm_config, MODELS["full attention"], layout)
    return dict(lazily("kvoffload.vllm.fingerprint").fingerprint_parts(vllm_config, caches.layout, []))


def test_only_the_order_of_heads_and_tokens_changes_the_fingerprint(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of layers and blocks, and not the variable that sets it."""
    before = {layout: fingerprint_of(vllm_config, layout) for layout in SERVED_LAYOUTS}
    one, other = before["BLHNC"], before["BLNHC"]
    assert (before["LBHNC"], before["LBNHC"]) == (one, other)
    assert {part for part in one if one[part] != other[part]} == {"layout", "cache"}
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert fingerprint_of(vllm_config, "LBHNC") == one
    assert vllm_config.cache_config.kv_cache_layout == "LBHNC", "the configuration itself is left alone"


@cache
def layer_class() -> Any:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):  # type: ignore[misc]
        """A layer of a model on CUDA: only its spec and its attention backend."""

        def __init__(self, spec: Any, backend: Any) -> None:
            self._spec, self._backend = spec, backend

        def get_attn_backend(self) -> Any:
            return self._backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self._spec

    return Layer


@cache
def backend(kind: str) -> Any:
    """Returns an attention backend: one that is served ("triton"), one that needs layers outermost ("layers only"), one
    that computes with 16 tokens at a time ("small blocks"), and one that is not known."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    changes: dict[str, dict[str, Any]] = {
        "triton": {},
        "layers only": {
            "supported_kv_cache_layouts": classmethod(lambda cls: (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC))
        },
        "small blocks": {"get_supported_kernel_block_sizes": staticmethod(lambda kv_cache_spec=None: [16])},
        "unknown": {"get_name": staticmethod(lambda: "FLASHMLA_SPARSE")},
    }
    return type(kind, (TritonAttentionBackend,), changes[kind])


REQUESTS: dict[str, tuple[str, list[tuple[Make, str]], str]] = {
    "one backend": ("auto", [(full(), "triton")] * 2, ""),
    "windows": ("auto", [(full(), "triton"), (window(), "triton")], ""),
    "FP8": ("fp8_e4m3", [(full(dtype="uint8"), "triton")] * 2, ""),
    "scales between values": ("int8_per_token_head", [(full(), "triton")], "#49226"),
    "workers elsewhere": ("auto", [], "VLLM_KV_CACHE_LAYOUT=BLHNC"),
    "two backends": ("auto", [(full(), "triton"), (full(), "layers only")], "several attention backends"),
    "a backend without it": ("auto", [(full(), "layers only")], "does not support it"),
    "a backend that is not known": ("auto", [(full(), "unknown")], "FLASHMLA_SPARSE is not known"),
    "split blocks": ("auto", [(full(), "small blocks")], "a part of a block of 32 tokens"),
    "pages of two sizes": ("auto", [(full(head_size=s), "triton") for s in (32, 64)], "differ in size"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_the_layout_is_asked_for_where_nothing_speaks_against_it(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dtype, layers, reason = REQUESTS[case]
    # vLLM does not make such a configuration without a GPU.
    monkeypatch.setattr(vllm_config.cache_config, "cache_dtype", cache_dtype)
    context = {f"layer{i}": layer_class()(make(), backend(kind)) for i, (make, kind) in enumerate(layers)}
    monkeypatch.setattr(vllm_config.compilation_config, "static_forward_context", context)
    assert nesting.required_layout(vllm_config) == nesting.LAYERS_FIRST, "on a CPU"
    assert not caplog.text
    monkeypatch.setattr(vllm_config.device_config, "device_type", "cuda")
    with caplog.at_level("INFO", logger="kvoffload"):
        wanted = nesting.LAYERS_FIRST if reason else nesting.BLOCKS_FIRST
        assert nesting.required_layout(vllm_config) == wanted
    assert reason in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_backends_that_read_by_stride_exist() -> None:
    """A name that vLLM changes must be changed here too, or the layout is never asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert nesting.READ_BY_STRIDE - {"FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"} <= set(AttentionBackendEnum.__members__)


class DeviceView:
    """Pages on a CUDA device whose driver cannot be used."""

    shape = (4, 64)

    @property
    def device(self) -> Any:
        return torch.device("cuda", 99)

    def __len__(self) -> int:
        return 4


def test_a_cuda_device_without_native_code_is_refused(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = Caches(vllm_config, MODELS["full attention"], "BLHNC")
    monkeypatch.setattr("kvoffload.vllm.pages.page_view", lambda *arguments: DeviceView())
    vllm_pages.page_groups(caches.layout, caches.tensors)
    monkeypatch.setattr(native_loop, "load", lambda name: None)
    with pytest.raises(ConfigError, match=r"native code only.*reinstall kvoffload.*KVOFFLOAD_NATIVE"):
        vllm_pages.page_groups(caches.layout, caches.tensors)


def test_a_device_without_a_usable_driver_does_not_keep_the_engine_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = HostPool(4, 4096)
    transfer = vllm_pages.make_transfer(
        [PageGroup([DeviceView()])],
        lazily("kvoffload.vllm.replicas").RankPool(pool.handle(), pool.data, pool, stores=True),
    )
    assert isinstance(transfer, FailedTransfer)
    assert "the engine starts without it" in caplog.text
    pool.close()


def test_a_rank_that_cannot_copy_leaves_no_pool(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.vllm import rank_half

    caches, pool = Caches(vllm_config, MODELS["full attention"], "BLHNC"), Mock()
    monkeypatch.setattr(rank_half, "layer_pages", lambda *arguments: ())
    monkeypatch.setattr(rank_half, "open_pool", lambda *arguments: pool)
    monkeypatch.setattr(rank_half, "make_transfer", None)
    with pytest.raises(TypeError):
        rank_half.RankHalf(vllm_config, caches.config, caches.layout, caches.tensors)
    pool.close.assert_called_once_with()
