/* Streams whose work is deferred. It runs piece by piece, in any order that streams and events allow. */

#include "emulator.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_PIECES = 4 };            /* into which a copy is torn */
enum { STEPS_PER_SPEED = 40 };      /* how often streams change their speeds */
enum { QUERIES_OF_LATEST = 6 };     /* if work runs as late as possible: one query in so many makes its event run */
static const double MILLISECONDS_PER_BYTE = 1.0 / 50e6, MILLISECONDS_PER_PIECE = 1e-3;

typedef enum { COPIES, FILL, LAUNCH, RECORD, WAIT } kind;

typedef struct operation {
    struct operation *next;
    kind kind;
    copy_piece *copies;
    size_t count, at; /* pieces of copies, blocks of a launch: those before `at` are done */
    int value;
    launch *launch;
    unsigned *blocks;
    event *event;
    stream *recorder; /* of the record for which this one waits, and the number of the record there */
    int64_t number;
} operation;

struct stream {
    stream *next;
    operation *first, *last;
    int64_t num_issued, num_done; /* operations */
    double speed;
};

/* `number`: that of the last record among the operations of `recorder`. */
struct event {
    event *next;
    stream *recorder; /* NULL: it was never recorded */
    int64_t number;
    double time;
    int has_time;
};

static stream *streams;
static event *events; /* they, too, live until the next reset */
static int timing;
static size_t queue_size;
static uint64_t random_state;
static double now;

static uint64_t next_random(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1D;
}

size_t random_below(size_t n) { return (next_random() >> 11) % n; }

static void shuffle(void *items, size_t size, size_t count) {
    char swap[64];
    for (size_t i = count; i > 1; i--) {
        char *a = (char *)items + (i - 1) * size, *b = (char *)items + random_below(i) * size;
        memcpy(swap, a, size), memcpy(a, b, size), memcpy(b, swap, size);
    }
}

static void end_operation(stream *s) {
    operation *o = s->first;
    s->first = o->next;
    if (!s->first)
        s->last = NULL;
    s->num_done++;
    free(o->copies), free(o->launch), free(o->blocks), free(o);
}

void reset_streams(uint64_t seed, int new_timing, size_t new_queue_size) {
    for (stream *next; streams; streams = next) {
        next = streams->next;
        while (streams->first)
            end_operation(streams);
        free(streams);
    }
    for (event *next; events; events = next) {
        next = events->next;
        free(events);
    }
    random_state = seed * 0x9E3779B97F4A7C15 + 0x1234567;
    timing = new_timing, queue_size = new_queue_size, now = 0;
}

stream *new_stream(void) {
    stream *s = calloc(1, sizeof *s);
    s->next = streams, s->speed = 1;
    return streams = s;
}

event *new_event(int has_time) {
    event *e = calloc(1, sizeof *e);
    e->next = events, e->has_time = has_time;
    return events = e;
}

static int is_reached(const event *e) { return !e->recorder || e->recorder->num_done >= e->number; }

static int is_ready(const stream *s) {
    return s->first && (s->first->kind != WAIT || s->first->recorder->num_done >= s->first->number);
}

/* Memory is looked up again: it may have been freed since the work was issued. */
static int copy(copy_piece c) {
    const range *target = find_memory(c.target, c.nbytes), *source = find_memory(c.source, c.nbytes);
    if (!target || !source) {
        problem("a copy of %zu bytes from %#llx to %#llx runs after its memory was freed or unregistered", c.nbytes,
                (unsigned long long)c.source, (unsigned long long)c.target);
        return ILLEGAL_ADDRESS;
    }
    if (!attribute_values[ATTRIBUTE_HOST_POINTERS] && (target->kind == REGISTERED_MEMORY || source->kind == REGISTERED_MEMORY)) {
        problem("a copy uses the host's address of registered memory, which this device cannot (attribute 91)");
        return ILLEGAL_ADDRESS;
    }
    memmove((void *)c.target, (void *)c.source, c.nbytes);
    now += c.nbytes * MILLISECONDS_PER_BYTE;
    return SUCCESS;
}

/* Runs a piece of the stream's first operation, which is ready. After an error of the device nothing runs any more, but
 * events are reached, so that nobody waits for ever. */
static void run_piece(stream *s) {
    operation *o = s->first;
    int code = SUCCESS;
    now += MILLISECONDS_PER_PIECE;
    if (!sticky && o->kind == COPIES && o->at < o->count)
        code = copy(o->copies[o->at++]);
    else if (!sticky && o->kind == LAUNCH && o->at < o->count)
        code = run_block(o->launch, o->blocks[o->at++], random_below(2) == 0);
    else if (!sticky && o->kind == FILL && o->at < o->count) {
        const range *r = find_memory(o->copies->target, o->copies->nbytes);
        if (r)
            memset((void *)o->copies->target, o->value, o->copies->nbytes);
        code = r ? SUCCESS : ILLEGAL_ADDRESS;
        o->at++;
    } else if (o->kind == RECORD)
        o->event->time = now;
    if (code)
        sticky = code;
    if (sticky || o->at == o->count)
        end_operation(s);
}

