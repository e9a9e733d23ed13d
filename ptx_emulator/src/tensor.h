// Tensor cores: operand tiles and the arithmetic shared by wgmma and tcgen05.
#pragma once
#include "machine.h"

// A shared-memory matrix descriptor, in bytes.
struct MatrixDescriptor {
    u32 start, leading, stride;
    u8 swizzle;  // 0 none, 2 128 bytes, 4 64 bytes, 6 32 bytes
};
MatrixDescriptor decode_descriptor(u64 bits, const char* what);
// The address of 16-byte granule g of row r of a K-major tile.
u32 k_major_address(const MatrixDescriptor& d, u32 row, u32 granule);
float decode_element(u8 type, const u8* bytes, u32 index);
// rows x depth elements, row-major, out of the shared memory of one CTA.
void load_tile(CTA* c, u64 descriptor, bool mn_major, u8 type, u32 rows, u32 depth, float* out,
               u64 fenced, const char* what);

// Accumulation rule of a tensor core.  One instruction aligns all its terms, including the
// accumulator, to the largest exponent (the exponent of a product is the sum of its operands'
// exponents, unnormalised).  It truncates each term below `fraction` fractional bits, adds exactly,
// and truncates the sum to `keep` mantissa bits, or rounds it to nearest for FP16 accumulators.
// The Hopper rules were measured on an H200; the Blackwell rules were published for a B200 (arXiv
// 2511.10909).  On Hopper a zero has no
// exponent, the largest exponent is at least -133, and a zero sum is +0.
struct AccumulationModel {
    int fraction, keep;
    bool fp16, hopper;
};
constexpr AccumulationModel HOPPER = {25, 23, false, true}, HOPPER_FP8 = {13, 13, false, true},
                BLACKWELL = {25, 23, false, false}, BLACKWELL_FP4 = {35, 23, false, false};
constexpr AccumulationModel with_fp16(AccumulationModel r) { return {r.fraction, 0, true, r.hopper}; }
struct Operands {  // operands of D[m][n] += sum_k A[m][k] * B[n][k]
    const float *a, *b;
    u8 type_a, type_b;
    u32 m, n, k;
};
// Scale exponents are per row; null without scales.
void multiply_add(const Operands& ops, double* acc, AccumulationModel adder, const i32* scale_a = nullptr,
                  const i32* scale_b = nullptr);
struct Scale {
    float significand;
    i32 exponent;
};
Scale decode_scale(u8 type, u8 code);
// FP4 with a scale every `block` elements: sixteen products are added exactly before the scales
// apply, and the exponent of a term is the sum of the exponents of its two scales.
void multiply_add_fp4(const Operands& ops, const Scale* scale_a, const Scale* scale_b, u32 block,
                      double* acc);

void need_columns(CTA* c, u32 column, u32 count, const char* what);
CTA* pair_peer(CTA* c, const char* what);
