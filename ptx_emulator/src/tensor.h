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

// How a tensor core adds.  One instruction aligns all its terms, the accumulator among them, to the
// largest exponent (a product's is the sum of its operands', unnormalised), truncates each below
// `fraction` fractional bits, adds exactly, and truncates the sum to `keep` mantissa bits, or
// rounds it to nearest for FP16 accumulators.  The Hopper rules are what an H200 answers; the
// Blackwell rules are those published for a B200 (arXiv 2511.10909).  On Hopper a zero has no
// exponent, the largest exponent is at least -133, and a zero sum is +0.
struct Adder {
    int fraction, keep;
    bool fp16, hopper;
};
constexpr Adder HOPPER = {25, 23, false, true}, HOPPER_FP8 = {13, 13, false, true},
                BLACKWELL = {25, 23, false, false}, BLACKWELL_FP4 = {35, 23, false, false};
constexpr Adder with_fp16(Adder r) { return {r.fraction, 0, true, r.hopper}; }
struct Operands {  // of D[m][n] += sum_k A[m][k] * B[n][k]
    const float *a, *b;
    u8 type_a, type_b;
    u32 m, n, k;
};
// Scale exponents are per row; null where there are none.
void multiply_add(const Operands& ops, double* acc, Adder adder, const i32* scale_a = nullptr,
                  const i32* scale_b = nullptr);
struct Scale {
    float significand;
    i32 exponent;
};
Scale decode_scale(u8 type, u8 code);
// FP4 with a scale every `block` elements: sixteen products are added exactly before the scales
// apply, and a term's exponent is that of its two scales.
void multiply_add_fp4(const Operands& ops, const Scale* scale_a, const Scale* scale_b, u32 block,
                      double* acc);

void need_columns(CTA* c, u32 column, u32 count, const char* what);
CTA* pair_peer(CTA* c, const char* what);
