# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Native versions of the parts of ``AutoPolicy`` and ``ARCPolicy``, whose plain versions are the reference and document
the methods.

Pointers go into numpy arrays that each object owns, so memory is freed with the object. Every slot and entry that a
caller gives is checked against the size of the arrays. No Python code, which could change the object or what it was
given, runs between the checks and the end of a call: so no list is made there, because a finalizer may run, and numpy
is called in C.
"""

from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
)
from cpython.object cimport PyObject, PyObject_Hash
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cimport numpy as cnp

import os

import numpy as np
import xxhash

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

cdef extern from "numpy/arrayobject.h":
    bint PyArray_ISCARRAY_RO(cnp.ndarray)

cdef extern from "prefetch.h" nogil:
    void kvo_prefetch(const void* address)
    void kvo_prefetch_write(void* address)

cdef extern from "ghosts.h" nogil:
    unsigned kvo_match16(const uint32_t* tags, uint32_t tag)
    uint64_t kvo_xxh3(const uint8_t* at, int64_t size)
    int __builtin_clz(unsigned)

cdef enum:
    CHUNK = 128
    LINE = 64

cdef int64_t NO_END = <int64_t>1 << 62

cdef uint64_t SECRET = int.from_bytes(os.urandom(8), "little")
"""Decides where names and keys are in tables in which a search goes on until a place is free. Else clients, who know
how keys are hashed, could choose keys that are all in one place."""


cdef inline uint64_t scattered(uint64_t h) noexcept:
    return ((h ^ SECRET) * <uint64_t>0x9E3779B97F4A7C15) >> 32


# Numbers in numpy arrays.

cdef inline cnp.ndarray new_array(Py_ssize_t n, int kind):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, kind)


cdef inline cnp.ndarray new_int64(Py_ssize_t n):
    return new_array(n, cnp.NPY_INT64)


cdef inline int64_t* int64s(cnp.ndarray array) noexcept:
    return <int64_t*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray of_kind(object array, int kind, dtype):
    """Returns the contiguous array of this kind that has these numbers: ``array`` itself, if it is one."""
    if (
        cnp.PyArray_Check(array)
        and cnp.PyArray_NDIM(<cnp.ndarray>array) == 1
        and cnp.PyArray_TYPE(<cnp.ndarray>array) == kind
        and PyArray_ISCARRAY_RO(<cnp.ndarray>array)
    ):
        return <cnp.ndarray>array
    given = np.asarray(array)
    if given.ndim != 1 or (given.dtype.kind == "b") != (kind == cnp.NPY_BOOL) or given.dtype.kind not in "biu":
        raise TypeError(f"there must be a list of numbers of type {np.dtype(dtype)}, not {given.dtype} {given.shape}")
    return np.require(given, dtype, ["C", "A"])


cdef inline cnp.ndarray numbers(object array):
    return of_kind(array, cnp.NPY_INT64, np.int64)


cdef inline cnp.ndarray hashes_of(object array):
    return of_kind(array, cnp.NPY_UINT64, np.uint64)


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


cdef inline const uint8_t* bools(cnp.ndarray array) noexcept:
    return <const uint8_t*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray first(cnp.ndarray array, Py_ssize_t n):
    """Returns the first ``n`` of contiguous numbers: ``array`` itself, if there are no more."""
    if n == cnp.PyArray_DIM(array, 0):
        return array
    cdef cnp.ndarray result = new_int64(n)
    memcpy(cnp.PyArray_DATA(result), cnp.PyArray_DATA(array), n * sizeof(int64_t))
    return result


def key_hashes(keys):
    fast = PySequence_Fast(keys, b"keys must be a sequence")
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i, size
    cdef PyObject** items = PySequence_Fast_ITEMS(fast)
    cdef cnp.ndarray result = new_array(n, cnp.NPY_UINT64)
    cdef uint64_t* to = <uint64_t*>cnp.PyArray_DATA(result)
    for i in range(n):
        if i + 8 < n:
            kvo_prefetch(items[i + 8])
            kvo_prefetch(<char*>items[i + 8] + LINE)
        if PyBytes_CheckExact(<object>items[i]):
            size = PyBytes_GET_SIZE(<object>items[i])
            if 17 <= size <= 64:
                to[i] = kvo_xxh3(<const uint8_t*>PyBytes_AS_STRING(<object>items[i]), size)
                continue
        elif not PyTuple_CheckExact(fast):
            # What other keys run could change a list.
            fast = tuple(fast)
            if PySequence_Fast_GET_SIZE(fast) != n:
                raise ValueError("the keys change")
            items = PySequence_Fast_ITEMS(fast)
        to[i] = <uint64_t>xxhash.xxh3_64_intdigest(<object>items[i])
    return result


def same_keys(a, b):
    one, other = PySequence_Fast(a, b"keys must be a sequence"), PySequence_Fast(b, b"keys must be a sequence")
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(one), i
    cdef PyObject** items = PySequence_Fast_ITEMS(one)
    cdef PyObject** others = PySequence_Fast_ITEMS(other)
    if n != PySequence_Fast_GET_SIZE(other):
        return False
    for i in range(n):
        if not is_same(items[i], others[i]):
            return False
    return True


# Ghosts.

cdef enum:
    WAYS = 16
    DISORDERED = 128

cdef struct Times:
    uint32_t added
    uint32_t stamp

cdef struct Bucket:
    uint32_t tags[WAYS]
    Times times[WAYS]


cdef class GhostTable:
    """A bucket is three lines of the cache: its tags, and pairs of age and stamp, so that a new entry touches two of
    them. Ages and stamps take 32 bits.

    ``added`` is the number of hashes that had been added before, modulo 2**32; a bucket is freed of what is forgotten
    before that is ambiguous. A stamp is counted from ``_base``, and shifted by one for the mark. Stamps more than 2**30
    before the latest count as equally early. A table for at most 32 hashes is one bucket in two structs.
    """

    cdef readonly Py_ssize_t _capacity, _ways, _num_buckets
    cdef uint64_t _num_added
    cdef int64_t _base
    cdef cnp.ndarray _bucket_memory, _next_memory
    cdef Bucket* _buckets
    cdef uint8_t* _next_way
    """The earliest entry of each bucket. DISORDERED is added if an entry was removed since they were in order."""

    def __cinit__(self, Py_ssize_t capacity):
        if not 0 < capacity < 1 << 30:
            raise ValueError(f"capacity={capacity}: must be from 1 to {(1 << 30) - 1}")
        self._capacity = capacity
        self._ways = WAYS if capacity > 2 * WAYS else capacity
        cdef Py_ssize_t whole = 2 * capacity // WAYS, rest = 2 * capacity % WAYS
        self._num_buckets = whole + (2 * rest + (whole & 1) > WAYS) if capacity > 2 * WAYS else 1
        # Written, not only asked for: else the first evictions pay for getting the memory from the system.
        lines = max(2, self._num_buckets) * sizeof(Bucket) + LINE
        self._bucket_memory = np.empty(lines, dtype=np.uint8)
        to_line = -self._bucket_memory.ctypes.data % LINE
        self._buckets = <Bucket*>(<char*>cnp.PyArray_DATA(self._bucket_memory) + <Py_ssize_t>to_line)
        self._next_memory = np.empty(self._num_buckets, dtype=np.uint8)
        self._next_way = <uint8_t*>cnp.PyArray_DATA(self._next_memory)
        self.clear()

    def clear(self):
        self._bucket_memory.fill(0)
        self._next_memory.fill(0)
        self._num_added = 0
        self._base = 0

    def __len__(self):
        cdef Py_ssize_t i, way
        cdef int64_t count = 0
        for i in range(max(2, self._num_buckets)):
            for way in range(WAYS):
                count += self._buckets[i].tags[way] != 0 and not self._is_forgotten(i * WAYS + way)
        return count

    cdef inline uint64_t _bucket_of(self, uint64_t h) noexcept:
        return (h >> 32) * <uint64_t>self._num_buckets >> 32

    cdef inline uint32_t _age(self, int64_t entry) noexcept:
        return <uint32_t>self._num_added - self._buckets[entry // WAYS].times[entry % WAYS].added

    cdef inline bint _is_forgotten(self, int64_t entry) noexcept:
        return self._age(entry) > <uint32_t>self._capacity

    cdef inline int64_t _locate(self, uint64_t bucket, uint64_t h) noexcept:
        """Returns the only entry that can hold the hash, or -1."""
        cdef uint32_t tag = <uint32_t>h | 1
        cdef unsigned ways = kvo_match16(self._buckets[bucket].tags, tag)
        if self._num_buckets == 1:
            ways |= kvo_match16(self._buckets[1].tags, tag) << WAYS
        return <int64_t>(bucket * WAYS) + 31 - __builtin_clz(ways) if ways else -1

    cdef inline int64_t _find(self, uint64_t h) noexcept:
        cdef int64_t entry = self._locate(self._bucket_of(h), h)
        if entry >= 0 and self._is_forgotten(entry):
            # Freed, so that a hash that is added again is in its bucket once. It is the earliest of its bucket.
            self._buckets[entry // WAYS].tags[entry % WAYS] = 0
            return -1
        return entry

    def find(self, hashes):
        cdef cnp.ndarray given = hashes_of(hashes)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), start = 0, stop, i
        cdef uint64_t* hs = <uint64_t*>cnp.PyArray_DATA(given)
        cdef cnp.ndarray result = new_int64(n)
        cdef int64_t* to = int64s(result)
        while start < n:
            stop = min(n, start + CHUNK)
            for i in range(start, stop):
                kvo_prefetch(self._buckets[self._bucket_of(hs[i])].tags)
            for i in range(start, stop):
                to[i] = self._find(hs[i])
            start = stop
        return result

    def find_again(self, hashes, entries):
        cdef cnp.ndarray given = hashes_of(hashes), before = numbers(entries)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef uint64_t* hs = <uint64_t*>cnp.PyArray_DATA(given)
        cdef int64_t* known = int64s(before)
        cdef cnp.ndarray result
        if cnp.PyArray_DIM(before, 0) != n:
            raise IndexError("there must be as many entries as hashes")
        for i in range(n):
            if known[i] >= 0:
                break
        else:
            return before
        result = new_int64(n)
        for i in range(n):
            int64s(result)[i] = self._find(hs[i]) if known[i] >= 0 else -1
        return result

    cdef cnp.ndarray _checked(self, entries):
        return checked(entries, max(2, self._num_buckets) * WAYS)

    def stamps(self, entries):
        cdef cnp.ndarray given = self._checked(entries)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray result = new_int64(n)
        for i in range(n):
            int64s(result)[i] = self._base + (self._buckets[at[i] // WAYS].times[at[i] % WAYS].stamp >> 1)
        return result

    def is_marked(self, entries):
        cdef cnp.ndarray given = numbers(entries)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, size = max(2, self._num_buckets) * WAYS
        cdef cnp.ndarray result = new_array(n, cnp.NPY_BOOL)
        cdef uint8_t* to = <uint8_t*>cnp.PyArray_DATA(result)
        for i in range(n):
            if at[i] >= size:
                raise IndexError(f"entry {at[i]} is not in [0, {size})")
            to[i] = at[i] >= 0 and self._buckets[at[i] // WAYS].times[at[i] % WAYS].stamp & 1
        return result

    def mark(self, entries, marks):
        cdef cnp.ndarray given = numbers(entries)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray marked = flags(marks, n)
        cdef uint32_t* stamp
        check_indices(given, max(2, self._num_buckets) * WAYS)
        for i in range(n):
            stamp = &self._buckets[at[i] // WAYS].times[at[i] % WAYS].stamp
            stamp[0] = stamp[0] & ~<uint32_t>1 | bools(marked)[i]

    def remove(self, entries):
        cdef cnp.ndarray given = self._checked(entries)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._remove(at[i])

    cdef inline void _remove(self, int64_t entry) noexcept:
        self._buckets[entry // WAYS].tags[entry % WAYS] = 0
        self._next_way[entry // self._entries_per_bucket()] |= DISORDERED

    cdef inline Py_ssize_t _entries_per_bucket(self) noexcept:
        return WAYS if self._num_buckets > 1 else 2 * WAYS

    def add(self, hashes, stamps, new=False):
        cdef cnp.ndarray given = hashes_of(hashes), times = numbers(stamps)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), start, stop, i
        if cnp.PyArray_DIM(times, 0) != n:
            raise IndexError("there must be as many stamps as hashes")
        cdef Py_ssize_t begin = max(0, n - self._capacity)
        cdef uint64_t* hs = <uint64_t*>cnp.PyArray_DATA(given)
        cdef int64_t* ts = int64s(times)
        cdef uint64_t homes[CHUNK]
        cdef int64_t entry, stamp, latest = self._base
        cdef Bucket* bucket
        cdef uint8_t way
        for i in range(begin, n):
            latest = max(latest, ts[i])
        if latest - self._base >= <int64_t>1 << 31:
            self._move_base(latest - (<int64_t>1 << 30))
        if (self._num_added + n) >> 30 != self._num_added >> 30:
            self._free_forgotten()
        if not new:
            for i in range(begin, n):
                entry = self._locate(self._bucket_of(hs[i]), hs[i])
                if entry >= 0:
                    self._remove(entry)
        start = begin
        while start < n:
            stop = min(n, start + CHUNK)
            for i in range(start, stop):
                homes[i - start] = self._bucket_of(hs[i])
                bucket = &self._buckets[homes[i - start]]
                kvo_prefetch_write(bucket.tags)
                kvo_prefetch_write(&bucket.times[self._next_way[homes[i - start]] % WAYS])
            for i in range(start, stop):
                if self._next_way[homes[i - start]] & DISORDERED:
                    self._put_in_order(homes[i - start])
                way = self._next_way[homes[i - start]]
                self._next_way[homes[i - start]] = 0 if way + 1 == self._ways else way + 1
                bucket = &self._buckets[homes[i - start] + way // WAYS]
                stamp = ts[i] - self._base if ts[i] > self._base else 0
                bucket.tags[way % WAYS] = <uint32_t>hs[i] | 1
                bucket.times[way % WAYS].added = <uint32_t>self._num_added
                bucket.times[way % WAYS].stamp = <uint32_t>stamp << 1
                self._num_added += 1
            start = stop

    cdef void _put_in_order(self, uint64_t home) noexcept:
        """Moves the entries of a bucket so that the free ones come first, then the others, the earliest first."""
        cdef Bucket sorted_by_age[2]
        cdef uint64_t ages[2 * WAYS]
        cdef uint64_t age
        cdef Bucket* bucket
        cdef Py_ssize_t way, at
        for way in range(self._ways):
            bucket = &self._buckets[home + way // WAYS]
            age = self._age(home * WAYS + way) if bucket.tags[way % WAYS] else NO_END
            at = way
            while at and ages[at - 1] < age:
                ages[at] = ages[at - 1]
                copy_entry(&sorted_by_age[0], at, &sorted_by_age[0], at - 1)
                at -= 1
            ages[at] = age
            copy_entry(&sorted_by_age[0], at, &self._buckets[home], way)
        for way in range(self._ways):
            copy_entry(&self._buckets[home], way, &sorted_by_age[0], way)
        self._next_way[home] = 0

    cdef void _move_base(self, int64_t base) noexcept:
        """Counts stamps from a later base. What was before it is now as early as it."""
        cdef Py_ssize_t i, way
        cdef int64_t stamp
        cdef uint32_t* at
        for i in range(max(2, self._num_buckets)):
            for way in range(WAYS):
                at = &self._buckets[i].times[way].stamp
                stamp = max(<int64_t>0, (at[0] >> 1) + self._base - base)
                at[0] = <uint32_t>stamp << 1 | at[0] & 1
        self._base = base

    cdef void _free_forgotten(self) noexcept:
        cdef Py_ssize_t entry
        for entry in range(max(2, self._num_buckets) * WAYS):
            if self._is_forgotten(entry):
                self._buckets[entry // WAYS].tags[entry % WAYS] = 0


cdef inline void copy_entry(Bucket* to, Py_ssize_t to_way, Bucket* of, Py_ssize_t way) noexcept:
    to[to_way // WAYS].tags[to_way % WAYS] = of[way // WAYS].tags[way % WAYS]
    to[to_way // WAYS].times[to_way % WAYS] = of[way // WAYS].times[way % WAYS]


# Shadows.

cdef enum:
    MAX_RULES = 4
    NOWHERE = 0
    ONCE = 1
    AGAIN = 2
    GHOST = 3
    LISTS = 4
    END = -1

cdef struct Node:
    uint64_t name
    int64_t stamp
    int64_t seen
    int32_t older[MAX_RULES]
    int32_t newer[MAX_RULES]
    uint8_t where[MAX_RULES]

cdef struct RuleNumbers:
    bint has_share
    bint holds
    int64_t quota
    double tested_from


cdef class Shadows:
    """One table of names for all shadows: a name has one stamp, because every shadow that knows it saw the same
    requests."""

    cdef readonly Py_ssize_t capacity
    cdef Py_ssize_t _num_rules, _ghost_limit, _num_nodes, _table_size
    cdef RuleNumbers _rules[MAX_RULES]
    cdef cnp.ndarray _node_memory, _table_memory, _chain_memory
    cdef Node* _nodes
    cdef int32_t* _table
    """Index of a node, or END, at the hash of its name or behind it."""
    cdef int32_t _free
    """The first of the free nodes, which ``newer[0]`` links."""
    cdef int64_t _clock, _request
    cdef int32_t _oldest[MAX_RULES][LISTS]
    cdef int32_t _newest[MAX_RULES][LISTS]
    cdef int64_t _size[MAX_RULES][LISTS]

    def __cinit__(self, Py_ssize_t capacity, rules, Py_ssize_t ghosts):
        """``rules``: of each whether it has a share, its quota, from which number of blocks used again it tests the
        distance, and whether it holds. ``ghosts``: their number."""
        self.capacity = capacity
        self._ghost_limit = ghosts
        rules = tuple(rules)
        self._num_rules = len(rules)
        if self._num_rules > MAX_RULES:
            raise ValueError(f"{len(rules)} rules: there can be {MAX_RULES}")
        for r, (has_share, quota, tested_from, holds) in enumerate(rules):
            self._rules[r] = RuleNumbers(has_share, holds, quota, tested_from)
        self.clear()

    def clear(self):
        self._resize(64, 0)
        self._clock = self._request = 0
        for r in range(MAX_RULES):
            for where in range(LISTS):
                self._oldest[r][where] = self._newest[r][where] = END
                self._size[r][where] = 0

    def lists(self, Py_ssize_t r):
        """Returns the names in the two lists of a shadow, oldest first, and its ghosts."""
        if not 0 <= r < self._num_rules:
            raise IndexError(f"rule {r} of {self._num_rules}")
        result = ([], [], [])
        cdef int32_t node
        for where in range(ONCE, LISTS):
            node = self._oldest[r][where]
            while node != END:
                result[where - ONCE].append(self._nodes[node].name)
                node = self._nodes[node].newer[r]
        return result

    cdef int _resize(self, Py_ssize_t num_nodes, Py_ssize_t before) except -1:
        """Makes room for this many nodes, of which the first ``before`` are those that there are, all in use. If there
        is no memory, nothing has changed."""
        cdef int32_t node
        cdef cnp.ndarray memory = new_array(num_nodes * sizeof(Node), cnp.NPY_UINT8)
        cdef cnp.ndarray table = new_array(2 * num_nodes, cnp.NPY_INT32)
        if before:
            memcpy(cnp.PyArray_DATA(memory), self._nodes, before * sizeof(Node))
        self._node_memory, self._nodes, self._num_nodes = memory, <Node*>cnp.PyArray_DATA(memory), num_nodes
        self._table_memory, self._table, self._table_size = table, <int32_t*>cnp.PyArray_DATA(table), 2 * num_nodes
        memset(self._table, 0xff, self._table_size * sizeof(int32_t))  # Each place is END.
        self._free = END
        for node in range(before):
            self._table[self._place(self._nodes[node].name)] = node
        for node in range(<int32_t>num_nodes - 1, <int32_t>before - 1, -1):
            self._nodes[node].newer[0] = self._free
            self._free = node
        return 0

    cdef inline uint64_t _home(self, uint64_t name) noexcept:
        return scattered(name) & (self._table_size - 1)

    cdef inline uint64_t _place(self, uint64_t name) noexcept:
        """Returns where in the table the name is, or where it is to be put."""
        cdef uint64_t at = self._home(name)
        while self._table[at] != END and self._nodes[self._table[at]].name != name:
            at = at + 1 & (self._table_size - 1)
        return at

    cdef int32_t _node_of(self, uint64_t name) except -1:
        """Returns the node of a name, a new one if there is none."""
        cdef uint64_t at = self._place(name)
        cdef int32_t node = self._table[at]
        if node != END:
            return node
        if self._free == END:
            self._resize(2 * self._num_nodes, self._num_nodes)
            at = self._place(name)
        node = self._free
        self._free = self._nodes[node].newer[0]
        memset(&self._nodes[node], 0, sizeof(Node))
        self._nodes[node].name = name
        self._nodes[node].stamp = -1
        self._table[at] = node
        return node

    cdef void _drop_if_nowhere(self, int32_t node) noexcept:
        """Frees a node that is in no list."""
        cdef uint64_t at, hole, home, mask = self._table_size - 1
        for r in range(self._num_rules):
            if self._nodes[node].where[r] != NOWHERE:
                return
        hole = at = self._place(self._nodes[node].name)
        while True:
            # The entries behind the hole move into it, unless they would be before their home.
            at = at + 1 & mask
            if self._table[at] == END:
                break
            home = self._home(self._nodes[self._table[at]].name)
            if (at - home & mask) >= (at - hole & mask):
                self._table[hole] = self._table[at]
                hole = at
        self._table[hole] = END
        self._nodes[node].newer[0] = self._free
        self._free = node

    cdef inline void _unlink(self, Py_ssize_t r, int32_t node) noexcept:
        cdef int where = self._nodes[node].where[r]
        cdef int32_t older = self._nodes[node].older[r], newer = self._nodes[node].newer[r]
        if where == NOWHERE:
            return
        if older == END:
            self._oldest[r][where] = newer
        else:
            self._nodes[older].newer[r] = newer
        if newer == END:
            self._newest[r][where] = older
        else:
            self._nodes[newer].older[r] = older
        self._nodes[node].where[r] = NOWHERE
        self._size[r][where] -= 1

    cdef inline void _append(self, Py_ssize_t r, int where, int32_t node) noexcept:
        """Moves a node to the recent end of a list."""
        self._unlink(r, node)
        self._nodes[node].where[r] = where
        self._nodes[node].older[r] = self._newest[r][where]
        self._nodes[node].newer[r] = END
        if self._newest[r][where] == END:
            self._oldest[r][where] = node
        else:
            self._nodes[self._newest[r][where]].newer[r] = node
        self._newest[r][where] = node
        self._size[r][where] += 1

    cdef inline void _cut(self, Py_ssize_t r, int where, int64_t limit) noexcept:
        """Forgets the oldest names of a list, until ``limit`` are left."""
        cdef int32_t node
        while self._size[r][where] > limit:
            node = self._oldest[r][where]
            self._unlink(r, node)
            if self._nodes[node].seen != self._request:
                self._drop_if_nowhere(node)

    def access(self, hashes, uint64_t limit):
        """Serves a request for a chain: those of ``hashes`` that are at most ``limit``, head first. Returns how many
        distinct ones these are, and of each shadow how many leading ones were present."""
        cdef cnp.ndarray given = hashes_of(hashes)
        cdef uint64_t* hs = <uint64_t*>cnp.PyArray_DATA(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, num = 0
        cdef int32_t node
        cdef int32_t* chain
        cdef Py_ssize_t found[MAX_RULES]
        for i in range(n):
            num += hs[i] <= limit
        if num == 0:
            return 0, ()
        if self._chain_memory is None or cnp.PyArray_DIM(self._chain_memory, 0) < 3 * num:
            self._chain_memory = new_array(3 * num, cnp.NPY_INT32)
        chain = <int32_t*>cnp.PyArray_DATA(self._chain_memory)
        self._request += 1
        num = 0
        for i in range(n):
            if hs[i] > limit:
                continue
            node = self._node_of(hs[i])
            if self._nodes[node].seen != self._request:
                self._nodes[node].seen = self._request
                chain[num] = node
                num += 1
        for i in range(self._num_rules):
            found[i] = self._access(i, chain, num) if self._rules[i].has_share else self._access_lru(i, chain, num)
        for i in range(num):
            self._nodes[chain[i]].stamp = self._clock + num - i
            self._drop_if_nowhere(chain[i])
        self._clock += num
        return num, tuple([found[i] for i in range(self._num_rules)])

    cdef Py_ssize_t _access_lru(self, Py_ssize_t r, int32_t* chain, Py_ssize_t num) noexcept:
        cdef Py_ssize_t found = 0, i
        while found < num and self._nodes[chain[found]].where[r] == AGAIN:
            found += 1
        for i in range(num - 1, -1, -1):
            self._append(r, AGAIN, chain[i])
        self._cut(r, AGAIN, self.capacity)
        return found

    cdef Py_ssize_t _access(self, Py_ssize_t r, int32_t* chain, Py_ssize_t num) noexcept:
        cdef int32_t* new_once = chain + num
        """Places in the chain, the last one first."""
        cdef int32_t* new_again = chain + 2 * num
        cdef Py_ssize_t found = 0, num_once = 0, num_again = 0, drop_once = 0, drop_again = 0, i
        cdef int64_t floor = -1
        cdef Node* node
        while found < num and ONCE <= self._nodes[chain[found]].where[r] <= AGAIN:
            found += 1
        if self._size[r][AGAIN] and self._size[r][AGAIN] >= self._rules[r].tested_from:
            floor = self._nodes[self._oldest[r][AGAIN]].stamp
        for i in range(num - 1, -1, -1):
            node = &self._nodes[chain[i]]
            if ONCE <= node.where[r] <= AGAIN:
                self._append(r, AGAIN, chain[i])
            elif node.where[r] == GHOST and node.stamp > floor:
                new_again[num_again] = <int32_t>i
                num_again += 1
            else:
                new_once[num_once] = <int32_t>i
                num_once += 1
        self._make_room(r, chain, num, num_once, num_again, &drop_once, &drop_again)
        for i in range(drop_once, num_once):
            self._append(r, ONCE, chain[new_once[i]])
        for i in range(drop_again, num_again):
            self._append(r, AGAIN, chain[new_again[i]])
        if drop_again < num_again:
            for i in range(num - 1, -1, -1):
                if self._nodes[chain[i]].where[r] == AGAIN:
                    self._append(r, AGAIN, chain[i])
        return found

    cdef void _make_room(
        self, Py_ssize_t r, int32_t* chain, Py_ssize_t num, Py_ssize_t new_once, Py_ssize_t new_again,
        Py_ssize_t* drop_once, Py_ssize_t* drop_again,
    ) noexcept:
        """Makes room for new names, and says how many of the deepest ones of each kind the rule refuses. The steps are
        those of ``tournament.plan``."""
        cdef int64_t once = self._size[r][ONCE], again = self._size[r][AGAIN], quota = self._rules[r].quota
        cdef int64_t left = once + again + new_once + new_again - self.capacity
        cdef int64_t drop = 0, evict, evict_again, more, i = 0, k = 0
        cdef int32_t* at_once = chain + num
        cdef int32_t* at_again = chain + 2 * num
        if left <= 0:
            return
        if self._rules[r].holds and once > quota:
            drop = min(left, <int64_t>new_once)
        left -= drop
        evict = min(left, once, max(<int64_t>0, once + new_once - drop - quota))
        left -= evict
        more = min(left, new_once - drop, max(<int64_t>0, once - evict + new_once - drop - quota))
        drop += more
        left -= more
        evict_again = min(left, again - (num - new_once - new_again))
        left -= evict_again
        more = min(left, new_once - drop)
        drop += more
        left -= more
        more = min(left, once - evict)
        evict += more
        drop_once[0] = drop
        drop_again[0] = min(left - more, <int64_t>new_again)
        # Those that are refused become ghosts in the order of the chain, the last one first.
        while i < drop or k < drop_again[0]:
            if k == drop_again[0] or (i < drop and at_once[i] > at_again[k]):
                self._append(r, GHOST, chain[at_once[i]])
                i += 1
            else:
                self._append(r, GHOST, chain[at_again[k]])
                k += 1
        for i in range(evict):
            self._append(r, GHOST, self._oldest[r][ONCE])
        for i in range(evict_again):
            self._append(r, GHOST, self._oldest[r][AGAIN])
        self._cut(r, GHOST, self._ghost_limit)


# Keys in order.

cdef struct Place:
    uint32_t hash
    int32_t node

cdef struct Links:
    uint32_t hash
    int32_t older
    int32_t newer


cdef class KeyQueue:
    """A hash table with linear probing, half empty at least, of nodes in a linked list. A place has 32 bits of the
    hash, which say where it belongs, so that most probes need not look at the key. All keys are exactly bytes, so that no
    Python code runs when they are hashed, compared or released."""

    cdef readonly Py_ssize_t limit
    cdef Py_ssize_t _len
    cdef cnp.ndarray _key_memory, _link_memory, _place_memory
    cdef PyObject** _keys
    cdef Links* _links
    cdef Place* _places
    cdef uint32_t _mask
    cdef int32_t _oldest, _newest, _free

    def __cinit__(self, Py_ssize_t limit):
        if not 0 < limit <= 1 << 30:
            raise ValueError(f"limit={limit}: must be from 1 to {1 << 30}")
        self.limit = limit
        size = 1 << (2 * limit - 1).bit_length()
        self._mask = size - 1
        self._key_memory = np.full(limit, None, dtype=object)
        self._keys = <PyObject**>cnp.PyArray_DATA(self._key_memory)
        self._link_memory = np.empty(limit * sizeof(Links), dtype=np.uint8)
        self._links = <Links*>cnp.PyArray_DATA(self._link_memory)
        self._place_memory = np.empty(size * sizeof(Place), dtype=np.uint8)
        self._places = <Place*>cnp.PyArray_DATA(self._place_memory)
        self.clear()

    def clear(self):
        cdef int32_t node
        self._key_memory.fill(None)
        self._place_memory.fill(255)  # Each node is END.
        self._len = 0
        self._oldest = self._newest = self._free = END
        for node in range(<int32_t>self.limit - 1, -1, -1):
            self._links[node].newer = self._free
            self._free = node

    def __len__(self):
        return self._len

    def __iter__(self):
        result = []
        cdef int32_t node = self._oldest
        while node != END:
            result.append(<object>self._keys[node])
            node = self._links[node].newer
        return iter(result)

    def __contains__(self, key):
        h = hash(key)
        if not PyBytes_Check(key):
            return False
        key = exactly_bytes(key)
        return self._places[self._place(<PyObject*>key, mixed(hash(key)))].node != END

    cdef inline uint32_t _place(self, PyObject* key, uint32_t h) noexcept:
        """Returns where in the table the key is, or where it is to be put."""
        cdef uint32_t at = h & self._mask
        while self._places[at].node != END:
            if self._places[at].hash == h and is_same(self._keys[self._places[at].node], key):
                break
            at = at + 1 & self._mask
        return at

    cdef inline int _hash(self, PyObject** keys, Py_ssize_t n, uint32_t* hashes) except -1:
        """Hashes up to CHUNK keys."""
        cdef Py_ssize_t i
        for i in range(n):
            hashes[i] = mixed(PyObject_Hash(<object>keys[i]))
            kvo_prefetch(&self._places[hashes[i] & self._mask])
        return 0

    def holds(self, keys):
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start, i
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef uint32_t hashes[CHUNK]
        cdef cnp.ndarray result = new_array(n, cnp.NPY_BOOL)
        cdef uint8_t* to = <uint8_t*>cnp.PyArray_DATA(result)
        if self._len == 0:
            memset(to, 0, n)
            return result
        for start in range(0, n, CHUNK):
            self._hash(items + start, min(n - start, CHUNK), hashes)
            for i in range(start, min(n, start + CHUNK)):
                to[i] = self._places[self._place(items[i], hashes[i - start])].node != END
        return result

    def add(self, keys):
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start, i
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef uint32_t hashes[CHUNK]
        cdef uint32_t at
        cdef int32_t node
        cdef PyObject* none
        for start in range(0, n, CHUNK):
            self._hash(items + start, min(n - start, CHUNK), hashes)
            if self._len + CHUNK > self.limit:
                self._prefetch_oldest()
            for i in range(start, min(n, start + CHUNK)):
                at = self._place(items[i], hashes[i - start])
                node = self._places[at].node
                if node != END:
                    self._unlink(node)
                    self._link(node)
                    continue
                if self._len == self.limit:
                    self._drop(self._oldest)
                    at = self._place(items[i], hashes[i - start])
                node = self._free
                self._free = self._links[node].newer
                none = self._keys[node]
                increment(items[i])
                self._keys[node] = items[i]
                decrement(none)
                self._links[node].hash = self._places[at].hash = hashes[i - start]
                self._places[at].node = node
                self._link(node)
                self._len += 1

    cdef void _prefetch_oldest(self) noexcept:
        """Prefetches what a chunk of calls of ``_drop`` will need, because these follow one another."""
        cdef int32_t node = self._oldest
        cdef Py_ssize_t i
        for i in range(CHUNK):
            if node == END:
                break
            kvo_prefetch_write(&self._places[self._links[node].hash & self._mask])
            kvo_prefetch_write(self._keys[node])
            node = self._links[node].newer

    def discard(self, keys):
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start, i
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef uint32_t hashes[CHUNK]
        cdef int32_t node
        if self._len == 0:
            return
        for start in range(0, n, CHUNK):
            self._hash(items + start, min(n - start, CHUNK), hashes)
            for i in range(start, min(n, start + CHUNK)):
                node = self._places[self._place(items[i], hashes[i - start])].node
                if node != END:
                    self._drop(node)

    def cut(self, Py_ssize_t limit):
        while self._len > max(0, limit):
            if self._len % CHUNK == 0:
                self._prefetch_oldest()
            self._drop(self._oldest)

    cdef void _drop(self, int32_t node) noexcept:
        cdef uint32_t at = self._links[node].hash & self._mask, hole
        cdef PyObject* none = <PyObject*>None
        cdef PyObject* key = self._keys[node]
        while self._places[at].node != node:
            at = at + 1 & self._mask
        hole = at
        while True:
            # The places behind the hole move into it, unless they would be before their home.
            at = at + 1 & self._mask
            if self._places[at].node == END:
                break
            if (at - self._places[at].hash & self._mask) >= (at - hole & self._mask):
                self._places[hole] = self._places[at]
                hole = at
        self._places[hole].node = END
        self._unlink(node)
        self._links[node].newer = self._free
        self._free = node
        self._len -= 1
        increment(none)
        self._keys[node] = none
        decrement(key)

    cdef inline void _unlink(self, int32_t node) noexcept:
        cdef int32_t older = self._links[node].older, newer = self._links[node].newer
        if older == END:
            self._oldest = newer
        else:
            self._links[older].newer = newer
        if newer == END:
            self._newest = older
        else:
            self._links[newer].older = older

    cdef inline void _link(self, int32_t node) noexcept:
        self._links[node].older = self._newest
        self._links[node].newer = END
        if self._newest == END:
            self._oldest = node
        else:
            self._links[self._newest].newer = node
        self._newest = node


cdef inline uint32_t mixed(Py_hash_t h) noexcept:
    return <uint32_t>scattered(<uint64_t>h)


cdef inline object only_bytes(object keys):
    """Returns a list or tuple of the same keys, as bytes. Raises TypeError if one is no bytes."""
    fast = PySequence_Fast(keys, b"keys must be a sequence")
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i
    cdef PyObject** items = PySequence_Fast_ITEMS(fast)
    for i in range(n):
        if i + 8 < n:
            kvo_prefetch(items[i + 8])
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
    """Returns whether keys are equal. Only bytes can be equal without being the same object."""
    if a == b:
        return True
    return (
        PyBytes_CheckExact(<object>a)
        and PyBytes_CheckExact(<object>b)
        and PyBytes_GET_SIZE(<object>a) == PyBytes_GET_SIZE(<object>b)
        and memcmp(PyBytes_AS_STRING(<object>a), PyBytes_AS_STRING(<object>b), PyBytes_GET_SIZE(<object>a)) == 0
    )


# Two lists.

cdef enum:
    ABSENT = -1
    SKIPPED = -2
    QUEUED = -3

cdef struct Entry:
    int64_t position
    int64_t slot


cdef class Heap:
    """Entries, the one with the lowest position first. The owner makes room before it pushes one."""

    cdef cnp.ndarray memory
    cdef Entry* entries
    cdef Py_ssize_t len, size

    def __cinit__(self):
        self.replace(0)

    cdef cnp.ndarray replace(self, Py_ssize_t size):
        """Becomes an empty heap with room for ``size`` entries. Returns the memory of the entries that there were."""
        cdef cnp.ndarray before = self.memory
        self.memory = new_int64(2 * size)
        self.entries = <Entry*>cnp.PyArray_DATA(self.memory)
        self.len, self.size = 0, size
        return before

    cdef void push(self, Entry entry) noexcept:
        cdef Py_ssize_t i = self.len, parent
        self.len += 1
        while i:
            parent = (i - 1) // 2
            if self.entries[parent].position <= entry.position:
                break
            self.entries[i] = self.entries[parent]
            i = parent
        self.entries[i] = entry

    cdef void pop(self) noexcept:
        cdef Entry last
        cdef Py_ssize_t i = 0, child
        self.len -= 1
        last = self.entries[self.len]
        while True:
            child = 2 * i + 1
            if child >= self.len:
                break
            if child + 1 < self.len and self.entries[child + 1].position < self.entries[child].position:
                child += 1
            if self.entries[child].position >= last.position:
                break
            self.entries[i] = self.entries[child]
            i = child
        self.entries[i] = last


cdef class ListPair:
    """Two linked lists that share the arrays of their links. Members that an eviction has skipped are not linked: they
    are in a heap if they were marked evictable since then."""

    cdef readonly Py_ssize_t _capacity
    cdef int64_t _clock
    cdef cnp.ndarray _stamp_memory, _older_memory, _newer_memory, _list_memory
    cdef int64_t* _stamp
    cdef int32_t* _older
    """SKIPPED or QUEUED for members that are not linked."""
    cdef int32_t* _newer
    cdef uint8_t* _list
    """0: used once, 1: used again."""
    cdef int32_t _oldest[2]
    cdef int32_t _newest[2]
    cdef readonly Py_ssize_t num_once, num_again
    cdef Heap _once_heap, _again_heap

    def __cinit__(self, Py_ssize_t capacity):
        if not 0 <= capacity < 1 << 31:
            raise ValueError(f"capacity={capacity}: must be from 0 to {(1 << 31) - 1}")
        self._capacity = capacity
        self._stamp_memory = np.empty(capacity, dtype=np.int64)
        self._stamp = int64s(self._stamp_memory)
        self._older_memory = np.zeros(capacity, dtype=np.int32)
        self._older = <int32_t*>cnp.PyArray_DATA(self._older_memory)
        self._newer_memory = np.zeros(capacity, dtype=np.int32)
        self._newer = <int32_t*>cnp.PyArray_DATA(self._newer_memory)
        self._list_memory = np.zeros(capacity, dtype=np.uint8)
        self._list = <uint8_t*>cnp.PyArray_DATA(self._list_memory)
        self._once_heap, self._again_heap = Heap(), Heap()
        self.clear()

    def clear(self):
        self._stamp_memory.fill(ABSENT)
        self._clock = 0
        self.num_once = self.num_again = 0
        self._once_heap.len = self._again_heap.len = 0
        for which in range(2):
            self._oldest[which] = self._newest[which] = END

    def tick(self, Py_ssize_t n):
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    cdef inline Heap _heap(self, int which):
        return self._again_heap if which else self._once_heap

    cdef inline void _count(self, int which, Py_ssize_t n) noexcept:
        if which:
            self.num_again += n
        else:
            self.num_once += n

    cdef inline void _unlink(self, int64_t slot) noexcept:
        cdef int32_t older = self._older[slot], newer
        cdef int which = self._list[slot]
        if older <= SKIPPED:
            return
        newer = self._newer[slot]
        if older == END:
            self._oldest[which] = newer
        else:
            self._newer[older] = newer
        if newer == END:
            self._newest[which] = older
        else:
            self._older[newer] = older

    cdef inline void _append(self, int64_t slot, int which, int64_t position) noexcept:
        """Makes a slot, a member or not, the most recent of a list."""
        if self._stamp[slot] != ABSENT:
            self._unlink(slot)
            self._count(self._list[slot], -1)
        self._count(which, 1)
        self._list[slot] = which
        self._stamp[slot] = position
        self._older[slot] = self._newest[which]
        self._newer[slot] = END
        if self._newest[which] == END:
            self._oldest[which] = <int32_t>slot
        else:
            self._newer[self._newest[which]] = <int32_t>slot
        self._newest[which] = <int32_t>slot

    def use(self, slots, ready):
        cdef cnp.ndarray given = numbers(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray marks = flags(ready, n)
        cdef int64_t* at = int64s(given)
        cdef bint stays
        check_indices(given, self._capacity)
        for i in range(n):
            stays = self._stamp[at[i]] != ABSENT and not self._list[at[i]] and not bools(marks)[i]
            self._append(at[i], not stays, self._clock + i)
        self._clock += n

    def insert(self, slots, again):
        cdef cnp.ndarray given = numbers(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray marks = flags(again, n)
        check_indices(given, self._capacity)
        for i in range(n):
            self._append(int64s(given)[i], bools(marks)[i] != 0, self._clock + i)
        self._clock += n

    def move_to_end(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        for i in range(n):
            if self._stamp[at[i]] != ABSENT:
                self._append(at[i], self._list[at[i]], self._clock + i)
        self._clock += n

    def discard(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            if self._stamp[at[i]] != ABSENT:
                self._unlink(at[i])
                self._stamp[at[i]] = ABSENT
                self._count(self._list[at[i]], -1)

    def mark_evictable(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            if self._older[at[i]] == SKIPPED and self._stamp[at[i]] != ABSENT:
                self._push(at[i])

    cdef int _push(self, int64_t slot) except -1:
        cdef Heap heap = self._heap(self._list[slot])
        cdef Entry entry
        if heap.len == heap.size:
            self._renew(heap)
        entry.position = self._stamp[slot]
        entry.slot = slot
        heap.push(entry)
        self._older[slot] = QUEUED
        return 0

    cdef int _renew(self, Heap heap) except -1:
        """Drops entries of blocks that have moved or left, and makes room for as many entries as are left."""
        cdef Py_ssize_t i, kept = 0, n = heap.len
        for i in range(n):
            kept += self._is_queued(heap.entries[i])
        cdef cnp.ndarray before = heap.replace(2 * kept + 64)
        cdef Entry* entries = <Entry*>cnp.PyArray_DATA(before)
        for i in range(n):
            # A heap without some of its entries, in the same order, is almost one: few entries move.
            if self._is_queued(entries[i]):
                heap.push(entries[i])
        return 0

    cdef inline bint _is_queued(self, Entry entry) noexcept:
        """Returns whether an entry of a heap is alive. A position is used once, so it tells the list as well."""
        return self._stamp[entry.slot] == entry.position and self._older[entry.slot] == QUEUED

    cdef set _queued(self, Heap heap):
        """Returns the slots in a heap."""
        cdef Py_ssize_t i
        return {heap.entries[i].slot for i in range(heap.len) if self._is_queued(heap.entries[i])}

    cdef int64_t _oldest_of(self, int which) noexcept:
        """Returns the oldest member of a list, busy or not, -1 if there is none. Does not count skipped ones."""
        cdef Heap heap = self._heap(which)
        while heap.len:
            if self._is_queued(heap.entries[0]):
                return heap.entries[0].slot
            heap.pop()
        return self._oldest[which]

    cdef void _take_out(self, int64_t slot) noexcept:
        """Takes what ``_oldest_of`` has returned out of the order."""
        if self._older[slot] == QUEUED:
            self._heap(self._list[slot]).pop()
        else:
            self._unlink(slot)

    def oldest_again(self):
        cdef int64_t slot = self._oldest_of(1)
        return self._stamp[slot] if slot >= 0 else -1

    def pop_oldest(self, Py_ssize_t n, busy):
        return self._pop(n, busy, True, True)

    def pop_once(self, Py_ssize_t n, busy):
        return self._pop(n, busy, True, False)

    def pop_again(self, Py_ssize_t n, busy):
        return self._pop(n, busy, False, True)

    cdef tuple _pop(self, Py_ssize_t n, busy, bint from_once, bint from_again):
        cdef cnp.ndarray marks = flags(busy, self._capacity)
        cdef const uint8_t* is_busy = bools(marks)
        n = max(0, min(n, from_once * self.num_once + from_again * self.num_again))
        cdef cnp.ndarray slots = new_int64(n), positions = new_int64(n)
        cdef Py_ssize_t popped = 0
        cdef int64_t slot, rival
        while popped < n:
            slot = self._oldest_of(0) if from_once else -1
            rival = self._oldest_of(1) if from_again else -1
            if slot < 0 or (rival >= 0 and self._stamp[rival] < self._stamp[slot]):
                slot = rival
            if slot < 0:
                break
            self._take_out(slot)
            if is_busy[slot]:
                self._older[slot] = SKIPPED
                continue
            int64s(slots)[popped] = slot
            int64s(positions)[popped] = self._stamp[slot]
            self._stamp[slot] = ABSENT
            self._count(self._list[slot], -1)
            popped += 1
        return first(slots, popped), first(positions, popped)

    def check_integrity(self, slots):
        members = np.flatnonzero(self._stamp_memory != ABSENT)
        if members.tolist() != sorted(slots.tolist()) or len(members) != self.num_once + self.num_again:
            raise IntegrityError("the lists do not hold the blocks that they should")
        linked = set()
        for which, size in enumerate((self.num_once, self.num_again)):
            if np.count_nonzero(self._list_memory[members] == which) != size:
                raise IntegrityError("a list does not count its members right")
            slot, before = self._oldest[which], -1
            while slot != END:
                if slot in linked or self._list[slot] != which or self._stamp[slot] <= before:
                    raise IntegrityError("a list is out of order")
                linked.add(slot)
                before, slot = self._stamp[slot], self._newer[slot]
        aside = {slot for slot in members.tolist() if self._older[slot] <= SKIPPED}
        queued = self._queued(self._once_heap) | self._queued(self._again_heap)
        if linked | aside != set(members.tolist()) or linked & aside:
            raise IntegrityError("a list has lost a block")
        if queued != {slot for slot in aside if self._older[slot] == QUEUED}:
            raise IntegrityError("a list has lost a skipped block")
