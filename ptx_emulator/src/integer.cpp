// Integer arithmetic.
#include <algorithm>

#include "alu.h"

using u128 = unsigned __int128;
using i128 = __int128;

static void add_sub(Warp& w, const Instruction& in, u32 mask) {
    const int bits = type_bits(in.type);
    const bool subtract = in.op == SUB;
    each_lane(w, in, mask,
              [=](u64 a, u64 b) { return zero_extend(subtract ? a - b : a + b, bits); });
}

static void multiply(Warp& w, const Instruction& in, u32 mask) {
    const int bits = type_bits(in.type);
    const bool add = in.op == MAD, with_sign = is_signed(in.type);
    each_lane(w, in, mask, in.num_operands - 1, [&](u64 a, u64 b, u64 c, u64, int) -> u64 {
        const u128 product = with_sign ? (u128)((i128)sign_extend(a, bits) * sign_extend(b, bits))
                                       : (u128)zero_extend(a, bits) * zero_extend(b, bits);
        if (in.flags & F_WIDE) return zero_extend((u64)product + (add ? c : 0), 2 * bits);
        const u64 half = zero_extend((u64)((in.flags & F_HI) ? product >> bits : product), bits);
        return add ? zero_extend(half + c, bits) : half;
    });
}

// Division by zero gives all ones, and the remainder the dividend, as the hardware does.
static void divide(Warp& w, const Instruction& in, u32 mask) {
    const int bits = type_bits(in.type);
    const bool remainder = in.op == REM, with_sign = is_signed(in.type);
    each_lane(w, in, mask, [=](u64 a, u64 b) -> u64 {
        const u64 x = zero_extend(a, bits), y = zero_extend(b, bits);
        if (!y) return remainder ? x : zero_extend(~0ull, bits);
        if (!with_sign) return remainder ? x % y : x / y;
        const i64 p = sign_extend(a, bits), q = sign_extend(b, bits);
        if (q == -1) return remainder ? 0 : zero_extend(-a, bits);  // the quotient may overflow
        return zero_extend(remainder ? p % q : p / q, bits);
    });
}

static void minmax(Warp& w, const Instruction& in, u32 mask) {
    const bool minimum = in.op == MIN;
    const int bits = type_bits(in.type), count = in.num_operands - 1;
    auto pick = [=](u64 a, u64 b) {
        return zero_extend(is_less(in.type, a, b) == minimum ? a : b, bits);
    };
    each_lane(w, in, mask, count, [&](u64 a, u64 b, u64 c, u64, int) -> u64 {
        u64 r = pick(a, b);
        if (count == 3) r = pick(r, c);
        return (in.flags & F_RELU) && sign_extend(r, bits) < 0 ? 0 : r;
    });
}

void integer_arithmetic(Warp& w, const Instruction& in, u32 mask) {
    const int bits = type_bits(in.type);
    switch (in.op) {
        case ADD:
        case SUB:
            return add_sub(w, in, mask);
        case MUL:
        case MAD:
            return multiply(w, in, mask);
        case DIV:
        case REM:
            return divide(w, in, mask);
        case MIN:
        case MAX:
            return minmax(w, in, mask);
        case ABS:
            return each_lane(w, in, mask, [=](u64 a) {
                return zero_extend(sign_extend(a, bits) < 0 ? -a : a, bits);
            });
        case NEG:
            return each_lane(w, in, mask, [=](u64 a) { return zero_extend(-a, bits); });
    }
    fail("integer instruction %d", in.op);
}
