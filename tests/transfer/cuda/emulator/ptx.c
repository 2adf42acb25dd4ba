/* Reads PTX. An instruction that is not known here makes the module invalid. */

#include "ptx.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STATEMENT = 512 };
static const char *const special_names[] = {"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"};

static int wrong(const char *statement) {
    problem("PTX that the emulator does not know: %s", statement);
    return 0;
}

static int read_type(const char *text, type *t) {
    if (strcmp(text, "pred") == 0)
        return *t = (type){1, 0}, 1;
    int bits = atoi(text + 1);
    *t = (type){bits, text[0] == 's'};
    return strchr("usb", text[0]) && (bits == 8 || bits == 16 || bits == 32 || bits == 64);
}

static int register_number(kernel *k, const char *name) {
    for (size_t i = 0; i < k->num_registers; i++)
        if (strcmp(k->registers[i], name) == 0)
            return (int)i;
    k->registers = realloc(k->registers, (k->num_registers + 1) * sizeof *k->registers);
    snprintf(k->registers[k->num_registers], sizeof *k->registers, "%s", name);
    return (int)k->num_registers++;
}

static int read_operand(kernel *k, const char *text, operand *out) {
    if (text[0] == '%') {
        *out = (operand){1, register_number(k, text)};
        return strchr(text, '.') == NULL || out->value < NUM_SPECIAL;
    }
    for (size_t i = 0; i < k->num_parameters; i++)
        if (strcmp(k->parameters[i].name, text) == 0)
            return *out = (operand){0, PARAMETERS + k->parameters[i].offset}, 1;
    char *end;
    *out = (operand){0, text[0] == '-' ? (uint64_t)strtoll(text, &end, 0) : strtoull(text, &end, 0)};
    return end != text && *end == 0;
}

