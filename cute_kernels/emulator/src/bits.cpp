// Logic, shifts, bit fields, byte permutation.
#include <algorithm>

#include "alu.h"

static u32 lut3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) r |= ((i & 4) ? a : ~a) & ((i & 2) ? b : ~b) & ((i & 1) ? c : ~c);
  return r;
}

static u32 permute_bytes(u32 a, u32 b, u32 selector, u8 mode) {
  const u64 bytes = (u64)b << 32 | a;
  const u32 first = selector & 3;
  u32 r = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 nibble = (selector >> (4 * i)) & 0xf;
    u32 index;
    switch (mode) {
      case 0: index = nibble & 7; break;
      case 1: index = first + i; break;                   // f4e
      case 2: index = first - i; break;                   // b4e
      case 3: index = first; break;                       // rc8
      case 4: index = std::max(first, i); break;          // ecl
      case 5: index = std::min(first, i); break;          // ecr
      default: index = (first & 1) * 2 + (i & 1); break;  // rc16
    }
    u32 byte = (bytes >> (8 * (index & 7))) & 0xff;
    if (mode == 0 && (nibble & 8)) byte = (byte & 0x80) ? 0xff : 0;  // replicate the sign
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
static u64 find_leading(u64 a, int bits, bool with_sign, bool shift_amount) {
  u64 v = zero_extend(a, bits);
  if (with_sign && (v >> (bits - 1))) v = zero_extend(~v, bits);
  if (!v) return 0xffffffffu;
  const u32 position = 63 - __builtin_clzll(v);
  return shift_amount ? bits - 1 - position : position;
}
static u64 reverse_bits(u64 a, int bits) {
  u64 r = 0;
  for (int i = 0; i < bits; i++) r |= ((a >> i) & 1) << (bits - 1 - i);
  return r;
}
static u32 bit_mask(u32 start, u32 length, bool wrap) {
  if (wrap) start &= 31, length &= 31;
  if (start >= 32) return 0;
  return (u32)(zero_extend(~0ull, std::min(length, 32u)) << start);
}
static u32 funnel_shift(const Instruction& in, u32 low, u32 high, u32 amount) {
  const u32 n = (in.flags & F_WRAP) ? amount & 31 : std::min(amount, 32u);
  const u64 v = (u64)high << 32 | low;
  return (in.flags & F_LEFT) ? (u32)((v << n) >> 32) : (u32)(v >> n);
}

bool bit_manipulation(Warp& w, const Instruction& in, u32 mask) {
  const int bits = type_bits(in.type);
  const bool with_sign = is_signed(in.type);
  auto set = [&](auto f) {
    each_lane(w, in, mask, f);
    return true;
  };
  switch (in.op) {
    case AND: return set([=](u64 a, u64 b) { return zero_extend(a & b, bits); });
    case OR: return set([=](u64 a, u64 b) { return zero_extend(a | b, bits); });
    case XOR: return set([=](u64 a, u64 b) { return zero_extend(a ^ b, bits); });
    case NOT: return set([=](u64 a) { return zero_extend(~a, bits); });
    case CNOT: return set([=](u64 a) { return (u64)(zero_extend(a, bits) == 0); });
    case LOP3: {
      const u32 table = in.sub;
      return set([=](u64 a, u64 b, u64 c) { return (u64)lut3(a, b, c, table); });
    }
    case SHL:
      return set(
          [=](u64 a, u64 n) { return (u32)n >= (u32)bits ? 0 : zero_extend(a << (u32)n, bits); });
    case SHR:
      return set([=](u64 a, u64 n) -> u64 {
        const u32 amount = n;
        if (with_sign)
          return zero_extend(sign_extend(a, bits) >> std::min<u32>(amount, bits - 1), bits);
        return amount >= (u32)bits ? 0 : zero_extend(a, bits) >> amount;
      });
    case SHF: return set([&](u64 a, u64 b, u64 n) { return (u64)funnel_shift(in, a, b, n); });
    case PRMT: {
      const u8 mode = in.sub;
      return set([=](u64 a, u64 b, u64 c) { return (u64)permute_bytes(a, b, c, mode); });
    }
    case POPC: return set([=](u64 a) { return __builtin_popcountll(zero_extend(a, bits)); });
    case CLZ:
      return set([=](u64 a) {
        a = zero_extend(a, bits);
        return a ? __builtin_clzll(a) - (64 - bits) : bits;
      });
    case BREV: return set([=](u64 a) { return reverse_bits(a, bits); });
    case BFE:
      return set([=](u64 a, u64 position, u64 length) {
        return extract_field(a, position & 0xff, length & 0xff, bits, with_sign);
      });
    case BFI:
      return set([=](u64 a, u64 base, u64 position, u64 length) {
        return insert_field(a, base, position & 0xff, length & 0xff, bits);
      });
    case BFIND: {
      const bool shift_amount = in.sub;
      return set([=](u64 a) { return find_leading(a, bits, with_sign, shift_amount); });
    }
    case BMSK: {
      const bool wrap = in.sub;
      return set([=](u64 a, u64 n) { return (u64)bit_mask(a, n, wrap); });
    }
    case SZEXT: {
      const bool wrap = in.sub;
      return set([=](u64 a, u64 n) -> u64 {
        const u32 width = wrap ? n & 31 : std::min<u32>((u32)n, 32);
        if (!width) return 0;
        return with_sign ? (u32)sign_extend(a, width) : (u32)zero_extend(a, width);
      });
    }
    case DP4A: integer_arithmetic(w, in, mask); return true;
  }
  return false;
}
