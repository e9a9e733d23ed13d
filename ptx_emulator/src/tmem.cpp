// Tensor memory: allocation, tcgen05.ld and .st, tcgen05.cp.
#include <cstring>
#include <vector>

#include "memory.h"
#include "races.h"
#include "tensor.h"

constexpr u32 UNWRITTEN = 0x7fffffff;
static u32 column_of(u32 address) { return address & 0xffff; }
static u32 lane_of(u32 address) { return (address >> 16) & 0x7f; }
static u32 units_of(u32 column, u32 count) {  // as in CTA::tmem_used
    return (2u << (column + count - 1) / TMEM_UNIT) - (1u << column / TMEM_UNIT);
}

CTA* pair_peer(CTA* c, const char* what) { return cta_at(c->cluster, c->rank ^ 1, what); }

// Operands: shared-memory address that receives the tensor-memory address, columns.
INSTRUCTION(Status, allocate, TC_ALLOC) {
    if (Status s = need_full_warp(w, mask, "tcgen05.alloc")) return s;
    CTA* c = w.cta;
    const u32 columns = (u32)value_of(w, in, 1, 0);
    if (columns < TMEM_UNIT || columns > TMEM_COLUMNS || (columns & (columns - 1)))
        fail("tcgen05.alloc of %u columns: must be a power of two in 32..512", columns);
    if (c->tmem_permit_given_up) fail("tcgen05.alloc after relinquish_alloc_permit");
    if (c->tmem.empty()) c->tmem.assign(TMEM_LANES * TMEM_COLUMNS, UNWRITTEN);
    for (u32 address = 0; address < TMEM_COLUMNS; address += columns) {
        const u32 units = units_of(address, columns);
        if (c->tmem_used & units) continue;
        c->tmem_used |= units;
        const u32 to = shared_address(w, in, 0, 0);
        memcpy(shared_pointer(w, to, 4), &address, 4);
        note_generic_write(w, 0, to, 4);
        machine.epoch++;
        return OK;
    }
    w.waits_for = "tcgen05.alloc";
    return BLOCK;
}

INSTRUCTION(Status, deallocate, TC_DEALLOC) {
    if (Status s = need_full_warp(w, mask, "tcgen05.dealloc")) return s;
    CTA* c = w.cta;
    const u32 first = column_of((u32)value_of(w, in, 0, 0));
    const u32 columns = (u32)value_of(w, in, 1, 0);
    if (c->tmem.empty() || columns < TMEM_UNIT || columns % TMEM_UNIT || first % TMEM_UNIT ||
        first + columns > TMEM_COLUMNS)
        fail("tcgen05.dealloc of column %u, %u columns, which was never allocated", first, columns);
    const u32 units = units_of(first, columns);
    if (units & ~c->tmem_used)
        fail("tcgen05.dealloc of column %u, %u columns: free tensor memory", first, columns);
    c->tmem_used &= ~units;
    machine.epoch++;
    return OK;
}

void need_columns(CTA* c, u32 column, u32 count, const char* what) {
    if (column + count > TMEM_COLUMNS || units_of(column, count) & ~c->tmem_used)
        fail("%s touches tensor memory columns %u..%u, outside any allocation", what, column,
             column + count - 1);
}

namespace {
enum Shape { S32x32b, S16x64b, S16x128b, S16x256b };
struct Cell {
    u32 lane, column;
};
// Lane and column of register i of a lane, relative to the first lane and column of the access.
Cell cell_of(Shape shape, u32 i, u32 lane) {
    switch (shape) {
        case S32x32b:
            return {lane, i};
        case S16x128b:
            return {lane / 4 + (i & 1) * 8, (i / 2) * 4 + lane % 4};
        default:
            return {lane / 4 + ((i >> 1) & 1) * 8,
                    (i / 4) * 8 + (lane % 4) * 2 + (i & 1)};  // 16x256b
    }
}
u32 columns_of(Shape shape, u32 repetitions) {
    if (shape == S16x64b || shape > S16x256b) fail("tcgen05.ld/st shape %d is not modelled", shape);
    return repetitions * (shape == S32x32b ? 1 : shape == S16x128b ? 4 : 8);
}
struct Access {
    Shape shape;
    u32 lane, column, registers;
    u32& cell(CTA* c, u32 i, u32 thread) const {
        const Cell at = cell_of(shape, i, thread);
        return *c->tmem_cell(lane + at.lane, column + at.column);
    }
};

void load(Warp& w, const Access& a, const Operand& to) {
    CTA* c = w.cta;
    for (u32 i = 0; i < a.registers; i++)
        if (u64* d = target(w, element(to, i)))
            for (int t = 0; t < 32; t++) d[t] = a.cell(c, i, t);
}
// In chaos mode the values reach tensor memory at tcgen05.wait::st, to expose missing waits.
// Loads have no such delay: kernels may use a register without tcgen05.wait::ld, as NVIDIA's do.
void store(Warp& w, const Access& a, const Operand& from) {
    CTA* c = w.cta;
    for (u32 i = 0; i < a.registers; i++) {
        std::vector<u32> values(32);
        for (int t = 0; t < 32; t++) values[t] = (u32)value_of(w, element(from, i), t);
        Deferred write = [=] {
            for (int t = 0; t < 32; t++) a.cell(c, i, t) = values[t];
            machine.epoch++;
        };
        if (machine.chaos())
            w.tmem_stores.push_back(write);
        else
            write();
    }
}
}  // namespace

