# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Native versions of classes of ``kvoffload.cache``, whose plain versions are the reference and document the methods.

Pointers go into numpy arrays that each object owns from ``__cinit__`` on and never replaces, except where said. Every
slot that a caller gives is checked against the capacity. Callers who break a promise of a method, such as distinct
slots, get wrong answers, but no memory is read or written out of bounds. Keys are hashed by Python, so both versions
agree on them. Only keys whose type is exactly ``bytes`` are compared without Python; other keys may run any code, so
that lists and arrays given with them are copied first. Making a list or a tuple, or calling numpy through Python, may
run any code too, that of finalizers: so all objects are made, and all arrays converted, before arrays are checked.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_New
from cpython.object cimport Py_EQ, PyObject, PyObject_Hash, PyObject_RichCompareBool
from cpython.tuple cimport PyTuple_CheckExact
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
    unsigned kvo_match8(const uint32_t* tags, uint32_t tag)
    int __builtin_ctz(unsigned)

cdef enum:
    WAYS = 8
    CHUNK = 128
    AHEAD = 16
    WRITING = -1
    FREE = -1
    SPILLED = -2
    MAX_SLOTS = 1 << 28

cdef struct Bucket:
    uint32_t tags[WAYS]
    int32_t slots[WAYS]


# Numbers in numpy arrays.

cdef inline cnp.ndarray new_int64(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_INT64)


cdef inline int64_t* int64s(cnp.ndarray array) noexcept:
    return <int64_t*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray contiguous(object array):
    """Returns the numbers as a contiguous array of int64: ``array`` itself, if it is one."""
    if (
        cnp.PyArray_Check(array)
        and cnp.PyArray_NDIM(<cnp.ndarray>array) == 1
        and cnp.PyArray_TYPE(<cnp.ndarray>array) == cnp.NPY_INT64
        and PyArray_ISBEHAVED_RO(<cnp.ndarray>array)
    ):
        return cnp.PyArray_GETCONTIGUOUS(<cnp.ndarray>array)
    return converted(array)


cdef cnp.ndarray converted(object array):
    result = np.asarray(array)
    if result.size == 0 and not isinstance(array, np.ndarray):
        return new_int64(0)
    if result.ndim != 1 or result.dtype.kind not in "iu":
        raise IndexError(f"slots must be whole numbers in one dimension, not {result.dtype} in {result.ndim}")
    return np.require(result, np.int64, ["C", "A"])


cdef inline cnp.ndarray checked(object slots, Py_ssize_t capacity):
    """Returns slots as ``contiguous`` does. Raises IndexError if one is not in [0, capacity)."""
    cdef cnp.ndarray array = contiguous(slots)
    check_slots(array, capacity)
    return array


cdef inline int check_slots(cnp.ndarray array, Py_ssize_t capacity) except -1:
    cdef int64_t* at = int64s(array)
    cdef Py_ssize_t i, n = cnp.PyArray_DIM(array, 0)
    cdef bint bad = False
    for i in range(n):
        bad |= <uint64_t>at[i] >= <uint64_t>capacity
    if bad:
        raise IndexError(f"a slot is not in [0, {capacity})")
    return 0


cdef inline cnp.ndarray new_flags(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_BOOL)


cdef inline uint8_t* flags_of(cnp.ndarray array) noexcept:
    return <uint8_t*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray first(cnp.ndarray array, Py_ssize_t n):
    """Returns the first ``n`` of contiguous numbers: ``array`` itself, if there are no more."""
    if n == cnp.PyArray_DIM(array, 0):
        return array
    cdef cnp.ndarray result = new_int64(n)
    memcpy(cnp.PyArray_DATA(result), cnp.PyArray_DATA(array), n * sizeof(int64_t))
    return result


# Keys.

cdef uint64_t SECRET = int.from_bytes(os.urandom(8), "little")
"""Decides where keys are in the table of ``split``. Clients that know how Python hashes, as with PYTHONHASHSEED, could
choose keys that are all in one place."""


cdef inline uint64_t scattered(uint64_t h) noexcept:
    return ((h ^ SECRET) * <uint64_t>0x9E3779B97F4A7C15) >> 32


cdef inline uint32_t tag_of(uint64_t h) noexcept:
    return <uint32_t>(h >> 32) | 1


cdef inline bint is_same(PyObject* a, PyObject* b) except -1:
    if a == b:
        return True
    if PyBytes_CheckExact(<object>a) and PyBytes_CheckExact(<object>b):
        return (
            PyBytes_GET_SIZE(<object>a) == PyBytes_GET_SIZE(<object>b)
            and memcmp(PyBytes_AS_STRING(<object>a), PyBytes_AS_STRING(<object>b), PyBytes_GET_SIZE(<object>a)) == 0
        )
    return compare(<object>a, <object>b)


cdef bint compare(object a, object b) except -1:
    """Does what ``==`` does, with references of its own: the comparison may run code that releases others."""
    own_a, own_b = a, b
    return PyObject_RichCompareBool(own_a, own_b, Py_EQ)


cdef inline bint all_bytes(PyObject** keys, Py_ssize_t n) noexcept:
    cdef Py_ssize_t i
    for i in range(n):
        if i + AHEAD < n:
            kvo_prefetch(keys[i + AHEAD])
        if not PyBytes_CheckExact(<object>keys[i]):
            return False
    return True


