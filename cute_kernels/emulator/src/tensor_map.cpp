// Tensor maps in the hardware's format: address, (kind 2 | rank - 1 | element type | swizzle),
// strides / 16 (the low 32 bits of four, then their highest four bits), dimensions - 1, box - 1.
#include <cstdio>
#include <cstring>

#include "memory.h"

namespace {
constexpr u32 MAP_BYTES = 128, MAP_ALIGNMENT = 64, MAP_KIND = 2;
constexpr u32 TYPE_SHIFT = 7, SWIZZLE_SHIFT = 13, KNOWN_FLAGS = 0x67ff;
constexpr u8 FIRST_UNPACKED_TYPE = 13;
constexpr u32 MAX_BOX = 256;
constexpr u64 ADDRESS_ALIGNMENT = 16, STRIDE_LIMIT = 1ull << 40;
constexpr u32 SWIZZLE_SPAN[] = {1u << 30, 32, 64, 128};
// By hardware code: u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16 u4 tf32 u4-in-u8 u6-in-u8
constexpr u8 ELEMENT_BITS[16] = {8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 4, 32, 4, 6, 32};
// CUtensorMapDataType and the elemtype of tensormap.replace, to the hardware's codes
constexpr u8 DRIVER_TYPE[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 12, 12, 11, 13, 14};
constexpr u8 PTX_TYPE[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 12, 11, 13, 14};
enum ReplacedField {
  GLOBAL_ADDRESS,
  RANK,
  BOX_DIM,
  GLOBAL_DIM,
  GLOBAL_STRIDE,
  ELEMENT_STRIDE,
  ELEMTYPE,
  INTERLEAVE,
  SWIZZLE_MODE,
  FILL_MODE
};
}  // namespace

u32 TensorMap::element_bits() const { return ELEMENT_BITS[type]; }
u32 TensorMap::box_bytes() const {
  u64 bits = element_bits();
  for (u32 i = 0; i < rank; i++) bits *= box[i];
  return (u32)(bits / 8);
}
u8 TensorMap::reduction_type() const {
  switch (type) {
    case 2: return T_U32;
    case 3: return T_S32;
    case 4: return T_U64;
    case 5: return T_S64;
    case 6: return T_F16;
    case 7:
    case 8: return T_F32;
    case 9: return T_F64;
    case 10: return T_BF16;
  }
  fail("TMA reduction on tensor-map element type %d is not modelled", type);
}

bool tensor_map_decode(const void* memory, TensorMap* map) {
  u32 words[MAP_BYTES / 4];
  memcpy(words, memory, MAP_BYTES);
  if ((words[2] & 0xf) != MAP_KIND) return false;
  map->address = words[0] | (u64)words[1] << 32;
  map->rank = ((words[2] >> 4) & 7) + 1;
  map->type = (words[2] >> TYPE_SHIFT) & 15;
  map->swizzle = (words[2] >> SWIZZLE_SHIFT) & 3;
  map->other_flags = words[2] & ~KNOWN_FLAGS;
  if (map->rank > 5) return false;
  for (int i = 0; i < 4; i++)
    map->stride[i] = ((u64)(words[7] >> 4 * i & 0xf) << 32 | words[3 + i]) << 4;
  for (int i = 0; i < 5; i++) map->last[i] = words[8 + i];
  map->box[0] = (words[13] >> 24) + 1;
  for (int i = 1; i < 5; i++) map->box[i] = ((words[14] >> (8 * (i - 1))) & 0xff) + 1;
  return true;
}

