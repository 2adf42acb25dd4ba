"""The kernels that gather and scatter, without a GPU.

Triton's kernel runs in its interpreter, where addresses are those of the host, and is compiled for GPUs that are not
here. What torch's functions do is tested with tensors on the host.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import PageGroup
from tests.transfer.cuda.layouts import CACHES, GUARD, Cache, aligned, separate

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvoffload.transfer.cuda import kernels
from kvoffload.transfer.cuda.kernels import Pieces, TritonCopier, as_words, cut, gather, scatter
from kvoffload.transfer.cuda.pages import PageTable, Run, page_table

needs_triton = pytest.mark.skipif(kernels.kernel is None, reason="needs Triton")
KEPT: list[np.ndarray] = []
"""Memory that copiers use by address."""


# The interpreter.


def interpreted(source: Callable[..., Any] = kernels.copy_pieces) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(source)


def triton_copier(table: PageTable, launch: Any) -> TritonCopier:
    """Returns a copier whose entries are in host memory, where the interpreter reads them."""
    pieces = cut(table)
    copier = TritonCopier(pieces, pieces.entries.ctypes.data, launch)
    KEPT.append(pieces.entries)
    return copier


def faults(cache: Cache, launch: Any, blocks: list[int]) -> str | None:
    """Gathers ``blocks`` and scatters other bytes into them. Returns what differs from plain copies, or None."""
    copier = triton_copier(cache.table, launch)
    index, num_bytes = np.array(blocks, np.int64), len(blocks) * cache.row_bytes
    stage = aligned(num_bytes + 2 * GUARD)
    stage[:] = cache.rng.integers(0, 256, len(stage), np.uint8)
    rows = slice(GUARD, GUARD + num_bytes)

    wanted, before = stage.copy(), cache.bytes.copy()
    wanted[rows] = np.concatenate([view[index] for view in cache.views], axis=1).ravel()
    copier.copy(index.ctypes.data, len(blocks), stage[rows].ctypes.data, to_staging=True)
    if not np.array_equal(stage, wanted):
        return "gathered bytes"
    if not np.array_equal(cache.bytes, before):
        return "gathering has changed the cache"

    stage[rows] = cache.rng.integers(0, 256, num_bytes, np.uint8)
    copier.copy(index.ctypes.data, len(blocks), stage[rows].ctypes.data, to_staging=False)
    found = cache.bytes.copy()
    cache.bytes[:] = before
    at = 0
    for view in cache.views:
        view[index] = stage[rows].reshape(len(blocks), -1)[:, at : at + view.shape[1]]
        at += view.shape[1]
    return None if np.array_equal(found, cache.bytes) else "scattered bytes"


@needs_triton
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_blocks_are_copied_as_plain_indexing_does(make: Callable[[], Cache]) -> None:
    cache = make()
    some = cache.rng.permutation(cache.num_blocks)[: cache.num_blocks - 1].tolist()
    assert faults(cache, interpreted(), some) is None


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    num_blocks = draw(st.integers(1, 6))
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 48, 512]))
    pages = draw(st.lists(st.integers(1, 40).map(lambda n: n * unit), min_size=1, max_size=5))
    gaps = draw(st.lists(st.integers(0, 3).map(lambda n: n * unit), min_size=len(pages), max_size=len(pages)))
    seed = draw(st.integers(0, 1 << 20))
    if draw(st.booleans()):
        stride = sum(pages) + sum(gaps)
        starts = [sum(pages[:i]) + sum(gaps[:i]) for i in range(len(pages))]
        return Cache(num_blocks, pages, starts, [stride] * len(pages), seed)
    strides = [page + gap for page, gap in zip(pages, gaps, strict=True)]
    return Cache(num_blocks, pages, [num_blocks * sum(strides[:i]) for i in range(len(pages))], strides, seed)


@needs_triton
@settings(max_examples=50)
@given(cache=caches(), data=st.data())
def test_random_layouts_are_copied_as_plain_indexing_does(cache: Cache, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.integers(0, cache.num_blocks - 1), min_size=1, unique=True))
    assert faults(cache, interpreted(), blocks) is None


class Sparse(NamedTuple):
    """Pages of one layer, ``stride`` bytes apart, in the upper half of a mapping that is mostly never touched."""

    memory: mmap.mmap
    view: np.ndarray


@pytest.fixture
def sparse() -> Sparse:
    """A cache of 7 GiB of addresses, with as much mapped below it, where a wrong address may fall."""
    num_blocks, stride, page = 8, 1 << 30, 4096
    file = os.memfd_create("sparse")
    os.ftruncate(file, 2 * num_blocks * stride)
    memory = mmap.mmap(file, 0)
    os.close(file)
    data = np.frombuffer(memory, np.uint8)
    view = np.lib.stride_tricks.as_strided(data[num_blocks * stride :], (num_blocks, page), (stride, 1))
    view[:] = np.random.default_rng(1).integers(0, 256, view.shape, np.uint8)
    return Sparse(memory, view)


def far_faults(sparse: Sparse, launch: Any) -> bool:
    """Returns whether blocks that are more than 4 GiB apart are gathered or scattered wrongly."""
    copier = triton_copier(page_table(PageGroup([sparse.view])), launch)
    index, stage = np.array([6, 1, 3, 7]), aligned(4 * 4096)
    copier.copy(index.ctypes.data, 4, stage.ctypes.data, to_staging=True)
    if not np.array_equal(stage, sparse.view[index].ravel()):
        return True
    wanted = sparse.view.copy()
    wanted[index] = stage.reshape(4, -1)[::-1]
    stage[:] = wanted[index].ravel()
    copier.copy(index.ctypes.data, 4, stage.ctypes.data, to_staging=False)
    return not np.array_equal(sparse.view, wanted)


@needs_triton
def test_blocks_beyond_4_gib_are_copied(sparse: Sparse) -> None:
    assert not far_faults(sparse, interpreted())


PLANTED = {
    "32-bit addresses": ("base + block * stride", "base + (block * stride).to(tl.int32)"),
    "32-bit multiplication": ("base + block * stride", "base + (block.to(tl.int32) * stride.to(tl.int32))"),
    "the page's length for its stride": ("block * stride", "block * nbytes"),
    "no offset of the page": ("row_bytes + offset", "row_bytes"),
    "the whole piece is copied": (
        "inside = words[None, :] < tl.multiple_of(size, ALIGN // WORD_BYTES)[:, None]",
        "inside = exists[:, None] & (words[None, :] >= 0)",
    ),
    "the last word is left out": ("(nbytes // WORD_BYTES)", "(nbytes // WORD_BYTES - 1)"),
    "steps are skipped": ("tl.num_programs(0).to(tl.int64) * PIECES", "tl.num_programs(0).to(tl.int64) * 2 * PIECES"),
    "the first block for all": ("tl.load(blocks + row, ", "tl.load(blocks + row * 0, "),
    "the table of the first piece": ("(number - row * num_pieces)", "(number * 0)"),
}


def planted(right: str, wrong: str, folder: Path) -> Callable[..., Any]:
    """Returns the kernel's source with ``wrong`` in the place of ``right``."""
    source = inspect.getsource(kernels.copy_pieces)
    assert source.count(right) == 1
    path = folder / "planted.py"
    path.write_text(
        f"from __future__ import annotations\n\nimport triton.language as tl\n\n\n{source.replace(right, wrong)}"
    )
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Callable[..., Any] = module.copy_pieces
    return kernel


