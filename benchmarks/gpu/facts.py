"""What this machine is, and how fast it copies page-locked memory."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Layout, make_views
from kvoffload.abc import PageGroup
from kvoffload.host.limits import available_memory
from kvoffload.transfer.cuda import driver
from kvoffload.units import format_bytes

PAGE = 4096
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
ATTRIBUTES = {16: "multiprocessors", 20: "compute mode", 41: "unified addressing"} | {
    driver.CAN_USE_HOST_POINTERS: "can use host pointer for registered memory",
    driver.CAN_REGISTER: "host register supported",
}
QUERY = (
    "driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,pcie.link.gen.current,pcie.link.width.current,"
    "persistence_mode,ecc.mode.current,mig.mode.current,compute_mode"
)


def run(report: Report, options: Options) -> None:
    gpu = cuda.properties()
    report.add("device", gpu.name)
    report.add("compute capability", f"{gpu.major}.{gpu.minor}")
    report.add("device memory", format_bytes(gpu.total_memory))
    report.add("device memory free", format_bytes(cuda.free_memory()))
    report.add("kernel", platform.release())
    report.add("python", platform.python_version())
    for name in ("torch", "numpy", "vllm"):
        try:
            report.add(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.add(name, "not installed")
    calls = driver.Driver(0)
    report.add("CUDA of the driver", calls.version)
    for attribute, name in ATTRIBUTES.items():
        report.add(f"attribute {attribute}, {name}", calls.attribute(attribute))
    node = calls.numa_node()
    report.add("NUMA node of the device", "unknown" if node is None else str(node))
    report.add("NUMA nodes", str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1))
    report.add("batched copies (CUDA 12.8)", "yes" if calls.copies_in_batches else "no: a call per copy")
    for name in ("enabled", "shmem_enabled"):
        report.add(f"transparent huge pages: {name}", _read(HUGE_PAGES / name))
    report.add("host memory available", format_bytes(available_memory()))
    for direction, speed in cuda.memcpy_peaks(options.size(cuda.PEAK_BYTES)).items():
        report.add(f"memcpy of page-locked memory, {direction}", speed, "GB/s")
    # An idle link saves power, so it is asked now.
    ask_nvidia_smi(report)
    group = PageGroup(make_views(Layout.MERGED, 32, 64, options.size(PAGE) or 64))
    begin = time.perf_counter()
    device = cuda.make_device([group])
    report.add("device made, with the check of batches and kernels", (time.perf_counter() - begin) * 1e3, "ms")
    report.must("batches work", device.batches or not calls.copies_in_batches)
    report.must("the kernel works", device.native_calls().kernels[0] is not None)
    device.close()


def ask_nvidia_smi(report: Report) -> None:
    """Adds what nvidia-smi knows of the first device."""
    program = shutil.which("nvidia-smi")
    if program is None:
        report.add("nvidia-smi", "not installed")
        return
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = done.stdout.strip().split(", ")
    if done.returncode or len(values) != len(QUERY.split(",")):
        report.add("nvidia-smi", f"failed: {(done.stdout + done.stderr).strip()[:100]}")
        return
    for name, value in zip(QUERY.split(","), values, strict=True):
        report.add(name.replace("_", " "), value)
    device = Path("/sys/bus/pci/devices") / values[1].lower().removeprefix("0000")
    for name in ("current_link_speed", "current_link_width"):
        report.add(f"PCIe {name.replace('_', ' ')}", _read(device / name))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return f"unknown ({error.strerror})"
