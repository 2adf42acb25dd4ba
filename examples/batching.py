"""kvoffload in an engine that runs many requests on too few device blocks: which offers it accepts, and what it does
when a request that runs finds no block."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import kvoffload as kv

TOKENS, LAYERS, PAGE_BYTES = 16, 2, 4096  # tokens per block, layers of the model, bytes per block and layer


@dataclass(eq=False)
class Request:
    """A request for ``wanted`` tokens, prompt included."""

    request_id: str
    tokens: list[int]
    wanted: int
    kv_transfer_params: None = None
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    is_loading: bool = False
    is_new: bool = True  # whether its whole block table goes into the next step

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return kv.hash_blocks(self.tokens, TOKENS)

    def get_block_ids(self) -> tuple[list[int]]:
        return (list(self.blocks),)


class Engine:
    """``free`` are the device blocks that no request holds. ``loaded`` counts tokens that were loaded."""

    def __init__(self, config: kv.OffloadConfig, num_device_blocks: int) -> None:
        self.device = np.zeros((LAYERS, 1 + num_device_blocks, PAGE_BYTES), dtype=np.uint8)
        self.pool = kv.HostPool(config.num_blocks(LAYERS * PAGE_BYTES), LAYERS * PAGE_BYTES)
        groups = [kv.PageGroup(list(self.device))]
        self.worker = kv.OffloadingConnectorWorker(kv.InlineTransfer(groups, self.pool.data))
        fingerprint = kv.fingerprint({"weights": "version 1"})  # in earnest: everything that shapes the bytes
        engine = kv.EngineSpec([kv.KVGroup(TOKENS)], share_loads=False)
        self.scheduler = kv.build_scheduler(config, engine, [self.pool.data], fingerprint)
        self.free = list(range(1, 1 + num_device_blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # also those that are loading
        self.kept: dict[str, list[int]] = {}  # blocks of requests that have ended, until their stores have
        self.loaded = self.preemptions = 0

    def reserve(self, request: Request, offer: int) -> int:
        """Returns for how many tokens a request takes blocks when it is admitted: its whole prompt and one more, so
        that a request that was loaded always computes a token. With blocks for the ``offer`` alone, requests that were
        loaded would take turns to be preempted, and load the same blocks forever."""
        return request.num_tokens + 1

    def lacking(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // TOKENS) - len(request.blocks))

    def take(self, request: Request, num_tokens: int) -> list[int]:
        new = [self.free.pop() for _ in range(self.lacking(request, num_tokens))]
        request.blocks += new
        return new

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        block_ids: dict[str, tuple[list[int]]] = {}
        replaced: set[str] = set()
        preempted: list[Request] = []

        def schedule(request: Request, new: list[int]) -> None:
            scheduled[request.request_id] = request.num_tokens - request.num_computed_tokens
            block_ids[request.request_id] = (list(request.blocks if request.is_new else new),)
            replaced.update({request.request_id} if request.is_new else ())
            request.is_new = False

        # Requests that hold blocks come first, those that were loaded among them. The youngest gives way, but none
        # whose blocks a load is filling.
        for request in list(self.running):
            while not request.is_loading and request in self.running:
                if self.lacking(request, request.num_tokens) <= len(self.free):
                    schedule(request, self.take(request, request.num_tokens))
                    break
                youngest = [each for each in self.running if not each.is_loading][-1]
                self.running.remove(youngest)
                self.free += youngest.blocks
                youngest.blocks, youngest.num_computed_tokens, youngest.is_new = [], 0, True
                preempted.append(youngest)
        while self.waiting:
            request = self.waiting[0]
            offer, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            if offer is None or self.lacking(request, self.reserve(request, offer)) > len(self.free):
                break  # it is asked again in the next step
            self.take(request, self.reserve(request, offer))
            self.scheduler.update_state_after_alloc(request, request, offer)
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens, request.is_loading = offer, offer > 0
            if not offer:
                schedule(request, [])
        self.waiting = preempted + self.waiting
        self.preemptions += len(preempted)
        lost = [request.request_id for request in preempted]
        meta = self.scheduler.build_connector_meta(
            kv.ScheduledStep(scheduled, block_ids, frozenset(replaced), preempted=lost)
        )
        with self.worker.step(meta, self.scheduler.update_connector_output) as finished:
            for request in self.running:
                if request.request_id in scheduled:
                    self.compute(request)
        for request in list(self.running):
            if request.request_id in finished.loaded:
                request.is_loading = False
                if request.request_id in finished.failed:
                    request.num_computed_tokens = 0
                self.loaded += request.num_computed_tokens
            elif request.request_id in scheduled:
                request.num_computed_tokens = request.num_tokens
                request.tokens.append(sum(request.tokens) % 251)
                if request.num_tokens == request.wanted:
                    self.running.remove(request)
                    self.kept[request.request_id] = request.blocks
                    if not self.scheduler.request_finished(request)[0]:
                        self.free += self.kept.pop(request.request_id)
        for name in finished.released:
            self.free += self.kept.pop(name)

    def compute(self, request: Request) -> None:
        """The forward pass: the KV of a block is the first byte of its hash. Checks what the request attends to."""
        for i, name in enumerate(request.block_hashes):
            if (i + 1) * TOKENS <= request.num_computed_tokens:
                assert (self.device[:, request.blocks[i]] == name[0]).all(), "wrong bytes"
            self.device[:, request.blocks[i]] = name[0]

    def run(self, requests: list[Request], max_steps: int = 10_000) -> int:
        """Serves ``requests``. Returns how many of them have all tokens after at most ``max_steps`` steps."""
        self.waiting += requests
        while (self.waiting or self.running or self.scheduler.has_pending_work()) and max_steps:
            self.step()
            max_steps -= 1
        return sum(request.num_tokens == request.wanted for request in requests)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.pool.close()


def questions(count: int) -> list[Request]:
    """Returns requests with prompts of four blocks and a token, and answers of more than a block."""
    return [Request(f"r{i}", [i, *range(4 * TOKENS)], 6 * TOKENS) for i in range(count)]


if __name__ == "__main__":
    engine = Engine(kv.OffloadConfig(host_bytes=4 << 20), num_device_blocks=11)
    assert [engine.run(questions(10)) for _ in range(2)] == [10, 10]
    print(f"20 requests in 11 blocks: {engine.loaded} tokens were loaded, {engine.preemptions} preemptions")
    engine.close()