@needs_triton
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, sparse: Sparse) -> None:
    launch = interpreted(planted(*PLANTED[fault], tmp_path))
    if "32-bit" in fault:
        assert far_faults(sparse, launch)
    else:
        names = ("blocks outermost with gaps", "pages of several sizes", "more steps than programs")
        assert any(faults(cache, launch, [2, 0, *range(3, cache.num_blocks)]) for cache in (CACHES[n]() for n in names))


# Pieces.


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_pieces_cover_each_run_once(make: Callable[[], Cache]) -> None:
    table = make().table
    pieces = cut(table)
    covered: list[tuple[int, int, int]] = []
    for base, stride, nbytes, offset in pieces.entries.tolist():
        assert 0 < nbytes <= pieces.piece_bytes
        (run,) = (run for run in table.runs if run.offset <= offset < run.offset + run.nbytes)
        assert (stride, base - run.base) == (run.stride, offset - run.offset)
        covered.append((offset, nbytes, stride))
    ends = [offset + nbytes for offset, nbytes, _ in covered]
    assert [offset for offset, _, _ in covered] == [0, *ends[:-1]]
    assert ends[-1] == table.device_block_bytes == pieces.row_bytes


@pytest.mark.parametrize(
    ("runs", "align", "piece_bytes"),
    [
        ([Run(1 << 20, 65536, 65536, 0)], 16, 16384),
        ([Run(1 << 20, 36864, 36864, 0)], 16, 8192),
        ([Run(1 << 20, 9216, 9216, 0)], 16, 2048),
        ([Run(1 << 20, 64, 64, 0)], 16, 512),
        ([Run(1 << 20, 65536, 65536, 0), Run(8 + (1 << 30), 65536, 65536, 65536)], 8, 16384),
        ([Run(1 << 20, 656, 656, 0), Run(1 << 30, 656, 656, 656)], 16, 1024),
        ([Run(1 << 20, 66, 66, 0)], 2, 256),
        ([Run(1 << 20, 65537, 65536, 0)], 1, 4096),
    ],
)
def test_the_layout_decides_the_width_of_words_and_the_size_of_pieces(
    runs: list[Run], align: int, piece_bytes: int
) -> None:
    pieces = cut(PageTable(tuple(runs), 8))
    assert (pieces.align, pieces.piece_bytes) == (align, piece_bytes)


