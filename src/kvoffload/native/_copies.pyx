# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native version of ``kvoffload.transfer.blocks``, whose plain version is the reference and documents the methods.

All arguments are checked while Python's lock is held, and the addresses to copy are written into memory of this call.
Then the copy runs without the lock.
"""

include "common.pxi"

from libc.stdlib cimport free, malloc

cdef extern from "copying.h" nogil:
    ctypedef struct kvo_run:
        char* data
        Py_ssize_t block_step
        Py_ssize_t page_bytes
        Py_ssize_t host_at
    ctypedef struct kvo_row:
        int64_t block
        char* host
    ctypedef struct kvo_job:
        const kvo_run* runs
        Py_ssize_t num_runs
        const kvo_row* rows
        Py_ssize_t num_rows
        Py_ssize_t rows_at_once
        Py_ssize_t next
        int is_store
    int kvo_run_job(kvo_job* job, int wants_help)

cdef enum:
    TURN_BYTES = 2 << 20  # What a thread takes of a job at once.


cdef cnp.ndarray bytes_of(object array, int dimensions, str what):
    if not cnp.PyArray_Check(array) or cnp.PyArray_TYPE(<cnp.ndarray>array) != cnp.NPY_UINT8:
        raise TypeError(f"{what} must be a numpy array of uint8")
    if cnp.PyArray_NDIM(<cnp.ndarray>array) != dimensions:
        raise ValueError(f"{what} must have {dimensions} dimensions")
    cdef int last = dimensions - 1
    if cnp.PyArray_DIM(<cnp.ndarray>array, last) > 1 and cnp.PyArray_STRIDE(<cnp.ndarray>array, last) != 1:
        raise ValueError(f"the bytes in a row of {what} must be contiguous")
    return <cnp.ndarray>array


cdef cnp.ndarray numbers_of(object array, str what, Py_ssize_t length):
    if not cnp.PyArray_Check(array) or cnp.PyArray_TYPE(<cnp.ndarray>array) != cnp.NPY_INT64:
        raise TypeError(f"{what} must be a numpy array of int64")
    if cnp.PyArray_NDIM(<cnp.ndarray>array) != 1 or cnp.PyArray_DIM(<cnp.ndarray>array, 0) != length:
        raise ValueError(f"{what} must be {length} numbers")
    return cnp.PyArray_ContiguousFromAny(array, cnp.NPY_INT64, 1, 1)


cdef class BlockCopier:
    cdef list _views
    cdef cnp.ndarray _host
    cdef kvo_run* _runs
    cdef Py_ssize_t _num_runs, _num_blocks, _num_slots, _num_parts, _slot_step, _part_step
    cdef bint _can_load
    cdef readonly Py_ssize_t block_bytes

    def __cinit__(self, views, host, offsets):
        cdef cnp.ndarray view
        cdef kvo_run* run = NULL
        cdef Py_ssize_t row_bytes, page_bytes, host_at, num_blocks = 0
        cdef char* data
        self._views = [bytes_of(each, 2, "a view") for each in views]
        self._host = bytes_of(host, 3, "host")
        row_bytes = cnp.PyArray_DIM(self._host, 2)
        if len(offsets) != len(self._views):
            raise ValueError(f"{len(offsets)} places are given for {len(self._views)} views")
        self._runs = <kvo_run*>malloc(max(1, len(self._views)) * sizeof(kvo_run))
        if self._runs is NULL:
            raise MemoryError
        self.block_bytes = self._num_runs = 0
        self._can_load = True
        for view, at in zip(self._views, offsets):
            data, page_bytes = <char*>cnp.PyArray_DATA(view), cnp.PyArray_DIM(view, 1)
            # As Python's numbers, these do not overflow.
            if not 0 <= at <= row_bytes - page_bytes:
                raise ValueError(f"a page of {page_bytes} bytes at {at} does not fit into a row of {row_bytes} bytes")
            if run is NULL:
                num_blocks = cnp.PyArray_DIM(view, 0)
            elif cnp.PyArray_DIM(view, 0) != num_blocks:
                raise ValueError(f"the views must all have {num_blocks} blocks")
            self.block_bytes += page_bytes
            self._can_load = self._can_load and cnp.PyArray_ISWRITEABLE(view)
            host_at = at
            if (
                run is not NULL
                and data == run.data + run.page_bytes
                and cnp.PyArray_STRIDE(view, 0) == run.block_step
                and host_at == run.host_at + run.page_bytes
            ):
                # The pages of a block are one piece of memory.
                run.page_bytes += page_bytes
                continue
            run = &self._runs[self._num_runs]
            self._num_runs += 1
            run.data, run.block_step = data, cnp.PyArray_STRIDE(view, 0)
            run.page_bytes, run.host_at = page_bytes, host_at
        self._num_slots, self._num_parts = cnp.PyArray_DIM(self._host, 0), cnp.PyArray_DIM(self._host, 1)
        self._slot_step, self._part_step = cnp.PyArray_STRIDE(self._host, 0), cnp.PyArray_STRIDE(self._host, 1)
        self._num_blocks = num_blocks

    def __dealloc__(self):
        free(self._runs)

    def copy_rows(self, device_blocks, slots, parts, bint is_store, bint use_two_threads):
        """Returns the number of threads that did it: two only if there is enough for both, and if this thread may run on
        several processors."""
        if not cnp.PyArray_Check(device_blocks) or cnp.PyArray_NDIM(<cnp.ndarray>device_blocks) != 1:
            raise TypeError("device_blocks must be a numpy array of int64")
        if not (cnp.PyArray_ISWRITEABLE(self._host) if is_store else self._can_load):
            raise ValueError("the target of the copies is read-only")
        cdef Py_ssize_t n = cnp.PyArray_DIM(<cnp.ndarray>device_blocks, 0), i
        cdef cnp.ndarray block_array = numbers_of(device_blocks, "device_blocks", n)
        cdef cnp.ndarray slot_array = numbers_of(slots, "slots", n)
        cdef cnp.ndarray part_array = numbers_of(parts, "parts", n)
        cdef int64_t* block = int64s(block_array)
        cdef int64_t* slot = int64s(slot_array)
        cdef int64_t* part = int64s(part_array)
        cdef char* host = <char*>cnp.PyArray_DATA(self._host)
        cdef kvo_job job
        cdef int num_threads
        cdef kvo_row* rows = <kvo_row*>malloc(max(1, n) * sizeof(kvo_row))
        if rows is NULL:
            raise MemoryError
        try:
            for i in range(n):
                if not (
                    0 <= block[i] < self._num_blocks
                    and 0 <= slot[i] < self._num_slots
                    and 0 <= part[i] < self._num_parts
                ):
                    raise IndexError(
                        f"row {i} copies device block {block[i]} and part {part[i]} of slot {slot[i]}, but there are "
                        f"{self._num_blocks} device blocks and {self._num_slots} slots of {self._num_parts} parts"
                    )
                rows[i].block = block[i]
                rows[i].host = host + slot[i] * self._slot_step + part[i] * self._part_step
            job.runs, job.num_runs = self._runs, self._num_runs
            job.rows, job.num_rows = rows, n
            job.rows_at_once = max(1, TURN_BYTES // max(1, self.block_bytes))
            job.next = 0
            job.is_store = is_store
            use_two_threads = use_two_threads and n > job.rows_at_once
            with nogil:
                num_threads = kvo_run_job(&job, use_two_threads)
            return num_threads
        finally:
            free(rows)
