// Data races by happens-before: every access is compared with the last write, and every write with
// the last reads, of the same word.  Order comes from barriers, mbarriers and completed
// asynchronous operations, not from the schedule.
#include "races.h"

#include <algorithm>

#include "memory.h"

bool races_on = false;
const Actor* acting = nullptr;
static u32 num_agents = 0;
constexpr u32 MAX_AGENTS = 512;  // cells hold a clock for every agent: 120 MB a CTA at this size
constexpr u32 QUARTERS = 4;      // of tensor memory: the lanes that one warp can reach

static u32 agents_per_cta(const CTA* c) { return 4 * (u32)c->warps.size() + 1; }

void race_join(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

u32 agent_of(const Warp& w, AgentKind kind) {
    return w.cta->rank * agents_per_cta(w.cta) + (u32)kind * (u32)w.cta->warps.size() + w.id;
}

void races_setup(Cluster* cluster) {
    races_on = machine.config.check_races;
    if (!races_on) return;
    const u32 per_cta = agents_per_cta(cluster->ctas[0].get());
    num_agents = per_cta * (u32)cluster->ctas.size();
    if (num_agents > MAX_AGENTS)
        fail("races: a cluster with %zu warps is too large to follow",
             cluster->ctas.size() * cluster->ctas[0]->warps.size());
    for (auto& c : cluster->ctas) {
        const size_t cells = c->smem.size() / 4 + TMEM_COLUMNS * QUARTERS;
        c->last_writes.assign(cells, LastWrite());
        c->last_reads.assign(cells * num_agents, 0);
        c->tensor_core.agent = c->rank * per_cta + per_cta - 1;
        c->tensor_core.clock.assign(num_agents, 0);
        for (auto& w : c->warps) {
            w.clock.assign(num_agents, 0);
            w.clock[agent_of(w, WARP_AGENT)] = 1;
        }
    }
}

Actor warp_actor(const Warp& w) { return {agent_of(w, WARP_AGENT), w.clock, machine.line()}; }

// The clocks of asynchronous agents themselves live in the issuing CTA's tensor_core.clock.
static Actor issue(Warp& w, u32 agent) {
    if (!races_on) return {};
    Actor a{agent, w.clock, machine.line()};
    a.clock[agent] = ++w.cta->tensor_core.clock[agent];
    // Later accesses of the warp are not ordered before the operation.
    w.clock[agent_of(w, WARP_AGENT)]++;
    return a;
}
Actor issue_async(Warp& w, AgentKind kind) { return issue(w, agent_of(w, kind)); }
Actor issue_tensor(Warp& w) { return issue(w, w.cta->tensor_core.agent); }

static std::string name_of(const CTA* c, u32 agent, int line) {
    static const char* const KINDS[] = {"warp", "a TMA load of warp", "a bulk store of warp",
                                        "a wgmma of warp"};
    const u32 warps = (u32)c->warps.size(), rank = agent / agents_per_cta(c),
              index = agent % agents_per_cta(c);
    std::string name = index < 4 * warps
                           ? KINDS[index / warps] + (" " + std::to_string(index % warps))
                           : "the tensor core";
    name += " of CTA rank " + std::to_string(rank);
    if (line) name += " (PTX line " + std::to_string(line) + ")";
    return name;
}

// A write to a part of a word is not compared with the last write of the word.
static void touch(CTA* c, size_t cell, bool write, bool part, const Actor& by, const char* where,
                  u32 at) {
    LastWrite& last = c->last_writes[cell];
    u32* reads = &c->last_reads[cell * num_agents];
    const u32* known = by.clock.data();
    if (last.when && last.agent != by.agent && last.when > known[last.agent] && !(part && write))
        fail("data race on %s %u: %s by %s is not ordered after the write by %s", where, at,
             write ? "write" : "read", name_of(c, by.agent, by.line).c_str(),
             name_of(c, last.agent, last.line).c_str());
    if (!write) {
        reads[by.agent] = known[by.agent];
        return;
    }
    for (u32 i = 0; i < num_agents; i++)
        if (reads[i] > known[i] && i != by.agent)
            fail("data race on %s %u: write by %s is not ordered after a read by %s", where, at,
                 name_of(c, by.agent, by.line).c_str(), name_of(c, i, 0).c_str());
    last = {(u16)by.agent, known[by.agent], by.line};
    std::fill(reads, reads + num_agents, 0u);
}

void race_shared(CTA* c, u32 offset, u32 bytes, bool write, const Actor& by) {
    if (!races_on || by.clock.empty()) return;
    for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; i++)
        touch(c, i, write, bytes < 4, by, "shared offset", i * 4);
}

void race_shared(Warp& w, u32 address, u32 bytes, bool write) {
    if (!races_on) return;
    CTA* c;
    shared_pointer(w, address, bytes, &c);
    // Moves the warp's clock into an actor and back, instead of copying it.
    struct Lent {
        Warp& w;
        Actor actor;
        explicit Lent(Warp& warp) : w(warp) {
            actor.agent = agent_of(w, WARP_AGENT);
            actor.line = machine.line();
            actor.clock.swap(w.clock);
        }
        ~Lent() { actor.clock.swap(w.clock); }
    } lent(w);
    race_shared(c, offset_of(address), bytes, write, lent.actor);
}

void race_tmem(CTA* c, u32 column, u32 columns, int quarter, bool write, const Actor& by) {
    if (!races_on || by.clock.empty()) return;
    const size_t base = c->smem.size() / 4;
    for (u32 i = column; i < column + columns && i < TMEM_COLUMNS; i++)
        for (int q = 0; q < (int)QUARTERS; q++)
            if (quarter < 0 || quarter == q)
                touch(c, base + i * QUARTERS + q, write, false, by, "tensor memory column", i);
}

void race_release(Warp& w, SyncClock& s) {
    if (!races_on) return;
    race_join(s.gathering, w.clock);
    w.clock[agent_of(w, WARP_AGENT)]++;
}
void race_acquire(Warp& w, const SyncClock& s) {
    if (races_on) race_join(w.clock, s.released);
}
void race_complete(SyncClock& s) {
    if (!races_on) return;
    race_join(s.released, s.gathering);
    s.gathering.clear();
}
