"""``python -m benchmarks.gpu``: runs the proof on a GPU, part by part, and prints one table.

Each part is a process with a time limit and writes a JSON file. A part that fails does not stop the others. Exits with
1 if there is no GPU, a part failed, or a gate was missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu import bundle
from benchmarks.gpu.parts import Options, Skipped
from benchmarks.gpu.report import Report, State, read, table

PARTS = {
    # The most telling first. All but the last fit into TOTAL_S; it runs for what is left, or alone.
    "facts": ("facts", 30),
    "tests": ("suite", 120),
    "copies": ("copies", 90),
    "engine": ("engine", 60),
    "busy": ("busy", 60),
    "submit": ("submit", 40),
    "interference": ("interference", 50),
    "registration": ("registration", 50),
    "sanitizer": ("sanitizer", 60),
    "vllm": ("vllm_runs", 400),
}
"""By name: the module, and how many seconds the part may take."""
LAST = ("vllm",)
"""Has what the others leave."""
NEEDED = ("torch", "numpy", "pytest", "xxhash")
TOTAL_S = 560
MIN_S = 15
"""A part is not begun with less time than this."""
GRACE_S = 5.0
"""After its limit a part has this long to end after SIGINT, before it is killed."""
SETTINGS = {
    # Streams that share a connection wait for one another, and controls would find nothing.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Products of float32 are then those of float32.
    "NVIDIA_TF32_OVERRIDE": "0",
}
"""The environment of the parts."""
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="directory of the JSON files")
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_S,
        help=f"time for all parts (default {TOTAL_S}; with 300 each part is shorter and has fewer rounds)",
    )
    parser.add_argument("--resume", action="store_true", help="run only parts that have not ended yet")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table of the files in --out")
    parser.add_argument("--dry-run", action="store_true", help="rehearse every part without a GPU, with small sizes")
    parser.add_argument("--child", metavar="LIMIT", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {min(unknown)!r}; the parts are {', '.join(PARTS)}")
    if options.child is not None:
        share = options.child / PARTS[options.parts[0]][1]
        return _run_here(options.parts[0], Options(options.child, False, options.out, share))
    if not options.table:
        missing = "" if options.dry_run else _missing_device()
        if missing:
            print(f"make gpu: {missing}", file=sys.stderr)
            return 1
        options.out.mkdir(parents=True, exist_ok=True)
        if options.dry_run:
            _rehearse(options.parts or list(PARTS), options.out)
        else:
            run_all(options.parts or list(PARTS), options.out, options.seconds, options.resume)
    code = print_table(options.out)
    if options.out.is_dir() and not options.dry_run:
        print(
            f"Please send {bundle.write(options.out, PARTS)}: attach it to an issue of the project, also if all gates "
            "passed. It holds no names of the user or machine, keys or identifiers of the GPU."
        )
    return code


def _missing_device() -> str:
    """Returns why nothing can run here, or nothing."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported by {sys.executable}: {error}"
    import torch

    if not torch.cuda.is_available():
        return f"there is no CUDA device that torch {torch.__version__} can use"
    return ""


def run_all(names: list[str], out: Path, seconds: float, resume: bool) -> None:
    end = time.monotonic() + seconds
    for path in out.glob("*.json"):
        if read(path)["rehearsal"]:
            path.unlink()
    for name in names:
        path = out / f"{name}.json"
        if resume and path.exists() and read(path)["state"] in (State.ENDED, State.SKIPPED):
            continue
        limit = _limit(names[names.index(name) :], end - time.monotonic())
        report = Report(name, path)
        if limit < MIN_S:
            report.end(State.SKIPPED, f'no time left: make gpu ARGS="{name}"')
            continue
        print(f"{name}: at most {limit:.0f} s ...", file=sys.stderr, flush=True)
        report.write()
        _run_part(name, limit, out, report)


def _limit(names: list[str], seconds: float) -> float:
    """Returns how long the first part may take, if ``seconds`` are left for all: its share if that is too little for
    all of them. One that ends early leaves its time to the others."""
    limit, most = PARTS[names[0]][1], sum(PARTS[name][1] for name in names if name not in LAST or name == names[0])
    return min(limit, seconds, max(MIN_S, seconds * limit / most))


def _run_part(name: str, limit: float, out: Path, report: Report) -> None:
    """Runs a part in a process group of its own, which is killed at the end."""
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--child", f"{limit:.0f}", "--out", str(out.resolve())]
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONUNBUFFERED="1", **SETTINGS)
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            if read(report.path)["state"] == State.RUNNING:
                _end(report.path, State.FAILED, f"the process ended with {code}: see {name}.log")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _end(report.path, State.TIMED_OUT, f"after {limit:.0f} s: see {name}.log")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _end(path: Path, state: State, note: str) -> None:
    """Writes the end of a part whose process has not done so. Its figures are kept."""
    fields = read(path)
    report = Report(fields["part"], path, rows=fields["rows"])
    report.end(state, note)


def _run_here(name: str, options: Options) -> int:
    """Runs a part in this process."""
    report = Report(name, options.out / f"{name}.json", rehearsal=options.dry_run)
    report.write()
    try:
        importlib.import_module(f"benchmarks.gpu.{PARTS[name][0]}").run(report, options)
    except Skipped as reason:
        report.end(State.SKIPPED, str(reason))
    except Exception as error:
        traceback.print_exc()
        report.end(State.FAILED, f"{type(error).__name__}: {error}"[:300])
        return 1
    else:
        report.end(State.ENDED)
    return 0


def _rehearse(names: list[str], out: Path) -> None:
    from benchmarks.gpu import rehearsal

    rehearsal.install()
    for name in names:
        _run_here(name, Options(PARTS[name][1], True, out.resolve()))


def print_table(out: Path) -> int:
    """Prints the table of the parts in ``out``. Returns 1 if a part has failed or a gate was missed. Gates of a
    rehearsal do not count."""
    reports = [read(out / f"{name}.json") for name in PARTS if (out / f"{name}.json").exists()]
    print(table(reports))
    gates = [row for report in reports for row in report["rows"] if row.passed is not None and not report["rehearsal"]]
    missed = sum(not row.passed for row in gates)
    failed = [report["part"] for report in reports if report["state"] not in (State.ENDED, State.SKIPPED)]
    print(f"{len(gates) - missed} of {len(gates)} gates passed", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    if any(report["rehearsal"] for report in reports):
        print("This was a rehearsal without a GPU: its figures and gates say nothing about one, and do not count.")
    return int(bool(missed or failed or not reports))


if __name__ == "__main__":
    sys.exit(main())