void tensor_map_encode(const TensorMap& map, void* memory) {
  u32 words[MAP_BYTES / 4] = {};
  words[0] = (u32)map.address;
  words[1] = (u32)(map.address >> 32);
  words[2] = MAP_KIND | (map.rank - 1) << 4 | map.type << TYPE_SHIFT |
             map.swizzle << SWIZZLE_SHIFT | map.other_flags;
  for (int i = 0; i < 4; i++) {
    words[3 + i] = (u32)(map.stride[i] >> 4);
    words[7] |= (u32)(map.stride[i] >> 36 & 0xf) << 4 * i;
  }
  for (int i = 0; i < 5; i++) words[8 + i] = map.last[i];
  words[13] = (u32)(map.box[0] - 1) << 24;
  for (int i = 1; i < 5; i++) words[14] |= (u32)((map.box[i] - 1) & 0xff) << (8 * (i - 1));
  memcpy(memory, words, MAP_BYTES);
}

static const u8* map_memory(Warp& w, u64 address) {
  if (is_shared_window(address)) return shared_pointer(w, shared_address(address), MAP_BYTES);
  machine.check_range(address, MAP_BYTES, "tensor map");
  return (const u8*)address;
}

static void check_global_address(const char* what, u64 address) {
  if (address % ADDRESS_ALIGNMENT)
    fail("%s: the global address %#llx is not a multiple of %llu bytes, as a tensor map's must be",
         what, (unsigned long long)address, (unsigned long long)ADDRESS_ALIGNMENT);
}

TensorMap tensor_map_at(Warp& w, u64 address) {
  if (address % 64) fail("tensor map at %#llx is not 64-byte aligned", (unsigned long long)address);
  TensorMap map;
  if (!tensor_map_decode(map_memory(w, address), &map))
    fail("TMA through memory that holds no tensor map (%#llx)", (unsigned long long)address);
  check_global_address("TMA", map.address);
  if (map.type >= FIRST_UNPACKED_TYPE)
    fail("TMA: unpacked 4- and 6-bit element types are not modelled");
  const u32 inner = map.box[0] * map.element_bits() / 8;
  if (inner > SWIZZLE_SPAN[map.swizzle])
    fail("TMA: inner box of %u bytes is wider than the %u-byte swizzle", inner,
         SWIZZLE_SPAN[map.swizzle]);
  if (inner % 16) fail("TMA: inner box of %u bytes is not a multiple of 16", inner);
  return map;
}

static void replace_field(TensorMap& map, const Instruction& in, u64 value) {
  const int index = (int)in.aux;
  switch (in.sub) {
    case GLOBAL_ADDRESS:
      check_global_address("tensormap.replace", value);
      map.address = value;
      return;
    case RANK:
      if ((u32)value > 4) fail("tensormap.replace: rank field %u", (u32)value);
      map.rank = (u32)value + 1;
      return;
    case BOX_DIM:
      if ((u32)value < 1 || (u32)value > MAX_BOX)
        fail("tensormap.replace: box dimension %d of %u", index, (u32)value);
      map.box[index] = (u32)value;
      return;
    case GLOBAL_DIM:
      if ((u32)value == 0) fail("tensormap.replace: dimension %d of 0", index);
      map.last[index] = (u32)value - 1;
      return;
    case GLOBAL_STRIDE:
      if (value % 16 || value >= STRIDE_LIMIT)
        fail("tensormap.replace: stride %d of %llu bytes is not a multiple of 16 below 2^40", index,
             (unsigned long long)value);
      map.stride[index] = value;
      return;
    case ELEMENT_STRIDE:
      if ((u32)value != 1) fail("element strides other than 1 are not modelled");
      return;
    case ELEMTYPE:
      if (value > 15) fail("tensormap.replace: element type %u", (u32)value);
      map.type = PTX_TYPE[value];
      return;
    case INTERLEAVE:
      if (value) fail("interleaved tensor maps are not modelled");
      return;
    case SWIZZLE_MODE:
      if (value > 3) fail("tensormap.replace: swizzle mode %u is not modelled", (u32)value);
      map.swizzle = value;
      return;
    case FILL_MODE:
      if (value) fail("NaN fill is not modelled");
      return;
  }
  fail("tensormap.replace of field %d", in.sub);
}

