#include "numbers.h"

#include <algorithm>
#include <cfenv>

#include "machine.h"

static const u16 HALF_NAN = 0x7fff;  // the NaN that the hardware writes for 16-bit formats

RoundingScope::RoundingScope(u8 rounding) : saved_(fegetround()) {
    fesetround(rounding == RZ   ? FE_TOWARDZERO
               : rounding == RM ? FE_DOWNWARD
               : rounding == RP ? FE_UPWARD
                                : FE_TONEAREST);
}
RoundingScope::~RoundingScope() { fesetround(saved_); }

// The code of a representable number, without its sign: the leading one of a normal number adds 1
// to the exponent.
static u32 code_of(double rounded, int mantissa, int bias) {
    const int exponent = std::max(exponent_of_normal(rounded), 1 - bias);
    return ((exponent + bias - 1) << mantissa) + (u32)(rounded * pow2(mantissa - exponent));
}

float half_to_float(u16 h) { return (float)bits_as<_Float16>(h); }
u16 float_to_half(float f) { return f != f ? HALF_NAN : bits_as<u16>((_Float16)f); }
u16 float_to_bf16(float f) {
    if (f != f) return HALF_NAN;
    u32 x = float_bits(f);
    return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}

u16 round_to_16(bool fp16, double value, double residue, u8 rounding, bool satfinite) {
    if (value != value) return HALF_NAN;
    const float single = (float)value;
    if (rounding == RN && residue == 0 && !satfinite && (double)single == value)
        return fp16 ? float_to_half(single) : float_to_bf16(single);
    const int mantissa = fp16 ? 10 : 7, bias = fp16 ? 15 : 127;
    const u16 infinity = fp16 ? 0x7c00 : 0x7f80, sign = std::signbit(value) ? 0x8000 : 0;
    const bool away = rounding == RP ? !sign : rounding == RM && sign;
    const double magnitude = std::fabs(value);
    if (rounding > RP) fail("rounding mode %d to a 16-bit float is not modelled", rounding);
    if (rounding != RN && residue != 0)
        fail("directed rounding of an inexact intermediate to a 16-bit float is not modelled");
    if (std::isinf(magnitude)) return sign | (satfinite ? infinity - 1 : infinity);
    const int quantum = std::max(exponent_of_normal(magnitude), 1 - bias) - mantissa;
    const double scaled = magnitude * pow2(-quantum);
    double whole = std::floor(scaled);
    const double part = scaled - whole;
    const int sticky = residue == 0 ? 0 : (residue > 0) == (value > 0) ? 1 : -1;
    if (rounding == RN) {
        if (part > 0.5 ||
            (part == 0.5 && (sticky > 0 || (sticky == 0 && std::fmod(whole, 2) == 1))))
            whole += 1;
    } else if (away && part > 0) {
        whole += 1;
    }
    const double rounded = whole * pow2(quantum);
    if (rounded >= pow2(bias + 1))
        return sign | (satfinite || (rounding != RN && !away) ? infinity - 1 : infinity);
    return sign | code_of(rounded, mantissa, bias);
}

namespace {
struct MiniFormat {
    int exponent_bits, mantissa_bits, bias;
    double max;
    u32 nan;
    bool has_infinity;
};
MiniFormat mini_format(u8 type) {
    switch (type) {
        case T_E4M3:
            return {4, 3, 7, 448, 0x7f, false};
        case T_E5M2:
            return {5, 2, 15, 57344, 0x7f, true};
        case T_E2M1:
            return {2, 1, 1, 6, 0x7, false};
        case T_E2M3:
            return {2, 3, 1, 7.5, 0x1f, false};
        case T_E3M2:
            return {3, 2, 3, 28, 0x1f, false};
    }
    fail("type %d is not a narrow float", type);
}
// The exponent of |x|.  The sign is ignored, and overflow gives NaN without .satfinite.
u32 encode_ue8m0(double x, u8 rounding, bool satfinite) {
    if (rounding != RZ && rounding != RP) fail("ue8m0 is rounded by .rz or .rp");
    constexpr u32 NOT_A_NUMBER = 255, LARGEST = 254;
    if (x != x) return NOT_A_NUMBER;
    const u32 magnitude = float_bits((float)std::fabs(x)), mantissa = magnitude & 0x7fffff;
    const u32 two_to_minus_127 = 0x400000;  // a subnormal float, and the smallest ue8m0
    u32 exponent = magnitude >> 23;
    if (rounding == RP && mantissa && magnitude > two_to_minus_127) exponent += 1;
    return satfinite ? std::min(exponent, LARGEST) : exponent;
}
}  // namespace

float decode_mini(u8 type, u32 code) {
    if (type == T_UE8M0) return code == 255 ? NAN : (float)std::ldexp(1.0, (int)code - 127);
    const MiniFormat f = mini_format(type);
    const u32 exponent = (code >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1);
    const u32 mantissa = code & ((1u << f.mantissa_bits) - 1);
    const double sign = (code >> (f.exponent_bits + f.mantissa_bits)) & 1 ? -1 : 1;
    if (type == T_E4M3 && (code & 0x7f) == 0x7f) return NAN;
    if (type == T_E5M2 && exponent == 31) return mantissa ? NAN : (float)(sign * INFINITY);
    const double fraction = (double)mantissa / (1 << f.mantissa_bits);
    return (float)(sign * (exponent ? std::ldexp(1.0 + fraction, (int)exponent - f.bias)
                                    : std::ldexp(fraction, 1 - f.bias)));
}

u32 encode_mini(double x, u8 type, u8 rounding, bool satfinite, double fraction) {
    if (type == T_UE8M0) return encode_ue8m0(x, rounding, satfinite);
    const MiniFormat f = mini_format(type);
    if (x != x) return f.nan;
    const u32 sign = std::signbit(x) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
    const u32 infinity = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
    const double magnitude = std::fabs(x);
    double rounded = INFINITY;
    if (!std::isinf(magnitude)) {
        const int quantum = std::max(exponent_of_normal(magnitude), 1 - f.bias) - f.mantissa_bits;
        const double scaled = magnitude * pow2(-quantum);
        rounded = (rounding == RS   ? std::floor(scaled + fraction)
                   : rounding == RZ ? std::floor(scaled)
                                    : std::nearbyint(scaled)) *
                  pow2(quantum);
    }
    if (rounded > f.max) {
        if (f.has_infinity && !satfinite) return sign | infinity;
        rounded = f.max;
    }
    return sign | code_of(rounded, f.mantissa_bits, f.bias);
}
