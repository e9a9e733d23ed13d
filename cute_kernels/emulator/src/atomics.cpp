// atom, red, and the reductions of bulk copies.
#include <algorithm>
#include <cstring>

#include "alu.h"
#include "memory.h"
#include "numbers.h"

static u16 half_add(u8 type, u16 a, u16 b) {
  return type == T_F16 ? float_to_half(half_to_float(a) + half_to_float(b))
                       : float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
}
static u64 half_result(u8 op, u8 type, u16 a, u16 b) {
  switch (op) {
    case ATOM_ADD: return half_add(type, a, b);
    case ATOM_MIN:
    case ATOM_MAX: return half_minmax(type, a, b, op == ATOM_MIN);
  }
  fail("atomic operation %d on 16-bit floats is not modelled", op);
}
static u64 float_result(u8 op, u32 a, u32 b) {
  const float x = bits_float(a), y = bits_float(b);
  switch (op) {
    case ATOM_ADD: return float_bits(x + y);
    case ATOM_MIN: return float_bits(std::fmin(x, y));
    case ATOM_MAX: return float_bits(std::fmax(x, y));
  }
  fail("atomic operation %d on f32 is not modelled", op);
}
static u64 integer_result(u8 op, u8 type, u64 a, u64 b, u64 swap) {
  const int bits = type_bits(type);
  const bool less = is_signed(type) ? sign_extend(a, bits) < sign_extend(b, bits) : a < b;
  switch (op) {
    case ATOM_ADD: return a + b;
    case ATOM_MIN: return less ? a : b;
    case ATOM_MAX: return less ? b : a;
    case ATOM_AND: return a & b;
    case ATOM_OR: return a | b;
    case ATOM_XOR: return a ^ b;
    case ATOM_EXCH: return b;
    case ATOM_CAS: return a == b ? swap : a;
    case ATOM_INC: return a >= b ? 0 : a + 1;
    case ATOM_DEC: return a == 0 || a > b ? b : a - 1;
  }
  fail("atomic operation %d", op);
}

u64 atomic_result(u8 op, u8 type, u64 old, u64 value, u64 swap) {
  switch (type) {
    case T_F16:
    case T_BF16: return half_result(op, type, old, value);
    case T_F16X2:
    case T_BF16X2: {
      const u8 half = type == T_F16X2 ? T_F16 : T_BF16;
      return half_result(op, half, old, value) | half_result(op, half, old >> 16, value >> 16)
                                                     << 16;
    }
    case T_F32: return float_result(op, old, value);
    case T_F64:
      if (op != ATOM_ADD) fail("atomic operation %d on f64 is not modelled", op);
      return double_bits(bits_double(old) + bits_double(value));
  }
  const int bits = type_bits(type);
  if (bits > 64) fail("128-bit atomics are not modelled");
  return zero_extend(integer_result(op, type, zero_extend(old, bits), zero_extend(value, bits),
                                    zero_extend(swap, bits)),
                     bits);
}

void reduce_global(u8 op, u8 type, u64 address, const u8* values, u32 bytes) {
  const u32 step = type_bytes(type);
  for (u32 i = 0; i < bytes; i += step) {
    u64 old = 0, value = 0;
    memcpy(&old, (u8*)address + i, step);
    memcpy(&value, values + i, step);
    old = atomic_result(op, type, old, value, 0);
    memcpy((u8*)address + i, &old, step);
  }
}

void atomics(Warp& w, const Instruction& in, u32 mask) {
  const int first = in.op == ATOM ? 1 : 0;
  const u32 bytes = type_bytes(in.type), count = std::max<u32>(in.vec, 1);
  for (u32 i = 0; i < count; i++) {
    u64 scratch[2][32] = {};
    const Source value = source(w, element(operand(in, first + 1), i), scratch[0]);
    const bool swaps = in.num_operands > first + 2;
    const Source swap =
        swaps ? source(w, operand(in, first + 2), scratch[1]) : Source{scratch[1], 0};
    u64* d = in.op == ATOM ? target(w, element(operand(in, 0), i)) : nullptr;
    FOR_LANES (lane, mask) {
      const u64 a = address_of(w, operand(in, first), lane) + i * bytes;
      if (i == 0 && a % (bytes * count))
        fail("misaligned %u-byte atomic at %#llx", bytes * count, (unsigned long long)a);
      u8* p = resolve(w, in.space, a, bytes, lane, true);
      u64 old = 0;
      if (bytes > 8) fail("128-bit atomics are not modelled");
      memcpy(&old, p, bytes);
      const u64 r = atomic_result(in.sub, in.type, old, value[lane], swap[lane]);
      memcpy(p, &r, bytes);
      if (in.space == SHARED || is_shared_window(a))
        note_generic_write_unraced(w, lane, shared_address(a), bytes);
      if (d) d[lane] = old;
    }
  }
  machine.stats.atomics += __builtin_popcount(mask);
  machine.epoch++;
}
