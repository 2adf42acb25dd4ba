"""The scheduler half of vLLM's own offloading, without a model, on one tier: a server that a test kills.

``python tier_server.py FOLDER ENTRY SEED``. FOLDER gets the files of a model, ENTRY is the JSON of an entry of
``secondary_tiers``. Documents are the same in every server, and so are the bytes of their chunks. Prints "serving" once
it runs, then a line of JSON per ROUND requests. Ends with status 1 if a chunk has other bytes than it should.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from demo.vllm_servers import Server, offloading_scheduler, set_positions

DOCUMENTS = 24
LONGEST = 12
LIVE = 6
ROUND = 20
CPU_BYTES = 64 * 4096
"""64 chunks: a quarter of what the documents have."""


def chain(document: int) -> list[bytes]:
    """Returns the keys of a document's chunks, in order."""
    from vllm.v1.kv_offload.base import make_offload_key

    length = Random(document).randint(3, LONGEST)
    return [make_offload_key(hashlib.sha256(f"{document} {i}".encode()).digest(), 0) for i in range(length)]


def content(key: bytes, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a chunk."""
    return np.frombuffer(hashlib.shake_128(key).digest(nbytes), np.uint8)


class WrongBytesError(Exception):
    """A chunk that the manager says is there has other bytes."""


class Requests:
    """Requests that look up the chunks of a document, load what is found, and store the rest."""

    def __init__(self, manager: Any, seed: int) -> None:
        self._manager = manager
        self._rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._random = Random(seed)
        self._live: list[tuple[Any, list[bytes]]] = []
        self._new: list[str] = []
        self._stored: set[bytes] = set()
        self._arrived = 0
        self.counts: Counter[str] = Counter()
        """``kept``: chunks that were loaded although this server never stored them."""
        (tier,) = manager.secondary_tiers
        self._watch(tier)

    def _watch(self, tier: Any) -> None:
        submit = tier.submit_load

        def submit_load(job: Any) -> None:
            self.counts["promoted"] += len(job.keys)
            submit(job)

        tier.submit_load = submit_load

    def step(self) -> None:
        """Does what a step of vLLM's scheduler does, for a few requests at a time."""
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        while len(self._live) < LIVE:
            context, keys = ReqContext(req_id=f"r{self._arrived}"), chain(self._random.randrange(DOCUMENTS))
            self._arrived += 1
            set_positions(context, keys)
            self._manager.on_new_request(context)
            self._live.append((context, keys))
            self._new.append(context.req_id)
        self._live = [request for request in self._live if not self._advance(*request)]
        self._manager.on_schedule_end(ScheduleEndContext(new_req_ids=self._new, preempted_req_ids=()))
        self._new = []

    def _advance(self, context: Any, keys: list[bytes]) -> bool:
        """Returns whether the request has ended."""
        from vllm.v1.kv_offload.base import LookupResult

        found = 0
        for key in keys:
            result = self._manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            if result is not LookupResult.HIT:
                return False
            found += 1
        self._manager.touch(keys, context)
        if found:
            self._load(keys[:found], context)
        self._store(keys[found:], context)
        self._manager.on_request_finished(context)
        self.counts["requests"] += 1
        return True

    def _load(self, keys: list[bytes], context: Any) -> None:
        spec = self._manager.prepare_load(keys, context)
        for key, row in zip(keys, spec.chunk_ids, strict=True):
            if not np.array_equal(self._rows[row], content(key, self._rows.shape[1])):
                raise WrongBytesError(f"{key.hex()} in row {row}")
            self.counts["kept"] += key not in self._stored
        self._manager.complete_load(keys, context)
        self.counts["loaded"] += len(keys)

    def _store(self, keys: list[bytes], context: Any) -> None:
        prepared = self._manager.prepare_store(keys, context) if keys else None
        if prepared is None or not prepared.keys_to_store:
            return
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self._rows[row] = content(key, self._rows.shape[1])
        self._manager.complete_store(prepared.keys_to_store, context)
        self._stored |= set(prepared.keys_to_store)
        self.counts["stored"] += len(prepared.keys_to_store)


def main() -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    folder, entry, seed = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    scheduler, _ = offloading_scheduler(TieringOffloadingSpec, Server(), folder, entry, CPU_BYTES)
    requests = Requests(scheduler.manager, seed)
    print("serving", flush=True)
    said = 0
    while True:
        requests.step()
        if requests.counts["requests"] >= said + ROUND:
            said = requests.counts["requests"]
            print(json.dumps(requests.counts), flush=True)


if __name__ == "__main__":
    main()
