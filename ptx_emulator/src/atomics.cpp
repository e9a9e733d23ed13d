// atom and red.
#include <algorithm>
#include <cstring>

#include "alu.h"
#include "memory.h"
#include "numbers.h"

static u64 float_result(u8 op, u32 a, u32 b) {
    if (op != ATOM_ADD) fail("atomic operation %d on f32 is not modelled", op);
    return float_bits(bits_float(a) + bits_float(b));
}
u64 integer_reduced(u8 op, u8 type, u64 a, u64 b, u64 swap) {
    switch (op) {
        case ATOM_ADD:
            return a + b;
        case ATOM_MIN:
            return is_less(type, a, b) ? a : b;
        case ATOM_MAX:
            return is_less(type, a, b) ? b : a;
        case ATOM_AND:
            return a & b;
        case ATOM_OR:
            return a | b;
        case ATOM_XOR:
            return a ^ b;
        case ATOM_EXCH:
            return b;
        case ATOM_CAS:
            return a == b ? swap : a;
    }
    fail("atomic operation %d", op);
}

static u64 result_of(const Instruction& in, u64 old, u64 value, u64 swap) {
    if (in.type == T_F32) return float_result(in.sub, old, value);
    if (is_float(in.type) || half_of(in.type)) fail("atomics on type %d are not modelled", in.type);
    const int bits = type_bits(in.type);
    return zero_extend(integer_reduced(in.sub, in.type, zero_extend(old, bits),
                                       zero_extend(value, bits), zero_extend(swap, bits)),
                       bits);
}

INSTRUCTION(void, atomics, ATOM, RED) {
    const int first = in.op == ATOM ? 1 : 0;
    const u32 bytes = type_bytes(in.type);
    if (in.vec > 1) fail("vector atomics are not modelled");
    u64 scratch[2][32] = {};
    const Source value = source(w, operand(in, first + 1), scratch[0]);
    const bool swaps = in.num_operands > first + 2;
    const Source swap =
        swaps ? source(w, operand(in, first + 2), scratch[1]) : Source{scratch[1], 0};
    u64* d = in.op == ATOM ? target(w, operand(in, 0)) : nullptr;
    FOR_LANES (lane, mask) {
        const u64 a = address_of(w, in, first, lane);
        u8* p = resolve(w, in.space, a, bytes, lane, true);
        u64 old = 0;
        memcpy(&old, p, bytes);
        const u64 r = result_of(in, old, value[lane], swap[lane]);
        memcpy(p, &r, bytes);
        if (in.space == SHARED || is_shared_window(a))
            note_generic_write_unraced(w, lane, shared_address(a), bytes);
        if (d) d[lane] = old;
    }
    machine.stats.atomics += __builtin_popcount(mask);
    machine.epoch++;
}
