// Exchanges between the lanes of a warp.
#include "alu.h"
#include "numbers.h"

// True if all named lanes that are alive have arrived.
static bool gathered(const Warp& w, u32 members, u32 mask) { return !(members & w.alive & ~mask); }

static void shuffle(Warp& w, const Instruction& in, u32 mask) {
    u64 scratch[3][32], a[32];
    const Source values = source(w, operand(in, 2), scratch[0]);
    const Source b = source(w, operand(in, 3), scratch[1]);
    const Source c = source(w, operand(in, 4), scratch[2]);
    for (int lane = 0; lane < 32; lane++) a[lane] = values[lane];  // d may be a
    u64* d = target(w, operand(in, 0));
    u64* p = target(w, operand(in, 1));
    FOR_LANES (lane, mask) {
        const u32 segment = ((u32)c[lane] >> 8) & 31, clamp = c[lane] & 31, amount = b[lane] & 31;
        const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
        int from;
        bool inside;
        switch (in.sub) {
            case 0:
                from = first | (amount & ~segment), inside = from <= last;
                break;  // idx
            case 1:
                from = (int)lane - (int)amount, inside = from >= last;
                break;  // up
            case 2:
                from = lane + amount, inside = from <= last;
                break;  // down
            default:
                from = lane ^ amount, inside = from <= last;  // bfly
        }
        if (d) d[lane] = (u32)a[inside ? from : lane];
        if (p) p[lane] = inside;
    }
}

static void vote(Warp& w, const Instruction& in, u32 mask, u32 active) {
    u64 scratch[32];
    const Source a = source(w, operand(in, 1), scratch);
    const bool negated = operand(in, 1).negated;
    u32 ballot = 0;
    FOR_LANES (lane, active) ballot |= (u32)((a[lane] & 1) ^ negated) << lane;
    const bool all = ballot == active, any = ballot != 0;
    const u32 r = in.sub == 0 ? all : in.sub == 1 ? any : in.sub == 2 ? all || !any : ballot;
    u64* d = w.reg(operand(in, 0).reg);
    FOR_LANES (lane, mask) d[lane] = r;
}

static void match(Warp& w, const Instruction& in, u32 mask, u32 active) {
    const bool all = in.sub;
    u64 scratch[32], a[32];
    const Source values = source(w, operand(in, 2), scratch);
    for (int lane = 0; lane < 32; lane++) a[lane] = zero_extend(values[lane], type_bits(in.type));
    u64* d = target(w, operand(in, 0));
    u64* p = target(w, operand(in, 1));
    FOR_LANES (lane, mask) {
        u32 same = 0;
        FOR_LANES (other, active)
            if (a[other] == a[lane]) same |= 1u << other;
        if (all && p) p[lane] = same == active;
        if (d) d[lane] = !all || same == active ? same : 0;
    }
}

static void elect(Warp& w, const Instruction& in, u32 mask, u32 active) {
    const u32 leader = first_lane(active);
    u64* d = target(w, operand(in, 0));
    u64* p = target(w, operand(in, 1));
    FOR_LANES (lane, mask) {
        if (d) d[lane] = leader;
        if (p) p[lane] = lane == leader;
    }
}

static u32 reduce(const Instruction& in, u32 a, u32 b) {
    if (in.type != T_F32) return integer_reduced(in.sub, in.type, a, b);
    const float r = float_minmax(in, bits_float(a), bits_float(b), in.sub == ATOM_MIN);
    return r != r ? 0x7fffffff : float_bits(r);
}
static void redux(Warp& w, const Instruction& in, u32 mask, u32 active) {
    u64 scratch[32];
    const Source a = source(w, operand(in, 1), scratch);
    u32 r = 0;
    bool first = true;
    FOR_LANES (lane, active) {
        const u32 v = (u32)a[lane] & ((in.flags & F_ABS) ? 0x7fffffff : ~0u);
        r = first ? v : reduce(in, r, v);
        first = false;
    }
    u64* d = w.reg(operand(in, 0).reg);
    FOR_LANES (lane, mask) d[lane] = r;
}

INSTRUCTION(void, active_mask, ACTIVEMASK) {
    each_lane(w, in, mask, 0, [=](u64, u64, u64, u64, int) -> u64 { return mask; });
}

INSTRUCTION(Status, exchange, SHFL, VOTE, MATCH, ELECT, REDUX) {
    const int members_operand = in.op == SHFL ? 5 : in.op == MATCH ? 3 : 2;
    const u32 members = value_of(w, in, members_operand, first_lane(mask));
    if (!gathered(w, members, mask)) return CONVERGE;
    const u32 active = mask & members;
    if (!active) fail("no executing lane is in the member mask %#x", members);
    switch (in.op) {
        case SHFL:
            shuffle(w, in, mask);
            break;
        case VOTE:
            vote(w, in, mask, active);
            break;
        case MATCH:
            match(w, in, mask, active);
            break;
        case ELECT:
            elect(w, in, mask, active);
            break;
        case REDUX:
            redux(w, in, mask, active);
            break;
    }
    return OK;
}
