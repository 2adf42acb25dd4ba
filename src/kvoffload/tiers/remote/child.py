"""The process of a store's client: ``python -P -m kvoffload.tiers.remote.child SOCKET``."""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from kvoffload.abc import KVOffloadError
from kvoffload.tiers.remote.client import StoreClient
from kvoffload.tiers.remote.config import read_hmac_key
from kvoffload.tiers.remote.growth import GrowthWatch
from kvoffload.tiers.remote.identities import announce
from kvoffload.tiers.remote.messages import Kind, Op, Setup, StoreRequest, Unframer, frame
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from kvoffload.tiers.threads import IOThreads

NUM_READ_THREADS = 2
NUM_WRITE_THREADS = 2
"""One computes checksums while the other moves bytes. More would not help: one call of a client moves many blocks at
once, and clients may spin while they wait."""
NUM_SMALL_READ_THREADS = 1
SMALL_READ_BLOCKS = 4
"""A read of at most so many blocks has a thread at the usual priority: for a short time, spinning does no harm."""
NUM_LOOKUP_THREADS = 1
NUM_WORKERS = NUM_READ_THREADS + NUM_SMALL_READ_THREADS + NUM_WRITE_THREADS + NUM_LOOKUP_THREADS
TRANSFER_NICENESS = 10
"""Added to the niceness of the threads that read and write many blocks. Clients spin there until the transfer ends, and
on a busy machine that would take cores from the engine and from the threads that move the bytes."""
FINISH_DEADLINE_S = 2.0
"""Time for the requests under way when the engine ends the process."""
WATCH_INTERVAL_S = 1.0
RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Serves requests from the socket ``descriptor`` until the engine closes it or ends."""
    parent = os.getppid()
    end_with_parent(parent)
    connection = _Connection(socket.socket(fileno=descriptor))
    messages = connection.messages()
    kind, body = next(messages, (None, b""))
    if kind is not Kind.SETUP:
        return
    setup = Setup.unpack(body)
    with ExitStack() as stack:
        try:
            module, _, name = setup.client.partition(":")
            connect = getattr(importlib.import_module(module), name)
            # The memory of the module and its libraries does not count.
            watch = stack.enter_context(GrowthWatch(setup.client_bytes))
            with watch.asking():
                server = _Server(setup, connect, connection, watch)
        except (KVOffloadError, ImportError) as error:
            connection.send(Kind.NOTE, str(error).encode(errors="replace"))
            return
        connection.send(Kind.READY)
        server.serve(messages)


def end_with_parent(parent: int) -> None:
    """Ends this process when the process ``parent`` ends, however that ends.

    The kernel sends the signal when the thread that started this process ends, but not if it ended before; and the
    socket stays open while a forked process has a copy. So a thread also compares the parent's process id.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Connection:
    """The socket to the engine."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        with self._sending:
            try:
                self._socket.sendall(frame(kind, body))
            except OSError:
                os._exit(1)  # The engine is gone.

    def messages(self) -> Iterator[tuple[Kind, bytes]]:
        """Yields messages until the engine has closed its end."""
        unframer = Unframer()
        while data := self._socket.recv(RECEIVE_BYTES):
            yield from unframer.feed(data)


class _Server:
    """Runs requests with the client of ``setup``. Lookups and removals have a thread of their own, so that they do not
    queue behind reads and writes, and neither do reads behind writes."""

    def __init__(
        self, setup: Setup, connect: Callable[..., StoreClient], connection: _Connection, watch: GrowthWatch
    ) -> None:
        self._setup = setup
        self._connection = connection
        self._watch = watch
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self._pools = [handle.open()[: setup.num_slots] for handle in setup.handles]
        self._value_bytes = RECORD_BYTES + sum(pool.shape[1] for pool in self._pools)
        self._values = ValueFormat(setup.fingerprint, setup.prefix, read_hmac_key(setup.hmac_key_file))
        self._client = connect(setup.settings)
        self._workers: queue.SimpleQueue[StoreWorker] = queue.SimpleQueue()
        for _ in range(NUM_WORKERS):
            self._workers.put(self._new_worker())
        self._lookups = IOThreads(NUM_LOOKUP_THREADS, "lookup")
        self._small_reads = IOThreads(NUM_SMALL_READ_THREADS, "small read")
        self._reads = IOThreads(NUM_READ_THREADS, "read")
        self._writes = IOThreads(NUM_WRITE_THREADS, "write")

    def _new_worker(self) -> StoreWorker:
        memory = ValueMemory(self._pools, self._client.registers_memory)
        if self._client.registers_memory:
            self._watch.allow(memory.memory.nbytes)
            self._client.register(memory.memory)
        return StoreWorker(self._client, memory, self._values, pause=time.sleep)

    def serve(self, messages: Iterator[tuple[Kind, bytes]]) -> None:
        self._lookups.submit_read(self._announce)
        for kind, body in messages:
            if kind is Kind.REQUEST:
                request = StoreRequest.unpack(body)
                threads = self._threads_for(request)
                is_nice = threads in (self._reads, self._writes)
                if not threads.submit_read(partial(self._run, request, is_nice)):
                    return  # The engine has more requests under way than it may.
        deadline = time.monotonic() + FINISH_DEADLINE_S
        for threads in (self._lookups, self._small_reads, self._reads, self._writes):
            threads.close(max(0.0, deadline - time.monotonic()))
        self._client.close()

    def _threads_for(self, request: StoreRequest) -> IOThreads:
        if request.op is Op.READ:
            return self._small_reads if len(request.keys) <= SMALL_READ_BLOCKS else self._reads
        return self._writes if request.op is Op.WRITE else self._lookups

    def _run(self, request: StoreRequest, is_nice: bool) -> None:
        if is_nice:
            # On Linux, 0 is the calling thread.
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness + TRANSFER_NICENESS)
        worker = self._workers.get()
        with self._watch.asking(len(request.keys) * self._value_bytes if request.op is Op.READ else 0):
            response = worker.run(request)
        self._workers.put(worker)
        self._connection.send(Kind.RESPONSE, response.pack())

    def _announce(self) -> None:
        # One message, because the log drops messages that follow soon after another.
        with self._watch.asking():
            notes = [self._client.advice(), *announce(self._client, self._values, self._setup.identity)]
        if any(notes):
            self._connection.send(Kind.NOTE, "\n".join(filter(None, notes)).encode(errors="replace"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Threads of a client may hang, and must not keep the process.
    sys.stdout.flush()
    os._exit(0)
