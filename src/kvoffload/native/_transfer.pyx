# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loop of a CUDA transfer without Python's lock: ``transfer.h`` as a class.

``kvoffload.transfer.cuda.transfer`` uses it. Handles and addresses are numbers; 0 is none. All methods but ``run``
are called on one thread. Jobs are checked here, with Python's lock; what is copied later has no reference to Python.
"""

include "common.pxi"

import logging

from kvoffload.abc import TransferResult

cimport cython
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

logger = logging.getLogger("kvoffload.transfer.cuda")

cdef extern from "transfer.h" nogil:
    enum: KVT_DIRECTIONS, KVT_ORDINARY, KVT_FENCE
    enum: KVT_DONE, KVT_NEEDS_CHUNK, KVT_BLOCK
    ctypedef struct kvt_calls:
        void* copy_batch
        void* copy
        void* launch
        void* record
        void* wait
        void* query
        void* elapsed
    ctypedef struct kvt_piece_run:
        int64_t base, stride, nbytes, offset
    ctypedef struct kvt_kernel:
        void* gather
        void* scatter
        uint64_t pieces
        uint32_t num_pieces
        unsigned threads, max_programs
        double rows_per_program
    ctypedef struct kvt_group:
        int64_t num_blocks, factor, block_bytes, row_bytes, num_runs
        kvt_piece_run* runs
        kvt_kernel kernel
    ctypedef struct kvt_pool:
        char* data
        int64_t num_slots, slot_bytes, num_ready, boundary_slots
    ctypedef struct kvt_limits:
        int64_t chunk_bytes, chunk_rows, stage_bytes, fence_bytes, bounce_bytes
    ctypedef struct kvt_point:
        void* event
    ctypedef struct kvt_job:
        kvt_job* next
        int64_t id, nbytes
        double seconds
        int ok
    ctypedef struct kvt_jobs:
        kvt_job* first
    ctypedef struct kvt_chunk_row:
        pass
    ctypedef struct kvt_stage:
        uint64_t address
    ctypedef struct kvt_bounce:
        kvt_bounce* next
        char* data
    ctypedef struct kvt_chunk:
        kvt_chunk* next
        kvt_chunk_row* rows
        void* begin
        void* copied
        void* kernel
        kvt_stage* stage
    ctypedef struct kvt_stream:
        void* handle
        void* end
    ctypedef struct kvt_lane:
        kvt_stream kernels, copies
        int64_t max_bytes, max_staged
        kvt_chunk* free
        kvt_stage stage
    ctypedef struct kvt_direction:
        kvt_lane lanes[2]
        kvt_bounce* bounces
        kvt_chunk_row* sorted
        int64_t* counts
    ctypedef struct kvt_error:
        int code
        const char* what
        size_t num_copies, copy
    ctypedef struct kvt_fault:
        int kind
        int64_t group
    ctypedef struct kvt_fence:
        const int64_t* jobs
        const int64_t* blocks
        int64_t num_jobs, num_blocks
        const kvt_job* job
    ctypedef struct kvt_loop:
        kvt_calls calls
        kvt_group* groups
        int64_t num_groups
        kvt_pool pool
        kvt_limits limits
        int is_closing, has_failed, batches_are_off
        kvt_direction directions[2]
        kvt_error error
        kvt_jobs new_stores
    int kvt_get(const int*)
    int kvt_check(kvt_loop*, const char*, int, size_t, size_t)
    void kvt_init(kvt_loop*)
    int kvt_counts_fit(const kvt_loop*, const int64_t*, int64_t*, int64_t*, int64_t, int64_t)
    kvt_job* kvt_new_job(
        kvt_loop*, int64_t, const int64_t*, const int64_t*, const int64_t*, const int64_t*, kvt_fault*)
    void kvt_submit(kvt_loop*, kvt_job*, int)
    kvt_job* kvt_take_results(kvt_loop*)
    void kvt_wait_any(kvt_loop*, double)
    void kvt_add_point(kvt_loop*, kvt_point*)
    int kvt_renew_point(kvt_loop*)
    int kvt_record_point(kvt_loop*, void*)
    int kvt_hold(kvt_direction*, int, double)
    void kvt_let_go(kvt_direction*, int)
    int kvt_step(kvt_direction*)
    void kvt_run(kvt_direction*)
    void kvt_close(kvt_loop*)
    int kvt_fence_now(kvt_direction*, kvt_fence*, void*)
    int kvt_mark_end(kvt_direction*, void*)
    int kvt_query_end(kvt_direction*)
    void kvt_free_jobs(kvt_loop*)
    void set_ready "kvt_set_ready"(kvt_loop*, int64_t)


cdef inline void* handle(object number) except? NULL:
    return <void*><uintptr_t>number


@cython.no_gc_clear
cdef class Loop:
    """``calls``: addresses of the driver's functions, in the order of ``kvt_calls``. ``groups``: of each its number of
    device blocks (0: no pages here), factor, bytes per row, runs and Kernel or None. ``pool``: the slots, shape (slots, bytes).
    ``limits``: numbers in the order of ``kvt_limits``."""

    cdef kvt_loop* _loop
    cdef list _memory
    cdef object _pool
    cdef int64_t* _counts
    cdef readonly Py_ssize_t num_open
    """Jobs that ``take`` has not returned."""

    def __cinit__(self, calls, groups, cnp.ndarray pool, Py_ssize_t boundary_slots, limits):
        self._memory = []
        self._pool = pool
        cdef kvt_loop* loop = <kvt_loop*>self._new(sizeof(kvt_loop))
        cdef kvt_direction* direction
        cdef Py_ssize_t i
        kvt_init(loop)
        self._loop = loop
        (loop.calls.copy_batch, loop.calls.copy, loop.calls.launch, loop.calls.record, loop.calls.wait,
         loop.calls.query, loop.calls.elapsed) = (
            handle(calls[0]), handle(calls[1]), handle(calls[2]), handle(calls[3]), handle(calls[4]),
            handle(calls[5]), handle(calls[6]))
        (loop.limits.chunk_bytes, loop.limits.chunk_rows, loop.limits.stage_bytes, loop.limits.fence_bytes,
         loop.limits.bounce_bytes) = limits
        loop.pool.data = <char*>cnp.PyArray_DATA(pool)
        loop.pool.num_slots, loop.pool.slot_bytes = pool.shape[0], pool.shape[1]
        loop.pool.boundary_slots = boundary_slots
        loop.num_groups = len(groups)
        loop.groups = <kvt_group*>self._new(max(1, len(groups)) * sizeof(kvt_group))
        for i, group in enumerate(groups):
            self._set_group(&loop.groups[i], group[0], group[1], group[2], group[3], group[4])
        self._counts = <int64_t*>self._new(3 * max(1, len(groups)) * sizeof(int64_t))
        for i in range(KVT_DIRECTIONS):
            direction = &loop.directions[i]
            direction.sorted = self._new_rows()
            direction.counts = <int64_t*>self._new(max(1, len(groups)) * sizeof(int64_t))
            direction.lanes[KVT_ORDINARY].max_staged = loop.limits.stage_bytes
            direction.lanes[KVT_FENCE].max_staged = loop.limits.fence_bytes
            direction.lanes[KVT_ORDINARY].max_bytes = direction.lanes[KVT_FENCE].max_bytes = loop.limits.chunk_bytes

    def __dealloc__(self):
        if self._loop is not NULL:
            kvt_free_jobs(self._loop)
        if self._memory is not None:
            for address in self._memory:
                free(handle(address))

    # Setting up.

    cdef void* _new(self, size_t nbytes) except NULL:
        """Returns zeroed memory that lives as long as this object."""
        cdef void* memory = calloc(1, nbytes)
        if memory is NULL:
            raise MemoryError
        self._memory.append(<uintptr_t>memory)
        return memory

    cdef kvt_chunk_row* _new_rows(self) except NULL:
        # The rows of two chunk objects may be exchanged, which is no matter: all are freed together.
        return <kvt_chunk_row*>self._new(self._loop.limits.chunk_rows * sizeof(kvt_chunk_row))

    cdef int _set_group(
        self, kvt_group* group, int64_t num_blocks, int64_t factor, int64_t row_bytes, runs, kernel
    ) except -1:
        cdef Py_ssize_t i
        if num_blocks >= 1 << 31:
            raise ValueError(f"a group has {num_blocks} device blocks, which are too many")
        group.num_blocks, group.factor, group.row_bytes, group.num_runs = num_blocks, factor, row_bytes, len(runs)
        group.runs = <kvt_piece_run*>self._new(max(1, len(runs)) * sizeof(kvt_piece_run))
        for i, run in enumerate(runs):
            group.runs[i].base, group.runs[i].stride = run.base, run.stride
            group.runs[i].nbytes, group.runs[i].offset = run.nbytes, run.offset
            group.block_bytes += run.nbytes
        if kernel is not None:
            if not kernel.row_bytes == group.block_bytes == row_bytes:
                raise ValueError(
                    f"a kernel is for rows of {kernel.row_bytes} bytes, not for {group.block_bytes} of {row_bytes}"
                )
            group.kernel.gather, group.kernel.scatter = handle(kernel.gather), handle(kernel.scatter)
            group.kernel.pieces, group.kernel.num_pieces = kernel.pieces, kernel.num_pieces
            group.kernel.threads, group.kernel.max_programs = kernel.threads, kernel.max_programs
            group.kernel.rows_per_program = kernel.rows_per_program
        return 0

    def set_streams(self, Py_ssize_t direction, Py_ssize_t lane, kernels, copies, ends, stage):
        """Gives a lane its streams and an event for the end of each. ``stage``: the staging memory that its chunks
        share, or 0."""
        cdef kvt_lane* at = &self._loop.directions[direction].lanes[lane]
        at.kernels.handle, at.copies.handle = handle(kernels), handle(copies)
        at.kernels.end, at.copies.end = handle(ends[0]), handle(ends[1])
        at.stage.address = stage

    def add_chunk(self, Py_ssize_t direction, Py_ssize_t lane, events, stage=None):
        """Adds a chunk with three events. ``stage``: its staging memory; None: that of the lane."""
        cdef kvt_lane* at = &self._loop.directions[direction].lanes[lane]
        cdef kvt_chunk* chunk = <kvt_chunk*>self._new(sizeof(kvt_chunk))
        chunk.rows = self._new_rows()
        chunk.begin, chunk.copied, chunk.kernel = handle(events[0]), handle(events[1]), handle(events[2])
        chunk.stage = &at.stage
        if stage is not None:
            chunk.stage = <kvt_stage*>self._new(sizeof(kvt_stage))
            chunk.stage.address = stage
        chunk.next = at.free
        at.free = chunk

    def add_bounce(self, Py_ssize_t direction, address):
        """Adds a bounce buffer of as many bytes as a chunk that goes through one may have."""
        cdef kvt_bounce* bounce = <kvt_bounce*>self._new(sizeof(kvt_bounce))
        bounce.data = <char*>handle(address)
        bounce.next = self._loop.directions[direction].bounces
        self._loop.directions[direction].bounces = bounce

    # The engine's thread.

    def submit(self, job_id, spec, bint is_store):
        """Queues a job, or logs why it cannot be copied, and lets it fail."""
        cdef kvt_loop* loop = self._loop
        cdef int64_t* sizes = self._counts
        cdef int64_t* firsts = sizes + loop.num_groups
        cdef int64_t* filled = firsts + loop.num_groups
        cdef Py_ssize_t n = loop.num_groups, g
        cdef kvt_fault fault
        cdef kvt_job* job
        device = spec.device
        self.num_open += 1
        if not (len(device.group_sizes) == len(device.block_indices) == n):
            self._refuse(job_id, f"the job is for {len(device.group_sizes)} groups, but there are {n}")
            return
        cdef cnp.ndarray blocks = numbers(device.block_ids)
        cdef cnp.ndarray slots = numbers(spec.host.slots)
        for g in range(n):
            sizes[g], firsts[g] = device.group_sizes[g], device.block_indices[g]
        if not kvt_counts_fit(loop, sizes, firsts, filled, len(blocks), len(slots)):
            self._refuse(
                job_id,
                f"its groups have {[sizes[g] for g in range(n)]} device blocks in {[filled[g] for g in range(n)]} "
                f"slots, but {len(blocks)} device blocks and {len(slots)} slots are given",
            )
            return
        job = kvt_new_job(loop, job_id, sizes, firsts, int64s(blocks), int64s(slots), &fault)
        if job is not NULL:
            kvt_submit(loop, job, is_store)
        elif not fault.kind:
            raise MemoryError
        else:
            name, end = ("device block", loop.groups[fault.group].num_blocks), ("slot", loop.pool.num_slots)
            what = name if fault.kind == KVT_BLOCK else end
            self._refuse(job_id, f"a {what[0]} of group {fault.group} is not in [0, {what[1]})")

    cdef int _refuse(self, job_id, reason) except -1:
        logger.error("kvoffload: job %d cannot be copied: %s", job_id, reason)
        for g in range(self._loop.num_groups):
            self._counts[g] = self._counts[self._loop.num_groups + g] = 0
        cdef kvt_fault fault
        cdef kvt_job* job = kvt_new_job(
            self._loop, job_id, self._counts, self._counts + self._loop.num_groups, NULL, NULL, &fault
        )
        if job is NULL:
            raise MemoryError
        job.ok = 0
        kvt_submit(self._loop, job, False)
        return 0

    @property
    def has_new_stores(self):
        """Whether stores wait for the next point."""
        return self._loop.new_stores.first is not NULL

    def set_ready(self, int64_t num_slots):
        """The device may copy to and from the slots below this number."""
        set_ready(self._loop, num_slots)

    def add_point(self, event):
        """Adds a point, whose event no one uses yet."""
        cdef kvt_point* point = <kvt_point*>self._new(sizeof(kvt_point))
        point.event = handle(event)
        kvt_add_point(self._loop, point)

    def renew_point(self):
        """Returns False if a point must be added before ``record_point``."""
        return bool(kvt_renew_point(self._loop))

    def record_point(self, stream):
        """Records a point of the engine's stream and queues new stores. Returns False after an error."""
        cdef void* engine = handle(stream)
        cdef int result
        with nogil:
            result = kvt_record_point(self._loop, engine)
        return result == 0

    def take(self):
        """Returns the results of the jobs that have ended."""
        cdef kvt_job* job = kvt_take_results(self._loop)
        cdef kvt_job* following
        results = []
        while job is not NULL:
            results.append(TransferResult(job.id, bool(job.ok), job.nbytes, job.seconds))
            following = job.next
            free(job)
            job = following
        self.num_open -= len(results)
        return results

    def wait_any(self, double timeout_s):
        """Waits for results, an error or ``close``."""
        with nogil:
            kvt_wait_any(self._loop, timeout_s)

    def hold(self, Py_ssize_t direction, double timeout_s):
        """Keeps the thread of a direction from making steps. Returns False if that took too long."""
        cdef int is_mine
        with nogil:
            is_mine = kvt_hold(&self._loop.directions[direction], True, timeout_s)
        return bool(is_mine)

    def let_go(self, Py_ssize_t direction):
        """Ends ``hold``, and lets the thread look at what a fence has issued."""
        kvt_let_go(&self._loop.directions[direction], True)

    def fence(self, Py_ssize_t direction, jobs, blocks, stream):
        """Makes ``stream`` wait for the rows of ``jobs`` that copy one of ``blocks`` (None: any), sorted int64 arrays.
        The caller holds the direction. Returns False if it must be called again with one more chunk for fences."""
        cdef cnp.ndarray job_ids = numbers(jobs), named = numbers([] if blocks is None else blocks)
        cdef kvt_fence fence
        cdef void* engine = handle(stream)
        cdef int result
        fence.job = NULL
        fence.jobs, fence.num_jobs = int64s(job_ids), len(job_ids)
        fence.blocks, fence.num_blocks = int64s(named), -1 if blocks is None else len(named)
        with nogil:
            result = kvt_fence_now(&self._loop.directions[direction], &fence, engine)
        return result != KVT_NEEDS_CHUNK

    def close(self):
        """Lets ``run`` and ``wait_any`` return."""
        kvt_close(self._loop)

    def mark_end(self, stream):
        """Marks the end of all that was issued; the later work of ``stream`` comes after it. Returns the driver's
        code."""
        cdef void* engine = handle(stream)
        cdef int code = 0, i
        with nogil:
            for i in range(KVT_DIRECTIONS):
                if code == 0:
                    code = kvt_mark_end(&self._loop.directions[i], engine)
        return code

    def query_end(self):
        """Returns 0 if the device has reached the end, else 600, or the code of an error."""
        cdef int code = 0, i
        with nogil:
            for i in range(KVT_DIRECTIONS):
                if code == 0:
                    code = kvt_query_end(&self._loop.directions[i])
        return code

    def fail(self):
        """Stops the loop, because of an error outside it."""
        kvt_check(self._loop, b"a call of a copying thread", -1, 0, 0)

    @property
    def error(self):
        """The first error: the driver's function and code, the number of copies and the one that failed. None: there
        is none."""
        if not kvt_get(&self._loop.has_failed):
            return None
        cdef kvt_error* error = &self._loop.error
        return error.what.decode(), error.code, error.num_copies, error.copy

    @property
    def batches_are_off(self):
        """Whether the driver has refused a batch, so that there are none any more."""
        return bool(kvt_get(&self._loop.batches_are_off))

    # The threads.

    def advance(self, Py_ssize_t direction):
        """Makes one step. Returns whether there was anything to do."""
        cdef kvt_direction* at = &self._loop.directions[direction]
        cdef int result
        with nogil:
            kvt_hold(at, False, -1.0)
            result = kvt_step(at)
            kvt_let_go(at, False)
        return result == KVT_DONE

    def run(self, Py_ssize_t direction):
        """Makes steps until ``close`` or an error."""
        with nogil:
            kvt_run(&self._loop.directions[direction])
