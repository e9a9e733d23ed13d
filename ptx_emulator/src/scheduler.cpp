// Scheduling of warps, divergence, and asynchronous work.
#include <algorithm>

#include "machine.h"

Execute executions[NUM_OPCODES];

namespace {
bool is_flow(const Instruction& in) { return in.op >= BRA; }

void cta_exit(CTA* c) {
    Cluster* cluster = c->cluster;
    c->exited = true;
    cluster->live--;
    if (!cluster->live && cluster->in_flight - c->pending_reads > 0)
        fail(
            "the cluster's last CTA exits while %d asynchronous operations are in flight (loads, "
            "tensor-memory copies, MMAs, commits): nothing waited for them",
            cluster->in_flight);
    if (c->tmem_used)
        fail("CTA exits holding %u columns of tensor memory",
             __builtin_popcount(c->tmem_used) * TMEM_UNIT);
    if (c->pending_reads)
        fail(
            "CTA exits while a bulk store still reads its shared memory (missing "
            "cp.async.bulk.wait_group)");
}

void lanes_exit(Warp& w, u32 mask) {
    w.alive &= ~mask;
    if (w.alive) return;
    CTA* c = w.cta;
    c->live_warps--;
    for (auto& b : c->barriers) barrier_settle(c, b);
    cluster_barrier_settle(c->cluster);
    machine.epoch++;
    if (!w.open_wgmmas.empty() || !w.wgmma_groups.empty())
        fail("warp exits with wgmma operations it never waited for");
    for (auto& store : w.tmem_stores) store();
    if (c->live_warps == 0) cta_exit(c);
}

void set_pc(Warp& w, u32 mask, u32 pc) {
    if (w.converged && mask == w.alive) {
        w.warp_pc = pc;
        return;
    }
    if (w.converged) {
        std::fill(w.pc, w.pc + 32, w.warp_pc);
        w.converged = false;
    }
    FOR_LANES (lane, mask) w.pc[lane] = pc;
}
void try_converge(Warp& w) {
    if (w.converged || !w.alive) return;
    const u32 pc = w.pc[first_lane(w.alive)];
    FOR_LANES (lane, w.alive)
        if (w.pc[lane] != pc) return;
    w.converged = true;
    w.warp_pc = pc;
    w.stalled = 0;
}

// mask: the lanes at this instruction; taken: the lanes whose guard is true.
void branch(Warp& w, const Instruction& in, u32 mask, u32 taken, u32 pc) {
    if (in.op == BRA && taken == mask) {
        set_pc(w, mask, (u32)in.aux);
        return;
    }
    u64 index[32];
    if (in.op == BRX)
        FOR_LANES (lane, taken) index[lane] = value_of(w, in, 0, lane);
    if (mask & ~taken) set_pc(w, mask & ~taken, pc + 1);
    if (!taken) return;
    switch (in.op) {
        case BRA:
            set_pc(w, taken, (u32)in.aux);
            break;
        case BRX: {
            const Operand& table = operand(in, 1);
            FOR_LANES (lane, taken) {
                if (index[lane] >= table.count) fail("brx.idx out of range");
                set_pc(w, 1u << lane, (u32)element(table, (u32)index[lane]).imm);
            }
            break;
        }
        case EXIT:
            lanes_exit(w, taken);
            break;
    }
}

u32 guarded(Warp& w, const Instruction& in, u32 mask) {
    if (in.guard < 0) return mask;
    const u64* predicate = w.reg(in.guard);
    u32 taken = mask;
    FOR_LANES (lane, mask)
        if (!((predicate[lane] & 1) ^ in.guard_negated)) taken &= ~(1u << lane);
    return taken;
}

// The lanes that run next: the lanes with the lowest pc that are not stalled, so that diverged
// lanes converge again; in chaos mode, now and then any other lanes.
bool pick_lanes(Warp& w, bool any, u32* mask, u32* pc) {
    if (w.converged) {
        *mask = w.alive;
        *pc = w.warp_pc;
        return true;
    }
    u32 candidates = w.alive & ~w.stalled;
    if (!candidates) return false;
    if (any) {
        for (u32 skip = machine.rng() % __builtin_popcount(candidates); skip--;)
            candidates &= candidates - 1;
        *pc = w.pc[first_lane(candidates)];
    } else {
        *pc = ~0u;
        FOR_LANES (lane, candidates) *pc = std::min(*pc, w.pc[lane]);
    }
    *mask = 0;
    FOR_LANES (lane, w.alive)
        if (w.pc[lane] == *pc) *mask |= 1u << lane;
    w.stalled &= ~*mask;
    return true;
}
}  // namespace

void Machine::post(Deferred run, u64* chain) {
    // Most operations land soon; one in eight may take very long.
    u64 when = now;
    if (chaos()) when += 1 + rng() % (rng() % 8 ? 200 : 4000);
    if (chain) *chain = when = std::max(when, *chain);
    if (!in_event)
        warp->cta->cluster->in_flight++;  // work that an event posts touches global memory only
    events.push({when, sequence++, in_event ? nullptr : warp, instruction, std::move(run)});
}

// Runs the events that are due; force advances time to the next event.
bool Machine::run_events(bool force) {
    if (events.empty()) return false;
    if (force) now = std::max(now, events.top().when);
    while (!events.empty() && events.top().when <= now) {
        const Event e = events.top();
        events.pop();
        instruction = e.instruction;
        warp = e.issuer;
        in_event = true;
        e.run();
        in_event = false;
        if (e.issuer) e.issuer->cta->cluster->in_flight--;
    }
    warp = nullptr;
    return true;
}

// Lets a warp run until it blocks or its turn is over; returns whether it did anything.
bool Machine::visit(Warp& w) {
    u64 quantum = chaos() ? 1 + rng() % 48 : 20000;
    bool ran = false, any_lanes = chance(8);
    w.stalled = 0;
    w.blocked = false;
    while (quantum && w.alive) {
        u32 mask, pc;
        if (!pick_lanes(w, any_lanes, &mask, &pc)) {
            w.blocked = true;
            return ran;
        }
        any_lanes = any_lanes && w.converged;
        if (pc >= program->instructions.size())
            fail("program counter ran past the end of the kernel");
        const Instruction& in = program->instructions[pc];
        instruction = &in;
        warp = &w;
        const u32 taken = guarded(w, in, mask);
        const bool flow = is_flow(in);
        const Status status = flow || !taken ? OK : executions[in.op](w, in, taken);
        if (status != OK) {
            if (status == CONVERGE) w.waits_for = "the other lanes of the warp to converge";
            if (w.converged) {
                w.blocked = true;
                return ran;
            }
            w.stalled |= mask;
            continue;
        }
        stats.warp_insns++;
        stats.thread_insns += __builtin_popcount(taken);
        stats.op[in.op]++;
        quantum--;
        now++;
        ran = true;
        if (flow)
            branch(w, in, mask, taken, pc);
        else if (w.converged)
            w.warp_pc = pc + 1;
        else
            set_pc(w, mask, pc + 1);
        try_converge(w);
        if (in.op == NANOSLEEP) return true;
        if (stats.warp_insns > config.max_insns)
            fail("instruction budget of %llu exhausted\n%s", config.max_insns, report().c_str());
    }
    return ran;
}