/* Splits an instruction's name, such as ld.global.v4.u32. Modifiers that change no result here are passed over. */
static int read_name(char *name, instruction *in) {
    static const struct { const char *name; opcode opcode; } plain[] = {
        {"add", ADD}, {"sub", SUB}, {"div", DIV}, {"rem", REM}, {"min", MIN}, {"max", MAX}, {"and", AND}, {"or", OR},
        {"xor", XOR}, {"not", NOT}, {"neg", NEG}, {"shl", SHL}, {"shr", SHR}, {"bfe", BFE}, {"mov", MOV}, {"cvta", MOV},
        {"cvt", CVT}, {"setp", SETP}, {"selp", SELP}, {"bra", BRA}, {"ret", RET}, {"ld", LD}, {"st", ST}, {"mul", MUL_LO},
        {"mad", MAD_LO},
    };
    static const char *const comparisons[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    static const char *const passed[] = {"uni", "to", "global", "nc", "ca", "cg", "cs", "L1::no_allocate", "lo"};
    char *part = strtok(name, ".");
    int known = 0, num_types = 0;
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        if (strcmp(part, plain[i].name) == 0)
            in->opcode = plain[i].opcode, known = 1;
    in->num_words = 1, in->space = GLOBAL;
    int has_width = !(in->opcode == MUL_LO || in->opcode == MAD_LO);
    while (known && (part = strtok(NULL, "."))) {
        type t;
        int is_passed = 0, is_comparison = 0;
        for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
            is_passed |= strcmp(part, passed[i]) == 0;
        for (int i = 0; in->opcode == SETP && i <= GE; i++)
            if (strcmp(part, comparisons[i]) == 0)
                in->comparison = i, is_comparison = 1;
        has_width |= strcmp(part, "lo") == 0;
        if (strcmp(part, "wide") == 0 || strcmp(part, "hi") == 0)
            in->opcode = part[0] == 'h' ? MUL_HI : in->opcode == MUL_LO ? MUL_WIDE : MAD_WIDE, has_width = 1;
        else if (strcmp(part, "param") == 0)
            in->space = PARAM;
        else if (part[0] == 'v' && strchr("24", part[1]) && !part[2])
            in->num_words = part[1] - '0';
        else if (!is_passed && !is_comparison) {
            if (!read_type(part, &t) || num_types++ == 2)
                return 0;
            in->from = t;
            if (num_types == 1)
                in->type = t;
        }
    }
    return known && has_width && (num_types > 0) == (in->opcode != BRA && in->opcode != RET);
}

/* Reads the statement `text`, which ends without its semicolon. */
static int read_instruction(kernel *k, const char *text) {
    static const int counts[] = {[ADD] = 3, [SUB] = 3, [MUL_LO] = 3, [MUL_HI] = 3, [MUL_WIDE] = 3, [MAD_LO] = 4,
        [MAD_WIDE] = 4, [DIV] = 3, [REM] = 3, [MIN] = 3, [MAX] = 3, [AND] = 3, [OR] = 3, [XOR] = 3, [NOT] = 2, [NEG] = 2,
        [SHL] = 3, [SHR] = 3, [BFE] = 4, [MOV] = 2, [CVT] = 2, [SETP] = 3, [SELP] = 4, [BRA] = 0, [RET] = 0};
    char copy[MAX_STATEMENT], addressed[MAX_STATEMENT] = "";
    snprintf(copy, sizeof copy, "%s", text);
    instruction in = {.predicate = -1};
    char *at = copy;
    if (*at == '@') {
        in.is_negated = at[1] == '!';
        char *name = at + 1 + in.is_negated;
        at = name + strcspn(name, " \t");
        if (*at)
            *at++ = 0;
        in.predicate = register_number(k, name);
        at += strspn(at, " \t");
    }
    char *rest = at + strcspn(at, " \t");
    if (*rest)
        *rest++ = 0;
    if (!read_name(at, &in))
        return wrong(text);
    char *open = strchr(rest, '['), *close = strchr(rest, ']');
    if ((in.opcode == LD || in.opcode == ST) != (open && close))
        return wrong(text);
    if (open) { /* the address goes to the end of the operands */
        snprintf(addressed, sizeof addressed, "%.*s", (int)(close - open - 1), open + 1);
        memset(open, ' ', close - open + 1);
    }
    if (in.opcode == BRA) {
        rest += strspn(rest, " \t");
        snprintf(in.label, sizeof in.label, "%s", rest);
    } else
        for (char *each = strtok(rest, ", \t{}"); each; each = strtok(NULL, ", \t{}"))
            if (in.num_operands == MAX_OPERANDS - 2 || !read_operand(k, each, &in.operands[in.num_operands++]))
                return wrong(text);
    if (in.num_operands != (open ? in.num_words : counts[in.opcode]))
        return wrong(text);
    if (open) {
        char *plus = strchr(addressed, '+');
        if (plus)
            *plus = 0;
        if (!read_operand(k, addressed, &in.operands[in.num_operands++]) ||
            !read_operand(k, plus ? plus + 1 : "0", &in.operands[in.num_operands++]))
            return wrong(text);
    }
    k->code = realloc(k->code, (k->num_instructions + 1) * sizeof *k->code);
    k->code[k->num_instructions++] = in;
    return 1;
}

/* Reads ".param .u64 name" or ".param .align 4 .b8 name[3840]". */
static int read_parameter(kernel *k, const char *text) {
    parameter *p = &k->parameters[k->num_parameters];
    unsigned alignment = 0, bits = 0, count = 1;
    char letter;
    if (k->num_parameters == sizeof k->parameters / sizeof *k->parameters ||
        !(sscanf(text, " .param .align %u .b%u %63[^[][%u]", &alignment, &bits, p->name, &count) == 4 ||
          sscanf(text, " .param .%c%u %63s", &letter, &bits, p->name) == 3))
        return wrong(text);
    p->nbytes = (size_t)count * bits / 8;
    alignment = alignment ? alignment : bits / 8;
    p->offset = (k->parameter_bytes + alignment - 1) / alignment * alignment;
    k->parameter_bytes = p->offset + p->nbytes;
    k->num_parameters++;
    return k->parameter_bytes <= MAX_PARAMETER_BYTES ? 1 : wrong("more than 4,096 bytes of parameters");
}

/* Cuts `text` at characters of `ends`, calls read with each piece that is not empty, without blanks at both sides. */
static int read_each(kernel *k, const char *from, const char *to, char end, int (*read)(kernel *, const char *)) {
    char piece[MAX_STATEMENT];
    while (from < to) {
        const char *stop = memchr(from, end, to - from), *last = stop ? stop : to;
        while (from < last && isspace((unsigned char)*from))
            from++;
        const char *trimmed = last;
        while (trimmed > from && isspace((unsigned char)trimmed[-1]))
            trimmed--;
        if (trimmed - from >= MAX_STATEMENT)
            return wrong("a long statement");
        memcpy(piece, from, trimmed - from);
        piece[trimmed - from] = 0;
        if (piece[0] && !read(k, piece))
            return 0;
        from = last + 1;
    }
    return 1;
}

/* Reads a statement of a kernel with the labels before it. */
static int read_statement(kernel *k, const char *text) {
    for (size_t n; text[n = strcspn(text, ": \t\n")] == ':' && text[0] != '@'; text += strspn(text, " \t\n")) {
        if (k->num_labels == sizeof k->labels / sizeof *k->labels)
            return wrong("more labels than the emulator has room for");
        snprintf(k->labels[k->num_labels].name, sizeof k->labels->name, "%.*s", (int)n, text);
        k->labels[k->num_labels++].at = k->num_instructions;
        text += n + 1;
    }
    if (!*text || strncmp(text, ".reg", 4) == 0 || strncmp(text, ".pragma", 7) == 0)
        return 1;
    return read_instruction(k, text);
}

static int find_labels(kernel *k) {
    for (size_t i = 0; i < k->num_instructions; i++) {
        instruction *in = &k->code[i];
        in->target = SIZE_MAX;
        for (size_t l = 0; in->opcode == BRA && l < k->num_labels; l++)
            if (strcmp(k->labels[l].name, in->label) == 0)
                in->target = k->labels[l].at;
        if (in->opcode == BRA && in->target == SIZE_MAX)
            return wrong(in->label);
    }
    return 1;
}

/* Reads a kernel that begins behind ".entry" and returns the end of it, or NULL. */
static const char *read_kernel(kernel *k, const char *text) {
    const char *open = strchr(text, '('), *close = open ? strchr(open, ')') : NULL;
    const char *begin = close ? strchr(close, '{') : NULL, *end = begin ? strstr(begin, "\n}") : NULL;
    if (!end || sscanf(text, " %63[^( \t\n]", k->name) != 1)
        return wrong("a kernel without an end"), NULL;
    const char *most = strstr(close, ".maxntid");
    k->max_threads = most && most < begin ? (unsigned)atoi(most + 8) : MAX_THREADS;
    for (int i = 0; i < NUM_SPECIAL; i++)
        register_number(k, special_names[i]);
    if (!read_each(k, open + 1, close, ',', read_parameter) || !read_each(k, begin + 1, end, ';', read_statement) ||
        !find_labels(k))
        return NULL;
    return end + 2;
}

/* Whether this driver and this device take PTX of a version and for an architecture. */
static int check_target(const char *text) {
    int major, minor, arch;
    const char *version = strstr(text, ".version"), *target = strstr(text, ".target");
    if (!version || !target || sscanf(version, ".version %d.%d", &major, &minor) != 2 || sscanf(target, ".target sm_%d", &arch) != 1)
        return INVALID_PTX;
    int has = (driver_version / 1000 - 4) * 10 + driver_version % 1000 / 10; /* CUDA 12.0 has PTX 8.0 */
    if (10 * major + minor > has)
        return UNSUPPORTED_PTX_VERSION;
    return arch <= 10 * attribute_values[ATTRIBUTE_MAJOR] + attribute_values[ATTRIBUTE_MINOR] ? SUCCESS : NO_BINARY;
}

module *load_module(const char *source, int *code) {
    char *text = strdup(source);
    for (char *at = text; (at = strstr(at, "//"));) /* comments */
        while (*at && *at != '\n')
            *at++ = ' ';
    module *m = calloc(1, sizeof *m);
    *code = check_target(text);
    for (const char *at = text; !*code && at && (at = strstr(at, ".entry"));) {
        kernel *k = calloc(1, sizeof *k);
        k->next = m->kernels, m->kernels = k;
        at = read_kernel(k, at + 6);
        if (!at)
            *code = INVALID_PTX;
    }
    free(text);
    if (!*code && m->kernels)
        return m;
    unload_module(m);
    *code = *code ? *code : INVALID_PTX;
    return NULL;
}

void unload_module(module *m) {
    for (kernel *k = m->kernels, *next; k; k = next) {
        next = k->next;
        free(k->registers), free(k->code), free(k);
    }
    free(m);
}

const kernel *find_kernel(const module *m, const char *name) {
    for (const kernel *k = m->kernels; k; k = k->next)
        if (strcmp(k->name, name) == 0)
            return k;
    return NULL;
}

unsigned max_threads(const kernel *k) { return k->max_threads; }

/* Copies the values to which `parameters` point. */
int read_parameters(launch *l, void **parameters) {
    memset(l->parameters, 0xDD, sizeof l->parameters);
    for (size_t i = 0; i < l->kernel->num_parameters; i++) {
        const parameter *p = &l->kernel->parameters[i];
        if (!parameters[i])
            return INVALID_VALUE;
        memcpy(l->parameters + p->offset, parameters[i], p->nbytes);
    }
    return SUCCESS;
}
