// The emulated machine: one grid at a time; every warp is interpreted 32 lanes at once.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"

struct EmulatorError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
std::string written(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct CTA;
struct Cluster;
struct Machine;
struct Warp;

// ---- data races on shared and tensor memory, found by vector clocks (races.cpp).
// For each CTA of a cluster, the agents are its warps, then the TMA loads, the bulk stores and the
// wgmmas that each warp issued, then the tensor core.
using Clock = std::vector<u32>;
struct Actor {  // an accessing agent, and the clock of what happened before its access
    u32 agent = 0;
    Clock clock;
    int line = 0;
};
struct LastWrite {
    u16 agent = 0;
    u32 when = 0;
    int line = 0;
};
struct SyncClock {  // clocks of a barrier: arrivals of the open phase, and of all completed phases
    Clock gathering, released;
};

// A group of cp.async or cp.async.bulk operations of one lane.
struct CopyGroup {
    int reads = 0,
        writes = 0;  // operations that still have to read their source, write their target
    u32 clock = 0;   // race detection: the newest operation of the group
};
using CopyGroupPtr = std::shared_ptr<CopyGroup>;
struct CopyGroups {  // by lane: the committed groups, and the open group
    std::deque<CopyGroupPtr> committed[32];
    CopyGroupPtr open[32];
    const CopyGroupPtr& opened(int lane) {
        if (!open[lane]) open[lane] = std::make_shared<CopyGroup>();
        return open[lane];
    }
    void commit(int lane) {
        committed[lane].push_back(opened(lane));
        open[lane] = nullptr;
    }
};

// Result of an instruction. OK: it was executed. BLOCK: try again after the machine has changed.
// CONVERGE: try again when the other lanes of the warp have arrived.
enum Status : u8 { OK, BLOCK, CONVERGE };

using Deferred = std::function<void()>;

struct Warp {
    CTA* cta;
    int id;
    u32 alive = 0;  // lane masks
    u32 stalled = 0;
    bool converged = true;
    u32 warp_pc = 0;  // while converged
    u32 pc[32];       // while diverged
    bool blocked = false, timed_out = false;
    std::string waits_for;
    std::vector<u64> registers;
    std::vector<u8> local;
    CopyGroups bulk_stores, copies;
    std::vector<u64> copy_time;  // when the last cp.async of a lane lands
    std::vector<Deferred> open_wgmmas;
    std::deque<std::vector<Deferred>> wgmma_groups;
    std::vector<Deferred> tmem_stores;  // chaos: tcgen05.st not yet waited for
    std::vector<u64> fenced;            // by lane: time of its last fence.proxy.async
    int waiting_on_barrier = -1;
    u64 barrier_generation = 0, cluster_generation = 0;
    bool cluster_arrived = false;
    Clock clock;  // race detection: the warp's vector clock, and clocks of committed wgmma groups
    std::deque<u32> wgmma_clocks;
    u64* reg(i32 r) { return registers.data() + (size_t)r * 32; }
};

struct NamedBarrier {
    u32 expected = 0, arrived = 0;
    u64 generation = 0;
    SyncClock sync;
};

constexpr u32 TMEM_LANES = 128, TMEM_COLUMNS = 512, TMEM_UNIT = 32;  // columns of one allocation
constexpr u32 SMEM_BASE = 1024;  // the driver keeps the first KiB
constexpr u32 SMEM_LIMIT = 232448;

struct CTA {
    Cluster* cluster;
    u32 rank, at[3];  // x, y, z in the grid
    u64 linear;
    std::vector<u8> smem;
    // By 4 bytes: the last generic-proxy writer (thread + 1, in the top 16 bits) and when it wrote.
    std::vector<u64> proxy_shadow;
    std::vector<u32> tmem;
    u32 tmem_used = 0;  // bit mask of the allocated units
    bool tmem_permit_given_up = false;
    NamedBarrier barriers[16];
    std::vector<Warp> warps;
    int live_warps = 0, pending_reads = 0;
    bool exited = false;
    u64 tensor_core_time = 0;
    // Race detection.  Cells cover shared words, then tensor memory by column and quarter.
    std::vector<LastWrite> last_writes;
    std::vector<u32> last_reads;  // cell x agent
    std::map<u32, SyncClock> mbarrier_sync;
    Actor tensor_core;
    u32* tmem_cell(u32 lane, u32 column) { return &tmem[(size_t)lane * TMEM_COLUMNS + column]; }
};

struct Cluster {
    u32 at[3];
    std::vector<std::unique_ptr<CTA>> ctas;
    int live = 0;
    int in_flight = 0;  // asynchronous operations that still touch the cluster
    u32 arrived = 0;
    u64 generation = 0;
    SyncClock sync;
};

// The names of the fields are read by stats(): keep X in the order of the struct.
// clang-format off
#define STATISTICS(X) \
  X(ld_global_bytes) X(st_global_bytes) X(ld_global_sectors) X(st_global_sectors) \
  X(tma_load_bytes) X(tma_store_bytes) X(smem_wavefronts) X(smem_accesses) X(mma_flops) \
  X(mma_insns) X(ctas) X(atomics)
// clang-format on
struct Stats {
    u64 warp_insns = 0, thread_insns = 0;
    u64 op[NUM_OPCODES] = {};
#define X(name) u64 name = 0;
    STATISTICS(X)
#undef X
};

struct Event {
    u64 when, sequence;
    Warp* issuer;  // null if only global memory is touched
    const Instruction* instruction;
    Deferred run;
    bool operator<(const Event& o) const {  // std::priority_queue puts the largest first
        return when != o.when ? when > o.when : sequence > o.sequence;
    }
};

constexpr u64 SHARED_WINDOW = 1ull << 60, LOCAL_WINDOW = 2ull << 60;  // of generic addresses

struct GlobalAccess {
    u64 address = 0, bytes = 0;
    const char* what = "global access";
};

enum Mode : u32 { EAGER, CHAOS };
struct Config {
    u32 num_sms = 4, ctas_per_sm = 1;
    u64 seed = 0;
    u32 mode = EAGER;
    u64 max_insns = 4000000000ull, max_idle_insns = 50000000ull;
    u32 check_fences = 1, check_races = 0;
};

struct Machine {
    Config config;
    Stats stats;
    const Program* program = nullptr;
    u32 grid[3], block[3], cluster[3];
    u32 dynamic_smem = 0;
    bool explicit_cluster = false;
    u8* params = nullptr;  // 128-byte aligned copy of the kernel's parameters
    std::vector<std::unique_ptr<Cluster>> resident;
    u64 next_cluster = 0, total_clusters = 0;
    std::priority_queue<Event> events;
    u64 now = 0, sequence = 0;
    u64 epoch = 0;   // changes whenever something changes that a blocked warp may wait for
    u64 writes = 1;  // a clock of generic shared-memory writes and proxy fences
    std::mt19937_64 rng;
    std::map<u64, u64> ranges, module_ranges;  // start -> end of the memory a kernel may touch
    u64 busy_epoch = 0, busy_insns = 0;        // when the epoch last changed
    const Instruction* instruction = nullptr;  // the current instruction, and its warp
    Warp* warp = nullptr;
    bool in_event = false;
    GlobalAccess access;  // the newest one

    void launch();
    void start_clusters();
    bool visit(Warp& w);
    bool run_events(bool force);
    bool chaos() const { return config.mode == CHAOS; }
    bool chance(u64 one_in) { return chaos() && rng() % one_in == 0; }
    u32 cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
    int line() const { return instruction ? instruction->line : 0; }
    std::string report();
    // Lets an asynchronous operation happen later.  Operations that share a chain happen in order.
    void post(Deferred run, u64* chain = nullptr);
    // Fails unless a kernel may access the global memory; notes the access.
    void check_range(u64 address, u64 bytes, const char* what) {
        access = {address, bytes, what};
        if (address < FIRST_ADDRESS || !ranges.empty()) check_watched(address, bytes, what);
    }

  private:
    static constexpr u64 FIRST_ADDRESS = 65536;
    u64 last_low_ = 1, last_high_ = 0;
    bool within(const std::map<u64, u64>& ranges, u64 address, u64 bytes);
    void check_watched(u64 address, u64 bytes, const char* what);
    void retire_clusters();
    void check_progress();
    std::unique_ptr<Cluster> make_cluster(u64 index);
    void check_launch() const;

  public:
    void forget_last_range() { last_low_ = 1, last_high_ = 0; }
};
extern Machine machine;

// ---- operands (operands.cpp)
struct Source {  // a value per lane, or one for all (stride 0)
    const u64* values;
    int stride;
    u64 operator[](int lane) const { return values[lane * stride]; }
};
Source source(Warp& w, const Operand& o, u64* scratch);
inline const Operand& operand(const Instruction& in, int i) {
    return machine.program->operands[in.operands + i];
}
// Element i of a vector operand; the operand itself if it is not a vector.
inline const Operand& element(const Operand& o, u32 i) {
    return o.kind == K_VEC ? machine.program->operands[o.reg + i] : o;
}
std::string name_of(const Warp& w);
u64 value_of(Warp& w, const Operand& o, int lane);
u64 address_of(Warp& w, const Operand& o, int lane);
// Value and address of operand i.
inline u64 value_of(Warp& w, const Instruction& in, int i, int lane) {
    return value_of(w, operand(in, i), lane);
}
inline u64 address_of(Warp& w, const Instruction& in, int i, int lane) {
    return address_of(w, operand(in, i), lane);
}
inline u64* target(Warp& w, const Operand& o) { return o.kind == K_REG ? w.reg(o.reg) : nullptr; }
inline int first_lane(u32 mask) { return __builtin_ctz(mask); }
// For instructions that a whole warp executes: CONVERGE while lanes are elsewhere, an error if some
// lanes have left or are switched off.
Status need_full_warp(const Warp& w, u32 mask, const char* what);
#define FOR_LANES(lane, mask)                                        \
    for (u32 rest_##lane = (mask), lane = 0;                         \
         rest_##lane && ((lane = __builtin_ctz(rest_##lane)), true); \
         rest_##lane &= rest_##lane - 1)

// ---- instructions: INSTRUCTION(void, f, ADD, SUB) { ... } defines the function f(w, in, mask)
// that executes these opcodes; it returns nothing or a Status. EXECUTES(f, ADD) registers an
// existing function.
using Execute = Status (*)(Warp& w, const Instruction& in, u32 mask);
extern Execute executions[NUM_OPCODES];
template <auto f>
struct Executes {
    Executes(std::initializer_list<Opcode> opcodes) {
        for (Opcode op : opcodes)
            executions[op] = [](Warp& w, const Instruction& in, u32 mask) {
                if constexpr (std::is_same_v<decltype(f(w, in, mask)), Status>)
                    return f(w, in, mask);
                f(w, in, mask);
                return OK;
            };
    }
};
#define EXECUTES(f, ...) static const Executes<f> executes_##f{__VA_ARGS__};
#define INSTRUCTION(result, f, ...)                            \
    static result f(Warp& w, const Instruction& in, u32 mask); \
    EXECUTES(f, __VA_ARGS__)                                   \
    static result f(Warp& w, const Instruction& in, u32 mask)

void barrier_settle(CTA* c, NamedBarrier& b);
void cluster_barrier_settle(Cluster* cluster);
