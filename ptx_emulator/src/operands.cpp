// Reading operands: registers, immediates, symbols, special registers.
#include <cstdarg>
#include <cstdio>

#include "machine.h"

static std::string written(const char* format, va_list args) {
    char text[16384];
    vsnprintf(text, sizeof text, format, args);
    return text;
}
std::string written(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = written(format, args);
    va_end(args);
    return text;
}
void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    EmulatorError error(written(format, args));
    va_end(args);
    throw error;
}

std::string name_of(const Warp& w) {
    return written("CTA (%u,%u,%u) warp %d", w.cta->at[0], w.cta->at[1], w.cta->at[2], w.id);
}

// The order is that of SPECIAL_REGISTERS in isa.py.
static u64 special_register(Warp& w, int id, int lane) {
    const CTA* c = w.cta;
    const u32 thread = w.id * 32 + lane;
    const Machine& m = machine;
    switch (id) {
        case 0:
            return thread % m.block[0];
        case 1:
            return thread / m.block[0] % m.block[1];
        case 2:
            return thread / m.block[0] / m.block[1];
        case 3 ... 5:
            return m.block[id - 3];
        case 6 ... 8:
            return c->at[id - 6];
        case 9 ... 11:
            return m.grid[id - 9];
        case 12:
            return lane;
        case 13:
            return w.id;
        case 14:
            return c->warps.size();
        case 15:
            return c->linear % m.config.num_sms;
        case 16:
            return m.config.num_sms;
        case 17 ... 19:
            return c->cluster->at[id - 17];
        case 20 ... 22:
            return m.grid[id - 20] / m.cluster[id - 20];
        case 23 ... 25:
            return c->at[id - 23] % m.cluster[id - 23];
        case 26 ... 28:
            return m.cluster[id - 26];
        case 29:
            return c->rank;
        case 30:
            return m.cluster_size();
        case 31:
            return 1u << lane;
        case 32:
            return (2u << lane) - 1;
        case 33:
            return (1u << lane) - 1;
        case 34:
            return ~((1u << lane) - 1);
        case 35:
            return ~((2u << lane) - 1);
        case 36:
            return m.now;
        case 37:
            return m.dynamic_smem;
        case 38:
            return m.dynamic_smem + m.program->static_smem + SMEM_BASE;
        case 39:
            return m.explicit_cluster;
        case 40:
            return 1;
        case 41:
            return m.now >> 32;
    }
    fail("unknown special register %d", id);
}

Source source(Warp& w, const Operand& o, u64* scratch) {
    switch (o.kind) {
        case K_REG:
            return {w.reg(o.reg), 1};
        case K_NONE:
            scratch[0] = 0;
            return {scratch, 0};
        case K_IMM:
        case K_GLOBAL_SYM:
        case K_LOCAL_SYM:
            scratch[0] = (u64)o.imm;
            return {scratch, 0};
        case K_SHARED_SYM:
            scratch[0] = (u64)(w.cta->rank << 24 | SMEM_BASE) + o.imm;
            return {scratch, 0};
        case K_PARAM_SYM:
            scratch[0] = (u64)machine.params + o.imm;
            return {scratch, 0};
        case K_SPECIAL:
            for (int lane = 0; lane < 32; lane++) scratch[lane] = special_register(w, o.reg, lane);
            return {scratch, 1};
    }
    fail("operand kind %d cannot be read as a value", o.kind);
}

u64 value_of(Warp& w, const Operand& o, int lane) {
    if (o.kind == K_REG) return w.reg(o.reg)[lane];
    u64 scratch[32];
    return source(w, o, scratch)[lane];
}

u64 address_of(Warp& w, const Operand& o, int lane) {
    switch (o.kind) {
        case K_ADDR_REG:
            return w.reg(o.reg)[lane] + o.imm;
        case K_ADDR_ABS:
            return o.imm;
        case K_SHARED_SYM ... K_LOCAL_SYM:
            return value_of(w, o, lane);
    }
    fail("operand kind %d is not an address", o.kind);
}

Status need_full_warp(const Warp& w, u32 mask, const char* what) {
    if (mask == ~0u) return OK;
    if (!w.converged) return CONVERGE;
    fail("%s must be executed by all 32 lanes of a warp; the mask is %#x", what, mask);
}
