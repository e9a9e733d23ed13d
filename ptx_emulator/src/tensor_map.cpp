// Tensor maps in the hardware's format: address, (kind 2 | rank - 1 | element type | swizzle),
// strides / 16 (the low 32 bits of four, then their highest four bits), dimensions - 1, box - 1.
#include <cstdio>
#include <cstring>

#include "memory.h"

namespace {
constexpr u32 MAP_BYTES = 128, MAP_KIND = 2;
constexpr u32 TYPE_SHIFT = 7, SWIZZLE_SHIFT = 13, OTHER_FLAGS = 0x240000;
constexpr u8 FIRST_UNPACKED_TYPE = 13;
constexpr u32 MAX_BOX = 256;
constexpr u64 ADDRESS_ALIGNMENT = 16, STRIDE_LIMIT = 1ull << 40;
constexpr u32 SWIZZLE_SPAN[] = {1u << 30, 32, 64, 128};
// By hardware code: u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16 u4 tf32 u4-in-u8 u6-in-u8
constexpr u8 ELEMENT_BITS[16] = {8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 4, 32, 4, 6, 32};
}  // namespace

u32 TensorMap::element_bits() const { return ELEMENT_BITS[type]; }
u32 TensorMap::box_bytes() const {
    u64 bits = element_bits();
    for (u32 i = 0; i < rank; i++) bits *= box[i];
    return (u32)(bits / 8);
}
bool tensor_map_decode(const void* memory, TensorMap* map) {
    u32 words[MAP_BYTES / 4];
    memcpy(words, memory, MAP_BYTES);
    if ((words[2] & 0xf) != MAP_KIND) return false;
    map->address = words[0] | (u64)words[1] << 32;
    map->rank = ((words[2] >> 4) & 7) + 1;
    map->type = (words[2] >> TYPE_SHIFT) & 15;
    map->swizzle = (words[2] >> SWIZZLE_SHIFT) & 3;
    if (map->rank > 5) return false;
    for (int i = 0; i < 4; i++)
        map->stride[i] = ((u64)(words[7] >> 4 * i & 0xf) << 32 | words[3 + i]) << 4;
    for (int i = 0; i < 5; i++) map->last[i] = words[8 + i];
    map->box[0] = (words[13] >> 24) + 1;
    for (int i = 1; i < 5; i++) map->box[i] = ((words[14] >> (8 * (i - 1))) & 0xff) + 1;
    return true;
}

static void tensor_map_encode(const TensorMap& map, void* memory) {
    u32 words[MAP_BYTES / 4] = {};
    words[0] = (u32)map.address;
    words[1] = (u32)(map.address >> 32);
    words[2] = MAP_KIND | (map.rank - 1) << 4 | map.type << TYPE_SHIFT |
               map.swizzle << SWIZZLE_SHIFT | OTHER_FLAGS;
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
        fail(
            "%s: the global address %#llx is not a multiple of %llu bytes, as a tensor map's must "
            "be",
            what, address, ADDRESS_ALIGNMENT);
}

TensorMap tensor_map_at(Warp& w, u64 address) {
    if (address % 64) fail("tensor map at %#llx is not 64-byte aligned", address);
    TensorMap map;
    if (!tensor_map_decode(map_memory(w, address), &map))
        fail("TMA through memory that holds no tensor map (%#llx)", address);
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

// A kernel that makes a tensor map itself masks the address to the bits of the format (see
// lower_alu.py).  If it dropped other bits, TMA would silently read another address.
INSTRUCTION(void, tensor_map_address, TMAP_ADDRESS) {
    FOR_LANES (lane, mask) {
        const u64 address = value_of(w, in, 1, lane);
        check_global_address("tensor map made by the kernel", address);
        target(w, operand(in, 0))[lane] = address & value_of(w, in, 2, lane);
    }
}

// Like cuTensorMapEncodeTiled, with the hardware's codes of element type and swizzle.  Returns
// null, or why the map is invalid.
extern "C" const char* emu_tensor_map_encode(void* out, int type, u32 rank, u64 address,
                                             const u64* dims, const u64* strides, const u32* box,
                                             int swizzle) {
    if (rank < 1 || rank > 5) return "the rank must be 1..5";
    if (address % ADDRESS_ALIGNMENT) return "the global address must be 16-byte aligned";
    TensorMap map;
    map.address = address;
    map.rank = rank;
    map.type = type;
    map.swizzle = swizzle;
    for (u32 i = 0; i < 5; i++) map.box[i] = 1;
    for (u32 i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > (1ull << 32)) return "dimensions must be 1..2^32";
        if (box[i] < 1 || box[i] > MAX_BOX) return "box dimensions must be 1..256";
        map.last[i] = (u32)(dims[i] - 1);
        map.box[i] = box[i];
        if (i == 0) continue;
        if (strides[i - 1] % 16 || strides[i - 1] >= STRIDE_LIMIT)
            return "strides must be multiples of 16 below 2^40";
        map.stride[i - 1] = strides[i - 1];
    }
    const u32 inner_bits = box[0] * map.element_bits();
    if (inner_bits % 128) return "the inner box must be a multiple of 16 bytes";
    if (inner_bits / 8 > SWIZZLE_SPAN[swizzle]) return "the inner box is wider than the swizzle";
    tensor_map_encode(map, out);
    return nullptr;
}
