// Floating-point formats: conversions that round exactly as the hardware does.
#pragma once
#include <cmath>
#include <cstring>

#include "isa.h"

template <class To, class From>
To bits_as(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline u32 float_bits(float f) { return bits_as<u32>(f); }
inline float bits_float(u32 x) { return bits_as<float>(x); }
inline u64 double_bits(double d) { return bits_as<u64>(d); }
inline double bits_double(u64 x) { return bits_as<double>(x); }
inline float flush_subnormal(float f) {
    return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.f, f) : f;
}
// For normal doubles only.
inline double pow2(int e) { return bits_double((u64)(e + 1023) << 52); }
inline int exponent_of_normal(double v) { return (int)(double_bits(v) >> 52 & 0x7ff) - 1023; }

float half_to_float(u16 h);
inline float bf16_to_float(u16 h) { return bits_float((u32)h << 16); }
u16 float_to_half(float f);
u16 float_to_bf16(float f);
// Rounds value + residue once to fp16 or bf16.  The residue is the exact remainder of a double
// computation, smaller than half an ulp of value; it decides ties.
u16 round_to_16(bool fp16, double value, double residue = 0, u8 rounding = RN,
                bool satfinite = false);

// e4m3, e5m2, e2m1, e2m3, e3m2 and ue8m0.
float decode_mini(u8 type, u32 code);
// fraction in [0, 1) is the random part of stochastic rounding (rounding RS).
u32 encode_mini(double x, u8 type, u8 rounding, bool satfinite, double fraction);

// Runs f under the rounding mode of an instruction.
class RoundingScope {
  public:
    explicit RoundingScope(u8 rounding);
    ~RoundingScope();

  private:
    int saved_;
};