cdef int hash_into(object fast, uint64_t* hashes) except -1:
    cdef Py_ssize_t i
    for i in range(PySequence_Fast_GET_SIZE(fast)):
        hashes[i] = <uint64_t>PyObject_Hash(<object>PySequence_Fast_ITEMS(fast)[i])
    return 0


def ranks(digests, keys):
    cdef cnp.ndarray column = digests
    if (
        cnp.PyArray_TYPE(column) != cnp.NPY_UINT64
        or cnp.PyArray_NDIM(column) != 1
        or not PyArray_ISBEHAVED_RO(column)
        or not cnp.PyArray_IS_C_CONTIGUOUS(column)
    ):
        raise TypeError("digests must be one contiguous column of uint64")
    fast = PySequence_Fast(keys, b"keys must be a sequence")
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start, i, size, left, half
    cdef const uint64_t* sorted_digests = <const uint64_t*>cnp.PyArray_DATA(column)
    cdef PyObject** items = PySequence_Fast_ITEMS(fast)
    cdef uint64_t asked[CHUNK]
    cdef cnp.ndarray result = new_int64(n)
    cdef int64_t* to = int64s(result)
    for start in range(0, n, CHUNK):
        size = min(n - start, CHUNK)
        for i in range(size):
            if not PyBytes_Check(<object>items[start + i]) or PyBytes_GET_SIZE(<object>items[start + i]) < 8:
                raise ValueError("a key has fewer bytes than a digest")
            memcpy(&asked[i], PyBytes_AS_STRING(<object>items[start + i]), 8)
            to[start + i] = 0
        # All searches make each step together, so that their misses of the processor's caches overlap.
        left = cnp.PyArray_DIM(column, 0)
        while left > 1:
            half = left // 2
            for i in range(size):
                to[start + i] += half * (sorted_digests[to[start + i] + half - 1] < asked[i])
            left -= half
        if left:
            for i in range(size):
                to[start + i] += sorted_digests[to[start + i]] < asked[i]
    return result


