# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The table of blocks and the stack of free slots; ``reference`` documents the methods.

Pointers go into numpy arrays that each object owns from ``__cinit__`` on and never replaces, except where said. Every
slot that a caller gives is checked against the capacity. Callers who break a promise of a method, such as distinct
slots, get wrong answers, but no memory is read or written out of bounds. Keys are hashed by Python, so both versions
agree on them; they are made bytes first, whose code is not Python's. Making a list or a tuple, or calling numpy through
Python, may run any code, that of finalizers: so all objects are made, and all arrays converted, before arrays are checked.
"""

cimport cython

include "common.pxi"

cdef extern from "prefetch.h" nogil:
    unsigned kvo_match8(const uint32_t* tags, uint32_t tag)
    int __builtin_ctz(unsigned)

cdef enum:
    WAYS = 8
    WRITING = -1
    FREE = -1
    SPILLED = -2

cdef struct Bucket:
    uint32_t tags[WAYS]
    int32_t slots[WAYS]


# Keys.

cdef inline uint32_t tag_of(uint64_t h) noexcept:
    return <uint32_t>(h >> 32) | 1


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
cdef class BlockTable:
    """The key's hash selects a bucket of eight entries; an entry is a 32-bit tag of the hash (0: empty) and a slot. Tags
    and slots of a bucket are side by side, in one line of the cache. A matching tag is confirmed by comparing the keys.
    The number of buckets is at least half the number of slots, so about one key in ten thousand finds its bucket full
    and goes to a dict. A batch of keys is probed together, and the table is never rebuilt."""

    cdef readonly Py_ssize_t num_blocks, num_held
    cdef public Py_ssize_t num_evictable, num_dropped
    cdef readonly cnp.ndarray key_of, ref_cnt, busy, dropped
    cdef cnp.ndarray _bucket_memory, _place_memory, _seen_memory, _scratch_memory
    cdef dict _spill
    cdef Bucket* _buckets
    cdef int32_t* _place
    cdef PyObject** _keys
    cdef uint64_t _mask
    cdef int32_t* _refs
    cdef uint8_t* _is_busy
    cdef uint8_t* _is_dropped
    cdef int32_t* _scratch

    def __cinit__(self, Py_ssize_t num_blocks):
        check_capacity(num_blocks)
        num_buckets = 1 << max(0, (max(num_blocks, 2) // 2 - 1).bit_length())
        self._mask = num_buckets - 1
        self._bucket_memory = np.zeros(num_buckets * sizeof(Bucket) + 64, dtype=np.uint8)
        self._buckets = <Bucket*>(<char*>cnp.PyArray_DATA(self._bucket_memory) + self._to_line())
        self._place_memory = np.full(num_blocks, FREE, dtype=np.int32)
        self._place = <int32_t*>cnp.PyArray_DATA(self._place_memory)
        # Callers see views, which cannot be resized.
        self.key_of = np.full(num_blocks, None, dtype=object)[:]
        self._keys = <PyObject**>cnp.PyArray_DATA(self.key_of)
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)[:]
        self._refs = <int32_t*>cnp.PyArray_DATA(self.ref_cnt)
        self.busy = np.zeros(num_blocks, dtype=np.bool_)[:]
        self._is_busy = bools(self.busy)
        self.dropped = np.zeros(num_blocks, dtype=np.bool_)[:]
        self._is_dropped = bools(self.dropped)
        self._scratch_memory = np.zeros(num_blocks, dtype=np.int32)
        self._scratch = <int32_t*>cnp.PyArray_DATA(self._scratch_memory)
        self._spill = {}
        self.num_blocks = num_blocks

    cdef Py_ssize_t _to_line(self) noexcept:
        """Returns the distance from the start of the memory of the buckets to the next line of the cache."""
        return -<Py_ssize_t>cnp.PyArray_DATA(self._bucket_memory) & 63

    cdef inline Bucket* _home(self, uint64_t h) noexcept:
        return &self._buckets[h & self._mask]

    def get(self, key):
        own = exactly_bytes(key)
        return self._get(<PyObject*>own, <uint64_t>PyObject_Hash(own))

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

    def find_in_transfer(self, keys):
        return self._look_up(keys)

    def find(self, keys):
        cdef cnp.ndarray result = self._look_up(keys)
        cdef int64_t* slots = int64s(result)
        cdef Py_ssize_t i
        if self.num_dropped:
            for i in range(cnp.PyArray_DIM(result, 0)):
                if slots[i] >= 0 and self._is_dropped[slots[i]]:
                    slots[i] = -1
        return result

    cdef cnp.ndarray _look_up(self, object keys):
        fast = only_bytes(keys)
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
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i, num_present = 0, num_absent = 0
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef cnp.ndarray found = new_int64(n), numbers_of_keys = new_int64(n)
        cdef int64_t* slots = int64s(found)
        cdef uint64_t* hashes = <uint64_t*>int64s(numbers_of_keys)
        self._find(items, n, slots, hashes)
        for i in range(n):
            num_present += slots[i] >= 0
        if num_present == n and not self.num_dropped:
            return found, absent
        cdef int32_t* seen
        cdef uint64_t at, mask = 16
        while mask < 2 * <uint64_t>(n - num_present):
            mask *= 2
        if self._seen_memory is None or <uint64_t>cnp.PyArray_DIM(self._seen_memory, 0) < mask:
            self._seen_memory = new_array(mask, cnp.NPY_INT32)
        seen = <int32_t*>cnp.PyArray_DATA(self._seen_memory)
        memset(seen, 0xff, mask * sizeof(int32_t))
        mask -= 1
        num_present = 0
        for i in range(n):
            if slots[i] >= 0:
                if not self._is_dropped[slots[i]]:
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
        return first(found, num_present), absent

    def insert(self, keys, slots):
        cdef cnp.ndarray given = self._insert(keys, slots)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._refs[at[i]] = WRITING
            self._is_busy[at[i]] = 1

    cdef cnp.ndarray _insert(self, object keys, object slots):
        """Returns the slots as an array. If it raises, nothing has changed."""
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i, start = 0, size
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef cnp.ndarray given = numbers(slots)
        cdef int64_t* at = int64s(given)
        cdef uint64_t hs[CHUNK]
        cdef Bucket* bucket
        cdef unsigned empty
        cdef int way
        cdef PyObject* before
        if cnp.PyArray_DIM(given, 0) != n:
            raise IndexError(f"{n} keys need as many slots, not {cnp.PyArray_DIM(given, 0)}")
        check_indices(given, self.num_blocks)
        while start < n:
            size = min(n - start, CHUNK)
            for i in range(start, start + size):
                hs[i - start] = <uint64_t>PyObject_Hash(<object>items[i])
                kvo_prefetch(self._home(hs[i - start]))
                kvo_prefetch(&self._keys[at[i]])
                kvo_prefetch(&self._place[at[i]])
            for i in range(start, start + size):
                bucket = self._home(hs[i - start])
                empty = kvo_match8(bucket.tags, 0)
                if empty:
                    way = __builtin_ctz(empty)
                    bucket.tags[way] = tag_of(hs[i - start])
                    bucket.slots[way] = <int32_t>at[i]
                    self._place[at[i]] = <int32_t>((hs[i - start] & self._mask) * WAYS) + way
                else:
                    self._spill[<object>items[i]] = at[i]
                    self._place[at[i]] = SPILLED
                self.num_held += 1
                before = self._keys[at[i]]
                increment(items[i])
                self._keys[at[i]] = items[i]
                decrement(before)
            start += size
        return given

    def remove(self, slots):
        cdef cnp.ndarray given = numbers(slots)
        cdef list result = PyList_New(cnp.PyArray_DIM(given, 0))
        check_indices(given, self.num_blocks)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self.num_evictable -= 1 - self._is_busy[at[i]]
            self.num_dropped -= self._is_dropped[at[i]]
            self._is_dropped[at[i]] = 0
            self._refs[at[i]] = 0
            self._is_busy[at[i]] = 0
        self._remove(given, result)
        return result

    cdef int _remove(self, cnp.ndarray slots, list result) except -1:
        """Fills ``result``."""
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
                self.num_held -= place != FREE
                if place >= 0:
                    self._buckets[place // WAYS].tags[place % WAYS] = 0
                elif place == SPILLED:
                    del self._spill[<object>key]
            start = stop
        return 0

    def drop_all_but(self, slots):
        cdef cnp.ndarray given = checked(slots, self.num_blocks)
        cdef list keys = self.key_of[given].tolist()
        cdef Py_ssize_t i
        memset(self._buckets, 0, (self._mask + 1) * sizeof(Bucket))
        self._place_memory.fill(FREE)
        self._spill.clear()
        self.num_held = self.num_evictable = 0
        given = self._insert(keys, given)
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._is_dropped[int64s(given)[i]] = 1
        self.num_dropped = cnp.PyArray_DIM(given, 0)

    def held(self):
        return np.flatnonzero(self._place_memory != FREE)

    def holds(self, slots):
        return self._place_memory[checked(slots, self.num_blocks)] != FREE

    def distinct(self, slots):
        cdef cnp.ndarray given = numbers(slots)
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
        fast = only_bytes(keys)
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), start = 0, size, i
        cdef PyObject** items = PySequence_Fast_ITEMS(fast)
        cdef int64_t slots[CHUNK]
        while start < n:
            size = min(n - start, CHUNK)
            self._find(items + start, size, slots, NULL)
            for i in range(size):
                if slots[i] < 0 or self._is_dropped[slots[i]] or self._refs[slots[i]] < 0:
                    return start + i
            start += size
        return n

    def is_writing(self, slots):
        """Negative slots count as the last ones, as in numpy."""
        cdef cnp.ndarray given = numbers(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray result = new_flags(n)
        cdef uint8_t* to = bools(result)
        cdef int64_t* at = int64s(given)
        cdef int64_t slot
        for i in range(n):
            slot = at[i] if at[i] >= 0 else at[i] + self.num_blocks
            if <uint64_t>slot >= <uint64_t>self.num_blocks:
                raise IndexError(f"slot {at[i]} is not in [0, {self.num_blocks})")
            to[i] = self._refs[slot] == WRITING
        return result

    def being_written(self, slots):
        cdef cnp.ndarray given = numbers(slots)
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
            bools(ready)[i] = self._refs[int64s(slots)[i]] != WRITING
        return slots, ready

    def chain(self, found, stored):
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
            bools(new)[i] = self._scratch[int64s(slots)[i]] == 1
        return slots, new

    cdef cnp.ndarray _tail_first(self, found):
        """Returns those of ``found`` that are not negative, each once, the last ones first."""
        cdef cnp.ndarray given = numbers(found)
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
        cdef cnp.ndarray given = numbers(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef list result = PyList_New(n)
        cdef int64_t* at = int64s(given)
        for i in range(n):
            if (
                <uint64_t>at[i] >= <uint64_t>self.num_blocks
                or self._is_busy[at[i]]
                or self._place[at[i]] == FREE
            ):
                return None
            self._scratch[at[i]] = <int32_t>i
        for i in range(n):
            if self._scratch[at[i]] != i:
                return None
        # Blocks that are not busy have neither pins nor marks.
        self.num_evictable -= n
        self._remove(given, result)
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

    def pin(self, slots):
        cdef cnp.ndarray given = checked(slots, self.num_blocks)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            self._refs[at[i]] += 1
            self.num_evictable -= 1 - self._is_busy[at[i]]
            self._is_busy[at[i]] = 1

    def set_ready(self, slots):
        cdef cnp.ndarray given = numbers(slots)
        return self._end_transfer(self._being_written(int64s(given), cnp.PyArray_DIM(given, 0)), True)

    def unpin(self, slots):
        return self._end_transfer(checked(slots, self.num_blocks), False)

    cdef tuple _end_transfer(self, cnp.ndarray given, bint written):
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, num_idle = 0, num_freed = 0
        cdef bint some_dropped = self.num_dropped > 0
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

    def check_keys(self):
        slots = self.held()
        if len(slots) != self.num_held:
            raise IntegrityError("the table counts its keys wrongly")
        if any(self.get(key) != slot for key, slot in zip(self.key_of[slots].tolist(), slots.tolist(), strict=True)):
            raise IntegrityError("a key is not found in its slot")
        words = np.frombuffer(self._bucket_memory, np.uint32, 2 * WAYS * (self._mask + 1), self._to_line())
        entries = int(np.count_nonzero(words.reshape(-1, 2 * WAYS)[:, :WAYS])) + len(self._spill)
        if entries != self.num_held:
            raise IntegrityError("the table has entries of removed keys")


@cython.no_gc_clear
cdef class FreeSlots:

    cdef cnp.ndarray _free_memory
    cdef readonly cnp.ndarray allocated
    cdef Py_ssize_t _num_free
    cdef Py_ssize_t _capacity
    cdef int64_t* _free_slots
    cdef uint8_t* _is_allocated

    def __cinit__(self, Py_ssize_t capacity):
        self._free_memory = np.zeros(capacity, dtype=np.int64)
        self._free_slots = int64s(self._free_memory)
        self.allocated = np.zeros(capacity, dtype=np.bool_)[:]
        self._is_allocated = bools(self.allocated)
        self._capacity = capacity

    @property
    def free(self):
        return self._free_memory[: self._num_free].tolist()

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
        cdef cnp.ndarray given = numbers(slots)
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
