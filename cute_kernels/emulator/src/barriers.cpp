// Named and cluster barriers, cluster launch control, and the other instructions that order warps.
#include <cstdio>
#include <cstring>

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
  b.last = b.open;
  b.open = {};
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

// sub: 0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or.  Operands: result, id, [count],
// [predicate].
static void arrive(Warp& w, const Instruction& in, u32 mask, NamedBarrier& b, u32 id, u32 count) {
  if (count && b.arrived && b.expected && b.expected != count)
    fail("named barrier %u: thread count %u differs from the %u of earlier arrivals", id, count,
         b.expected);
  if (count) b.expected = count;
  b.arrived += 32;
  race_release(w, b.sync);
  if (in.sub >= 2) {
    const Operand& predicate = operand(in, 3);
    FOR_LANES (lane, mask) {
      const bool v = (value_of(w, predicate, lane) & 1) ^ predicate.negated;
      b.open.popc += v;
      b.open.all &= v;
      b.open.any |= v;
    }
  }
  barrier_settle(w.cta, b);
}

static Status named_barrier(Warp& w, const Instruction& in, u32 mask) {
  if (mask != w.alive) return CONVERGE;
  const u32 id = (u32)value_of(w, operand(in, 1), first_lane(mask));
  const u32 count = (u32)value_of(w, operand(in, 2), first_lane(mask));
  if (id > 15) fail("bar with barrier id %u", id);
  if (count % 32) fail("bar thread count %u is not a multiple of the warp size", count);
  NamedBarrier& b = w.cta->barriers[id];
  if (in.sub == 1) {
    arrive(w, in, mask, b, id, count);
    return OK;
  }
  if (w.waiting_on_barrier != (int)id) {
    w.waiting_on_barrier = (int)id;
    w.barrier_generation = b.generation;
    arrive(w, in, mask, b, id, count);
  }
  if (b.generation == w.barrier_generation) {
    char why[64];
    snprintf(why, sizeof why, "named barrier %u: %u of %u threads", id, b.arrived,
             threads_expected(w.cta, b));
    w.waits_for = why;
    return BLOCK;
  }
  w.waiting_on_barrier = -1;
  race_acquire(w, b.sync);
  if (in.sub >= 2)
    FOR_LANES (lane, mask)
      w.reg(operand(in, 0).reg)[lane] = in.sub == 2   ? b.last.popc
                                        : in.sub == 3 ? b.last.all
                                                      : b.last.any;
  return OK;
}

static Status cluster_arrive(Warp& w, const Instruction& in, u32 mask) {
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
static Status cluster_wait(Warp& w, u32 mask) {
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

// clusterlaunchcontrol.try_cancel [response], [mbarrier]: the response is the first CTA of the next
// cluster and a flag, 16 bytes.
constexpr u32 RESPONSE_BYTES = 16;
static void next_cluster_response(u64 response[2]) {
  Machine& m = machine;
  response[0] = response[1] = 0;
  if (m.next_cluster >= m.total_clusters) return;
  const u64 index = m.next_cluster++;
  const u64 columns = m.grid[0] / m.cluster[0], rows = m.grid[1] / m.cluster[1];
  response[0] = index % columns * m.cluster[0] | index / columns % rows * m.cluster[1] << 32;
  response[1] = index / columns / rows * m.cluster[2] | 1ull << 32;
}
static void try_cancel(Warp& w, const Instruction& in, u32 mask) {
  Cluster* cluster = w.cta->cluster;
  const bool all = in.flags & F_MULTICAST;
  FOR_LANES (lane, mask) {
    const u32 to = shared_address(address_of(w, operand(in, 0), lane));
    const u32 barrier = shared_address(address_of(w, operand(in, 1), lane));
    if (to % RESPONSE_BYTES) fail("misaligned clusterlaunchcontrol response at %#x", to);
    shared_pointer(w, to, RESPONSE_BYTES);
    const Actor me = issue_async(w, LOAD_AGENT);
    machine.post([=] {
      u64 response[2];
      next_cluster_response(response);
      for (u32 rank = 0; rank < cluster->ctas.size(); rank++) {
        if (!all && rank != rank_of(to)) continue;
        CTA* c = cluster->ctas[rank].get();
        if (c->exited)
          fail("clusterlaunchcontrol response into CTA rank %u, which has exited", rank);
        memcpy(c->smem.data() + offset_of(to), response, RESPONSE_BYTES);
        note_async_write(c, offset_of(to), RESPONSE_BYTES, me);
        mbarrier_complete(c, offset_of(barrier), RESPONSE_BYTES, me);
      }
    });
  }
}
// sub: 0 is_canceled, 1..3 one coordinate, 4 all.  The response is a b128 in two registers.
static void query_cancel(Warp& w, const Instruction& in, u32 mask) {
  const u64* low = w.reg(operand(in, in.num_operands - 1).reg);
  const u64* high = low + 32;
  const Operand& d = operand(in, 0);
  FOR_LANES (lane, mask) {
    const u32 cta[3] = {(u32)low[lane], (u32)(low[lane] >> 32), (u32)high[lane]};
    if (in.sub == 0) {
      w.reg(d.reg)[lane] = high[lane] >> 32 & 1;
    } else if (in.sub <= 3) {
      w.reg(d.reg)[lane] = cta[in.sub - 1];
    } else {
      for (int i = 0; i < 3; i++)
        if (u64* r = target(w, element(d, i))) r[lane] = cta[i];
    }
  }
}

Status execute_sync(Warp& w, const Instruction& in, u32 mask) {
  switch (in.op) {
    case BAR: return named_barrier(w, in, mask);
    case BARWARP: {
      const u32 members = (u32)value_of(w, operand(in, 0), first_lane(mask));
      return members & w.alive & ~mask ? CONVERGE : OK;
    }
    case CLUSTER_ARRIVE: return cluster_arrive(w, in, mask);
    case CLUSTER_WAIT: return cluster_wait(w, mask);
    case SETMAXNREG:
      if (in.aux % 8 || in.aux < 24 || in.aux > 256) fail("setmaxnreg %lld", (long long)in.aux);
      return OK;
    case CLC_TRY: try_cancel(w, in, mask); return OK;
    case CLC_QUERY: query_cancel(w, in, mask); return OK;
    case FENCE:
    case NOP:
    case NANOSLEEP: return OK;
    case TRAP: fail("trap");
    case UNSUPPORTED:
      fail("instruction not modelled: %s",
           machine.program->text[&in - machine.program->instructions.data()].c_str());
  }
  fail("instruction class %d", in.op);
}
