// Moves and selections; dispatch of arithmetic to floats or integers.
#include "alu.h"

#include "memory.h"
#include "numbers.h"

INSTRUCTION(void, move, MOV) {
    const int bits = type_bits(in.type);
    each_lane(w, in, mask, [=](u64 a) { return zero_extend(a, bits); });
}

INSTRUCTION(void, convert_address, CVTA) {
    const u64 window = in.space == SHARED ? SHARED_WINDOW : in.space == LOCAL ? LOCAL_WINDOW : 0;
    const bool from_generic = in.sub;
    each_lane(w, in, mask, [=](u64 a) { return from_generic ? a - window : a + window; });
}

// mov.bN d, {a, b, ...}.
INSTRUCTION(void, pack, PACK) {
    const Operand& parts = operand(in, 1);
    const int bits = type_bits(in.type) / parts.count;
    u64* d = w.reg(operand(in, 0).reg);
    u64 packed[32] = {};
    for (int i = 0; i < parts.count; i++) {
        u64 scratch[32];
        const Source s = source(w, element(parts, i), scratch);
        FOR_LANES (lane, mask) packed[lane] |= zero_extend(s[lane], bits) << (i * bits);
    }
    FOR_LANES (lane, mask) d[lane] = packed[lane];
}

INSTRUCTION(void, unpack, UNPACK) {
    const Operand& parts = operand(in, 0);
    const int bits = type_bits(in.type) / parts.count;
    u64 scratch[32], packed[32] = {};
    const Source s = source(w, operand(in, 1), scratch);
    FOR_LANES (lane, mask) packed[lane] = s[lane];  // the target may be a source
    for (int i = 0; i < parts.count; i++)
        if (u64* d = target(w, element(parts, i)))
            FOR_LANES (lane, mask) d[lane] = zero_extend(packed[lane] >> (i * bits), bits);
}

INSTRUCTION(void, choose, SELP) {
    const int bits = type_bits(in.type);
    const bool negated = operand(in, 3).negated;
    each_lane(w, in, mask,
              [=](u64 a, u64 b, u64 p) { return zero_extend(((p & 1) ^ negated) ? a : b, bits); });
}

INSTRUCTION(void, map_to_rank, MAPA) {
    const u32 ranks = machine.cluster_size();
    each_lane(w, in, mask, [=](u64 a, u64 rank) {
        if ((u32)rank >= ranks) fail("mapa to CTA rank %u of a cluster of %u", (u32)rank, ranks);
        return (a & ~0xff000000ull) | (u64)(u32)rank << 24;
    });
}

INSTRUCTION(void, arithmetic, ADD, SUB, MUL, MAD, DIV, REM, ABS, NEG, MIN, MAX) {
    (is_float(in.type) || half_of(in.type) || in.type == T_F32X2 ? float_arithmetic
                                                                 : integer_arithmetic)(w, in, mask);
}
