// cp.async.bulk.tensor: boxes of a tensor, through a tensor map.
#include <algorithm>
#include <array>
#include <cstring>

#include "memory.h"
#include "races.h"

using Coordinates = std::array<i32, 5>;
constexpr u32 GRANULE = 16;          // bytes that a swizzle moves as one unit
constexpr u32 SMEM_ALIGNMENT = 128;  // of a box in shared memory, swizzled or not

// The bytes of one granule that lie inside the tensor.
struct Piece {
    u32 offset;   // offset of the granule from the start of the box, before swizzling
    u64 address;  // global
    u32 skip;     // bytes of the granule before them
    u32 bytes;    // 0: all of the granule is outside
};
template <class F>
static void walk_box(const TensorMap& map, const Coordinates& at, F visit) {
    const u32 bits = map.element_bits(), row_bytes = map.box[0] * bits / 8,
              per_granule = 128 / bits;
    u32 extent[5] = {1, 1, 1, 1, 1};
    for (u32 i = 1; i < map.rank; i++) extent[i] = map.box[i];
    const u32 rows = extent[1] * extent[2] * extent[3] * extent[4];
    for (u32 row = 0; row < rows; row++) {
        bool inside = true;
        u64 base = map.address;
        for (u32 r = 1, rest = row; r < map.rank; rest /= extent[r], r++) {
            const i64 position = (i64)at[r] + rest % extent[r];
            inside &= position >= 0 && position <= (i64)map.last[r];
            base += (u64)position * map.stride[r - 1];
        }
        for (u32 b = 0; b < row_bytes; b += GRANULE) {
            const i64 x = (i64)at[0] + (i64)b * 8 / bits;
            const i64 first = std::max<i64>(0, -x);
            const i64 end = std::min<i64>(per_granule, (i64)map.last[0] + 1 - x);
            if (!inside || end <= first) {
                visit(Piece{row * row_bytes + b, 0, 0, 0});
                continue;
            }
            visit(Piece{row * row_bytes + b, base + (u64)((x + first) * bits / 8),
                        (u32)(first * bits / 8), (u32)((end - first) * bits / 8)});
        }
    }
}

constexpr u32 GATHERED = 4;
static Coordinates coordinates(Warp& w, const Operand& vector, int lane, const TensorMap& map,
                               bool gathers = false) {
    if (gathers && (map.rank != 2 || map.box[1] != 1 || vector.count != 1 + GATHERED))
        fail(
            "gather4 takes a column and %u rows, through a rank-2 tensor map whose box is one row "
            "high",
            GATHERED);
    if (!gathers && vector.count != map.rank)
        fail("TMA with %d coordinates through a rank-%d tensor map", vector.count, map.rank);
    Coordinates at{};
    for (int i = 0; i < vector.count; i++) at[i] = (i32)value_of(w, element(vector, i), lane);
    return at;
}

static void load_box(CTA* d, u32 offset, const TensorMap& map, const Coordinates& at) {
    walk_box(map, at, [&](const Piece& piece) {
        u8* p = d->smem.data() + swizzled(offset + piece.offset, map.swizzle_span());
        if (piece.bytes < GRANULE) memset(p, 0, GRANULE);
        if (!piece.bytes) return;
        machine.check_range(piece.address, piece.bytes, "TMA load");
        memcpy(p + piece.skip, (const void*)piece.address, piece.bytes);
    });
}

// Operands: destination, tensor map, coordinates, mbarrier, [CTA mask].
INSTRUCTION(void, tma_load, TMA_G2S) {
    FOR_LANES (lane, mask) {
        const u32 to = shared_address(w, in, 0, lane), offset = offset_of(to);
        const TensorMap map = tensor_map_at(w, address_of(w, in, 1, lane));
        const u32 boxes = in.flags & F_GATHER ? GATHERED : 1;
        const Coordinates at = coordinates(w, operand(in, 2), lane, map, boxes > 1);
        const u32 ranks = destinations(w, in, 4, lane, to, "TMA load");
        if (offset % SMEM_ALIGNMENT)
            fail("TMA load: shared destination offset %u is not %u-byte aligned", offset,
                 SMEM_ALIGNMENT);
        const u32 box_bytes = map.box_bytes(), barrier = shared_address(w, in, 3, lane);
        post_load(w, in, lane, ranks, offset, boxes * box_bytes, barrier, "TMA load", [=](CTA* d) {
            // The rows of gather4 are contiguous, and swizzles apply to addresses.
            for (u32 i = 0; i < boxes; i++)
                load_box(d, offset + i * box_bytes, map,
                         boxes > 1 ? Coordinates{at[0], at[1 + i]} : at);
        });
    }
}

static void store_box(const TensorMap& map, const Coordinates& at, const std::vector<u8>& data) {
    walk_box(map, at, [&](const Piece& piece) {
        if (!piece.bytes) return;
        machine.check_range(piece.address, piece.bytes, "TMA store");
        memcpy((void*)piece.address, data.data() + piece.offset + piece.skip, piece.bytes);
    });
}

// Operands: tensor map, coordinates, source.
INSTRUCTION(void, tma_store, TMA_S2G) {
    for (u32 left = mask; left;) {
        const int lane = first_lane(left);
        const u64 map_address = address_of(w, in, 0, lane);
        const TensorMap map = tensor_map_at(w, map_address);
        const Coordinates at = coordinates(w, operand(in, 1), lane, map);
        const u32 from = shared_address(w, in, 2, lane);
        const u32 offset = offset_of(from), bytes = map.box_bytes();
        CTA* c;
        shared_pointer(w, from, bytes, &c);
        if (offset % SMEM_ALIGNMENT)
            fail("TMA store: shared source offset %u is not %u-byte aligned", offset,
                 SMEM_ALIGNMENT);
        // The DSL lets a whole warp issue one store: lanes with the same operands are one
        // operation.
        const Actor me = issue_async(w, STORE_AGENT);
        std::vector<CopyGroupPtr> groups;
        FOR_LANES (other, left) {
            if ((int)other != lane) {
                if (coordinates(w, operand(in, 1), other, map) != at ||
                    address_of(w, in, 0, other) != map_address ||
                    shared_address(w, in, 2, other) != from)
                    continue;
            }
            groups.push_back(w.bulk_stores.opened(other));
            if (races_on) groups.back()->clock = me.clock[me.agent];
            left &= ~(1u << other);
        }
        machine.stats.tma_store_bytes += bytes;
        {
            ActingScope scope(me);
            check_async_read(c, offset, bytes, w.fenced[lane], "TMA store");
        }
        post_store(
            c, groups,
            [=](std::vector<u8>& data) {
                data.resize(bytes);
                for (u32 b = 0; b < bytes; b += GRANULE)
                    memcpy(data.data() + b,
                           c->smem.data() + swizzled(offset + b, map.swizzle_span()), GRANULE);
            },
            [=](const std::vector<u8>& data) { store_box(map, at, data); });
    }
}
