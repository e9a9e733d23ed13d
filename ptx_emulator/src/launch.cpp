// Grid launches: clusters start and retire until all have run.
#include <algorithm>
#include <cstring>
#include <set>

#include "races.h"

Machine machine;

static void make_warps(CTA* c, u32 threads) {
    const Program& program = *machine.program;
    c->warps.resize((threads + 31) / 32);
    c->live_warps = (int)c->warps.size();
    for (u32 i = 0; i < c->warps.size(); i++) {
        Warp& w = c->warps[i];
        w.cta = c;
        w.id = i;
        const u32 lanes = std::min(32u, threads - i * 32);
        w.alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
        w.registers.assign((size_t)program.num_regs * 32 + 64, 0);
        w.local.assign((size_t)32 * program.local_bytes, 0xcd);
        w.copy_time.assign(32, 0);
        w.fenced.assign(32, 0);
    }
}

// Shared memory starts as garbage that is no valid mbarrier.
static void make_smem(CTA* c) {
    const size_t bytes = SMEM_BASE + machine.program->static_smem + machine.dynamic_smem;
    c->smem.assign((bytes + 15) / 16 * 16, 0xff);
    // The highest bit marks an initialised mbarrier, so all ones would look like one.
    for (size_t i = 7; i < c->smem.size(); i += 8) c->smem[i] = 0x7f;
    if (machine.chaos())
        for (size_t i = SMEM_BASE; i + 8 <= c->smem.size(); i += 8) {
            const u64 garbage = machine.rng() & ~(1ull << 63);
            memcpy(&c->smem[i], &garbage, 8);
        }
    if (machine.config.check_fences) c->proxy_shadow.assign(c->smem.size() / 4 + 1, 0);
}

std::unique_ptr<Cluster> Machine::make_cluster(u64 index) {
    auto made = std::make_unique<Cluster>();
    for (int i = 0; i < 3; index /= grid[i] / cluster[i], i++)
        made->at[i] = index % (grid[i] / cluster[i]);
    for (u32 rank = 0; rank < cluster_size(); rank++) {
        auto c = std::make_unique<CTA>();
        c->cluster = made.get();
        c->rank = rank;
        for (u32 i = 0, rest = rank; i < 3; rest /= cluster[i], i++)
            c->at[i] = made->at[i] * cluster[i] + rest % cluster[i];
        c->linear = c->at[0] + (u64)grid[0] * (c->at[1] + (u64)grid[1] * c->at[2]);
        make_smem(c.get());
        make_warps(c.get(), block[0] * block[1] * block[2]);
        made->ctas.push_back(std::move(c));
        stats.ctas++;
    }
    made->live = (int)cluster_size();
    races_setup(made.get());
    return made;
}

void Machine::start_clusters() {
    const u32 room = std::max(1u, config.num_sms * config.ctas_per_sm / cluster_size());
    while (resident.size() < room && next_cluster < total_clusters)
        resident.push_back(make_cluster(next_cluster++));
}

std::string Machine::report() {
    constexpr size_t LONGEST = 12000;
    std::string report;
    for (auto& cl : resident)
        for (auto& c : cl->ctas)
            for (auto& w : c->warps) {
                std::set<u32> pcs;
                FOR_LANES (lane, w.alive) pcs.insert(w.converged ? w.warp_pc : w.pc[lane]);
                for (u32 pc : pcs) {
                    report += "  " + name_of(w) + " at line " +
                              std::to_string(program->instructions[pc].line) + ": " +
                              program->text[pc].substr(0, 200);
                    if (w.blocked) report += "  -- waits for " + w.waits_for;
                    report += "\n";
                    if (report.size() > LONGEST) return report + "  ...\n";
                }
            }
    return report;
}

void Machine::check_launch() const {
    const u32 threads = block[0] * block[1] * block[2];
    if (!threads || threads > 1024) fail("block of %u threads", threads);
    if (program->static_smem + dynamic_smem > SMEM_LIMIT)
        fail("CTA asks for %u bytes of shared memory; the limit is %u",
             program->static_smem + dynamic_smem, SMEM_LIMIT);
    for (int i = 0; i < 3; i++)
        if (!cluster[i] || !grid[i] || grid[i] % cluster[i])
            fail("grid %ux%ux%u is empty or not divisible by the cluster %ux%ux%u", grid[0],
                 grid[1], grid[2], cluster[0], cluster[1], cluster[2]);
    if (cluster_size() > 16) fail("cluster of %u CTAs", cluster_size());
}

// Retires finished clusters and starts waiting ones.
void Machine::retire_clusters() {
    const size_t before = resident.size();
    resident.erase(
        std::remove_if(resident.begin(), resident.end(), [](auto& cl) { return cl->live == 0; }),
        resident.end());
    if (resident.size() != before) start_clusters();
}

// Warps that poll without blocking never stop: fail if nothing has changed for a long time.
void Machine::check_progress() {
    if (epoch != busy_epoch || !events.empty()) {
        busy_epoch = epoch;
        busy_insns = stats.warp_insns;
    } else if (stats.warp_insns - busy_insns > config.max_idle_insns) {
        fail("livelock: no warp has changed anything for %llu instructions\n%s",
             config.max_idle_insns, report().c_str());
    }
}

void Machine::launch() {
    check_launch();
    rng.seed(config.seed * 7919 + 17);
    total_clusters = (u64)(grid[0] / cluster[0]) * (grid[1] / cluster[1]) * (grid[2] / cluster[2]);
    next_cluster = 0;
    resident.clear();
    events = {};
    now = 0;
    writes = 1;
    forget_last_range();
    busy_epoch = epoch;
    busy_insns = 0;
    start_clusters();
    u64 epoch_of_timeout = ~0ull;
    std::vector<Warp*> order;
    while (!resident.empty()) {
        order.clear();
        for (auto& cl : resident)
            for (auto& c : cl->ctas)
                for (auto& w : c->warps)
                    if (w.alive) order.push_back(&w);
        if (chaos()) std::shuffle(order.begin(), order.end(), rng);
        bool progress = false;
        for (Warp* w : order) {
            progress |= visit(*w);
            run_events(false);
        }
        check_progress();
        if (!progress && !run_events(true) && !order.empty()) {
            // Nothing is due: let every mbarrier.try_wait time out, once for each state of the
            // machine.
            if (epoch_of_timeout == epoch)
                fail("deadlock: no warp can make progress\n%s", report().c_str());
            epoch_of_timeout = epoch;
            for (Warp* w : order) w->timed_out = true;
        }
        retire_clusters();
    }
    while (run_events(true)) {
    }
}