def test_rows_that_are_not_aligned_are_refused() -> None:
    launches: list[Any] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append(grid)

    copier = triton_copier(separate(4, [64]).table, Launch())
    launches.clear()
    with pytest.raises(ValueError, match="not a multiple of 16"):
        copier.copy(0, 1, 8, to_staging=True)
    copier.copy(0, 0, 16, to_staging=True)
    assert launches == []
    copier.copy(0, 100_000, 16, to_staging=True)
    assert launches == [(kernels.NUM_PROGRAMS,)]


# Compiled code.


class NoGpu:
    """Triton's driver for a GPU that is not there: compiles for it, loads nothing, and notes launches.

    The number of the device is its architecture, so that Triton keeps compilations apart.
    """

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.utils = self
        self.launches: list[tuple[Any, ...]] = []

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0x77

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: self.launches.append(args)


class Compiled(NamedTuple):
    """What some launches led to: the distinct kernels, and the arguments of two gathers."""

    kernels: list[Any]
    launches: list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Compiled]]:
    """Returns a function that launches the kernel on a GPU that is not there."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    def compiled(architecture: int, pieces: Pieces, source: Callable[..., Any] = kernels.copy_pieces) -> Compiled:
        from triton.runtime import driver

        gpu = NoGpu(architecture)
        # A launcher of its own, because Triton keeps what it has compiled per function.
        import triton

        launcher = triton.jit(source, do_not_specialize=kernels.RUNTIME_ARGUMENTS)
        found: list[Any] = []

        class Launch:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args, **options: found.append(launcher[grid](*args, **options))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(driver), "active", gpu)
            copier = TritonCopier(pieces, 0x7E00_0000_0000, Launch())
            gpu.launches.clear()
            for num_blocks, index, staging in ((1, 0x1000, 0x2000), (3, 0x7F00_0000_1008, 0x7F00_0000_0010)):
                copier.copy(index, num_blocks, staging, to_staging=True)
        return Compiled(list({id(each): each for each in found}.values()), gpu.launches)

    yield compiled
    patch.undo()


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Returns the registers and the bytes of memory that a program of the kernel takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"needs cuobjdump, which this Triton does not bring at {tool}")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def accesses(ptx: str) -> set[str]:
    """Returns the kinds of loads and stores of global memory, but not those of the tables, which are 64 bits wide."""
    return set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx)) - {"ld.global.b64"}


PAGES = {16: 65536, 8: 65544, 4: 65540, 2: 65538, 1: 65537}
"""By width of the words, a length of pages that allows no wider ones."""
WIDTHS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}


@needs_triton
@pytest.mark.parametrize(("architecture", "align"), [(80, 16), (90, 16), (100, 16), (90, 8), (90, 4), (90, 2), (90, 1)])
def test_compiled_code_moves_the_widest_words_without_spilling(
    compiled: Callable[..., Compiled], architecture: int, align: int, tmp_path: Path
) -> None:
    page = PAGES[align]
    code = compiled(architecture, cut(PageTable((Run(1 << 40, page, page, 0), Run(1 << 41, page, page, page)), 8)))
    assert len(code.kernels) == 2, "one compilation per direction serves all launches"
    for each in code.kernels:
        assert accesses(each.asm["ptx"]) == {f"ld.global.{WIDTHS[align]}", f"st.global.{WIDTHS[align]}"}
        assert re.search(r"\b(mul|mad)\.lo\.s64", each.asm["ptx"]), "addresses are not computed in 64 bits"
        used = resources(each.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == used["SHARED"] == 0
        assert used["REG"] <= 128


@needs_triton
def test_without_hints_compiled_code_moves_narrow_words(compiled: Callable[..., Compiled], tmp_path: Path) -> None:
    source = planted("tl.multiple_of(page, ALIGN)", "page", tmp_path)
    page = PAGES[16]
    code = compiled(90, cut(PageTable((Run(1 << 40, page, page, 0), Run(1 << 41, page, page, page)), 8)), source)
    assert "ld.global.b32" in accesses(code.kernels[0].asm["ptx"])


@needs_triton
def test_small_pages_are_moved_in_the_widest_words_too(compiled: Callable[..., Compiled], tmp_path: Path) -> None:
    code = compiled(90, cut(PageTable((Run(1 << 40, 512, 512, 0), Run(1 << 41, 64, 64, 512)), 8)))
    for each in code.kernels:
        assert accesses(each.asm["ptx"]) == {"ld.global.v4.b32", "st.global.v4.b32"}
        assert resources(each.asm["cubin"], tmp_path)["STACK"] == 0


@needs_triton
def test_a_launch_uses_the_current_stream_and_few_programs(compiled: Callable[..., Compiled]) -> None:
    page = 1 << 20
    small, large = compiled(90, cut(PageTable((Run(1 << 40, page, page, 0),), 8))).launches
    grid, stream = slice(0, 3), 3
    assert (small[grid], large[grid]) == ((kernels.NUM_PROGRAMS, 1, 1),) * 2
    assert small[stream] == large[stream] == 0x77
    assert large[-10:-4] == (0x7E00_0000_0000, 0x7F00_0000_1008, 0x7F00_0000_0010, 3, page // 16384, page)


# Which kernel is used.


class DeviceMemory:
    """Allocates host memory as if it were the device's."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    def allocate(self, nbytes: int) -> int:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.tensors[tensor.data_ptr()] = tensor
        return int(tensor.data_ptr())

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        return self.tensors[address][:nbytes]


