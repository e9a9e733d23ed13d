// cvt.
#include <algorithm>

#include "alu.h"
#include "numbers.h"

using i128 = __int128;

double number_of(u8 type, u64 v) {
    switch (type) {
        case T_F16:
            return half_to_float(v);
        case T_BF16:
            return bf16_to_float(v);
        case T_F32:
            return bits_float(v);
    }
    fail("type %d is not a scalar float", type);
}

static bool directed(u8 rounding) { return rounding == RZ || rounding == RM || rounding == RP; }

static u64 integer_to_integer(const Instruction& in, u8 to, u8 from, u64 v) {
    const int to_bits = type_bits(to), from_bits = type_bits(from);
    const i128 x =
        is_signed(from) ? (i128)sign_extend(v, from_bits) : (i128)zero_extend(v, from_bits);
    if (in.flags & F_SAT) {
        const i128 low = is_signed(to) ? -((i128)1 << (to_bits - 1)) : 0;
        const i128 high = ((i128)1 << (is_signed(to) ? to_bits - 1 : to_bits)) - 1;
        return zero_extend((u64)std::min(high, std::max(low, x)), to_bits);
    }
    // A narrow signed result is sign-extended to the width of its register.
    return zero_extend((u64)sign_extend((u64)x, to_bits),
                       is_signed(to) ? std::max(32, to_bits) : to_bits);
}

static u64 integer_to_float(const Instruction& in, u8 to, u8 from, u64 v) {
    const bool with_sign = is_signed(from);
    const i64 s = sign_extend(v, type_bits(from));
    const u64 u = zero_extend(v, type_bits(from));
    if (to == T_F32) {
        RoundingScope scope(directed(in.rounding) ? in.rounding : (u8)RN);
        volatile i64 vs = s;
        volatile u64 vu = u;
        volatile float r = with_sign ? (float)vs : (float)vu;
        return float_bits(r);
    }
    const double x = with_sign ? (double)s : (double)u;
    const i128 exact = with_sign ? (i128)s : (i128)u;
    return round_to_16(to == T_F16, x, (double)(exact - (i128)x), in.rounding);
}

static double to_integral(double x, u8 rounding) {
    switch (rounding) {
        case RZI:
        case RZ:
            return std::trunc(x);
        case RMI:
        case RM:
            return std::floor(x);
        case RPI:
        case RP:
            return std::ceil(x);
        case RNI:
        case RN:
            return std::nearbyint(x);
    }
    fail("rounding mode %d of a conversion is not modelled", rounding);
}

static u64 float_to_integer(const Instruction& in, u8 to, double x) {
    const int bits = type_bits(to);
    if (x != x) return bits == 64 ? 1ull << 63 : 0;
    x = to_integral(x, in.rounding);
    if (!is_signed(to))
        return x >= std::ldexp(1.0, bits) ? zero_extend(~0ull, bits) : x < 0 ? 0 : (u64)x;
    const i128 low = -((i128)1 << (bits - 1)), high = ((i128)1 << (bits - 1)) - 1;
    const i128 r = x >= (double)high ? high : x <= (double)low ? low : (i128)x;
    return zero_extend((u64)r, std::max(32, bits));
}

static double relu(const Instruction& in, double x) {
    return (in.flags & F_RELU) && !(x > 0) && x == x ? 0.0 : x;
}

static u64 float_to_float(const Instruction& in, u8 to, double x) {
    const bool integral = in.rounding >= RNI && in.rounding <= RPI;
    if (integral) x = to_integral(x, in.rounding);
    if (in.flags & F_SAT) x = x != x ? 0 : std::min(1.0, std::max(0.0, x));
    x = relu(in, x);
    switch (to) {
        case T_F32: {
            RoundingScope scope(directed(in.rounding) ? in.rounding : (u8)RN);
            volatile double vx = x;
            volatile float r = (float)vx;
            return float_bits((in.flags & F_FTZ) ? flush_subnormal(r) : r);
        }
        case T_F16:
        case T_BF16:
            return round_to_16(to == T_F16, x, 0, integral ? (u8)RN : in.rounding,
                               in.flags & F_SATFINITE);
    }
    fail("conversion to type %d is not modelled", to);
}