void tensor_map_replace(Warp& w, const Instruction& in, u32 mask) {
  FOR_LANES (lane, mask) {
    const u64 address = address_of(w, operand(in, 0), lane);
    const bool shared = in.space == SHARED || is_shared_window(address);
    u8* p = shared ? shared_pointer(w, shared_address(address), MAP_BYTES)
                   : (u8*)map_memory(w, address);
    TensorMap map;
    if (!tensor_map_decode(p, &map)) fail("tensormap.replace on memory that holds no tensor map");
    replace_field(map, in, value_of(w, operand(in, 1), lane));
    tensor_map_encode(map, p);
    if (shared) note_generic_write(w, lane, shared_address(address), MAP_BYTES);
  }
}

// A kernel that makes a tensor map by itself keeps the address bits that the format has room for, by
// an AND (see lower_alu.py).  What it drops would be read from elsewhere without a word.
void tensor_map_address(Warp& w, const Instruction& in, u32 mask) {
  FOR_LANES (lane, mask) {
    const u64 address = value_of(w, operand(in, 1), lane);
    check_global_address("tensor map made by the kernel", address);
    target(w, operand(in, 0))[lane] = address & value_of(w, operand(in, 2), lane);
  }
}

// tensormap.cp_fenceproxy [global], [shared]: one copy by the whole warp.
Status tensor_map_copy(Warp& w, const Instruction& in, u32 mask) {
  if (Status s = need_full_warp(w, mask, "tensormap.cp_fenceproxy")) return s;
  const u64 to = address_of(w, operand(in, 0), 0), from = address_of(w, operand(in, 1), 0);
  if (to % MAP_ALIGNMENT)
    fail("tensormap.cp_fenceproxy to a misaligned address %#llx", (unsigned long long)to);
  machine.check_range(to, MAP_BYTES, "tensormap.cp_fenceproxy");
  memcpy((void*)to, shared_pointer(w, shared_address(from), MAP_BYTES), MAP_BYTES);
  return OK;
}

// What cuTensorMapEncodeTiled does.  Returns null, or why the map is invalid or not modelled.
extern "C" const char* emu_tensor_map_encode(void* out, int type, u32 rank, u64 address,
                                             const u64* dims, const u64* strides, const u32* box,
                                             const u32* element_strides, int interleave,
                                             int swizzle, int fill) {
  if (rank < 1 || rank > 5) return "the rank must be 1..5";
  if (type < 0 || type > 15) return "unknown element type";
  if (interleave) return "interleaved layouts are not modelled";
  if (swizzle < 0 || swizzle > 3) return "this swizzle mode is not modelled";
  if (fill) return "NaN fill is not modelled";
  if (address % ADDRESS_ALIGNMENT) return "the global address must be 16-byte aligned";
  if ((u64)out % MAP_ALIGNMENT) return "the tensor map must be 64-byte aligned";
  TensorMap map;
  map.address = address;
  map.rank = rank;
  map.type = DRIVER_TYPE[type];
  map.swizzle = swizzle;
  for (u32 i = 0; i < 5; i++) map.box[i] = 1;
  for (u32 i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > (1ull << 32)) return "dimensions must be 1..2^32";
    if (box[i] < 1 || box[i] > MAX_BOX) return "box dimensions must be 1..256";
    if (element_strides[i] != 1) return "element strides other than 1 are not modelled";
    map.last[i] = (u32)(dims[i] - 1);
    map.box[i] = box[i];
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= STRIDE_LIMIT)
      return "strides must be multiples of 16 below 2^40";
    map.stride[i - 1] = strides[i - 1];
  }
  const u32 inner_bits = box[0] * map.element_bits();
  if (inner_bits % 128) return "the inner box must be a multiple of 16 bytes";
  if (map.type < FIRST_UNPACKED_TYPE && inner_bits / 8 > SWIZZLE_SPAN[swizzle])
    return "the inner box is wider than the swizzle";
  tensor_map_encode(map, out);
  return nullptr;
}
