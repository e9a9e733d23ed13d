// setp.
#include "alu.h"
#include "numbers.h"

template <class T>
static bool compare_ordered(u8 comparison, T x, T y) {
    switch (comparison) {
        case CMP_EQ:
            return x == y;
        case CMP_NE:
            return x != y;
        case CMP_LT:
            return x < y;
        case CMP_LE:
            return x <= y;
        case CMP_GT:
            return x > y;
        case CMP_GE:
            return x >= y;
    }
    fail("comparison %d", comparison);
}
static bool compare_floats(u8 comparison, double x, double y) {
    const bool unordered = x != x || y != y;
    if (comparison == CMP_NUM || comparison == CMP_NAN) return unordered == (comparison == CMP_NAN);
    const bool if_unordered = comparison >= CMP_EQU;
    return unordered ? if_unordered
                     : compare_ordered(if_unordered ? comparison - CMP_EQU : comparison, x, y);
}

bool compare(const Instruction& in, u8 type, u64 a, u64 b) {
    if (is_float(type)) {
        double x = number_of(type, a), y = number_of(type, b);
        if ((in.flags & F_FTZ) && type == T_F32)
            x = flush_subnormal((float)x), y = flush_subnormal((float)y);
        return compare_floats(in.sub, x, y);
    }
    const int bits = type_bits(type);
    if (is_signed(type)) return compare_ordered(in.sub, sign_extend(a, bits), sign_extend(b, bits));
    return compare_ordered(in.sub, zero_extend(a, bits), zero_extend(b, bits));
}

// setp p|q, a, b {, c}: q is the comparison's opposite.
INSTRUCTION(void, set_predicate, SETP) {
    const bool combined = in.num_operands > 4;
    u64 scratch[3][32] = {};
    const Source a = source(w, operand(in, 2), scratch[0]),
                 b = source(w, operand(in, 3), scratch[1]);
    const Source c = combined ? source(w, operand(in, 4), scratch[2]) : Source{scratch[2], 0};
    const bool negated = combined && operand(in, 4).negated;
    u64* p = target(w, operand(in, 0));
    u64* q = target(w, operand(in, 1));
    auto combine = [&](bool v, bool other) -> bool {
        switch (in.aux) {
            case 1:
                return v && other;
            case 2:
                return v || other;
            case 3:
                return v != other;
        }
        return v;
    };
    FOR_LANES (lane, mask) {
        const bool v = compare(in, in.type, a[lane], b[lane]), other = (c[lane] & 1) ^ negated;
        if (p) p[lane] = combine(v, other);
        if (q) q[lane] = combine(!v, other);
    }
}
