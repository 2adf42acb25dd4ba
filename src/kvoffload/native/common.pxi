# Numbers in numpy arrays, and keys, for the modules that include this file.

from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
)
from cpython.list cimport PyList_New
from cpython.object cimport PyObject, PyObject_Hash
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cimport numpy as cnp

import os

import numpy as np

from kvoffload.abc import IntegrityError

cnp.import_array()

cdef extern from *:
    unsigned int KVOFFLOAD_SOURCES
SOURCES = KVOFFLOAD_SOURCES

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    object PySequence_Fast(object, const char*)
    void increment "Py_INCREF"(PyObject*)
    void decrement "Py_DECREF"(PyObject*)
    void set_item "PyList_SET_ITEM"(object, Py_ssize_t, PyObject*)

cdef extern from "numpy/arrayobject.h":
    bint PyArray_ISBEHAVED_RO(cnp.ndarray)

cdef extern from "prefetch.h" nogil:
    void kvo_prefetch(const void* address)
    void kvo_prefetch_write(const void* address)

cdef enum:
    CHUNK = 128
    AHEAD = 16
    MAX_SLOTS = 1 << 28

cdef uint64_t SECRET = int.from_bytes(os.urandom(8), "little")
"""Decides where names and keys are in tables in which a search goes on until a place is free. Else clients, who know
how keys are hashed, as with PYTHONHASHSEED, could choose keys that are all in one place."""


cdef inline uint64_t scattered(uint64_t h) noexcept:
    return ((h ^ SECRET) * <uint64_t>0x9E3779B97F4A7C15) >> 32


cdef inline int check_capacity(capacity) except -1:
    if not 0 <= capacity <= MAX_SLOTS:
        raise ValueError(f"capacity={capacity}: must be at most {MAX_SLOTS} slots, and not negative")
    return 0


cdef inline cnp.ndarray new_array(Py_ssize_t n, int kind):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, kind)


cdef inline cnp.ndarray new_int64(Py_ssize_t n):
    return new_array(n, cnp.NPY_INT64)


cdef inline cnp.ndarray new_flags(Py_ssize_t n):
    return new_array(n, cnp.NPY_BOOL)


cdef inline int64_t* int64s(cnp.ndarray array) noexcept:
    return <int64_t*>cnp.PyArray_DATA(array)


cdef inline uint8_t* bools(cnp.ndarray array) noexcept:
    return <uint8_t*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray of_kind(object array, int kind, dtype):
    """Returns the contiguous array of this kind that has these numbers: ``array`` itself, if it is one."""
    if (
        cnp.PyArray_Check(array)
        and cnp.PyArray_NDIM(<cnp.ndarray>array) == 1
        and cnp.PyArray_TYPE(<cnp.ndarray>array) == kind
        and PyArray_ISBEHAVED_RO(<cnp.ndarray>array)
    ):
        return cnp.PyArray_GETCONTIGUOUS(<cnp.ndarray>array)
    given = np.asarray(array)
    if given.ndim == 1 and given.size == 0:
        return new_array(0, kind)
    if given.ndim != 1 or (given.dtype.kind == "b") != (kind == cnp.NPY_BOOL) or given.dtype.kind not in "biu":
        raise TypeError(f"there must be a list of numbers of type {np.dtype(dtype)}, not {given.dtype} {given.shape}")
    return np.require(given, dtype, ["C", "A"])


cdef inline cnp.ndarray numbers(object array):
    return of_kind(array, cnp.NPY_INT64, np.int64)


cdef inline cnp.ndarray checked(object indices, Py_ssize_t size):
    """Returns the indices as an array. Raises IndexError if one is not in [0, size)."""
    cdef cnp.ndarray array = numbers(indices)
    check_indices(array, size)
    return array


cdef inline int check_indices(cnp.ndarray array, Py_ssize_t size) except -1:
    cdef int64_t* at = int64s(array)
    cdef Py_ssize_t i
    cdef bint bad = False
    for i in range(cnp.PyArray_DIM(array, 0)):
        bad |= <uint64_t>at[i] >= <uint64_t>size
    if bad:
        raise IndexError(f"an index is not in [0, {size})")
    return 0


cdef inline cnp.ndarray flags(object array, Py_ssize_t n):
    """Returns an array of at least ``n`` bools."""
    cdef cnp.ndarray result = of_kind(array, cnp.NPY_BOOL, np.bool_)
    if cnp.PyArray_DIM(result, 0) < n:
        raise IndexError(f"{n} bools are needed, not {cnp.PyArray_DIM(result, 0)}")
    return result


cdef inline cnp.ndarray first(cnp.ndarray array, Py_ssize_t n):
    """Returns the first ``n`` of contiguous numbers: ``array`` itself, if there are no more."""
    if n == cnp.PyArray_DIM(array, 0):
        return array
    cdef cnp.ndarray result = new_int64(n)
    memcpy(cnp.PyArray_DATA(result), cnp.PyArray_DATA(array), n * sizeof(int64_t))
    return result


cdef inline object only_bytes(object keys):
    """Returns a list or tuple of the same keys, as bytes, so that no Python code runs when they are hashed, compared or
    released. Raises TypeError if one is no bytes."""
    fast = PySequence_Fast(keys, b"keys must be a sequence")
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i
    cdef PyObject** items = PySequence_Fast_ITEMS(fast)
    for i in range(n):
        if i + AHEAD < n:
            kvo_prefetch(items[i + AHEAD])
        if not PyBytes_CheckExact(<object>items[i]):
            return [exactly_bytes(key) for key in tuple(fast)]
    return fast


cdef object exactly_bytes(object key):
    if PyBytes_CheckExact(key):
        return key
    if not PyBytes_Check(key):
        raise TypeError(f"a key must be bytes, not {type(key).__name__}")
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


cdef inline bint is_same(PyObject* a, PyObject* b) noexcept:
    """Returns whether two keys are equal."""
    return a == b or (
        PyBytes_GET_SIZE(<object>a) == PyBytes_GET_SIZE(<object>b)
        and memcmp(PyBytes_AS_STRING(<object>a), PyBytes_AS_STRING(<object>b), PyBytes_GET_SIZE(<object>a)) == 0
    )
