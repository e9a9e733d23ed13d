// Accumulation of tensor cores.
#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"
#include "tensor.h"

static constexpr i32 NOT_FINITE = 4096;  // an exponent above all others
static constexpr i32 NONE = -1000;       // an exponent below all others, also after additions
static constexpr i32 LOWEST_TOP = -133;
static i32 zero_exponent(AccumulationModel r) { return r.hopper ? NONE : -126; }

static int min_exponent(u8 type) {
    switch (type) {
        case T_F16:
        case T_E5M2:
            return -14;
        case T_E4M3:
            return -6;
        default:
            return -126;
    }
}
static i32 exponent_of(double v, int lowest, i32 zero) {
    const i32 biased = (i32)(double_bits(v) >> 52 & 0x7ff);
    return biased == 0 ? zero : biased == 0x7ff ? NOT_FINITE : std::max(biased - 1023, lowest);
}

static double round_sum(double sum, AccumulationModel r) {
    if (sum == 0) return 0;
    if (!r.fp16) {
        if (std::fabs(sum) < pow2(-126)) {
            const double quantum = pow2(-126 - r.keep);
            return std::trunc(sum / quantum) * quantum;
        }
        return bits_double(double_bits(sum) & ~0ull << (52 - r.keep));
    }
    // Round to fp32 "to odd" first, so that rounding twice is rounding once.
    float t = (float)sum;
    if (std::fabs((double)t) > std::fabs(sum)) t = std::nextafterf(t, 0);
    if ((double)t != sum) t = bits_float(float_bits(t) | 1);
    return half_to_float(float_to_half(t));
}
static double finish(double sum, AccumulationModel r) {
    const double rounded = round_sum(sum, r);
    return r.hopper && rounded == 0 ? 0 : rounded;  // never -0
}

static std::vector<i32> exponents(const float* v, size_t count, u8 type, AccumulationModel r) {
    std::vector<i32> e(count);
    const int lowest = min_exponent(type);
    for (size_t i = 0; i < count; i++) e[i] = exponent_of(v[i], lowest, zero_exponent(r));
    return e;
}

static double add_not_finite(double c, const float* a, const float* b, u32 k, i32 scale) {
    double s = scale >= NOT_FINITE / 2 ? NAN : 0;
    for (u32 i = 0; i < k; i++) s += (double)a[i] * b[i];
    return c + s;
}

static double add_products(double c, const float* a, const float* b, const i32* ea, const i32* eb,
                           u32 k, i32 scale, AccumulationModel adder) {
    i32 top = -8192;
    for (u32 i = 0; i < k; i++) top = std::max(top, ea[i] + eb[i]);
    const i32 ec = exponent_of(c, adder.fp16 ? -14 : -126, zero_exponent(adder));
    if (top >= NOT_FINITE / 2 || ec == NOT_FINITE || scale >= NOT_FINITE / 2)
        return add_not_finite(c, a, b, k, scale);
    top = std::max({top + scale, ec, LOWEST_TOP});
    const double up = pow2(adder.fraction - top + scale);
    i64 sum = (i64)(c * pow2(adder.fraction - top));
    // Eight terms fit 32 bits: each is below 2^(fraction + 2).
    for (u32 i = 0; i < k; i += 8) {
        i32 part = 0;
        for (u32 j = i; j < std::min(i + 8, k); j++) part += (i32)((double)a[j] * b[j] * up);
        sum += part;
    }
    return finish((double)sum * pow2(top - adder.fraction), adder);
}

void multiply_add(const Operands& ops, double* acc, AccumulationModel adder, const i32* scale_a,
                  const i32* scale_b) {
    const std::vector<i32> ea = exponents(ops.a, (size_t)ops.m * ops.k, ops.type_a, adder);
    const std::vector<i32> eb = exponents(ops.b, (size_t)ops.n * ops.k, ops.type_b, adder);
    for (u32 i = 0; i < ops.m; i++)
        for (u32 j = 0; j < ops.n; j++) {
            const size_t row = (size_t)i * ops.k, column = (size_t)j * ops.k;
            double& c = acc[(size_t)i * ops.n + j];
            c = add_products(c, ops.a + row, ops.b + column, &ea[row], &eb[column], ops.k,
                             scale_a ? scale_a[i] + scale_b[j] : 0, adder);
        }
}

Scale decode_scale(u8 type, u8 code) {
    const float v = std::fabs(decode_mini(type, code));
    if (std::isnan(v)) return {NAN, 0};
    if (type == T_UE8M0) return {1, (i32)code - 127};
    const i32 e = exponent_of(v, -6, -126);
    return {(float)(v * pow2(-e)), e};
}

static double add_fp4(double c, const float* a, const float* b, const Scale* sa, const Scale* sb,
                      u32 k, u32 block) {
    constexpr u32 EXACT = 16;  // products that are added before the scales apply
    const AccumulationModel r = BLACKWELL_FP4;
    double terms[8];
    i32 term_exponents[8], top = exponent_of(c, -126, zero_exponent(r));
    bool finite = std::isfinite(c);
    const u32 count = k / EXACT;
    for (u32 g = 0; g < count; g++) {
        float s = 0;
        for (u32 i = g * EXACT; i < (g + 1) * EXACT; i++) s += a[i] * b[i];
        const Scale p = sa[g * EXACT / block], q = sb[g * EXACT / block];
        terms[g] = (double)s * p.significand * q.significand;
        term_exponents[g] = p.exponent + q.exponent;
        finite &= !std::isnan(terms[g]);
        top = std::max(top, term_exponents[g]);
    }
    if (!finite) {
        for (u32 g = 0; g < count; g++) c += terms[g];
        return c;
    }
    i64 sum = (i64)(c * pow2(r.fraction - top));
    for (u32 g = 0; g < count; g++)
        sum += (i64)(terms[g] * pow2(r.fraction + term_exponents[g] - top));
    return finish((double)sum * pow2(top - r.fraction), r);
}

void multiply_add_fp4(const Operands& ops, const Scale* scale_a, const Scale* scale_b, u32 block,
                      double* acc) {
    const u32 scales = ops.k / block;
    for (u32 i = 0; i < ops.m; i++)
        for (u32 j = 0; j < ops.n; j++) {
            double& c = acc[(size_t)i * ops.n + j];
            c = add_fp4(c, ops.a + (size_t)i * ops.k, ops.b + (size_t)j * ops.k,
                        scale_a + (size_t)i * scales, scale_b + (size_t)j * scales, ops.k, block);
        }
}
