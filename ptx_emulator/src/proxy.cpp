// Checks that the async proxy sees generic-proxy writes only after a fence.
#include "memory.h"
#include "races.h"

constexpr int THREAD_SHIFT = 48;
constexpr u64 TIME_MASK = (1ull << THREAD_SHIFT) - 1;

static u32 word_after(u32 offset, u32 bytes) { return (offset + bytes - 1) / 4 + 1; }

void note_generic_write_unraced(Warp& w, int lane, u32 address, u32 bytes) {
    if (!machine.config.check_fences) return;
    CTA* c;
    shared_pointer(w, address, bytes, &c);
    // Writes by another CTA are not tracked: a fence of that CTA would order them as well.
    const u64 tag = c == w.cta ? (u64)(w.id * 32 + lane + 1) << THREAD_SHIFT | machine.writes++ : 0;
    const u32 offset = offset_of(address);
    for (u32 i = offset / 4; i < word_after(offset, bytes); i++) c->proxy_shadow[i] = tag;
}

void note_generic_write(Warp& w, int lane, u32 address, u32 bytes) {
    if (races_on) race_shared(w, address, bytes, true);
    note_generic_write_unraced(w, lane, address, bytes);
}

static void need_fence(CTA* c, u32 offset, u32 bytes, u64 issuer_fenced, const char* what,
                       const char* does) {
    if (!machine.config.check_fences) return;
    for (u32 i = offset / 4; i < word_after(offset, bytes); i++) {
        const u64 tag = c->proxy_shadow[i];
        if (!tag) continue;
        const u32 thread = (u32)(tag >> THREAD_SHIFT) - 1;
        const u64 when = tag & TIME_MASK;
        if (c->warps[thread / 32].fenced[thread % 32] <= when && issuer_fenced <= when)
            fail("%s %s shared offset %u written by thread %u, with no fence.proxy.async between",
                 what, does, i * 4, thread);
        c->proxy_shadow[i] = 0;
    }
}

void check_async_read(CTA* c, u32 offset, u32 bytes, u64 issuer_fenced, const char* what) {
    if (acting) race_shared(c, offset, bytes, false, *acting);
    need_fence(c, offset, bytes, issuer_fenced, what, "reads");
}

void note_async_write(CTA* c, u32 offset, u32 bytes, const Actor& by, u64 issuer_fenced,
                      const char* what) {
    race_shared(c, offset, bytes, true, by);
    need_fence(c, offset, bytes, issuer_fenced, what, "overwrites");
}

INSTRUCTION(void, proxy_fence, FENCE_PROXY_ASYNC) {
    machine.writes++;
    FOR_LANES (lane, mask) w.fenced[lane] = machine.writes;
    machine.writes++;
}
