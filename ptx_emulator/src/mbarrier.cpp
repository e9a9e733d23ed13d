// mbarrier objects, which live in shared memory as 64 bits.
#include <cstring>

#include "memory.h"
#include "races.h"

namespace {
struct Mbarrier {
    i64 transactions : 24;  // bytes still to come
    u64 pending : 19;
    u64 expected : 19;
    u64 phase : 1;
    u64 live : 1;
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 64 bits");
constexpr i64 MAX_TRANSACTIONS = (1 << 20) - 1;
constexpr u64 MAX_COUNT = (1 << 20) - 1, FIELD_LIMIT = (1 << 19) - 1;

Mbarrier* mbarrier_at(CTA* c, u32 offset) {
    if (offset % 8) fail("misaligned mbarrier at shared offset %u", offset);
    need_in_smem(c, offset, 8, "mbarrier");
    auto* m = (Mbarrier*)(c->smem.data() + offset);
    if (!m->live) fail("use of an mbarrier that was not initialised (shared offset %u)", offset);
    return m;
}
bool complete_if_done(CTA* c, u32 offset, Mbarrier* m) {
    machine.epoch++;
    if (m->pending || m->transactions) return false;
    m->phase ^= 1;
    m->pending = m->expected;
    if (races_on) race_complete(c->mbarrier_sync[offset]);
    return true;
}
}  // namespace

bool mbarrier_done(CTA* c, u32 offset, u64 parity) {
    return mbarrier_at(c, offset)->phase != (parity & 1);
}

// The state is opaque to kernels: here the phase.
u64 mbarrier_arrive(CTA* c, u32 offset, u32 count) {
    Mbarrier* m = mbarrier_at(c, offset);
    const u64 state = m->phase;
    if (m->pending < count)
        fail(
            "mbarrier at shared offset %u of CTA rank %u: %u arrivals but only %u were pending of "
            "the %u that mbarrier.init counts: a wait for the phase before is missing, or the "
            "count is too small",
            offset, c->rank, count, (u32)m->pending, (u32)m->expected);
    m->pending -= count;
    complete_if_done(c, offset, m);
    return state;
}

void mbarrier_expect_arrival(CTA* c, u32 offset) {
    Mbarrier* m = mbarrier_at(c, offset);
    if (m->pending == FIELD_LIMIT) fail("mbarrier at shared offset %u: too many arrivals", offset);
    m->pending += 1;
}

void mbarrier_transaction(CTA* c, u32 offset, i64 bytes) {
    Mbarrier* m = mbarrier_at(c, offset);
    const i64 left = m->transactions + bytes;
    if (left > MAX_TRANSACTIONS || left < -MAX_TRANSACTIONS)
        fail("mbarrier at shared offset %u: transaction count %lld is out of range", offset, left);
    m->transactions = left;
    if (bytes < 0) complete_if_done(c, offset, m);
}

void mbarrier_complete(CTA* c, u32 offset, u32 bytes, const Actor& by) {
    if (races_on) race_join(c->mbarrier_sync[offset].gathering, by.clock);
    mbarrier_transaction(c, offset, -(i64)bytes);
}

INSTRUCTION(void, initialise, MBAR_INIT) {
    FOR_LANES (lane, mask) {
        const auto [c, offset, p] = shared_place(w, in, 0, lane, 8);
        if (offset % 8) fail("misaligned mbarrier at shared offset %u", offset);
        const u64 count = value_of(w, in, 1, lane);
        if (count < 1 || count > MAX_COUNT) fail("mbarrier.init with count %llu", count);
        if (count > FIELD_LIMIT) fail("mbarrier.init with count %llu is not modelled", count);
        c->mbarrier_sync.erase(offset);
        Mbarrier m;
        m.transactions = 0;
        m.pending = m.expected = count;
        m.phase = 0;
        m.live = 1;
        memcpy(p, &m, 8);
    }
}

// With or without expect_tx.  Operands: state, address, count or bytes.
INSTRUCTION(void, arrive, MBAR_ARRIVE) {
    FOR_LANES (lane, mask) {
        const auto [c, offset, _] = shared_place(w, in, 1, lane, 8);
        u32 count = 1;
        const u32 argument = in.num_operands > 2 ? (u32)value_of(w, in, 2, lane) : 1;
        if (in.flags & F_EXPECT_TX)
            mbarrier_transaction(c, offset, argument);
        else
            count = argument;
        if (races_on && !(in.flags & F_RELAXED))
            race_join(c->mbarrier_sync[offset].gathering, w.clock);
        const u64 state = mbarrier_arrive(c, offset, count);
        if (u64* d = target(w, operand(in, 0))) d[lane] = state;
    }
    if (races_on) w.clock[agent_of(w, WARP_AGENT)]++;
}

INSTRUCTION(void, expect_transactions, MBAR_EXPECT_TX) {
    FOR_LANES (lane, mask) {
        const auto [c, offset, _] = shared_place(w, in, 0, lane, 8);
        mbarrier_transaction(c, offset, (u32)value_of(w, in, 1, lane));
    }
}

// Operands: predicate, address, state or parity.
INSTRUCTION(Status, wait, MBAR_WAIT) {
    u32 done = 0;
    FOR_LANES (lane, mask) {
        const auto [c, offset, _] = shared_place(w, in, 1, lane, 8);
        if (!mbarrier_done(c, offset, value_of(w, in, 2, lane))) continue;
        if (races_on && !(in.flags & F_RELAXED)) race_acquire(w, c->mbarrier_sync[offset]);
        done |= 1u << lane;
    }
    if (done != mask && (in.flags & F_TRY) && !w.timed_out) {
        const int lane = first_lane(mask & ~done);
        const u32 address = shared_address(w, in, 1, lane);
        w.waits_for =
            written("mbarrier at shared offset %u (CTA rank %u), phase %u", offset_of(address),
                    rank_of(address), (u32)value_of(w, in, 2, lane) & 1);
        return BLOCK;
    }
    w.timed_out = false;
    if (u64* d = target(w, operand(in, 0)))
        FOR_LANES (lane, mask) d[lane] = done >> lane & 1;
    return OK;
}