def tensors(pages: list[int], num_blocks: int = 9) -> list[torch.Tensor]:
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.integers(0, 256, (num_blocks, page), np.uint8)) for page in pages]


class Wrong(kernels.BlockCopier):
    """Copies nothing in one direction."""

    def __init__(self, right: kernels.BlockCopier, wrong_direction: bool) -> None:
        self._right, self._wrong = right, wrong_direction

    def copy(self, index: int, num_blocks: int, staging: int, to_staging: bool) -> None:
        if to_staging != self._wrong:
            self._right.copy(index, num_blocks, staging, to_staging)


@needs_triton
@pytest.mark.parametrize("pages", [[1024, 64], [48, 7]])
def test_the_check_at_start_finds_a_wrong_kernel_and_puts_bytes_back(pages: list[int]) -> None:
    views = tensors(pages)
    before = [view.clone() for view in views]
    copier = triton_copier(page_table(PageGroup(views)), interpreted())
    assert kernels.copies_right(copier, views)
    for direction in (False, True):
        assert not kernels.copies_right(Wrong(copier, direction), views)
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))


@needs_triton
def test_the_check_at_start_leaves_random_numbers_alone() -> None:
    views = tensors([64])
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    kernels.copies_right(triton_copier(page_table(PageGroup(views)), interpreted()), views)
    assert torch.equal(torch.rand(4), wanted)


def test_without_triton_torch_copies_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "triton", None)
    memory = DeviceMemory()
    groups = [PageGroup(tensors([64])), PageGroup([]), PageGroup(tensors([32]))]
    with caplog.at_level(logging.WARNING):
        first, none, third = kernels.copiers(groups, memory.allocate, memory.at)
    assert isinstance(first, kernels.TorchCopier)
    assert isinstance(third, kernels.TorchCopier)
    assert none is None
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == len(caplog.records) == 1


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works here")
def test_where_triton_does_not_work_torch_copies(caplog: pytest.LogCaptureFixture) -> None:
    views, memory = tensors([64]), DeviceMemory()
    before = views[0].clone()
    with caplog.at_level(logging.WARNING):
        (copier,) = kernels.copiers([PageGroup(views)], memory.allocate, memory.at)
    assert isinstance(copier, kernels.TorchCopier)
    assert "Triton's kernel does not work here" in caplog.text
    assert torch.equal(views[0], before)


