/* Runs kernels, thread after thread. Every access to memory is checked: it must lie in one piece of memory and be
 * aligned. */

#include "ptx.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_STEPS = 10000000, UNSET_BYTE = 0xDD };

static uint64_t cut(uint64_t value, unsigned bits) { return bits >= 64 ? value : value & ((1ull << bits) - 1); }

static uint64_t extend(uint64_t value, type t) {
    return t.is_signed ? (uint64_t)((int64_t)(value << (64 - t.bits)) >> (64 - t.bits)) : cut(value, t.bits);
}

static uint64_t shift(opcode op, uint64_t a, uint64_t count, type t) {
    if (op == SHL)
        return count < t.bits ? a << count : 0;
    if (t.is_signed)
        return (uint64_t)((int64_t)a >> (count < t.bits ? count : t.bits - 1));
    return count < t.bits ? a >> count : 0;
}

/* Operands are extended to 64 bits: signed comparisons and divisions compare and divide these. */
static int compare(comparison c, uint64_t a, uint64_t b, int is_signed) {
    int less = is_signed ? (int64_t)a < (int64_t)b : a < b;
    switch (c) {
    case EQ: return a == b;
    case NE: return a != b;
    case LT: return less;
    case LE: return less || a == b;
    case GT: return !less && a != b;
    default: return !less;
    }
}

static uint64_t high_half(uint64_t a, uint64_t b, type t) {
    if (t.bits < 64)
        return a * b >> t.bits;
    return t.is_signed ? (uint64_t)((__int128)(int64_t)a * (int64_t)b >> 64) : (uint64_t)((unsigned __int128)a * b >> 64);
}

/* Returns the result of an instruction that only computes. `failed` is set for a division by zero. */
static uint64_t compute(const instruction *in, const uint64_t *v, int *failed) {
    type t = in->type;
    uint64_t a = extend(v[1], in->opcode == CVT ? in->from : t), b = extend(v[2], t);
    switch (in->opcode) {
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL_LO: case MUL_WIDE: return a * b; /* wide: of 32 bits at most, so 64 hold it */
    case MUL_HI: return high_half(a, b, t);
    case MAD_LO: case MAD_WIDE: return a * b + v[3];
    case DIV: case REM:
        if ((*failed = b == 0))
            return 0;
        if (t.is_signed)
            return in->opcode == DIV ? (uint64_t)((int64_t)a / (int64_t)b) : (uint64_t)((int64_t)a % (int64_t)b);
        return in->opcode == DIV ? a / b : a % b;
    case MIN: return compare(LT, a, b, t.is_signed) ? a : b;
    case MAX: return compare(GT, a, b, t.is_signed) ? a : b;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    case NOT: return ~a;
    case NEG: return -a;
    case SHL: case SHR: return shift(in->opcode, a, cut(v[2], 32), t);
    case BFE: return cut(shift(SHR, cut(a, t.bits), cut(v[2], 8), (type){t.bits, 0}), (unsigned)cut(v[3], 8));
    case SETP: return compare(in->comparison, a, b, t.is_signed);
    case SELP: return cut(v[3], 1) ? a : b;
    default: return a; /* mov and cvt */
    }
}

/* Bits of what an instruction writes. */
static unsigned result_bits(const instruction *in) {
    return in->opcode == SETP ? 1 : in->opcode == MUL_WIDE || in->opcode == MAD_WIDE ? 2 * in->type.bits : in->type.bits;
}

/* Returns where `nbytes` at an address are, or NULL: the error is in `code`. */
static uint8_t *place(const launch *l, const instruction *in, uint64_t address, size_t nbytes, const range **last, int *code) {
    const char *what = in->opcode == LD ? "reads" : "writes";
    if (address % nbytes) {
        problem("a kernel %s %zu bytes at %#llx, which is not aligned", what, nbytes, (unsigned long long)address);
        return *code = MISALIGNED_ADDRESS, NULL;
    }
    if (in->space == PARAM) {
        uint64_t at = address - PARAMETERS;
        if (in->opcode == LD && at < l->kernel->parameter_bytes && nbytes <= l->kernel->parameter_bytes - at)
            return (uint8_t *)l->parameters + at;
    } else {
        if (!*last || address < (*last)->from || address + nbytes > (*last)->to)
            *last = find_memory(address, nbytes);
        if (*last && ((*last)->kind != REGISTERED_MEMORY || attribute_values[ATTRIBUTE_HOST_POINTERS]))
            return (uint8_t *)address;
    }
    problem("a kernel %s %zu bytes at %#llx, outside of what it may reach", what, nbytes, (unsigned long long)address);
    return *code = ILLEGAL_ADDRESS, NULL;
}

static uint64_t value_of(const uint64_t *registers, operand o) { return o.is_register ? registers[o.value] : o.value; }

static int access_memory(const launch *l, const instruction *in, uint64_t *registers, const range **last) {
    const operand *o = in->operands;
    size_t nbytes = in->type.bits / 8;
    uint64_t address = value_of(registers, o[in->num_words]) + o[in->num_words + 1].value;
    int code = SUCCESS;
    uint8_t *at = place(l, in, address, nbytes * in->num_words, last, &code);
    if (!at)
        return code;
    for (int i = 0; i < in->num_words; i++, at += nbytes) {
        uint64_t value = in->opcode == ST ? value_of(registers, o[i]) : 0;
        if (in->opcode == ST)
            memcpy(at, &value, nbytes);
        else {
            memcpy(&value, at, nbytes);
            registers[o[i].value] = extend(value, in->type);
        }
    }
    return SUCCESS;
}

static int run_thread(const launch *l, uint64_t *registers) {
    const kernel *k = l->kernel;
    const range *last = NULL;
    size_t at = 0;
    for (int steps = 0; at < k->num_instructions; steps++) {
        const instruction *in = &k->code[at++];
        if (steps == MAX_STEPS)
            return problem("a kernel does not end"), LAUNCH_FAILED;
        if (in->predicate >= 0 && (registers[in->predicate] & 1) == (uint64_t)in->is_negated)
            continue;
        if (in->opcode == RET)
            return SUCCESS;
        if (in->opcode == BRA) {
            at = in->target;
            continue;
        }
        if (in->opcode == LD || in->opcode == ST) {
            int code = access_memory(l, in, registers, &last);
            if (code)
                return code;
            continue;
        }
        uint64_t values[4] = {0};
        int failed = 0;
        for (int i = 1; i < in->num_operands; i++)
            values[i] = value_of(registers, in->operands[i]);
        uint64_t result = cut(compute(in, values, &failed), result_bits(in));
        if (failed)
            return problem("a kernel divides by zero"), LAUNCH_FAILED;
        registers[in->operands[0].value] = result;
    }
    return problem("a kernel runs past its end"), LAUNCH_FAILED;
}

int run_block(const launch *l, unsigned block, int backwards) {
    size_t nbytes = l->kernel->num_registers * sizeof(uint64_t);
    uint64_t *registers = malloc(nbytes);
    int code = SUCCESS;
    for (unsigned i = 0; !code && i < l->threads; i++) {
        memset(registers, UNSET_BYTE, nbytes);
        registers[TID_X] = backwards ? l->threads - 1 - i : i;
        registers[NTID_X] = l->threads, registers[CTAID_X] = block, registers[NCTAID_X] = l->blocks;
        code = run_thread(l, registers);
    }
    free(registers);
    return code;
}
