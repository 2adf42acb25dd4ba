"""The kernel's code and the pieces that it copies. What it does is tested on the emulated driver and on GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import accumulate
from pathlib import Path

import pytest

from kvoffload.transfer.cuda import kernels
from kvoffload.transfer.cuda.calls import MAX_BLOCKS
from kvoffload.transfer.cuda.kernels import PIECE_BYTES, THREADS, cut, kernel_code, word_size
from kvoffload.transfer.cuda.pages import LayerRun, PageTable

SOURCE = Path(kernels.__file__).with_name("kernel.cu")
MADE_BY = "release 13.0"
NVCC, PTXAS = shutil.which("nvcc"), shutil.which("ptxas")
MOST_PARAMETER_BYTES = 4096


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_the_code_is_what_the_compiler_makes_of_the_source(tmp_path: Path) -> None:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if MADE_BY not in version:
        pytest.skip(f"needs nvcc, {MADE_BY}")
    made = tmp_path / "kernel.ptx"
    subprocess.run(["nvcc", "-ptx", "-arch=compute_75", "-o", made, SOURCE], check=True)
    lines = [line for line in made.read_text().splitlines() if line.strip() and not line.strip().startswith("//")]
    assert re.sub(r"(?m)^\.version .*", ".version 7.0", "\n".join(lines) + "\n") == kernel_code().decode()


@pytest.mark.skipif(PTXAS is None, reason="needs ptxas")
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_devices_run_it_without_spilling_registers(tmp_path: Path, capability: int) -> None:
    code = tmp_path / "kernel.ptx"
    code.write_bytes(kernel_code())
    command = ["ptxas", f"-arch=sm_{capability}", "-v", "-o", str(tmp_path / "kernel.cubin"), str(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this ptxas does not know sm_{capability}")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", done.stderr) == [("0", "0")] * 6


def test_the_code_takes_the_arguments_that_are_passed() -> None:
    code = kernel_code().decode()
    for name in (f"{way}{size}" for way in ("gather", "scatter") for size in kernels.WORD_SIZES):
        match = re.search(rf"\.entry {name}\((.*?)\)\s*\.maxntid (\d+), 1, 1", code, re.DOTALL)
        assert match, name
        parameters, threads = match.groups()
        assert re.findall(r"\.param (\.[a-z]+ ?\d* ?\.?b?8?)", parameters)[:5] == [".u64 "] * 3 + [".u32 "] * 2
        assert f".param .align 4 .b8 {name}_param_5[{4 * MAX_BLOCKS}]" in parameters
        assert int(threads) == THREADS
    assert 3 * 8 + 2 * 4 + 4 * MAX_BLOCKS <= MOST_PARAMETER_BYTES


@pytest.mark.parametrize("sizes", [[2048] * 4, [9216, 512, 64, 73728], [18432, 18432 + 48], [7, 129, 1], [6 * 16384]])
def test_pieces_cover_each_run_once(sizes: list[int]) -> None:
    offsets = accumulate(sizes, initial=0)
    runs = [LayerRun(at << 20, size + 64, size, at) for at, size in zip(offsets, sizes, strict=False)]
    table = PageTable(tuple(runs), sum(sizes), 9)
    covered: list[tuple[int, int]] = []
    for base, stride, nbytes, offset in cut(table).tolist():
        assert 0 < nbytes <= PIECE_BYTES
        (run,) = (run for run in table.runs if run.offset <= offset < run.offset + run.nbytes)
        assert (stride, base - run.base) == (run.stride, offset - run.offset)
        covered.append((offset, nbytes))
    ends = [offset + nbytes for offset, nbytes in covered]
    assert [offset for offset, _ in covered] == [0, *ends[:-1]]
    assert ends[-1] == table.device_block_bytes


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        ([LayerRun(1 << 20, 65536, 65536, 0)], 16),
        ([LayerRun(1 << 20, 65536, 65536, 0), LayerRun(8 + (1 << 30), 65536, 65536, 65536)], 4),
        ([LayerRun(1 << 20, 656, 656, 0), LayerRun(1 << 30, 656, 656, 656)], 16),
        ([LayerRun(1 << 20, 66, 66, 0)], 1),
        ([LayerRun(1 << 20, 65537, 65536, 0)], 1),
    ],
)
def test_words_divide_all_addresses_and_sizes(runs: list[LayerRun], size: int) -> None:
    assert word_size(PageTable(tuple(runs), sum(run.nbytes for run in runs), 8)) == size