@cython.no_gc_clear
cdef class KeyIndex:
    """Buckets as in the plain version, but tags and slots of a bucket are side by side, in one line of the cache."""

    cdef readonly cnp.ndarray key_of
    cdef cnp.ndarray _bucket_memory, _place_memory, _seen_memory
    cdef dict _spill
    cdef Bucket* _buckets
    cdef int32_t* _place
    cdef PyObject** _keys
    cdef uint64_t _mask
    cdef Py_ssize_t _len, _capacity
    cdef bint _only_bytes
    """No key is of another type. Then looking up keys that are bytes runs no Python code."""

    def __cinit__(self, capacity):
        if not 0 <= capacity <= MAX_SLOTS:
            raise ValueError(f"capacity={capacity}: must be at most {MAX_SLOTS} slots, and not negative")
        num_buckets = 1 << max(0, (max(int(capacity), 2) // 2 - 1).bit_length())
        self._mask = num_buckets - 1
        self._bucket_memory = np.zeros(num_buckets * sizeof(Bucket) + 64, dtype=np.uint8)
        self._buckets = <Bucket*>(<char*>cnp.PyArray_DATA(self._bucket_memory) + self._to_line())
        self._place_memory = np.full(capacity, FREE, dtype=np.int32)
        self._place = <int32_t*>cnp.PyArray_DATA(self._place_memory)
        # Callers see views, which cannot be resized.
        self.key_of = np.full(capacity, None, dtype=object)[:]
        self._keys = <PyObject**>cnp.PyArray_DATA(self.key_of)
        self._spill = {}
        self._capacity = capacity
        self._only_bytes = True

    def __len__(self):
        return self._len

    cdef Py_ssize_t _to_line(self) noexcept:
        """Returns the distance from the start of the memory of the buckets to the next line of the cache."""
        return -<Py_ssize_t>cnp.PyArray_DATA(self._bucket_memory) & 63

    cdef inline Bucket* _home(self, uint64_t h) noexcept:
        return &self._buckets[h & self._mask]

    cdef object _own(self, object keys):
        """Returns the keys in a list or tuple that does not change while they are looked up."""
        fast = PySequence_Fast(keys, b"keys must be a sequence")
        if PyTuple_CheckExact(fast):
            return fast
        if self._only_bytes and all_bytes(PySequence_Fast_ITEMS(fast), PySequence_Fast_GET_SIZE(fast)):
            return fast
        return tuple(fast)

    def get(self, key):
        return self._get(<PyObject*>key, <uint64_t>PyObject_Hash(key))

    cdef int64_t _get(self, PyObject* key, uint64_t h) except -2:
        cdef Bucket* bucket = self._home(h)
        cdef unsigned ways = kvo_match8(bucket.tags, tag_of(h))
        cdef int32_t slot
        while ways:
            slot = bucket.slots[__builtin_ctz(ways)]
            if is_same(self._keys[slot], key):
                return slot
            ways &= ways - 1
        return self._spill.get(<object>key, -1) if self._spill else -1

    def find(self, keys):
        fast = self._own(keys)
        cdef cnp.ndarray result = new_int64(PySequence_Fast_GET_SIZE(fast))
        self._find(PySequence_Fast_ITEMS(fast), PySequence_Fast_GET_SIZE(fast), int64s(result), NULL)
        return result

    cdef int _find(self, PyObject** keys, Py_ssize_t n, int64_t* slots, uint64_t* hashes) except -1:
        """Looks up keys in passes over a chunk, so that the misses of the processor's caches overlap. Fills ``hashes``,
        unless it is NULL."""
        cdef uint64_t local[CHUNK]
        cdef unsigned ways[CHUNK]
        cdef uint64_t* hs
        cdef Py_ssize_t start = 0, i, size
        cdef Bucket* bucket
        cdef PyObject* held
        cdef int32_t slot
        while start < n:
            size = min(n - start, CHUNK)
            hs = &local[0] if hashes == NULL else hashes + start
            for i in range(size):
                hs[i] = <uint64_t>PyObject_Hash(<object>keys[start + i])
                kvo_prefetch(self._home(hs[i]))
            for i in range(size):
                bucket = self._home(hs[i])
                ways[i] = kvo_match8(bucket.tags, tag_of(hs[i]))
                if ways[i]:
                    kvo_prefetch(&self._keys[bucket.slots[__builtin_ctz(ways[i])]])
            for i in range(size):
                if ways[i]:
                    held = self._keys[self._home(hs[i]).slots[__builtin_ctz(ways[i])]]
                    kvo_prefetch(held)
                    kvo_prefetch(<char*>held + 63)
            for i in range(size):
                slots[start + i] = -1
                if ways[i]:
                    slot = self._home(hs[i]).slots[__builtin_ctz(ways[i])]
                    if is_same(self._keys[slot], keys[start + i]):
                        slots[start + i] = slot
                        continue
                if ways[i] or self._spill:
                    slots[start + i] = self._get(keys[start + i], hs[i])
            start += size
        return 0

    def split(self, keys):
        cdef list absent = []
        fast = self._own(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i, num_present = 0, num_absent = 0
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef cnp.ndarray found = new_int64(n), homes = new_int64(n)
        cdef int64_t* slots = int64s(found)
        cdef uint64_t* hashes = <uint64_t*>int64s(homes)
        self._find(items, n, slots, hashes)
        for i in range(n):
            num_present += slots[i] >= 0
        if num_present == n:
            return found, absent, None
        cdef int32_t* seen
        cdef uint64_t at, mask = 16
        while mask < 2 * <uint64_t>(n - num_present):
            mask *= 2
        # Taken away meanwhile: a comparison of keys below may call this method.
        cdef cnp.ndarray seen_memory = self._seen_memory
        self._seen_memory = None
        if seen_memory is None or <uint64_t>cnp.PyArray_DIM(seen_memory, 0) < mask:
            seen_memory = np.empty(mask, dtype=np.int32)
        seen = <int32_t*>cnp.PyArray_DATA(seen_memory)
        memset(seen, 0xff, mask * sizeof(int32_t))
        mask -= 1
        num_present = 0
        for i in range(n):
            if slots[i] >= 0:
                slots[num_present] = slots[i]
                num_present += 1
                continue
            at = scattered(hashes[i]) & mask
            while seen[at] >= 0:
                if hashes[seen[at]] == hashes[i] and is_same(<PyObject*>absent[seen[at]], items[i]):
                    break
                at = (at + 1) & mask
            if seen[at] < 0:
                seen[at] = <int32_t>num_absent
                hashes[num_absent] = hashes[i]
                absent.append(<object>items[i])
                num_absent += 1
        self._seen_memory = seen_memory
        return first(found, num_present), absent, first(homes, num_absent)

    def insert(self, keys, slots, homes=None):
        self._insert(keys, slots, homes)

    cdef cnp.ndarray _insert(self, object keys, object slots, object homes):
        """Returns the slots, in an array that no caller can change. If it raises, nothing has changed, unless the
        comparison of keys raises."""
        fast = self._own(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i, start = 0, size
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef cnp.ndarray given = contiguous(slots), hashes = None if homes is None else contiguous(homes)
        cdef uint64_t* hs
        cdef Bucket* bucket
        cdef unsigned empty
        cdef int way
        cdef PyObject* before
        if cnp.PyArray_DIM(given, 0) != n:
            raise IndexError(f"{n} keys need as many slots, not {cnp.PyArray_DIM(given, 0)}")
        if self._only_bytes and not all_bytes(items, n):
            self._only_bytes = False
        if not self._only_bytes:
            given = given.copy()
        cdef int64_t* at = int64s(given)
        if hashes is None:
            hashes = new_int64(n)
            hash_into(fast, <uint64_t*>int64s(hashes))
        elif cnp.PyArray_DIM(hashes, 0) != n:
            raise IndexError(f"these are the homes of {cnp.PyArray_DIM(hashes, 0)} keys, not of {n}")
        check_slots(given, self._capacity)
        hs = <uint64_t*>int64s(hashes)
        while start < n:
            size = min(n - start, CHUNK)
            for i in range(start, start + size):
                kvo_prefetch(self._home(hs[i]))
                kvo_prefetch(&self._keys[at[i]])
                kvo_prefetch(&self._place[at[i]])
            for i in range(start, start + size):
                bucket = self._home(hs[i])
                empty = kvo_match8(bucket.tags, 0)
                if empty:
                    way = __builtin_ctz(empty)
                    bucket.tags[way] = tag_of(hs[i])
                    bucket.slots[way] = <int32_t>at[i]
                    self._place[at[i]] = <int32_t>((hs[i] & self._mask) * WAYS) + way
                else:
                    self._spill[<object>items[i]] = at[i]
                    self._place[at[i]] = SPILLED
                self._len += 1
                before = self._keys[at[i]]
                increment(items[i])
                self._keys[at[i]] = items[i]
                decrement(before)
            start += size
        return given

    def remove(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        cdef list spilled = [], result = PyList_New(cnp.PyArray_DIM(given, 0))
        check_slots(given, self._capacity)
        self._remove(given, result, spilled)
        return result

    cdef int _remove(self, cnp.ndarray slots, list result, list spilled) except -1:
        """Fills ``result``. No Python code runs before all slots are free."""
        cdef int64_t* at = int64s(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(slots, 0), i, start = 0, stop
        cdef PyObject* none = <PyObject*>None
        cdef PyObject* key
        cdef int32_t place
        while start < n:
            stop = min(n, start + CHUNK)
            for i in range(start, stop):
                kvo_prefetch(&self._place[at[i]])
                kvo_prefetch(&self._keys[at[i]])
            for i in range(start, stop):
                if self._place[at[i]] >= 0:
                    kvo_prefetch(&self._buckets[self._place[at[i]] // WAYS])
            for i in range(start, stop):
                key = self._keys[at[i]]
                increment(none)
                self._keys[at[i]] = none
                set_item(result, i, key)  # The list takes the reference over.
                place = self._place[at[i]]
                self._place[at[i]] = FREE
                self._len -= place != FREE
                if place >= 0:
                    self._buckets[place // WAYS].tags[place % WAYS] = 0
                elif place == SPILLED:
                    spilled.append(<object>key)
            start = stop
        for each in spilled:
            del self._spill[each]
        return 0

    def clear(self):
        self._len = 0
        memset(self._buckets, 0, (self._mask + 1) * sizeof(Bucket))
        self._place_memory.fill(FREE)
        self._spill.clear()

    def slots(self):
        return np.flatnonzero(self._place_memory != FREE)

    def holds(self, slots):
        return self._place_memory[checked(slots, self._capacity)] != FREE

    def check_integrity(self):
        slots = self.slots()
        if len(slots) != self._len:
            raise IntegrityError("the index counts its keys wrongly")
        if any(self.get(key) != slot for key, slot in zip(self.key_of[slots].tolist(), slots.tolist(), strict=True)):
            raise IntegrityError("a key is not found in its slot")
        words = np.frombuffer(self._bucket_memory, np.uint32, 2 * WAYS * (self._mask + 1), self._to_line())
        entries = int(np.count_nonzero(words.reshape(-1, 2 * WAYS)[:, :WAYS])) + len(self._spill)
        if entries != self._len:
            raise IntegrityError("the index has entries of removed keys")


@cython.no_gc_clear
cdef class BlockTable:
    """The methods of the plain version that run per request."""

    cdef readonly Py_ssize_t num_blocks
    cdef public Py_ssize_t num_evictable, _num_dropped
    cdef readonly KeyIndex _index
    cdef readonly cnp.ndarray key_of, ref_cnt, busy, _dropped
    cdef cnp.ndarray _scratch_memory
    cdef int32_t* _refs
    cdef uint8_t* _is_busy
    cdef uint8_t* _is_dropped
    cdef int32_t* _scratch

    def __cinit__(self, num_blocks):
        self.num_blocks = num_blocks
        self._index = KeyIndex(num_blocks)
        self.key_of = self._index.key_of
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)[:]
        self._refs = <int32_t*>cnp.PyArray_DATA(self.ref_cnt)
        self.busy = np.zeros(num_blocks, dtype=np.bool_)[:]
        self._is_busy = <uint8_t*>cnp.PyArray_DATA(self.busy)
        self._dropped = np.zeros(num_blocks, dtype=np.bool_)[:]
        self._is_dropped = <uint8_t*>cnp.PyArray_DATA(self._dropped)
        self._scratch_memory = np.zeros(num_blocks, dtype=np.int32)
        self._scratch = <int32_t*>cnp.PyArray_DATA(self._scratch_memory)

    def __contains__(self, key):
        cdef int64_t slot = self._index._get(<PyObject*>key, <uint64_t>PyObject_Hash(key))
        return slot >= 0 and not self._is_dropped[slot]

    def find(self, keys):
        fast = self._index._own(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* slots = int64s(result)
        self._index._find(PySequence_Fast_ITEMS(fast), n, slots, NULL)
        if self._num_dropped:
            for i in range(n):
                if slots[i] >= 0 and self._is_dropped[slots[i]]:
                    slots[i] = -1
        return result

    def distinct(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        if cnp.PyArray_DIM(given, 0) < 2:
            return given
        given = checked(given, self.num_blocks)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, kept = 0
        cdef int64_t* at = int64s(given)
        for i in range(n):
            self._scratch[at[i]] = <int32_t>i
        for i in range(n):
            kept += self._scratch[at[i]] == i
        if kept == n:
            return given
        cdef cnp.ndarray result = new_int64(kept)
        cdef int64_t* to = int64s(result)
        kept = 0
        for i in range(n):
            if self._scratch[at[i]] == i:
                to[kept] = at[i]
                kept += 1
        return result

    def leading_ready(self, keys):
        fast = self._index._own(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start = 0, size, i
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef int64_t slots[CHUNK]
        while start < n:
            size = min(n - start, CHUNK)
            self._index._find(items + start, size, slots, NULL)
            for i in range(size):
                if slots[i] < 0 or self._is_dropped[slots[i]] or self._refs[slots[i]] < 0:
                    return start + i
            start += size
        return n

    def insert(self, keys, slots, homes=None):
        cdef cnp.ndarray given = self._index._insert(keys, slots, homes)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._refs[at[i]] = WRITING
            self._is_busy[at[i]] = 1

    def remove(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        cdef list spilled = [], result = PyList_New(cnp.PyArray_DIM(given, 0))
        check_slots(given, self.num_blocks)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self.num_evictable -= 1 - self._is_busy[at[i]]
            self._num_dropped -= self._is_dropped[at[i]]
            self._is_dropped[at[i]] = 0
            self._refs[at[i]] = 0
            self._is_busy[at[i]] = 0
        self._index._remove(given, result, spilled)
        return result

    def is_writing(self, slots):
        """Negative slots count as the last ones, as in numpy."""
        cdef cnp.ndarray given = contiguous(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.npy_intp shape = n
        cdef cnp.ndarray result = cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_BOOL)
        cdef uint8_t* to = <uint8_t*>cnp.PyArray_DATA(result)
        cdef int64_t* at = int64s(given)
        cdef int64_t slot
        for i in range(n):
            slot = at[i] if at[i] >= 0 else at[i] + self.num_blocks
            if <uint64_t>slot >= <uint64_t>self.num_blocks:
                raise IndexError(f"slot {at[i]} is not in [0, {self.num_blocks})")
            to[i] = self._refs[slot] == WRITING
        return result

    def being_written(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        return self._being_written(int64s(given), cnp.PyArray_DIM(given, 0))

    cdef cnp.ndarray _being_written(self, int64_t* at, Py_ssize_t n):
        self._note_first(at, n)
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* to = int64s(result)
        cdef Py_ssize_t i, kept = 0
        for i in range(n):
            if at[i] >= 0 and self._scratch[at[i]] == i and self._refs[at[i]] == WRITING:
                to[kept] = at[i]
                kept += 1
        return first(result, kept)

    def used(self, found):
        cdef cnp.ndarray slots = self._tail_first(found), ready
        cdef Py_ssize_t n = cnp.PyArray_DIM(slots, 0), i
        ready = new_flags(n)
        for i in range(n):
            flags_of(ready)[i] = self._refs[int64s(slots)[i]] != WRITING
        return slots, ready

    def chain(self, found, stored):
        """The keys are looked up first, so what the comparison of keys may do to the table does no harm."""
        cdef cnp.ndarray others = self.find(stored), slots = self._tail_first(found), new
        cdef Py_ssize_t n = cnp.PyArray_DIM(slots, 0), i
        cdef int64_t* at = int64s(others)
        new = new_flags(n)
        for i in range(n):
            self._scratch[int64s(slots)[i]] = 0
        for i in range(cnp.PyArray_DIM(others, 0)):
            if at[i] >= 0:
                self._scratch[at[i]] = 1
        for i in range(n):
            flags_of(new)[i] = self._scratch[int64s(slots)[i]] == 1
        return slots, new

    cdef cnp.ndarray _tail_first(self, found):
        """Returns those of ``found`` that are not negative, each once, the last ones first."""
        cdef cnp.ndarray given = contiguous(found)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, kept = 0
        cdef int64_t* at = int64s(given)
        self._note_first(at, n)
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* to = int64s(result)
        for i in range(n - 1, -1, -1):
            if at[i] >= 0 and self._scratch[at[i]] == i:
                to[kept] = at[i]
                kept += 1
        return first(result, kept)

    cdef int _note_first(self, int64_t* at, Py_ssize_t n) except -1:
        """Notes of each slot that is not negative where it is first. Raises IndexError if there is no such slot."""
        cdef Py_ssize_t i
        cdef bint bad = False
        for i in range(n):
            bad |= at[i] >= self.num_blocks
        if bad:
            raise IndexError(f"a slot is not below {self.num_blocks}")
        for i in range(n - 1, -1, -1):
            if at[i] >= 0:
                self._scratch[at[i]] = <int32_t>i
        return 0

    def evict(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef list spilled = [], result = PyList_New(n)
        cdef int64_t* at = int64s(given)
        for i in range(n):
            if (
                <uint64_t>at[i] >= <uint64_t>self.num_blocks
                or self._is_busy[at[i]]
                or self._index._place[at[i]] == FREE
            ):
                return None
            self._scratch[at[i]] = <int32_t>i
        for i in range(n):
            if self._scratch[at[i]] != i:
                return None
        # Blocks that are not busy have neither pins nor marks.
        self.num_evictable -= n
        self._index._remove(given, result, spilled)
        return result

    def idle(self, slots):
        cdef cnp.ndarray given = checked(slots, self.num_blocks)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, kept = 0
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* at = int64s(given)
        cdef int64_t* to = int64s(result)
        for i in range(n):
            self._scratch[at[i]] = <int32_t>i
        for i in range(n):
            if self._scratch[at[i]] == i and not self._is_busy[at[i]]:
                to[kept] = at[i]
                kept += 1
        return first(result, kept)

    def mark_busy(self, slots, bint is_busy):
        cdef cnp.ndarray given = checked(slots, self.num_blocks)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._is_busy[int64s(given)[i]] = is_busy

    def pin(self, slots):
        cdef cnp.ndarray given = checked(slots, self.num_blocks)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._refs[at[i]] += 1
            self.num_evictable -= 1 - self._is_busy[at[i]]
            self._is_busy[at[i]] = 1

    def set_ready(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        return self._end_transfer(self._being_written(int64s(given), cnp.PyArray_DIM(given, 0)), True)

    def unpin(self, slots):
        return self._end_transfer(checked(slots, self.num_blocks), False)

    cdef tuple _end_transfer(self, cnp.ndarray given, bint written):
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, num_idle = 0, num_freed = 0
        cdef bint some_dropped = self._num_dropped > 0
        cdef cnp.ndarray idle = new_int64(n), freed = new_int64(n if some_dropped else 0)
        cdef int64_t* at = int64s(given)
        cdef int64_t* to = int64s(idle)
        for i in range(n):
            self._refs[at[i]] = 0 if written else self._refs[at[i]] - 1
            if self._refs[at[i]]:
                continue
            if some_dropped and self._is_dropped[at[i]]:
                int64s(freed)[num_freed] = at[i]
                num_freed += 1
            else:
                self._is_busy[at[i]] = 0
                to[num_idle] = at[i]
                num_idle += 1
        self.num_evictable += num_idle
        freed = first(freed, num_freed)
        if num_freed:
            self.remove(freed)
        return first(idle, num_idle), freed


@cython.no_gc_clear
cdef class FreeSlots:
    """The methods of the plain version that run per request."""

    cdef cnp.ndarray _free_memory
    cdef readonly cnp.ndarray _allocated
    cdef readonly Py_ssize_t _num_free
    cdef Py_ssize_t _capacity
    cdef int64_t* _free_slots
    cdef uint8_t* _is_allocated

    def __cinit__(self, capacity):
        self._free_memory = np.zeros(capacity, dtype=np.int64)
        self._free_slots = int64s(self._free_memory)
        self._allocated = np.zeros(capacity, dtype=np.bool_)[:]
        self._is_allocated = flags_of(self._allocated)
        self._capacity = capacity

    @property
    def _free(self):
        return self._free_memory.copy()

    def __len__(self):
        return self._num_free

    def take(self, Py_ssize_t n):
        if not 0 <= n <= self._num_free:
            raise IntegrityError(f"{n} slots were asked for, {self._num_free} are free")
        cdef cnp.ndarray slots = new_int64(n)
        cdef Py_ssize_t i
        for i in range(n):
            self._num_free -= 1
            int64s(slots)[i] = self._free_slots[self._num_free]
            self._is_allocated[int64s(slots)[i]] = 1
        return slots

    def give_back(self, slots):
        cdef cnp.ndarray given = contiguous(slots)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        for i in range(n):
            if <uint64_t>at[i] >= <uint64_t>self._capacity:
                raise IntegrityError("a slot was freed that does not exist")
            if not self._is_allocated[at[i]]:
                raise IntegrityError("a slot was freed that is not allocated")
        if self._num_free + n > self._capacity:
            raise IntegrityError("a slot was freed that is not allocated")
        for i in range(n):
            self._is_allocated[at[i]] = 0
            self._free_slots[self._num_free] = at[i]
            self._num_free += 1

    def add(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        if self._num_free + n > self._capacity:
            raise IndexError(f"{n} slots do not fit into {self._capacity}, of which {self._num_free} are free")
        for i in range(n - 1, -1, -1):
            self._free_slots[self._num_free] = at[i]
            self._num_free += 1


cdef const uint8_t* flags(cnp.ndarray array, Py_ssize_t capacity) except NULL:
    if (
        cnp.PyArray_NDIM(array) != 1
        or cnp.PyArray_TYPE(array) != cnp.NPY_BOOL
        or not cnp.PyArray_IS_C_CONTIGUOUS(array)
        or cnp.PyArray_DIM(array, 0) < capacity
    ):
        raise IndexError(f"there must be a bool for each of {capacity} slots")
    return <uint8_t*>cnp.PyArray_DATA(array)


cdef enum:
    ABSENT = -1
    SKIPPED = -2
    QUEUED = -3
    END = -1

cdef int64_t NO_END = <int64_t>1 << 62


cdef struct Links:
    int32_t older  # SKIPPED or QUEUED for members that are not in the linked list.
    int32_t newer


cdef struct Entry:
    int64_t position
    int64_t slot


@cython.no_gc_clear
cdef class RecencyList:
    """A linked list from the oldest member to the most recent one. Members that were skipped, because they were busy
    when older ones were removed, are not in it: they are in a heap by position if they were marked evictable since."""

    cdef Py_ssize_t _len, _capacity
    cdef int64_t _next_position
    cdef int32_t _oldest, _newest
    cdef cnp.ndarray _stamp_memory, _links_memory, _heap_memory
    cdef int64_t* _stamp
    cdef Links* _links
    cdef Entry* _heap
    """In ``_heap_memory``, which is replaced when it is full. May have entries of blocks that have moved or left."""
    cdef Py_ssize_t _heap_len, _heap_size

    def __cinit__(self, capacity):
        if not 0 <= capacity <= MAX_SLOTS:
            raise ValueError(f"capacity={capacity}: must be at most {MAX_SLOTS} slots, and not negative")
        self._capacity = capacity
        self._stamp_memory = np.full(capacity, ABSENT, dtype=np.int64)
        self._stamp = int64s(self._stamp_memory)
        self._links_memory = np.zeros((capacity, 2), dtype=np.int32)
        self._links = <Links*>cnp.PyArray_DATA(self._links_memory)
        self._reset()

    def __sizeof__(self):
        """Includes the arrays."""
        return object.__sizeof__(self) + self._stamp_memory.nbytes + self._links_memory.nbytes + self._heap_memory.nbytes

    cdef _reset(self):
        self._oldest = self._newest = END
        self._len = 0
        self._next_position = 0
        self._heap_len = self._heap_size = 0
        self._heap_memory = new_int64(0)
        self._heap = <Entry*>cnp.PyArray_DATA(self._heap_memory)

    def __len__(self):
        return self._len

    def holds(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.npy_intp shape = n
        cdef cnp.ndarray result = cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_BOOL)
        cdef uint8_t* to = <uint8_t*>cnp.PyArray_DATA(result)
        cdef int64_t* at = int64s(given)
        for i in range(n):
            to[i] = self._stamp[at[i]] != ABSENT
        return result

    cdef inline bint _is_aside(self, int64_t slot) noexcept:
        """Returns whether a member is not in the linked list."""
        return self._links[slot].older <= SKIPPED

    cdef inline void _unlink(self, int64_t slot) noexcept:
        """Takes a member out of the linked list, if it is in it."""
        cdef int32_t older = self._links[slot].older, newer
        if older <= SKIPPED:
            return
        newer = self._links[slot].newer
        if older == END:
            self._oldest = newer
        else:
            self._links[older].newer = newer
        if newer == END:
            self._newest = older
        else:
            self._links[newer].older = older

    cdef inline void _link(self, int64_t slot, int64_t position) noexcept:
        self._stamp[slot] = position
        self._links[slot].older = self._newest
        self._links[slot].newer = END
        if self._newest == END:
            self._oldest = <int32_t>slot
        else:
            self._links[self._newest].newer = <int32_t>slot
        self._newest = <int32_t>slot

    def append(self, slots, positions=None):
        self._append(slots, positions, False)

    def move_to_end(self, slots, positions=None):
        self._append(slots, positions, True)

    cdef int _append(self, slots, positions, bint members_only) except -1:
        cdef cnp.ndarray times = None if positions is None else contiguous(positions)
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef int64_t* at = int64s(given)
        cdef int64_t* time = NULL
        if times is not None:
            time = int64s(times)
            check_positions(times, n, self._next_position)
        for i in range(n):
            if i + AHEAD < n:
                kvo_prefetch_write(&self._stamp[at[i + AHEAD]])
                kvo_prefetch_write(&self._links[at[i + AHEAD]])
            if i + AHEAD // 2 < n:
                self._prefetch_neighbours(at[i + AHEAD // 2])
            if self._stamp[at[i]] != ABSENT:
                self._unlink(at[i])
            elif members_only:
                continue
            else:
                self._len += 1
            if time != NULL:
                self._next_position = time[i]
            self._link(at[i], self._next_position)
            self._next_position += 1
        return 0

    cdef inline void _prefetch_neighbours(self, int64_t slot) noexcept:
        cdef Links links = self._links[slot]
        if links.older >= 0:
            kvo_prefetch_write(&self._links[links.older])
        if links.newer >= 0:
            kvo_prefetch_write(&self._links[links.newer])

    def discard(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            if self._stamp[at[i]] != ABSENT:
                self._unlink(at[i])
                self._stamp[at[i]] = ABSENT
                self._len -= 1

    def mark_evictable(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            if self._links[at[i]].older == SKIPPED and self._stamp[at[i]] != ABSENT:
                self._push(at[i])

    cdef int _push(self, int64_t slot) except -1:
        cdef Entry entry
        if self._heap_len == self._heap_size:
            self._renew_heap()
        entry.position = self._stamp[slot]
        entry.slot = slot
        self._sift_up(self._heap_len, entry)
        self._heap_len += 1
        self._links[slot].older = QUEUED
        return 0

    cdef inline void _sift_up(self, Py_ssize_t i, Entry entry) noexcept:
        cdef Py_ssize_t parent
        while i:
            parent = (i - 1) // 2
            if self._heap[parent].position <= entry.position:
                break
            self._heap[i] = self._heap[parent]
            i = parent
        self._heap[i] = entry

    cdef inline bint _is_queued(self, Entry entry) noexcept:
        return self._stamp[entry.slot] == entry.position and self._links[entry.slot].older == QUEUED

    cdef int _renew_heap(self) except -1:
        """Drops entries of blocks that have moved or left, and makes room for as many entries as are left."""
        cdef Py_ssize_t i, kept = 0
        for i in range(self._heap_len):
            kept += self._is_queued(self._heap[i])
        cdef cnp.ndarray memory = new_int64(2 * (2 * kept + 64))
        cdef cnp.ndarray before = self._heap_memory
        cdef Entry* entries = self._heap
        cdef Py_ssize_t n = self._heap_len
        self._heap_memory, self._heap = memory, <Entry*>cnp.PyArray_DATA(memory)
        self._heap_len, self._heap_size = 0, 2 * kept + 64
        for i in range(n):
            # A heap without some of its entries, in the same order, is almost one: few entries move.
            if self._is_queued(entries[i]):
                self._sift_up(self._heap_len, entries[i])
                self._heap_len += 1
        return 0

    cdef Entry _pop_heap(self) noexcept:
        cdef Entry top = self._heap[0], last
        cdef Py_ssize_t i = 0, child
        self._heap_len -= 1
        last = self._heap[self._heap_len]
        while True:
            child = 2 * i + 1
            if child >= self._heap_len:
                break
            if child + 1 < self._heap_len and self._heap[child + 1].position < self._heap[child].position:
                child += 1
            if self._heap[child].position >= last.position:
                break
            self._heap[i] = self._heap[child]
            i = child
        self._heap[i] = last
        return top

    cdef inline int64_t _front(self) noexcept:
        """Returns the position of the oldest member that was not skipped, or was marked since; NO_END if there is
        none."""
        while self._heap_len and not self._is_queued(self._heap[0]):
            self._pop_heap()
        if self._heap_len:
            return self._heap[0].position
        return self._stamp[self._oldest] if self._oldest != END else NO_END

    cdef inline int64_t _take_front(self, const uint8_t* is_busy) noexcept:
        """Removes the member at ``_front`` and returns its slot. Skips it instead, and returns -1, if it is busy."""
        cdef int64_t slot
        if self._heap_len:
            slot = self._pop_heap().slot
        else:
            slot = self._oldest
            self._unlink(slot)
        if is_busy[slot]:
            self._links[slot].older = SKIPPED
            return -1
        self._stamp[slot] = ABSENT
        self._len -= 1
        return slot

    def pop_oldest(self, Py_ssize_t n, cnp.ndarray busy not None):
        return self._pop(n, busy, NO_END, None)

    def pop_with_positions(self, Py_ssize_t n, cnp.ndarray busy not None, int64_t before=NO_END):
        cdef cnp.ndarray positions = new_int64(max(0, min(n, self._len)))
        slots = self._pop(n, busy, before, positions)
        return slots, first(positions, len(slots))

    cdef cnp.ndarray _pop(self, Py_ssize_t n, cnp.ndarray busy, int64_t before, cnp.ndarray positions):
        cdef const uint8_t* is_busy = flags(busy, self._capacity)
        cdef Py_ssize_t popped = 0
        n = max(0, min(n, self._len))
        before = min(before, NO_END)
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* to = int64s(result)
        cdef int64_t* times = int64s(positions) if positions is not None else NULL
        cdef int64_t position, slot
        while popped < n:
            position = self._front()
            if position >= before:
                break
            slot = self._take_front(is_busy)
            if slot < 0:
                continue
            to[popped] = slot
            if times != NULL:
                times[popped] = position
            popped += 1
        return first(result, popped)

    def put_back(self, slots, positions):
        cdef cnp.ndarray times = contiguous(positions), given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i, n = cnp.PyArray_DIM(given, 0)
        if cnp.PyArray_DIM(times, 0) != n:
            raise ValueError(f"{n} slots need as many positions, not {cnp.PyArray_DIM(times, 0)}")
        for i in range(n):
            if self._stamp[at[i]] != ABSENT or not 0 <= int64s(times)[i] < NO_END:
                raise ValueError("a slot is a member already, or was never at that position")
        for i in range(n):
            if self._stamp[at[i]] != ABSENT:
                continue
            self._stamp[at[i]] = int64s(times)[i]
            self._links[at[i]].older = SKIPPED
            self._len += 1
            self._push(at[i])

    def oldest_position(self):
        cdef int64_t position = self._front()
        return position if position < NO_END else -1

    def clear(self):
        self._stamp_memory.fill(ABSENT)
        self._reset()

    def check_integrity(self):
        members = np.flatnonzero(self._stamp_memory != ABSENT)
        if len(members) != self._len:
            raise IntegrityError("a recency list does not count its members right")
        linked, slot, before = set(), self._oldest, -1
        while slot != END:
            if slot in linked or self._stamp[slot] <= before:
                raise IntegrityError("a recency list is out of order")
            linked.add(slot)
            before, slot = self._stamp[slot], self._links[slot].newer
        aside = {slot for slot in members.tolist() if self._is_aside(slot)}
        queued = {self._heap[i].slot for i in range(self._heap_len) if self._is_queued(self._heap[i])}
        if linked | aside != set(members.tolist()) or linked & aside:
            raise IntegrityError("a recency list has lost an entry")
        if queued != {slot for slot in aside if self._links[slot].older == QUEUED}:
            raise IntegrityError("a recency list has lost a skipped entry")


cdef int check_positions(cnp.ndarray positions, Py_ssize_t n, int64_t lowest) except -1:
    cdef int64_t* at = int64s(positions)
    cdef Py_ssize_t i
    if cnp.PyArray_DIM(positions, 0) != n:
        raise ValueError(f"{n} slots need as many positions, not {cnp.PyArray_DIM(positions, 0)}")
    for i in range(n):
        if not lowest <= at[i] < NO_END:
            raise ValueError("positions must ascend, from above all earlier ones")
        lowest = at[i] + 1
    return 0