@needs_triton
@pytest.mark.parametrize("wrong", [False, True])
def test_triton_copies_if_its_bytes_are_right(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    source = planted(*PLANTED["no offset of the page"], tmp_path) if wrong else kernels.copy_pieces
    monkeypatch.setattr(kernels, "kernel", interpreted(source))
    memory = DeviceMemory()
    (copier,) = kernels.copiers([PageGroup(tensors([64, 32]))], memory.allocate, memory.at)
    assert isinstance(copier, kernels.TorchCopier if wrong else TritonCopier)
    assert ("copied wrong bytes" in caplog.text) is wrong


@pytest.mark.parametrize("pages", [[64, 24, 40], [48, 48, 48], [7]])
def test_torch_copies_by_address(pages: list[int]) -> None:
    views = tensors(pages)
    rows = torch.zeros((4, sum(pages)), dtype=torch.uint8)
    index = torch.tensor([5, 0, 8, 2])
    memory = {index.data_ptr(): index.view(torch.uint8), rows.data_ptr(): rows.view(-1)}
    copier = kernels.TorchCopier(views, lambda address, nbytes: memory[address][:nbytes])
    copier.copy(index.data_ptr(), 3, rows.data_ptr(), to_staging=True)
    assert torch.equal(rows[:3], torch.cat([view[index[:3]] for view in views], dim=1))
    assert not rows[3].any()
    for view in views:
        view.zero_()
    copier.copy(index.data_ptr(), 2, rows.data_ptr(), to_staging=False)
    assert torch.equal(torch.cat([view[index[:3]] for view in views], dim=1)[:2], rows[:2])
    assert not any(view[8].any() for view in views)


# Torch's functions.

LAYERS, BLOCKS, PAGE = 3, 12, 64


def together() -> list[torch.Tensor]:
    """Returns views of one allocation, as vLLM makes them."""
    return list(torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8))


def apart() -> list[torch.Tensor]:
    """Returns separate allocations, with pages of different sizes."""
    return [torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8) for size in (64, 24, 40)]


def interleaved() -> list[torch.Tensor]:
    """Returns views of one allocation whose outermost dimension is blocks."""
    whole = torch.randint(0, 256, (BLOCKS, LAYERS, PAGE), dtype=torch.uint8)
    return [whole[:, layer] for layer in range(LAYERS)]


LAYOUTS = pytest.mark.parametrize("make", [together, apart, interleaved])


@LAYOUTS
def test_torch_gathers_every_layers_page_of_each_block(make: Callable[[], list[torch.Tensor]]) -> None:
    views = make()
    index = torch.tensor([5, 0, 11])
    stage = torch.empty((3, sum(view.shape[1] for view in views)), dtype=torch.uint8)
    gather(as_words(views), index, stage)
    assert torch.equal(stage, torch.cat([view[index] for view in views], dim=1))


@LAYOUTS
def test_torch_scatters_what_it_gathered_and_touches_nothing_else(make: Callable[[], list[torch.Tensor]]) -> None:
    views = make()
    before = [view.clone() for view in views]
    index = torch.tensor([7, 2])
    stage = torch.empty((2, sum(view.shape[1] for view in views)), dtype=torch.uint8)
    gather(as_words(views), index, stage)
    for view in views:
        view[index] = 0
    scatter(as_words(views), index, stage)
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))


def test_equally_spaced_views_become_one_array_of_words() -> None:
    (merged,) = as_words(together())
    assert merged.shape == (BLOCKS, LAYERS, PAGE // 8)
    assert merged.dtype == torch.int64
    assert len(as_words(apart())) == 3


def test_the_size_of_pages_limits_the_width_of_words() -> None:
    views = [torch.zeros((BLOCKS, 6), dtype=torch.uint8) for _ in range(2)]
    assert as_words(views)[0].dtype == torch.int16
