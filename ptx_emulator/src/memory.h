// Memory as instructions see it: address spaces, proxies, mbarriers, tensor maps.
#pragma once
#include "machine.h"

// ---- addresses (address.cpp)
constexpr u32 OFFSET_MASK = 0xffffff;  // a shared::cluster address is CTA rank << 24 | offset
inline bool is_shared_window(u64 a) { return a >= SHARED_WINDOW && a < LOCAL_WINDOW; }
inline u32 shared_address(u64 a) { return (u32)(a >= SHARED_WINDOW ? a - SHARED_WINDOW : a); }
inline u32 shared_address(Warp& w, const Instruction& in, int i, int lane) {
    return shared_address(address_of(w, in, i, lane));
}
inline u32 offset_of(u32 shared) { return shared & OFFSET_MASK; }
inline u32 rank_of(u32 shared) { return shared >> 24; }
CTA* cta_at(Cluster* cluster, u32 rank, const char* what);
u8* remote_shared_pointer(Warp& w, u32 address, u32 bytes, CTA** owner);
inline u8* shared_pointer(Warp& w, u32 address, u32 bytes, CTA** owner = nullptr) {
    CTA* c = w.cta;
    const u32 offset = offset_of(address);
    if (rank_of(address) != c->rank || offset < SMEM_BASE || offset + bytes > c->smem.size())
        return remote_shared_pointer(w, address, bytes, owner);
    if (owner) *owner = c;
    return c->smem.data() + offset;
}
struct SharedPlace {
    CTA* owner;
    u32 offset;
    u8* pointer;
};
SharedPlace shared_place(Warp& w, const Instruction& in, int i, int lane, u32 bytes);
// The CTAs in the multicast mask, operand i; without multicast, the CTA of the address.
u32 destinations(Warp& w, const Instruction& in, int i, int lane, u32 address, const char* what);
// Any space; checks alignment and bounds.
u8* resolve(Warp& w, u8 space, u64 address, u32 bytes, int lane, bool write);
void need_in_smem(CTA* c, u32 offset, u64 bytes, const char* what);

// ---- proxies (proxy.cpp).  The async proxy (TMA, tensor cores) sees a generic-proxy write once
// its writer, or the thread that issues the asynchronous operation, has executed fence.proxy.async
// after it.
void note_generic_write(Warp& w, int lane, u32 address, u32 bytes);
void note_generic_write_unraced(Warp& w, int lane, u32 address, u32 bytes);  // atomics
void check_async_read(CTA* c, u32 offset, u32 bytes, u64 issuer_fenced, const char* what);
void note_async_write(CTA* c, u32 offset, u32 bytes, const Actor& by, u64 issuer_fenced,
                      const char* what);

// ---- mbarriers (mbarrier.cpp)
bool mbarrier_done(CTA* c, u32 offset, u64 phase_parity);
void mbarrier_expect_arrival(CTA* c, u32 offset);  // expects one more arrival in the open phase
// Returns the state before the arrival.
u64 mbarrier_arrive(CTA* c, u32 offset, u32 count);
void mbarrier_transaction(CTA* c, u32 offset, i64 bytes);
// An asynchronous operation's bytes have landed.
void mbarrier_complete(CTA* c, u32 offset, u32 bytes, const Actor& by);

// ---- bulk and TMA copies (bulk_copy.cpp)
// A load into the same offset of CTAs of the cluster, whose mbarriers then get the bytes.
void post_load(Warp& w, const Instruction& in, int lane, u32 ranks, u32 offset, u32 bytes,
               u32 barrier, const char* what, std::function<void(CTA*)> write);
// The read, then the write, of a store from shared to global memory.
void post_store(CTA* source, std::vector<CopyGroupPtr> groups,
                std::function<void(std::vector<u8>&)> read,
                std::function<void(const std::vector<u8>&)> write);

// A tensor map, decoded.  In memory it has the hardware's own 128-byte format, because the DSL's
// host code writes those bits itself.
struct TensorMap {
    u64 address = 0;
    u32 last[5] = {};    // dimension - 1
    u64 stride[4] = {};  // bytes, of dimensions 1..4
    u16 box[5] = {};
    u8 type = 0, rank = 0, swizzle = 0;

    u32 element_bits() const;
    u32 box_bytes() const;
    u32 swizzle_span() const { return 16u << swizzle; }
};
bool tensor_map_decode(const void* memory, TensorMap* map);
TensorMap tensor_map_at(Warp& w, u64 address);
// Swizzles of 32, 64 and 128 bytes permute 16-byte granules; one of 16 bytes moves nothing.
inline u32 swizzled(u32 address, u32 span) { return address ^ (address >> 3 & (span - 16)); }
