# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The parts of policies: lists, ghosts, shadows and queues of keys. ``reference`` and ``tournament`` document the
methods.

Pointers go into numpy arrays that each object owns, so memory is freed with the object. Every slot and entry that a
caller gives is checked against the size of the arrays. No Python code, which could change the object or what it was
given, runs between the checks and the end of a call: so no list is made there, because a finalizer may run, and numpy
is called in C.
"""

include "common.pxi"

import xxhash

from kvoffload.native import reference

from libc.math cimport INFINITY

cdef extern from "ghosts.h" nogil:
    unsigned kvo_match16(const uint32_t* tags, uint32_t tag)
    uint64_t kvo_xxh3(const uint8_t* at, int64_t size)
    int __builtin_clz(unsigned)

cdef enum:
    LINE = 64
    GROUP_BYTES = 4

cdef int64_t NO_END = <int64_t>1 << 58
cdef bytes FIRST_GROUP = bytes(GROUP_BYTES)

cdef inline cnp.ndarray hashes_of(object array):
    return of_kind(array, cnp.NPY_UINT64, np.uint64)


cdef inline uint64_t* uint64s(cnp.ndarray array) noexcept:
    return <uint64_t*>cnp.PyArray_DATA(array)


# Hashes of keys.

cdef int hash_into(PyObject** keys, Py_ssize_t n, uint64_t* hashes, bint of_names) except -1:
    """Hashes keys or, with ``of_names``, what ``shared_names`` makes of them."""
    cdef Py_ssize_t i, size
    cdef uint8_t[64] name
    cdef const uint8_t* raw
    for i in range(n):
        if i + 8 < n:
            kvo_prefetch(keys[i + 8])
            kvo_prefetch(<char*>keys[i + 8] + LINE)
        size = PyBytes_GET_SIZE(<object>keys[i])
        if 17 <= size <= 64:
            raw = <const uint8_t*>PyBytes_AS_STRING(<object>keys[i])
            if of_names:
                memcpy(name, raw, size - GROUP_BYTES)
                memset(name + size - GROUP_BYTES, 0, GROUP_BYTES)
                raw = name
            hashes[i] = kvo_xxh3(raw, size)
            continue
        key = <object>keys[i]
        hashes[i] = <uint64_t>xxhash.xxh3_64_intdigest(key[:-GROUP_BYTES] + FIRST_GROUP if of_names else key)
    return 0


def hash_keys(keys):
    fast = only_bytes(keys)
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast), i
    cdef cnp.ndarray result = new_int64(n)
    for i in range(n):
        int64s(result)[i] = PyObject_Hash(<object>PySequence_Fast_ITEMS(fast)[i])
    return result


def key_hashes(keys, bint of_names=False):
    fast = only_bytes(keys)
    cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(fast)
    cdef cnp.ndarray result = new_array(n, cnp.NPY_UINT64)
    hash_into(PySequence_Fast_ITEMS(fast), n, uint64s(result), of_names)
    return result


def same_starts(keys, Py_ssize_t n):
    fast = PySequence_Fast(keys, b"keys must be a sequence")
    cdef Py_ssize_t num = PySequence_Fast_GET_SIZE(fast), i
    cdef PyObject** items = PySequence_Fast_ITEMS(fast)
    if num == 0:
        return True
    for i in range(num):
        if n < 0 or not PyBytes_CheckExact(<object>items[i]) or PyBytes_GET_SIZE(<object>items[i]) < n:
            return len({key[:n] for key in fast}) <= 1
        if memcmp(PyBytes_AS_STRING(<object>items[i]), PyBytes_AS_STRING(<object>items[0]), n):
            return False
    return True


# Gaps between uses.

cdef enum:
    CLASS_BITS = 3
    MAX_CLASS = 7
    CLASSES = 7
    AGES = 48

cdef int64_t[CLASSES - 2] GAP_BOUNDS
cdef int64_t[AGES + 1] AGE_BOUNDS
cdef int64_t STAMPS = <int64_t>1 << (32 - CLASS_BITS)
"""How far a stamp of a ghost may be from the base."""
cdef double RATES_HALF_LIFE = reference.RATES_HALF_LIFE
cdef double PRIOR = reference.PRIOR
cdef double TICKS_PER_S = reference.TICKS_PER_S
cdef double MAX_TICKS = reference.MAX_TICKS

cdef int take_bounds() except -1:
    assert (reference.GAP_CLASSES, reference.NUM_AGES) == (CLASSES, AGES)
    for i, ticks in enumerate(reference.GAP_BOUNDS):
        GAP_BOUNDS[i] = ticks
    for i, ticks in enumerate(reference.AGE_BOUNDS):
        AGE_BOUNDS[i] = ticks
    return 0

take_bounds()


cdef inline int gap_class(int64_t ticks) noexcept:
    cdef int gap = 1
    while gap < CLASSES - 1 and ticks >= GAP_BOUNDS[gap - 1]:
        gap += 1
    return gap


cdef inline int age_bin(int64_t ticks) noexcept:
    cdef int at = 0, step = 32
    while step:
        if at + step < AGES and AGE_BOUNDS[at + step] <= ticks:
            at += step
        step >>= 1
    return at


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
    before that is ambiguous. A stamp is counted from ``_base``, and shifted by CLASS_BITS for the class. Stamps more
    than 2**28 ticks, 18 hours, before the latest count as equally early. A table for at most 32 hashes is one bucket in two structs.
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

    cdef inline int64_t _stamp(self, int64_t entry) noexcept:
        return self._base + (self._buckets[entry // WAYS].times[entry % WAYS].stamp >> CLASS_BITS)

    cdef inline int _class(self, int64_t entry) noexcept:
        """Returns the class of an entry, 0 of none."""
        return self._buckets[entry // WAYS].times[entry % WAYS].stamp & MAX_CLASS if entry >= 0 else 0

    cdef inline void _set(self, int64_t entry, int64_t stamp, int gap) noexcept:
        """``stamp`` must be below ``_base`` plus STAMPS."""
        self._buckets[entry // WAYS].times[entry % WAYS].stamp = (
            <uint32_t>(stamp - self._base if stamp > self._base else 0) << CLASS_BITS | <uint32_t>gap
        )

    cdef cnp.ndarray _entries(self, object hashes):
        """Returns the entry of each hash, or -1."""
        cdef cnp.ndarray given = hashes_of(hashes)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), start = 0, stop, i
        cdef cnp.ndarray result = new_int64(n)
        cdef uint64_t* hs = uint64s(given)
        while start < n:
            stop = min(n, start + CHUNK)
            for i in range(start, stop):
                kvo_prefetch(self._buckets[self._bucket_of(hs[i])].tags)
            for i in range(start, stop):
                int64s(result)[i] = self._find(hs[i])
            start = stop
        return result

    def stamps(self, hashes):
        cdef cnp.ndarray result = self._entries(hashes)
        cdef int64_t* at = int64s(result)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(result, 0)):
            at[i] = self._stamp(at[i]) if at[i] >= 0 else -1
        return result

    def classes(self, hashes):
        cdef cnp.ndarray result = self._entries(hashes)
        cdef int64_t* at = int64s(result)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(result, 0)):
            at[i] = self._class(at[i])
        return result

    def use(self, hashes, int64_t now):
        cdef cnp.ndarray result = self._entries(hashes)
        cdef int64_t* at = int64s(result)
        cdef Py_ssize_t i
        self._reach(now)
        for i in range(cnp.PyArray_DIM(result, 0)):
            if at[i] >= 0:
                self._set(at[i], now, gap_class(now - self._stamp(at[i])))

    cdef inline void _reach(self, int64_t stamp) noexcept:
        """Moves the base, if ``stamp`` is too far from it."""
        if stamp - self._base >= STAMPS:
            self._move_base(stamp - STAMPS // 2)

    def take(self, hashes):
        cdef cnp.ndarray result = self._entries(hashes)
        cdef int64_t* at = int64s(result)
        cdef Py_ssize_t i
        cdef int gap
        for i in range(cnp.PyArray_DIM(result, 0)):
            gap = self._class(at[i])
            if at[i] >= 0:
                self._remove(at[i])
            at[i] = gap
        return result

    cdef inline void _remove(self, int64_t entry) noexcept:
        self._buckets[entry // WAYS].tags[entry % WAYS] = 0
        self._next_way[entry // self._entries_per_bucket()] |= DISORDERED

    cdef inline Py_ssize_t _entries_per_bucket(self) noexcept:
        return WAYS if self._num_buckets > 1 else 2 * WAYS

    def add(self, hashes, stamps, classes=None):
        cdef cnp.ndarray given = hashes_of(hashes), times = numbers(stamps)
        cdef cnp.ndarray known = None if classes is None else numbers(classes)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), start, stop, i
        cdef uint64_t* hs = uint64s(given)
        cdef int64_t* ts = int64s(times)
        cdef Py_ssize_t begin = max(0, n - self._capacity)
        cdef uint64_t homes[CHUNK]
        cdef uint8_t gaps[CHUNK]
        cdef int64_t entry, latest = self._base
        cdef Bucket* bucket
        cdef uint8_t way
        if cnp.PyArray_DIM(times, 0) != n:
            raise IndexError("there must be as many stamps as hashes")
        if known is not None:
            check_classes(known, n)
        for i in range(begin, n):
            latest = max(latest, ts[i])
        self._reach(latest)
        if (self._num_added + n) >> 30 != self._num_added >> 30:
            self._free_forgotten()
        start = begin
        while start < n:
            stop = min(n, start + CHUNK)
            for i in range(start, stop):
                homes[i - start] = self._bucket_of(hs[i])
                gaps[i - start] = 0 if known is None else int64s(known)[i]
                bucket = &self._buckets[homes[i - start]]
                kvo_prefetch_write(bucket.tags)
                kvo_prefetch_write(&bucket.times[self._next_way[homes[i - start]] % WAYS])
            for i in range(start, stop):
                entry = self._locate(homes[i - start], hs[i])
                if entry >= 0:
                    if known is None and not self._is_forgotten(entry):
                        gaps[i - start] = self._class(entry)
                    self._remove(entry)
                if self._next_way[homes[i - start]] & DISORDERED:
                    self._put_in_order(homes[i - start])
                way = self._next_way[homes[i - start]]
                self._next_way[homes[i - start]] = 0 if way + 1 == self._ways else way + 1
                bucket = &self._buckets[homes[i - start] + way // WAYS]
                bucket.tags[way % WAYS] = <uint32_t>hs[i] | 1
                bucket.times[way % WAYS].added = <uint32_t>self._num_added
                self._set(homes[i - start] * WAYS + way, ts[i], gaps[i - start])
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
                stamp = max(<int64_t>0, (at[0] >> CLASS_BITS) + self._base - base)
                at[0] = <uint32_t>stamp << CLASS_BITS | at[0] & MAX_CLASS
        self._base = base

    cdef void _free_forgotten(self) noexcept:
        cdef Py_ssize_t entry
        for entry in range(max(2, self._num_buckets) * WAYS):
            if self._is_forgotten(entry):
                self._buckets[entry // WAYS].tags[entry % WAYS] = 0


cdef inline void copy_entry(Bucket* to, Py_ssize_t to_way, Bucket* of, Py_ssize_t way) noexcept:
    to[to_way // WAYS].tags[to_way % WAYS] = of[way // WAYS].tags[way % WAYS]
    to[to_way // WAYS].times[to_way % WAYS] = of[way // WAYS].times[way % WAYS]


cdef class ReturnRates:

    cdef double _returned[CLASSES][AGES]
    cdef double _ended[CLASSES][AGES]
    cdef double _waiting[CLASSES][AGES]
    cdef double _values[CLASSES][AGES]

    def add(self, int gap, int64_t age, bint returned):
        check_class(gap)
        self._add(gap, age, returned)

    cdef inline void _add(self, int gap, int64_t age, bint returned) noexcept:
        cdef int at = age_bin(age)
        self._ended[gap][at] += 1
        self._returned[gap][at] += returned

    def wait(self, int gap, int64_t age):
        check_class(gap)
        self._waiting[gap][age_bin(age)] += 1

    cpdef void update(self, double decay) noexcept:
        cdef double spent[CLASSES][AGES]
        cdef double pooled_returned[AGES]
        cdef double pooled_spent[AGES]
        cdef double all_returned = 0, older, here, best, returned, room, weight
        cdef int gap, at, until
        memset(&pooled_returned[0], 0, sizeof(pooled_returned))
        memset(&pooled_spent[0], 0, sizeof(pooled_spent))
        for gap in range(CLASSES):
            older = 0
            for at in range(AGES - 1, -1, -1):
                here = self._ended[gap][at] + self._waiting[gap][at]
                spent[gap][at] = <double>(AGE_BOUNDS[at + 1] - AGE_BOUNDS[at]) * (older + 0.5 * here)
                older += here
                all_returned += self._returned[gap][at]
                pooled_returned[at] += self._returned[gap][at]
                pooled_spent[at] += spent[gap][at]
        memset(&self._waiting[0][0], 0, sizeof(self._waiting))
        if all_returned == 0:
            return
        weight = PRIOR / all_returned
        for gap in range(CLASSES):
            for at in range(AGES):
                best, returned, room = 0, 0, 0
                for until in range(at, AGES):
                    returned += self._returned[gap][until] + weight * pooled_returned[until]
                    room += spent[gap][until] + weight * pooled_spent[until]
                    if room > 0:
                        best = max(best, returned / room)
                self._values[gap][at] = best
        for gap in range(CLASSES):
            for at in range(AGES):
                self._returned[gap][at] *= decay
                self._ended[gap][at] *= decay

    def value(self, int gap, int64_t age):
        check_class(gap)
        return self._values[gap][age_bin(age)]


cdef int check_class(int gap) except -1:
    if not 0 <= gap < CLASSES:
        raise IndexError(f"class {gap} of {CLASSES}")
    return 0


# Shadows.

cdef enum:
    MAX_RULES = 3
    NOWHERE = 0
    ONCE = 1
    AGAIN = 2
    LISTS = ONCE + CLASSES
    END = -1

cdef struct Node:
    uint64_t name
    int64_t stamp
    int64_t seen
    int32_t older[1 + MAX_RULES]
    int32_t newer[1 + MAX_RULES]
    uint8_t where[MAX_RULES]
    uint8_t gap
    uint8_t is_on_device

cdef struct RuleNumbers:
    bint by_gap
    bint has_share
    int64_t quota

cdef class Shadows:
    """One table of names for all shadows. All names are in two lists: on the device, and off it in the order in which
    they left. What a shadow holds is in lists of its own: one for LRU, two for rules with a share, or one per class."""

    cdef readonly Py_ssize_t host, device
    cdef readonly ReturnRates rates
    cdef Py_ssize_t _num_rules, _num_nodes, _table_size
    cdef RuleNumbers _rules[MAX_RULES]
    cdef cnp.ndarray _node_memory, _table_memory, _chain_memory
    cdef Node* _nodes
    cdef int32_t* _table
    """Index of a node, or END, at the hash of its name or behind it."""
    cdef int32_t _free
    """The first of the free nodes, which ``newer[0]`` links."""
    cdef int64_t _clock, _request, _num_accesses, _next_update
    cdef int64_t _most_names
    cdef int32_t _oldest[1 + MAX_RULES][LISTS]
    cdef int32_t _newest[1 + MAX_RULES][LISTS]
    """Of each list. The last row is of all names: off the device (0) and on it (1)."""
    cdef int64_t _size[1 + MAX_RULES][LISTS]
    cdef int64_t _held[MAX_RULES]

    def __cinit__(self, Py_ssize_t host, Py_ssize_t device, rules):
        from kvoffload.cache.policies.tournament import SHADOW_NAMES

        self.host, self.device = host, device
        self._most_names = SHADOW_NAMES * (host + device)
        rules = tuple(rules)
        self._num_rules = len(rules)
        if self._num_rules > MAX_RULES:
            raise ValueError(f"{len(rules)} rules: there can be {MAX_RULES}")
        for r, rule in enumerate(rules):
            self._rules[r].by_gap = rule.by_gap
            self._rules[r].has_share = rule.share is not None
            self._rules[r].quota = rule.quota(host) if self._rules[r].has_share else 0
        self._resize(64, 0)
        self._clock = self._request = self._num_accesses = 0
        self._next_update = reference.next_update(0, host + device)
        self.rates = ReturnRates()
        for r in range(1 + MAX_RULES):
            for where in range(LISTS):
                self._oldest[r][where] = self._newest[r][where] = END
                self._size[r][where] = 0
        for r in range(MAX_RULES):
            self._held[r] = 0

    def held(self, Py_ssize_t r):
        if not 0 <= r < self._num_rules:
            raise IndexError(f"rule {r} of {self._num_rules}")
        return [name for _, name in sorted([pair for where in range(ONCE, LISTS) for pair in self._names(r, where)])]

    def known(self):
        return [name for where in range(2) for _, name in self._names(MAX_RULES, where)]

    cdef list _names(self, Py_ssize_t r, int where):
        """Returns stamp and name of the members of a list, oldest first."""
        cdef int32_t node = self._oldest[r][where]
        names = []
        while node != END:
            names.append((self._nodes[node].stamp, self._nodes[node].name))
            node = self._nodes[node].newer[r]
        return names

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

    cdef void _drop(self, int32_t node) noexcept:
        """Frees a node that is in no list."""
        cdef uint64_t at, hole, home, mask = self._table_size - 1
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

    cdef inline void _unlink(self, Py_ssize_t r, int where, int32_t node) noexcept:
        cdef int32_t older = self._nodes[node].older[r], newer = self._nodes[node].newer[r]
        if older == END:
            self._oldest[r][where] = newer
        else:
            self._nodes[older].newer[r] = newer
        if newer == END:
            self._newest[r][where] = older
        else:
            self._nodes[newer].older[r] = older
        self._size[r][where] -= 1

    cdef inline void _append(self, Py_ssize_t r, int where, int32_t node) noexcept:
        """Adds a node to the recent end of a list."""
        self._nodes[node].older[r] = self._newest[r][where]
        self._nodes[node].newer[r] = END
        if self._newest[r][where] == END:
            self._oldest[r][where] = node
        else:
            self._nodes[self._newest[r][where]].newer[r] = node
        self._newest[r][where] = node
        self._size[r][where] += 1

    cdef inline void _lose(self, Py_ssize_t r, int32_t node) noexcept:
        """Takes a node out of a shadow, if it is in it."""
        if self._nodes[node].where[r] != NOWHERE:
            self._unlink(r, self._nodes[node].where[r], node)
            self._nodes[node].where[r] = NOWHERE
            self._held[r] -= 1

    def access(self, hashes, uint64_t limit, int64_t now):
        cdef cnp.ndarray given = hashes_of(hashes)
        cdef uint64_t* hs = uint64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i, r, num = 0, on_device = 0
        cdef int32_t node
        cdef int32_t* chain
        cdef Py_ssize_t found[MAX_RULES]
        for i in range(n):
            num += hs[i] <= limit
        if num == 0:
            return 0, ()
        if self._chain_memory is None or cnp.PyArray_DIM(self._chain_memory, 0) < num:
            self._chain_memory = new_array(num, cnp.NPY_INT32)
        chain = <int32_t*>cnp.PyArray_DATA(self._chain_memory)
        self._request += 1
        self._clock = max(self._clock, now)
        num = 0
        for i in range(n):
            if hs[i] <= limit:
                node = self._node_of(hs[i])
                if self._nodes[node].seen != self._request:
                    self._nodes[node].seen = self._request
                    chain[num] = node
                    num += 1
        while on_device < num and self._nodes[chain[on_device]].is_on_device:
            on_device += 1
        for r in range(self._num_rules):
            i = on_device
            while i < num and (self._nodes[chain[i]].is_on_device or self._nodes[chain[i]].where[r] != NOWHERE):
                i += 1
            found[r] = i - on_device
        for i in range(num):
            self._learn(chain[i])
        for i in range(num - 1, -1, -1):
            self._nodes[chain[i]].stamp = self._clock + num - i
            self._nodes[chain[i]].is_on_device = True
            self._append(MAX_RULES, 1, chain[i])
        self._clock += num
        while self._size[MAX_RULES][1] > self.device:
            self._leave(self._oldest[MAX_RULES][1])
        for r in range(self._num_rules):
            self._make_room(r)
        self._forget()
        self._num_accesses += num
        if self._num_accesses >= self._next_update:
            self._update()
        return num, tuple([found[i] for i in range(self._num_rules)])

    cdef inline void _learn(self, int32_t at) noexcept:
        """Counts the return of a known name, and sets the class of the name's gap. No list holds the name then."""
        cdef Node* node = &self._nodes[at]
        cdef int64_t gap = self._clock - node.stamp
        cdef Py_ssize_t r
        if node.stamp < 0:
            return
        for r in range(self._num_rules):
            self._lose(r, at)
        self._unlink(MAX_RULES, node.is_on_device, at)
        self.rates._add(node.gap, gap, True)
        node.gap = gap_class(gap)

    cdef inline void _leave(self, int32_t at) noexcept:
        """Moves a name from the device to the shadows."""
        cdef Node* node = &self._nodes[at]
        cdef Py_ssize_t r
        self._unlink(MAX_RULES, 1, at)
        node.is_on_device = False
        self._append(MAX_RULES, 0, at)
        for r in range(self._num_rules):
            if self._rules[r].by_gap:
                node.where[r] = ONCE + node.gap
            else:
                node.where[r] = AGAIN if self._rules[r].has_share and node.gap else ONCE
            self._append(r, node.where[r], at)
            self._held[r] += 1

    cdef void _make_room(self, Py_ssize_t r) noexcept:
        cdef int which
        while self._held[r] > self.host:
            if self._rules[r].by_gap:
                which = self._least(r)
            elif self._rules[r].has_share:
                which = ONCE if self._size[r][ONCE] > self._rules[r].quota or not self._size[r][AGAIN] else AGAIN
            else:
                which = ONCE
            self._lose(r, self._oldest[r][which])

    cdef int _least(self, Py_ssize_t r) noexcept:
        """Returns the list whose oldest name has the lowest value."""
        cdef int which, least = ONCE
        cdef double worth, lowest = INFINITY
        cdef int32_t node
        cdef int64_t stamp = NO_END
        for which in range(ONCE, LISTS):
            node = self._oldest[r][which]
            if node == END:
                continue
            worth = self.rates._values[which - ONCE][age_bin(self._clock - self._nodes[node].stamp)]
            if worth < lowest or (worth == lowest and self._nodes[node].stamp < stamp):
                least, lowest, stamp = which, worth, self._nodes[node].stamp
        return least

    cdef void _forget(self) noexcept:
        """Forgets the names that left the device first, unless a shadow holds them."""
        cdef int64_t limit = max(<int64_t>0, self._most_names - self._size[MAX_RULES][1])
        cdef int64_t i
        cdef int32_t at
        cdef Py_ssize_t r
        for i in range(self._size[MAX_RULES][0] - limit):
            at = self._oldest[MAX_RULES][0]
            self._unlink(MAX_RULES, 0, at)
            for r in range(self._num_rules):
                if self._nodes[at].where[r] != NOWHERE:
                    self._append(MAX_RULES, 0, at)
                    break
            else:
                self.rates._add(self._nodes[at].gap, self._clock - self._nodes[at].stamp, False)
                self._drop(at)

    cdef int _update(self) except -1:
        cdef Py_ssize_t i
        cdef Node* node
        cdef int64_t before = self._next_update, capacity = self.host + self.device
        for i in range(self._table_size):
            if self._table[i] != END:
                node = &self._nodes[self._table[i]]
                self.rates._waiting[node.gap][age_bin(self._clock - node.stamp)] += 1
        self._next_update = reference.next_update(self._num_accesses, capacity)
        self.rates.update(0.5 ** (<double>(self._next_update - before) / (RATES_HALF_LIFE * capacity)))
        return 0


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


