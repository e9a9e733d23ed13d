// Operand tiles in shared memory, through matrix descriptors.
#include "memory.h"
#include "numbers.h"
#include "tensor.h"

constexpr u32 ADDRESS_MASK = 0x3ffff;  // range of a descriptor's start address

MatrixDescriptor decode_descriptor(u64 bits, const char* what) {
    if ((bits >> 49) & 7) fail("%s: a base offset in a matrix descriptor is not modelled", what);
    if ((bits >> 52) & 1) fail("%s: absolute leading-dimension addresses are not modelled", what);
    auto field = [=](int shift) { return (u32)((bits >> shift) & 0x3fff) << 4; };
    return {field(0), field(16), field(32), (u8)(bits >> 61)};
}

static u32 swizzle_span(u8 swizzle) {
    switch (swizzle) {
        case 0:
            return 16;
        case 2:
            return 128;
        case 4:
            return 64;
        case 6:
            return 32;
    }
    fail("matrix descriptor: swizzle mode %d is not modelled", swizzle);
}

// Both kinds of tile are made of 8-row (or 8-deep) atoms; unswizzled atoms are 16 bytes wide.
u32 k_major_address(const MatrixDescriptor& d, u32 row, u32 granule) {
    if (!d.swizzle) return d.start + (row / 8) * d.stride + (row % 8) * 16 + granule * d.leading;
    const u32 span = swizzle_span(d.swizzle);
    return swizzled(d.start + (row / 8) * d.stride + (row % 8) * span + granule * 16, span);
}
static u32 mn_major_address(const MatrixDescriptor& d, u32 row, u32 depth, u32 bytes) {
    const u32 span = swizzle_span(d.swizzle), per_span = span / bytes;
    const u32 within = (row % per_span) * bytes, span_index = row / per_span;
    if (!d.swizzle)
        return d.start + within + span_index * d.stride + (depth % 8) * 16 +
               (depth / 8) * d.leading;
    return swizzled(
        d.start + within + span_index * d.leading + (depth % 8) * span + (depth / 8) * d.stride,
        span);
}

static float decode_byte(u8 type, u8 code) {
    static float tables[8][256];
    static bool ready[8];
    const int i = type - T_E4M3;
    if (!ready[i]) {
        for (int c = 0; c < 256; c++) tables[i][c] = decode_mini(type, c);
        ready[i] = true;
    }
    return tables[i][code];
}
float decode_element(u8 type, const u8* bytes, u32 index) {
    u16 half;
    u32 word;
    switch (type) {
        case T_F16:
            memcpy(&half, bytes, 2);
            return half_to_float(half);
        case T_BF16:
            memcpy(&half, bytes, 2);
            return bf16_to_float(half);
        case T_TF32:
            memcpy(&word, bytes, 4);
            return bits_float(word & 0xffffe000);
        case T_E2M1:
            return decode_mini(T_E2M1, (*bytes >> ((index & 1) * 4)) & 0xf);
        default:
            return decode_byte(type, *bytes);
    }
}

void load_tile(CTA* c, u64 descriptor, bool mn_major, u8 type, u32 rows, u32 depth, float* out,
               u64 fenced, const char* what) {
    const MatrixDescriptor d = decode_descriptor(descriptor, what);
    const u32 bits = type_bits(type);
    auto read = [&](u32 address, u32 bytes) {
        address &= ADDRESS_MASK;
        need_in_smem(c, address, bytes, what);
        check_async_read(c, address, bytes, fenced, what);
        return c->smem.data() + address;
    };
    if (!mn_major) {
        const u32 granules = depth * bits / 128, per_granule = 128 / bits;
        for (u32 r = 0; r < rows; r++)
            for (u32 g = 0; g < granules; g++) {
                const u8* p = read(k_major_address(d, r, g), 16);
                for (u32 e = 0; e < per_granule; e++)
                    out[r * depth + g * per_granule + e] =
                        decode_element(type, p + e * bits / 8, e);
            }
        return;
    }
    if (bits < 8) fail("%s: 4-bit operands must be K-major", what);
    const u32 bytes = bits / 8;
    for (u32 r = 0; r < rows; r++)
        for (u32 k = 0; k < depth; k++)
            out[r * depth + k] =
                decode_element(type, read(mn_major_address(d, r, k, bytes), bytes), 0);
}
