// Floating-point arithmetic.
#include <algorithm>

#include "alu.h"
#include "numbers.h"

static const u32 FLOAT_NAN = 0x7fffffff;  // the NaN that the hardware writes

template <class T>
static T minmax(const Instruction& in, T a, T b, bool minimum) {
    if (in.flags & F_ABS) a = std::fabs(a), b = std::fabs(b);
    if (a != a || b != b) {
        if ((in.flags & F_NANPROP) || (a != a && b != b)) return (T)NAN;
        return a != a ? b : a;
    }
    if (a == 0 && b == 0) return std::signbit(a) == minimum ? a : b;  // -0 < +0
    return minimum ? std::min(a, b) : std::max(a, b);
}
float float_minmax(const Instruction& in, float a, float b, bool minimum) {
    return minmax(in, a, b, minimum);
}

template <class T>
static T arithmetic(const Instruction& in, T a, T b, T c) {
    switch (in.op) {
        case ADD:
            return a + b;
        case SUB:
            return a - b;
        case MUL:
            return a * b;
        case FMA:
        case MAD:
            return std::fma(a, b, c);
        case DIV:
            return a / b;
        case ABS:
            return std::fabs(a);
        case NEG:
            return -a;
        case MIN:
        case MAX: {
            T r = minmax(in, a, b, in.op == MIN);
            if (in.num_operands == 4) r = minmax(in, r, c, in.op == MIN);
            if (in.flags & F_XORSIGN)
                r = std::copysign(r, std::signbit(a) != std::signbit(b) ? (T)-1 : (T)1);
            return r;
        }
        case RCP:
            return (T)1 / a;
        case SQRT:
            return std::sqrt(a);
        case RSQRT:
            return (T)1 / std::sqrt(a);
        case EX2:
            return std::exp2(a);
        case LG2:
            return std::log2(a);
        case TANH:
            return std::tanh(a);
    }
    fail("floating-point instruction %d", in.op);
}

// volatile keeps the compiler from computing under the default rounding mode.
static float rounded(const Instruction& in, float a, float b, float c) {
    if (in.rounding == RN) return arithmetic(in, a, b, c);
    if (in.rounding > RP) fail("rounding mode %d of an arithmetic instruction", in.rounding);
    RoundingScope scope(in.rounding);
    volatile float x = a, y = b, z = c;
    volatile float r = arithmetic<float>(in, x, y, z);
    return r;
}

static bool keeps_nan_bits(u16 op) { return op == ABS || op == NEG; }

static u32 single(const Instruction& in, u32 a_bits, u32 b_bits, u32 c_bits) {
    float a = bits_float(a_bits), b = bits_float(b_bits), c = bits_float(c_bits);
    if (in.flags & F_FTZ) a = flush_subnormal(a), b = flush_subnormal(b), c = flush_subnormal(c);
    float r = rounded(in, a, b, c);
    if (in.flags & F_FTZ) r = flush_subnormal(r);
    if (in.flags & F_SAT) r = r != r ? 0.f : std::min(1.f, std::max(0.f, r));
    if (in.flags & F_RELU) r = r != r || r > 0 ? r : 0.f;  // -0 becomes +0
    return r != r && !keeps_nan_bits(in.op) ? FLOAT_NAN : float_bits(r);
}

static bool half_is_nan(u8 type, u16 h) { return (h & 0x7fff) > (type == T_F16 ? 0x7c00 : 0x7f80); }

static u16 half(const Instruction& in, u8 type, u16 a, u16 b, u16 c) {
    if (in.rounding != RN)
        fail("16-bit arithmetic rounds to nearest; got rounding %d", in.rounding);
    if (in.op == NEG || in.op == ABS)
        return half_is_nan(type, a) ? 0x7fff : in.op == NEG ? a ^ 0x8000 : a & 0x7fff;
    const bool ftz = (in.flags & F_FTZ) && type == T_F16;
    auto flush = [=](u16 h) -> u16 { return ftz && !(h & 0x7c00) ? h & 0x8000 : h; };
    const double x = number_of(type, flush(a)), y = number_of(type, flush(b)),
                 z = number_of(type, flush(c));
    double r, residue = 0;
    auto exact_sum = [&](double p, double q) {  // r + residue == p + q
        r = p + q;
        if (std::isfinite(r)) {
            const double t = r - p;
            residue = (p - (r - t)) + (q - t);
        }
    };
    switch (in.op) {
        case ADD:
            exact_sum(x, y);
            break;
        case SUB:
            exact_sum(x, -y);
            break;
        case FMA:
        case MAD:
            exact_sum(x * y, z);
            break;  // the product of two halves is exact
        default:
            r = arithmetic<double>(in, x, y, z);
    }
    if (in.flags & F_SAT) {
        if (!(r > 0)) r = residue = 0;
        if (r >= 1) r = 1, residue = 0;
    }
    const u16 h = round_to_16(type == T_F16, r, residue);
    return (in.flags & F_RELU) && (h & 0x8000) && !half_is_nan(type, h) ? 0 : flush(h);
}

void float_arithmetic(Warp& w, const Instruction& in, u32 mask) {
    const int count = in.num_operands - 1;
    auto apply = [&](auto f) {
        each_lane(w, in, mask, count,
                  [&](u64 a, u64 b, u64 c, u64, int) -> u64 { return f(a, b, c); });
    };
    switch (in.type) {
        case T_F32:
            return apply([&](u64 a, u64 b, u64 c) { return (u64)single(in, a, b, c); });
        case T_F16:
        case T_BF16:
            return apply([&](u64 a, u64 b, u64 c) { return (u64)half(in, in.type, a, b, c); });
        case T_F16X2:
        case T_BF16X2: {
            const u8 type = half_of(in.type);
            return apply([&](u64 a, u64 b, u64 c) {
                return half(in, type, a, b, c) | (u64)half(in, type, a >> 16, b >> 16, c >> 16)
                                                     << 16;
            });
        }
        case T_F32X2:
            return apply([&](u64 a, u64 b, u64 c) {
                return single(in, a, b, c) | (u64)single(in, a >> 32, b >> 32, c >> 32) << 32;
            });
    }
    fail("floating-point instruction on type %d is not modelled", in.type);
}
EXECUTES(float_arithmetic, FMA, RCP, SQRT, RSQRT, EX2, LG2, TANH)
