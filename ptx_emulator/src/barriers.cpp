// Named and cluster barriers, and the other instructions that order warps.
#include "memory.h"
#include "races.h"

static u32 threads_expected(const CTA* c, const NamedBarrier& b) {
    return b.expected ? b.expected : (u32)c->live_warps * 32;
}

void barrier_settle(CTA* c, NamedBarrier& b) {
    const u32 expected = threads_expected(c, b);
    if (!b.arrived || b.arrived < expected) return;
    if (b.arrived > expected)
        fail("named barrier received %u threads, expected %u", b.arrived, expected);
    b.arrived = b.expected = 0;
    b.generation++;
    race_complete(b.sync);
    machine.epoch++;
}

void cluster_barrier_settle(Cluster* cluster) {
    u32 live = 0;
    for (auto& c : cluster->ctas) live += c->live_warps;
    if (!cluster->arrived || cluster->arrived < live) return;
    cluster->arrived = 0;
    cluster->generation++;
    machine.epoch++;
    race_complete(cluster->sync);
}

static void arrive(Warp& w, NamedBarrier& b, u32 id, u32 count) {
    if (count && b.arrived && b.expected && b.expected != count)
        fail("named barrier %u: thread count %u differs from the %u of earlier arrivals", id, count,
             b.expected);
    if (count) b.expected = count;
    b.arrived += 32;
    race_release(w, b.sync);
    barrier_settle(w.cta, b);
}

// sub: 1 for bar.arrive.  Operands: id, [count].
INSTRUCTION(Status, named_barrier, BAR) {
    if (mask != w.alive) return CONVERGE;
    const u32 id = (u32)value_of(w, in, 0, first_lane(mask));
    const u32 count = (u32)value_of(w, in, 1, first_lane(mask));
    if (id > 15) fail("bar with barrier id %u", id);
    if (count % 32) fail("bar thread count %u is not a multiple of the warp size", count);
    NamedBarrier& b = w.cta->barriers[id];
    if (in.sub == 1) {
        arrive(w, b, id, count);
        return OK;
    }
    if (w.waiting_on_barrier != (int)id) {
        w.waiting_on_barrier = (int)id;
        w.barrier_generation = b.generation;
        arrive(w, b, id, count);
    }
    if (b.generation == w.barrier_generation) {
        w.waits_for = written("named barrier %u: %u of %u threads", id, b.arrived,
                              threads_expected(w.cta, b));
        return BLOCK;
    }
    w.waiting_on_barrier = -1;
    race_acquire(w, b.sync);
    return OK;
}

INSTRUCTION(Status, cluster_arrive, CLUSTER_ARRIVE) {
    if (mask != w.alive) return CONVERGE;
    Cluster* cluster = w.cta->cluster;
    if (w.cluster_arrived) fail("barrier.cluster.arrive twice without a wait");
    w.cluster_arrived = true;
    w.cluster_generation = cluster->generation;
    if (!(in.flags & F_RELAXED)) race_release(w, cluster->sync);
    cluster->arrived++;
    cluster_barrier_settle(cluster);
    return OK;
}

INSTRUCTION(Status, cluster_wait, CLUSTER_WAIT) {
    if (mask != w.alive) return CONVERGE;
    Cluster* cluster = w.cta->cluster;
    if (!w.cluster_arrived) fail("barrier.cluster.wait without an arrive");
    if (cluster->generation == w.cluster_generation) {
        w.waits_for = "cluster barrier";
        return BLOCK;
    }
    w.cluster_arrived = false;
    race_acquire(w, cluster->sync);
    return OK;
}

// bar.warp.sync: the named lanes wait for each other.
INSTRUCTION(Status, meet, BARWARP) {
    const u32 members = (u32)value_of(w, in, 0, first_lane(mask));
    return members & w.alive & ~mask ? CONVERGE : OK;
}

INSTRUCTION(void, set_registers, SETMAXNREG) {
    if (in.aux % 8 || in.aux < 24 || in.aux > 256) fail("setmaxnreg %lld", in.aux);
}

INSTRUCTION(void, nothing, FENCE, NOP, NANOSLEEP, TC_FENCE, WGMMA_FENCE) {}

INSTRUCTION(void, trap, TRAP) { fail("trap"); }

INSTRUCTION(void, refuse, UNSUPPORTED) {
    fail("instruction not modelled: %s",
         machine.program->text[&in - machine.program->instructions.data()].c_str());
}