static void run_one_of(stream *s) {
    while (s->first && !is_ready(s)) { /* what it waits for comes first, and what that waits for */
        stream *other = s->first->recorder;
        if (is_ready(other))
            run_piece(other);
        else
            run_one_of(other);
    }
    if (s->first)
        run_piece(s);
}

void run_stream(stream *s) {
    while (s->first)
        run_one_of(s);
}

void run_event(event *e) {
    while (!is_reached(e))
        run_one_of(e->recorder);
}

void run_all(void) {
    for (stream *s = streams; s; s = s->next)
        run_stream(s);
}

void tick(int steps) {
    while (steps-- > 0) {
        double sum = 0;
        for (stream *s = streams; s; s = s->next) {
            if (random_below(STEPS_PER_SPEED) == 0)
                s->speed = (double[]){0, 0.05, 1, 1}[random_below(4)];
            sum += is_ready(s) ? s->speed + 1e-6 : 0;
        }
        if (!sum)
            return;
        double left = sum * (next_random() >> 11) / (double)(1ull << 53);
        stream *chosen = NULL;
        for (stream *s = streams; s; s = s->next)
            if (is_ready(s) && (chosen = s) && (left -= s->speed + 1e-6) < 0)
                break;
        run_piece(chosen);
    }
}

void run_some(void) {
    if (timing == EARLIEST)
        tick(1 << 30);
    else if (timing == RANDOM)
        tick((int[]){0, 0, 1, 4, 16}[random_below(5)]);
}

static operation *issue(stream *s, kind kind, size_t count) {
    while (s->num_issued - s->num_done >= (int64_t)queue_size) /* a full launch queue blocks its caller */
        run_one_of(s);
    operation *o = calloc(1, sizeof *o);
    o->kind = kind, o->count = count;
    if (s->last)
        s->last->next = o;
    else
        s->first = o;
    s->last = o;
    s->num_issued++;
    return o;
}

void issue_copies(stream *s, const copy_piece *pieces, size_t count) {
    operation *o = issue(s, COPIES, 0);
    o->copies = malloc(count * MAX_PIECES * sizeof *o->copies);
    for (size_t i = 0; i < count; i++) {
        copy_piece left = pieces[i];
        for (int last = random_below(MAX_PIECES); left.nbytes; last--) {
            copy_piece part = left;
            if (last > 0)
                part.nbytes = 1 + random_below(left.nbytes);
            o->copies[o->count++] = part;
            left.target += part.nbytes, left.source += part.nbytes, left.nbytes -= part.nbytes;
        }
    }
    shuffle(o->copies, sizeof *o->copies, o->count);
}

void issue_fill(stream *s, uint64_t target, int value, size_t nbytes) {
    operation *o = issue(s, FILL, 1);
    o->copies = malloc(sizeof *o->copies);
    *o->copies = (copy_piece){target, 0, nbytes};
    o->value = value;
}

void issue_launch(stream *s, const launch *l) {
    operation *o = issue(s, LAUNCH, l->blocks);
    o->launch = malloc(sizeof *o->launch);
    *o->launch = *l;
    o->blocks = malloc(l->blocks * sizeof *o->blocks);
    for (unsigned i = 0; i < l->blocks; i++)
        o->blocks[i] = i;
    shuffle(o->blocks, sizeof *o->blocks, l->blocks);
}

void issue_record(stream *s, event *e) {
    issue(s, RECORD, 0)->event = e;
    e->recorder = s, e->number = s->num_issued;
}

void issue_wait(stream *s, event *e) {
    if (is_reached(e))
        return;
    operation *o = issue(s, WAIT, 0);
    o->recorder = e->recorder, o->number = e->number;
}

int query_event(event *e) {
    if (!is_reached(e) && timing == LATEST && random_below(QUERIES_OF_LATEST) == 0)
        run_event(e);
    return is_reached(e) ? SUCCESS : NOT_READY;
}

int milliseconds_between(float *out, event *a, event *b) {
    if (!a->has_time || !b->has_time || !a->recorder || !b->recorder)
        return INVALID_HANDLE;
    if (!is_reached(a) || !is_reached(b))
        return NOT_READY;
    *out = (float)(b->time - a->time);
    return SUCCESS;
}