# Lists in the order of use.

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


cdef struct Member:
    int64_t stamp  # The position, shifted by CLASS_BITS, plus the list. ABSENT: no member.
    int32_t older  # SKIPPED or QUEUED for members that are not linked.
    int32_t newer


cdef class Lists:
    """Linked lists on one clock: list 0 of slots used once, the others of those used again. What is known of a slot is
    side by side, in one line of the cache. Members that an eviction has skipped are not linked: they are in a heap if
    they were marked evictable since then."""

    cdef readonly Py_ssize_t _capacity
    cdef int64_t _clock
    cdef cnp.ndarray _memory
    cdef Member* _members
    cdef int _num_lists
    cdef int32_t _oldest[CLASSES]
    cdef int32_t _newest[CLASSES]
    cdef readonly Py_ssize_t num_once, num_again
    cdef tuple _heaps

    def __cinit__(self, Py_ssize_t capacity):
        check_capacity(capacity)
        self._capacity = capacity
        self._memory = np.zeros(capacity * sizeof(Member), dtype=np.uint8)
        self._members = <Member*>cnp.PyArray_DATA(self._memory)
        self._make_lists(1)

    cdef int _make_lists(self, int n) except -1:
        self._num_lists = n
        self._heaps = tuple([Heap() for _ in range(n)])
        self.clear()
        return 0

    def clear(self):
        self._memory.fill(255)  # Each stamp is ABSENT.
        self._clock = 0
        self.num_once = self.num_again = 0
        for which in range(self._num_lists):
            self._heap(which).len = 0
            self._oldest[which] = self._newest[which] = END

    cdef inline Heap _heap(self, int which):
        return <Heap>self._heaps[which]

    cdef inline void _count(self, int which, Py_ssize_t n) noexcept:
        if which:
            self.num_again += n
        else:
            self.num_once += n

    cdef inline int _which(self, int64_t slot) noexcept:
        return self._members[slot].stamp & ((1 << CLASS_BITS) - 1)

    cdef inline int64_t _position(self, int64_t slot) noexcept:
        return self._members[slot].stamp >> CLASS_BITS

    cdef inline void _unlink(self, int64_t slot) noexcept:
        cdef int32_t older = self._members[slot].older, newer
        cdef int which = self._which(slot)
        if older <= SKIPPED:
            return
        newer = self._members[slot].newer
        if older == END:
            self._oldest[which] = newer
        else:
            self._members[older].newer = newer
        if newer == END:
            self._newest[which] = older
        else:
            self._members[newer].older = older

    cdef inline void _append(self, int64_t slot, int which, int64_t position) noexcept:
        """Makes a slot, a member or not, the most recent of a list."""
        cdef Member* member = &self._members[slot]
        if member.stamp != ABSENT:
            self._unlink(slot)
            self._count(self._which(slot), -1)
        self._count(which, 1)
        member.stamp = position << CLASS_BITS | which
        member.older = self._newest[which]
        member.newer = END
        if self._newest[which] == END:
            self._oldest[which] = <int32_t>slot
        else:
            self._members[self._newest[which]].newer = <int32_t>slot
        self._newest[which] = <int32_t>slot

    cdef inline void _prefetch(self, const int64_t* at, Py_ssize_t i, Py_ssize_t n) noexcept:
        """Prefetches what ``_append`` and ``_unlink`` will need soon after they get ``at[i]``."""
        cdef Member* member
        if i + AHEAD < n:
            kvo_prefetch_write(&self._members[at[i + AHEAD]])
        if i + AHEAD // 2 < n:
            member = &self._members[at[i + AHEAD // 2]]
            if member.older >= 0:
                kvo_prefetch_write(&self._members[member.older])
            if member.newer >= 0:
                kvo_prefetch_write(&self._members[member.newer])

    def move_to_end(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        for i in range(n):
            self._prefetch(at, i, n)
            if self._members[at[i]].stamp != ABSENT:
                self._append(at[i], self._which(at[i]), self._clock + i)
        self._clock += n

    def discard(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        for i in range(n):
            self._prefetch(at, i, n)
            if self._members[at[i]].stamp != ABSENT:
                self._unlink(at[i])
                self._count(self._which(at[i]), -1)
                self._members[at[i]].stamp = ABSENT

    def mark_evictable(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(given, 0)):
            if self._members[at[i]].older == SKIPPED and self._members[at[i]].stamp != ABSENT:
                self._push(at[i])

    cdef int _push(self, int64_t slot) except -1:
        cdef Heap heap = self._heap(self._which(slot))
        cdef Entry entry
        if heap.len == heap.size:
            self._renew(heap)
        entry.position = self._position(slot)
        entry.slot = slot
        heap.push(entry)
        self._members[slot].older = QUEUED
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
        return self._position(entry.slot) == entry.position and self._members[entry.slot].older == QUEUED

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
        if self._members[slot].older == QUEUED:
            self._heap(self._which(slot)).pop()
        else:
            self._unlink(slot)

    cdef tuple _pop(self, Py_ssize_t n, busy, Py_ssize_t num_once=0, bint is_shared=False, ReturnRates rates=None):
        """``pop_oldest``, ``pop_shared`` and, with ``rates``, ``pop_least``."""
        cdef cnp.ndarray marks = flags(busy, self._capacity)
        n = max(0, min(n, self.num_once + self.num_again))
        cdef cnp.ndarray slots = new_int64(n), positions = new_int64(n)
        cdef int64_t* to = int64s(slots)
        cdef int64_t* at = int64s(positions)
        cdef Py_ssize_t popped = 0
        if is_shared:
            popped = self._pop_into(to, at, max(0, min(n, num_once)), bools(marks), 0, 1, None)
            popped += self._pop_into(to + popped, at + popped, n - popped, bools(marks), 1, self._num_lists, None)
            popped += self._pop_into(to + popped, at + popped, n - popped, bools(marks), 0, 1, None)
        else:
            popped = self._pop_into(to, at, n, bools(marks), 0, self._num_lists, rates)
        return first(slots, popped), first(positions, popped)

    cdef Py_ssize_t _pop_into(
        self, int64_t* slots, int64_t* positions, Py_ssize_t n, const uint8_t* is_busy, int begin, int end,
        ReturnRates rates,
    ) noexcept:
        """Returns how many of at most ``n`` members of the lists from ``begin`` to ``end`` it has removed: always the
        oldest one or, with ``rates``, that of the list whose oldest member has the lowest value."""
        cdef int which
        cdef Py_ssize_t popped = 0
        cdef int64_t slot
        cdef int64_t fronts[CLASSES]
        cdef int64_t ticks[CLASSES]
        for which in range(begin, end):
            fronts[which] = self._oldest_of(which)
            ticks[which] = self._position_or_end(fronts[which])
        while popped < n:
            which = self._least(ticks, begin, end, rates)
            if ticks[which] == NO_END:
                break
            slot = fronts[which]
            self._take_out(slot)
            fronts[which] = self._oldest_of(which)
            ticks[which] = self._position_or_end(fronts[which])
            if is_busy[slot]:
                self._members[slot].older = SKIPPED
                continue
            slots[popped] = slot
            positions[popped] = self._position(slot)
            self._count(self._which(slot), -1)
            self._members[slot].stamp = ABSENT
            popped += 1
        return popped

    cdef inline int64_t _position_or_end(self, int64_t slot) noexcept:
        return self._position(slot) if slot >= 0 else NO_END

    cdef inline int _least(self, const int64_t* ticks, int begin, int end, ReturnRates rates) noexcept:
        """Returns from which list a member leaves. ``ticks``: the position of the oldest of each, NO_END if it is
        empty."""
        cdef int which, least = begin
        cdef double worth, lowest
        if rates is None:
            for which in range(begin + 1, end):
                if ticks[which] < ticks[least]:
                    least = which
            return least
        lowest = self._value(begin, ticks[begin], rates)
        for which in range(begin + 1, end):
            worth = self._value(which, ticks[which], rates)
            if worth < lowest or (worth == lowest and ticks[which] < ticks[least]):
                least, lowest = which, worth
        return least

    cdef inline double _value(self, int which, int64_t ticks, ReturnRates rates) noexcept:
        return INFINITY if ticks == NO_END else rates._values[which][age_bin(self._clock - ticks)]

    cdef int _check(self, set members) except -1:
        columns = np.frombuffer(self._memory, dtype=[("stamp", "=i8"), ("older", "=i4"), ("newer", "=i4")])
        held = np.flatnonzero(columns["stamp"] != ABSENT)
        if members != set(held.tolist()) or len(members) != self.num_once + self.num_again:
            raise IntegrityError("the lists do not hold the blocks that they should")
        linked = set()
        if np.count_nonzero(columns["stamp"][held] & ((1 << CLASS_BITS) - 1)) != self.num_again:
            raise IntegrityError("the lists do not count their members right")
        for which in range(self._num_lists):
            slot, before = self._oldest[which], -1
            while slot != END:
                if slot in linked or self._which(slot) != which or self._position(slot) <= before:
                    raise IntegrityError("a list is out of order")
                linked.add(slot)
                before, slot = self._position(slot), self._members[slot].newer
        aside = {slot for slot in members if self._members[slot].older <= SKIPPED}
        queued = set().union(*map(self._queued, self._heaps))
        if linked | aside != members or linked & aside:
            raise IntegrityError("a list has lost a block")
        if queued != {slot for slot in aside if self._members[slot].older == QUEUED}:
            raise IntegrityError("a list has lost a skipped block")
        return 0


cdef class GapLists(Lists):

    def __cinit__(self, Py_ssize_t capacity):
        self._make_lists(CLASSES)

    def begin(self, double time_s):
        cdef double ticks = time_s * TICKS_PER_S
        if self._clock < ticks < MAX_TICKS:
            self._clock = <int64_t>ticks
        return self._clock

    def tick(self, Py_ssize_t n):
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def use(self, slots, ready):
        cdef cnp.ndarray given = numbers(slots)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray marks = flags(ready, n)
        cdef int64_t* at = int64s(given)
        cdef int64_t now = self._clock
        cdef bint stays
        check_indices(given, self._capacity)
        for i in range(n):
            self._prefetch(at, i, n)
            stays = self._members[at[i]].stamp == ABSENT or not (self._which(at[i]) or bools(marks)[i])
            self._append(at[i], 0 if stays else gap_class(now - self._position(at[i])), now + i)
        self._clock += n

    def insert(self, slots, classes):
        cdef cnp.ndarray given = numbers(slots), gaps = numbers(classes)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        check_indices(given, self._capacity)
        check_classes(gaps, n)
        for i in range(n):
            self._prefetch(int64s(given), i, n)
            self._append(int64s(given)[i], <int>int64s(gaps)[i], self._clock + i)
        self._clock += n

    def classes(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray result = new_int64(n)
        for i in range(n):
            int64s(result)[i] = self._which(int64s(given)[i]) if self._members[int64s(given)[i]].stamp != ABSENT else 0
        return result

    def pop_oldest(self, Py_ssize_t n, busy):
        return self._pop(n, busy)

    def pop_shared(self, Py_ssize_t n, Py_ssize_t num_once, busy):
        return self._pop(n, busy, num_once, True)

    def pop_least(self, Py_ssize_t n, busy, ReturnRates rates not None):
        return self._pop(n, busy, 0, False, rates)

    def num_refused(self, classes, stamps, Py_ssize_t shortage, ReturnRates rates not None):
        cdef cnp.ndarray given = numbers(classes), times = numbers(stamps)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), refused = 0, i
        cdef int64_t* gaps = int64s(given)
        cdef int64_t fronts[CLASSES]
        cdef int64_t ticks[CLASSES]
        cdef int which
        check_classes(given, cnp.PyArray_DIM(times, 0))
        for which in range(CLASSES):
            fronts[which] = self._oldest[which]
            ticks[which] = self._position_or_end(fronts[which])
        for i in range(shortage):
            which = self._least(ticks, 0, CLASSES, rates)
            if refused < n and self._value(<int>gaps[refused], int64s(times)[refused], rates) < self._value(
                which, ticks[which], rates
            ):
                refused += 1
            elif ticks[which] == NO_END:
                break
            else:
                fronts[which] = self._members[fronts[which]].newer
                ticks[which] = self._position_or_end(fronts[which])
        return refused

    def check_integrity(self, slots):
        self._check(set(slots.tolist()))


cdef int check_classes(cnp.ndarray gaps, Py_ssize_t n) except -1:
    cdef Py_ssize_t i
    if cnp.PyArray_DIM(gaps, 0) != n:
        raise IndexError(f"{n} slots need as many classes, not {cnp.PyArray_DIM(gaps, 0)}")
    for i in range(n):
        if not 0 <= int64s(gaps)[i] < CLASSES:
            raise IndexError(f"class {int64s(gaps)[i]} of {CLASSES}")
    return 0


cdef class RecencyList(Lists):

    def __len__(self):
        return self.num_once

    def holds(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        cdef cnp.ndarray result = new_flags(n)
        for i in range(n):
            bools(result)[i] = self._members[int64s(given)[i]].stamp != ABSENT
        return result

    def append(self, slots):
        cdef cnp.ndarray given = checked(slots, self._capacity)
        cdef int64_t* at = int64s(given)
        cdef Py_ssize_t n = cnp.PyArray_DIM(given, 0), i
        for i in range(n):
            self._prefetch(at, i, n)
            self._append(at[i], 0, self._clock + i)
        self._clock += n

    def pop_oldest(self, Py_ssize_t n, busy):
        return self._pop(n, busy)[0]

    def check_integrity(self):
        stamps = np.frombuffer(self._memory, dtype=np.int64)[:: sizeof(Member) // sizeof(int64_t)]
        self._check(set(np.flatnonzero(stamps != ABSENT).tolist()))
