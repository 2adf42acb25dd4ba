"""A router for several vLLM servers with kvoffload: a prompt goes to the server that holds most of it in its fastest
media, and a prompt that no server holds goes to the one with the fewest requests.

    vllm serve MODEL --port 8001 --kv-transfer-config '...' \
        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
    python examples/router.py http://127.0.0.1:8001=tcp://127.0.0.1:5557 http://127.0.0.1:8002=tcp://127.0.0.1:5558

The second server has another port, 8002 here, and if it is on the same machine another endpoint, tcp://*:5558.

The router reads one prompt per line, and prints which server it chose and why. It needs pyzmq and msgspec, which come
with vLLM. All servers must give the same names to the same blocks: with vLLM's default hash they do, with xxhash they
need the same PYTHONHASHSEED.
"""

import json
import sys
import threading
import urllib.request
from collections import OrderedDict

import msgspec
import zmq

WEIGHTS = {("GPU", None): 1.0, ("CPU", None): 0.8, ("STORAGE", "LOCAL"): 0.5, ("STORAGE", "REMOTE"): 0.4}
"""What a token is worth that need not be computed, by medium and locality: less if it takes longer to load."""
MAX_BLOCKS = 1 << 20
"""Blocks whose tokens are remembered, about 500 bytes each, and blocks per medium. Beyond it the oldest are forgotten,
or all of the medium: not every block that leaves a shared store is announced."""


class Index:
    """Which blocks ``servers`` hold, by their KV events. It is a guess: a server that lacks a block computes it."""

    def __init__(self, servers):
        self.next_blocks = OrderedDict()
        """(name of the block before it, its tokens, its extra keys): name of a block."""
        self.held = {server: {} for server in servers}
        """By server, (medium, locality, tier): names of blocks."""
        self.shared = {}
        """By shared tier: names of blocks, which every server can read."""
        self.block_size = 16
        self.group = None
        """The first KV cache group with KV. It stands for all."""

    def take(self, server, event):
        """Applies one event, a dictionary."""
        if event["type"] == "AllBlocksCleared":  # of the device; the others are removed one by one
            self.held[server].pop(("GPU", None, None), None)
            return
        group = event.get("group_idx") or 0
        # Groups with states, of recurrent layers, hold few of the blocks.
        if event["type"] == "BlockStored" and event.get("kv_cache_spec_kind") != "mamba":
            self.group = group if self.group is None else min(group, self.group)
        if group != (self.group or 0):
            return
        place = (event.get("medium") or "GPU", event.get("locality"), event.get("ownership"))
        if place[1] == "REMOTE":
            names = self.shared.setdefault(place[2], set())
        else:
            names = self.held[server].setdefault(place, set())
        if event["type"] == "BlockRemoved":
            names.difference_update(event["block_hashes"])
            return
        if len(names) > MAX_BLOCKS:
            names.clear()
        names.update(event["block_hashes"])
        before, size, tokens = event.get("parent_block_hash"), event["block_size"], event["token_ids"]
        extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for i, name in enumerate(event["block_hashes"] if tokens else []):
            self.block_size = size
            extra = repr(extra_keys[i] or None)
            self.next_blocks[before, tuple(tokens[i * size : (i + 1) * size]), extra] = before = name
        while len(self.next_blocks) > MAX_BLOCKS:
            self.next_blocks.popitem(last=False)

    def forget(self, server):
        """Called when events of ``server`` were lost, or it has started again."""
        self.held[server].clear()

    def chain(self, tokens):
        """Returns the names of the known blocks that ``tokens`` begin with."""
        names, size = [], self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            name = self.next_blocks.get((names[-1] if names else None, tuple(tokens[start : start + size]), "None"))
            if name is None:
                break
            names.append(name)
        return names

    def scores(self, tokens):
        """Returns, by server, the tokens of the prompt that it need not compute, weighted by where they are."""
        chain = self.chain(tokens)
        return {server: self.block_size * sum(self.weights(server, chain)) for server in self.held}

    def weights(self, server, chain):
        """Yields the weight of each block, up to the first one that ``server`` cannot read."""
        places = list(self.held[server].items())
        places += [(("STORAGE", "REMOTE", tier), names) for tier, names in self.shared.items()]
        for name in chain:
            weight = max((WEIGHTS.get(place[:2], 0.0) for place, names in places if name in names), default=0.0)
            if not weight:
                return
            yield weight


class Router:
    """Sends prompts to ``servers``, a mapping from the URL of each to the endpoint of its events."""

    def __init__(self, servers):
        self.index = Index(servers)
        self.load = dict.fromkeys(servers, 0)
        """Requests that each server has not answered yet."""
        self.lock = threading.Lock()
        self.context = zmq.Context()
        self.sockets, self.sequence = {}, dict.fromkeys(servers)
        for server, endpoint in servers.items():
            self.sockets[server] = self.context.socket(zmq.SUB)
            self.sockets[server].subscribe(b"")
            self.sockets[server].connect(endpoint)

    def receive(self):
        """Applies the events that have arrived."""
        for server, subscription in self.sockets.items():
            while subscription.poll(0):
                _, number, payload = subscription.recv_multipart()
                number = int.from_bytes(number, "big")
                if self.sequence[server] not in (None, number - 1):
                    self.index.forget(server)
                self.sequence[server] = number
                for event in msgspec.msgpack.decode(payload)[1]:
                    self.index.take(server, event)

    def choose(self, tokens):
        """Returns the server for a prompt, and the scores of all."""
        self.receive()
        scores = self.index.scores(tokens)
        return max(scores, key=lambda server: (scores[server], -self.load[server])), scores

    def complete(self, model, tokens, **options):
        """Returns the server that was chosen, the scores, and the answer. May be called by several threads."""
        with self.lock:
            server, scores = self.choose(tokens)
            self.load[server] += 1
        try:
            return server, scores, post(f"{server}/v1/completions", model=model, prompt=tokens, **options)
        finally:
            with self.lock:
                self.load[server] -= 1

    def close(self):
        self.context.destroy(linger=0)


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def main():
    servers = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if not servers or not all(servers.values()):
        sys.exit(f"usage: {sys.argv[0]} URL=ENDPOINT ...: each server, and where it publishes its events")
    router = Router(servers)
    first = next(iter(router.load))
    with urllib.request.urlopen(f"{first}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    for line in sys.stdin:
        tokens = post(f"{first}/tokenize", model=model, prompt=line.rstrip("\n"))["tokens"]
        server, scores, answer = router.complete(model, tokens, max_tokens=16)
        worth = {url: round(score) for url, score in scores.items()}
        print(f"{server} of {worth}, {len(tokens)} tokens: {answer['choices'][0]['text']!r}", flush=True)


if __name__ == "__main__":
    main()