// sub: the shape; aux: repetitions.
INSTRUCTION(Status, load_store, TC_LD, TC_ST) {
    const bool is_store = in.op == TC_ST;
    const char* what = is_store ? "tcgen05.st" : "tcgen05.ld";
    if (Status s = need_full_warp(w, mask, what)) return s;
    const Operand& where = operand(in, is_store ? 0 : 1);
    const Operand& values = operand(in, is_store ? 1 : 0);
    const u32 address = (u32)address_of(w, where, 0), quarter = w.id % 4 * 32;
    for (int lane = 1; lane < 32; lane++)
        if ((u32)address_of(w, where, lane) != address)
            fail("%s: the tensor memory address differs between lanes", what);
    Access a;
    a.shape = (Shape)in.sub;
    a.column = column_of(address);
    a.lane = lane_of(address);
    a.registers = values.kind == K_VEC ? values.count : 1;
    if (a.lane < 32) a.lane += quarter;  // the low lanes name the warp's own quarter
    if (a.lane < quarter || a.lane >= quarter + 32)
        fail("%s by warp %d at tensor memory lane %u: the warp may only reach lanes %u..%u", what,
             w.id, a.lane, quarter, quarter + 31);
    if (a.lane % (a.shape == S32x32b ? 32 : 16))
        fail("%s: shape %d cannot start at lane %u", what, in.sub, a.lane);
    const u32 columns = columns_of(a.shape, (u32)in.aux);
    need_columns(w.cta, a.column, columns, what);
    if (races_on) race_tmem(w.cta, a.column, columns, w.id % 4, is_store, warp_actor(w));
    if (is_store)
        store(w, a, values);
    else
        load(w, a, values);
    return OK;
}

INSTRUCTION(void, wait, TC_WAIT) {
    if (in.flags & F_LOAD) return;
    for (auto& write : w.tmem_stores) write();
    w.tmem_stores.clear();
}

namespace {
enum CopyShape { C32x128b, C128x256b, C128x128b, C4x256b, C64x128b_02_13, C64x128b_01_23 };

// The lanes that receive row r of the source.
std::vector<u32> lanes_of(CopyShape shape, u32 r) {
    switch (shape) {
        case C32x128b:
            return {r, r + 32, r + 64, r + 96};
        case C64x128b_02_13:
            return {r, r + 64};
        case C64x128b_01_23:
            return {r % 32 + (r / 32) * 64, r % 32 + (r / 32) * 64 + 32};
        default:
            return {r};
    }
}
void copy(CTA* c, u32 address, u64 descriptor, CopyShape shape, u64 fenced) {
    const MatrixDescriptor d = decode_descriptor(descriptor, "tcgen05.cp");
    const u32 rows = shape == C32x128b         ? 32
                     : shape == C4x256b        ? 4
                     : shape >= C64x128b_02_13 ? 64
                                               : 128;
    const u32 columns = shape == C128x256b || shape == C4x256b ? 8 : 4;
    const u32 column = column_of(address), lane = lane_of(address);
    need_columns(c, column, columns, "tcgen05.cp");
    if (acting) race_tmem(c, column, columns, -1, true, *acting);
    for (u32 r = 0; r < rows; r++)
        for (u32 g = 0; g < columns / 4; g++) {
            const u32 from = k_major_address(d, r, g);
            need_in_smem(c, from, 16, "tcgen05.cp");
            check_async_read(c, from, 16, fenced, "tcgen05.cp");
            for (u32 to : lanes_of(shape, r))
                memcpy(c->tmem_cell((lane + to) % TMEM_LANES, column + g * 4),
                       c->smem.data() + from, 16);
        }
}
}  // namespace

INSTRUCTION(void, give_up_permit, TC_RELINQUISH) { w.cta->tmem_permit_given_up = true; }

// Operands: tensor memory address, descriptor.  With cta_group::2 each CTA of the pair copies from
// its own shared memory.
INSTRUCTION(void, start_copy, TC_CP) {
    const bool pair = in.flags & F_CTA2;
    const auto shape = (CopyShape)in.sub;
    CTA* c = w.cta;
    FOR_LANES (lane, mask) {
        const u32 address = (u32)address_of(w, in, 0, lane);
        const u64 descriptor = value_of(w, in, 1, lane), fenced = w.fenced[lane];
        const Actor me = issue_tensor(w);
        machine.post(
            [=] {
                ActingScope scope(me);
                copy(c, address, descriptor, shape, fenced);
                if (pair)
                    copy(pair_peer(c, "tcgen05.cp.cta_group::2"), address, descriptor, shape,
                         fenced);
            },
            &c->tensor_core_time);
    }
}
