// Logic, shifts, bit fields, byte permutation.
#include <algorithm>

#include "alu.h"

static u32 lut3(u32 a, u32 b, u32 c, u32 table) {
    u32 r = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) r |= ((i & 4) ? a : ~a) & ((i & 2) ? b : ~b) & ((i & 1) ? c : ~c);
    return r;
}

static u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 nibble = (selector >> (4 * i)) & 0xf;
        u32 byte = (bytes >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8) byte = (byte & 0x80) ? 0xff : 0;  // replicate the sign
        r |= byte << (8 * i);
    }
    return r;
}

static u64 extract_field(u64 a, u32 position, u32 length, int bits, bool with_sign) {
    if (!length) return 0;
    const u64 v = zero_extend(a, bits);
    const bool sign = with_sign && (v >> std::min<u32>(position + length - 1, bits - 1)) & 1;
    const u32 available = position < (u32)bits ? std::min<u32>(length, bits - position) : 0;
    u64 r = available ? zero_extend(v >> position, available) : 0;
    if (sign && available < 64) r |= ~0ull << available;
    return zero_extend(r, bits);
}
static u64 insert_field(u64 a, u64 base, u32 position, u32 length, int bits) {
    if (!length || position >= (u32)bits) return zero_extend(base, bits);
    const u64 field = zero_extend(~0ull, length) << position;
    return zero_extend((base & ~field) | ((a << position) & field), bits);
}
static u64 reverse_bits(u64 a, int bits) {
    u64 r = 0;
    for (int i = 0; i < bits; i++) r |= ((a >> i) & 1) << (bits - 1 - i);
    return r;
}
static u32 funnel_shift(const Instruction& in, u32 low, u32 high, u32 amount) {
    const u32 n = (in.flags & F_WRAP) ? amount & 31 : std::min(amount, 32u);
    const u64 v = (u64)high << 32 | low;
    return (in.flags & F_LEFT) ? (u32)((v << n) >> 32) : (u32)(v >> n);
}

INSTRUCTION(void, bit_manipulation, AND, OR, XOR, NOT, LOP3, SHL, SHR, SHF, PRMT, POPC, CLZ, BREV,
            BFE, BFI) {
    const int bits = type_bits(in.type);
    const bool with_sign = is_signed(in.type);
    auto set = [&](auto f) { each_lane(w, in, mask, f); };
    switch (in.op) {
        case AND:
            return set([=](u64 a, u64 b) { return zero_extend(a & b, bits); });
        case OR:
            return set([=](u64 a, u64 b) { return zero_extend(a | b, bits); });
        case XOR:
            return set([=](u64 a, u64 b) { return zero_extend(a ^ b, bits); });
        case NOT:
            return set([=](u64 a) { return zero_extend(~a, bits); });
        case LOP3: {
            const u32 table = in.sub;
            return set([=](u64 a, u64 b, u64 c) { return (u64)lut3(a, b, c, table); });
        }
        case SHL:
            return set([=](u64 a, u64 n) {
                return (u32)n >= (u32)bits ? 0 : zero_extend(a << (u32)n, bits);
            });
        case SHR:
            return set([=](u64 a, u64 n) -> u64 {
                const u32 amount = n;
                if (with_sign)
                    return zero_extend(sign_extend(a, bits) >> std::min<u32>(amount, bits - 1),
                                       bits);
                return amount >= (u32)bits ? 0 : zero_extend(a, bits) >> amount;
            });
        case SHF:
            return set([&](u64 a, u64 b, u64 n) { return (u64)funnel_shift(in, a, b, n); });
        case PRMT:
            return set([](u64 a, u64 b, u64 c) { return (u64)permute_bytes(a, b, c); });
        case POPC:
            return set([=](u64 a) { return __builtin_popcountll(zero_extend(a, bits)); });
        case CLZ:
            return set([=](u64 a) {
                a = zero_extend(a, bits);
                return a ? __builtin_clzll(a) - (64 - bits) : bits;
            });
        case BREV:
            return set([=](u64 a) { return reverse_bits(a, bits); });
        case BFE:
            return set([=](u64 a, u64 position, u64 length) {
                return extract_field(a, position & 0xff, length & 0xff, bits, with_sign);
            });
        case BFI:
            return set([=](u64 a, u64 base, u64 position, u64 length) {
                return insert_field(a, base, position & 0xff, length & 0xff, bits);
            });
    }
}
