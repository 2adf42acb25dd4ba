"""``python -m benchmarks``: runs every benchmark and writes ``bench-report/NAME.json``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    calls,
    codec,
    convoys,
    copies,
    disk,
    doors,
    engine,
    fingerprint,
    handover,
    hicache,
    hints,
    managers,
    node,
    object_store,
    policies,
    prefetch,
    replay,
    shared_dir,
    states,
    steps,
    stores,
    submit,
    tenants,
    ttft,
    waiting,
    writes,
)

BENCHMARKS = {
    "calls": calls.main,
    "codec": codec.main,
    "managers": managers.main,
    "copies": copies.main,
    "disk": disk.main,
    "doors": doors.main,
    "engine": engine.main,
    "fingerprint": fingerprint.main,
    "convoys": convoys.main,
    "handover": handover.main,
    "hicache": hicache.main,
    "hints": hints.main,
    "object_store": object_store.main,
    "node": node.main,
    "policies": policies.main,
    "prefetch": prefetch.main,
    "replay": replay.main,
    "shared_dir": shared_dir.main,
    "states": states.main,
    "steps": steps.main,
    "stores": stores.main,
    "submit": submit.main,
    "tenants": tenants.main,
    "ttft": ttft.main,
    "waiting": waiting.main,
    "writes": writes.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="directory of the JSON files")
    parser.add_argument("--quick", action="store_true", help="use smaller sizes, to check that the benchmarks run")
    args = parser.parse_args()
    for name in args.names or BENCHMARKS:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; the benchmarks are {', '.join(BENCHMARKS)}")
        BENCHMARKS[name](args.out, args.quick)


if __name__ == "__main__":
    main()
