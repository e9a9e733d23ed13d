// Address spaces and bounds.
#include "memory.h"

CTA* cta_at(Cluster* cluster, u32 rank, const char* what) {
    if (rank >= cluster->ctas.size())
        fail("%s names CTA rank %u of a cluster of %zu", what, rank, cluster->ctas.size());
    return cluster->ctas[rank].get();
}

void need_in_smem(CTA* c, u32 offset, u64 bytes, const char* what) {
    if (offset < SMEM_BASE || offset + bytes > c->smem.size())
        fail("%s out of bounds: shared offset %u + %llu bytes, CTA has %u..%zu", what, offset,
             bytes, SMEM_BASE, c->smem.size());
}

// An address of another CTA, or out of bounds.
u8* remote_shared_pointer(Warp& w, u32 address, u32 bytes, CTA** owner) {
    CTA* c = cta_at(w.cta->cluster, rank_of(address), "a shared address");
    need_in_smem(c, offset_of(address), bytes, "shared access");
    if (c != w.cta && c->exited)
        fail("access to the shared memory of CTA rank %u, which has exited", c->rank);
    if (owner) *owner = c;
    return c->smem.data() + offset_of(address);
}

SharedPlace shared_place(Warp& w, const Instruction& in, int i, int lane, u32 bytes) {
    const u32 address = shared_address(w, in, i, lane);
    SharedPlace place{nullptr, offset_of(address), nullptr};
    place.pointer = shared_pointer(w, address, bytes, &place.owner);
    return place;
}

u32 destinations(Warp& w, const Instruction& in, int i, int lane, u32 address, const char* what) {
    const u32 ranks =
        in.flags & F_MULTICAST ? (u32)value_of(w, in, i, lane) & 0xffff : 1u << rank_of(address);
    const size_t ctas = w.cta->cluster->ctas.size();
    if (!ranks || ranks >> ctas) fail("%s to CTA mask %#x of a cluster of %zu", what, ranks, ctas);
    return ranks;
}

bool Machine::within(const std::map<u64, u64>& ranges, u64 address, u64 bytes) {
    auto it = ranges.upper_bound(address);
    if (it == ranges.begin()) return false;
    --it;
    if (address + bytes > it->second) return false;
    last_low_ = it->first;
    last_high_ = it->second;
    return true;
}

void Machine::check_watched(u64 address, u64 bytes, const char* what) {
    if (address < FIRST_ADDRESS) fail("%s through a null or tiny pointer %#llx", what, address);
    if (address >= last_low_ && address + bytes <= last_high_) return;
    if (within(ranges, address, bytes) || within(module_ranges, address, bytes)) return;
    if (params && address >= (u64)params && address + bytes <= (u64)params + program->param_bytes)
        return;
    std::string near;
    auto it = ranges.upper_bound(address);
    if (it != ranges.begin()) {
        --it;
        near = written("; %lld bytes past the end of an allocation of %llu",
                       address + bytes - it->second, it->second - it->first);
    }
    fail("%s out of bounds: address %#llx + %llu%s", what, address, bytes, near.c_str());
}

static u8* local_pointer(Warp& w, u64 offset, u32 bytes, int lane) {
    const u32 size = machine.program->local_bytes;
    if (offset + bytes > size)
        fail("local memory access out of bounds: offset %llu + %u of %u bytes", offset, bytes,
             size);
    return w.local.data() + (size_t)lane * size + offset;
}

u8* resolve(Warp& w, u8 space, u64 address, u32 bytes, int lane, bool write) {
    if (bytes > 1 && (bytes & (bytes - 1)) == 0 && (address & (bytes - 1)))
        fail("misaligned %u-byte access at %#llx", bytes, address);
    if (space == SHARED) return shared_pointer(w, shared_address(address), bytes);
    if (space == LOCAL || address >= LOCAL_WINDOW)
        return local_pointer(w, address >= LOCAL_WINDOW ? address - LOCAL_WINDOW : address, bytes,
                             lane);
    if (is_shared_window(address)) return shared_pointer(w, shared_address(address), bytes);
    if (space == PARAM) {
        if (address < (u64)machine.params ||
            address + bytes > (u64)machine.params + machine.program->param_bytes)
            fail("parameter access out of bounds");
        return (u8*)address;
    }
    machine.check_range(address, bytes, write ? "global store" : "global load");
    return (u8*)address;
}