static u64 convert_scalar(const Instruction& in, u8 to, u8 from, u64 v) {
    const bool to_float = is_float(to);
    if (!is_float(from))
        return to_float ? integer_to_float(in, to, from, v) : integer_to_integer(in, to, from, v);
    double x = number_of(from, v);
    if ((in.flags & F_FTZ) && from == T_F32) x = flush_subnormal((float)x);
    return to_float ? float_to_float(in, to, x) : float_to_integer(in, to, x);
}

// The element type and count of a packed narrow type; T_NONE for other types.
struct Packed {
    u8 element;
    int count;
};
static Packed packed_mini(u8 type) {
    if (type >= T_E4M3X4) return {u8(type - T_E4M3X4 + T_E4M3), 4};
    if (type >= T_E4M3X2) return {u8(type - T_E4M3X2 + T_E4M3), 2};
    return {T_NONE, 0};
}

// cvt.rs.satfinite.<mini>x4.f32 d, {a, b, e, f}, rbits.  a and e round by the low half of the
// random bits, b and f by the high half; the PTX ISA gives the hardware's own assignment only as a
// figure.
static void convert_stochastic(Warp& w, const Instruction& in, u32 mask, u8 element_type,
                               int bits) {
    const Operand& vector = operand(in, 1);
    u64 scratch[5][32];
    Source x[4];
    for (int i = 0; i < 4; i++) x[i] = source(w, element(vector, i), scratch[i]);
    const Source random = source(w, operand(in, 2), scratch[4]);
    u64* d = w.reg(operand(in, 0).reg);
    FOR_LANES (lane, mask) {
        u64 r = 0;
        for (int i = 0; i < 4; i++) {
            const u32 slice = (i & 1) ? (u32)random[lane] >> 16 : random[lane] & 0xffff;
            r = r << bits | encode_mini(relu(in, bits_float(x[i][lane])), element_type, RS,
                                        in.flags & F_SATFINITE, slice / 65536.0);
        }
        d[lane] = r;
    }
}

static void convert_to_mini(Warp& w, const Instruction& in, u32 mask, Packed to) {
    const int bits = type_bits(to.element);
    if (to.count == 4) return convert_stochastic(w, in, mask, to.element, bits);
    auto encode = [&](double x) -> u64 {
        return encode_mini(relu(in, x), to.element, in.rounding, in.flags & F_SATFINITE, 0);
    };
    if (const u8 from = half_of(in.type2))
        return each_lane(w, in, mask, [&](u64 a) {
            return encode(number_of(from, (u16)(a >> 16))) << bits |
                   encode(number_of(from, (u16)a));
        });
    if (in.type2 != T_F32)
        fail("conversion of type %d to a narrow float is not modelled", in.type2);
    each_lane(w, in, mask,
              [&](u64 a, u64 b) { return encode(bits_float(a)) << bits | encode(bits_float(b)); });
}

static void convert_from_mini(Warp& w, const Instruction& in, u32 mask, u8 from) {
    if (!half_of(in.type)) fail("conversion of a narrow float to type %d is not modelled", in.type);
    const int bits = type_bits(from);
    const u32 low_mask = (1u << bits) - 1;
    auto decode = [&](u32 code) -> u64 {
        return round_to_16(in.type == T_F16X2, relu(in, decode_mini(from, code)));
    };
    each_lane(w, in, mask,
              [&](u64 a) { return decode(a & low_mask) | decode((a >> bits) & low_mask) << 16; });
}

INSTRUCTION(void, convert, CVT) {
    const Packed to = packed_mini(in.type), from = packed_mini(in.type2);
    if (to.count) return convert_to_mini(w, in, mask, to);
    if (from.count) return convert_from_mini(w, in, mask, from.element);
    if (in.rounding == RS) fail("stochastic rounding to type %d is not modelled", in.type);
    if (const u8 type = half_of(in.type))
        return each_lane(w, in, mask, [&](u64 a, u64 b) {
            return convert_scalar(in, type, in.type2, b) | convert_scalar(in, type, in.type2, a)
                                                               << 16;
        });
    each_lane(w, in, mask, [&](u64 a) { return convert_scalar(in, in.type, in.type2, a); });
}
