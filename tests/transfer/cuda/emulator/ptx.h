/* Kernels as ptx.c has read them and kernels.c runs them. */

#ifndef PTX_H
#define PTX_H

#include "emulator.h"

enum { MAX_OPERANDS = 9, MAX_WORDS = 4 };
enum { TID_X, NTID_X, CTAID_X, NCTAID_X, NUM_SPECIAL }; /* the first registers */
#define PARAMETERS 0x7A00000000000000ull /* where kernels see their parameters */

typedef enum {
    ADD, SUB, MUL_LO, MUL_HI, MUL_WIDE, MAD_LO, MAD_WIDE, DIV, REM, MIN, MAX, AND, OR, XOR, NOT, NEG, SHL, SHR, BFE, MOV, CVT,
    SETP, SELP, BRA, RET, LD, ST,
} opcode;
typedef enum { EQ, NE, LT, LE, GT, GE } comparison;
typedef enum { GLOBAL, PARAM } space;

typedef struct {
    unsigned bits;
    int is_signed;
} type;

typedef struct {
    int is_register;
    uint64_t value; /* or the number of the register */
} operand;

typedef struct {
    opcode opcode;
    type type, from; /* `from`: of the source of a cvt */
    comparison comparison;
    space space;
    int predicate, is_negated; /* the register that must be true, or false; -1: none */
    int num_words;             /* of ld and st */
    int num_operands;
    operand operands[MAX_OPERANDS]; /* the target first; ld and st: the words, then address and offset */
    char label[64];
    size_t target;
} instruction;

typedef struct {
    char name[64];
    size_t offset, nbytes;
} parameter;

struct kernel {
    kernel *next;
    char name[64];
    unsigned max_threads;
    parameter parameters[16];
    size_t num_parameters, parameter_bytes;
    char (*registers)[24];
    size_t num_registers;
    instruction *code;
    size_t num_instructions;
    struct { char name[64]; size_t at; } labels[128];
    size_t num_labels;
};

struct module {
    kernel *kernels;
};

#endif
