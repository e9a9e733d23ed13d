// ld, st, ldmatrix, stmatrix, and the counts of sectors and bank conflicts.
#include <algorithm>
#include <cstring>

#include "memory.h"
#include "races.h"

// Number of shared-memory accesses for these words: a bank serves one word at a time.
template <class AddWords>
static u32 wavefronts(AddWords add_words) {
    u32 words[128], count = 0, per_bank[32] = {}, most = 0;
    add_words([&](u32 word) { words[count++] = word; });
    std::sort(words, words + count);
    count = std::unique(words, words + count) - words;
    for (u32 i = 0; i < count; i++) most = std::max(most, ++per_bank[words[i] & 31]);
    return most;
}

static void count_shared(const u64* address, u32 mask, u32 bytes) {
    // Lanes are served together in groups that move at most 128 bytes.
    const u32 group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    for (u32 first = 0; first < 32; first += group) {
        machine.stats.smem_accesses++;
        machine.stats.smem_wavefronts += wavefronts([&](auto add) {
            for (u32 lane = first; lane < first + group; lane++)
                if (mask >> lane & 1)
                    for (u32 b = 0; b < std::min(std::max(bytes, 4u), 16u); b += 4)
                        add((u32)(address[lane] + b) >> 2);
        });
    }
}

static void count_global(const u64* address, u32 mask, u32 bytes, bool store) {
    u64 sectors[64], count = 0, total = 0;
    FOR_LANES (lane, mask) {
        if (address[lane] >= SHARED_WINDOW) continue;
        for (u64 s = address[lane] >> 5; s <= (address[lane] + bytes - 1) >> 5; s++)
            sectors[count++] = s;
        total += bytes;
    }
    std::sort(sectors, sectors + count);
    const u64 distinct = std::unique(sectors, sectors + count) - sectors;
    Stats& s = machine.stats;
    (store ? s.st_global_sectors : s.ld_global_sectors) += distinct;
    (store ? s.st_global_bytes : s.ld_global_bytes) += total;
}

// Signed values are extended to the register, which has 32 bits, or 64 with F_WIDE.
static u64 extend_loaded(const Instruction& in, u64 v) {
    if (!is_signed(in.type)) return v;
    const i64 extended = sign_extend(v, type_bits(in.type));
    return (in.flags & F_WIDE) || in.type == T_S64 ? (u64)extended : (u32)extended;
}

static void load_element(Warp& w, const Instruction& in, const Operand& to, const u64* address,
                         u64 skip, u32 bytes, u32 mask) {
    u64* d = target(w, to);
    FOR_LANES (lane, mask) {
        const u64 a = address[lane] + skip;
        const u8* p = resolve(w, in.space, a, bytes, lane, false);
        if (!d) continue;
        if (races_on && (in.space == SHARED || is_shared_window(a)))
            race_shared(w, shared_address(a), bytes, false);
        u64 v = 0;
        memcpy(&v, p, bytes);
        d[lane] = extend_loaded(in, v);
    }
}
static void store_element(Warp& w, const Instruction& in, const Operand& from, const u64* address,
                          u64 skip, u32 bytes, u32 mask) {
    u64 scratch[32];
    const Source values = source(w, from, scratch);
    FOR_LANES (lane, mask) {
        const u64 a = address[lane] + skip;
        u8* p = resolve(w, in.space, a, bytes, lane, true);
        const u64 v = values[lane];
        memcpy(p, &v, bytes);
        if (in.space == SHARED || is_shared_window(a))
            note_generic_write(w, lane, shared_address(a), bytes);
    }
}

INSTRUCTION(void, load_store, LD, ST) {
    const bool store = in.op == ST;
    const u32 bytes = type_bytes(in.type), count = std::max<u32>(in.vec, 1), total = bytes * count;
    const Operand& where = operand(in, store ? 0 : 1);
    const Operand& values = operand(in, store ? 1 : 0);
    u64 address[32];
    FOR_LANES (lane, mask) address[lane] = address_of(w, where, lane);
    if (in.space == SHARED)
        count_shared(address, mask, total);
    else if (in.space != PARAM && in.space != LOCAL)
        count_global(address, mask, total, store);
    if (in.space != PARAM && in.space != LOCAL)
        FOR_LANES (lane, mask)
            if (address[lane] % total && address[lane] < LOCAL_WINDOW)
                fail("misaligned %u-byte %s at %#llx", total, store ? "store" : "load",
                     address[lane]);
    for (u32 i = 0; i < count; i++) {
        if (store)
            store_element(w, in, element(values, i), address, (u64)i * bytes, bytes, mask);
        else
            load_element(w, in, element(values, i), address, (u64)i * bytes, bytes, mask);
    }
    if (store) machine.epoch++;
}

// ---- ldmatrix, stmatrix: lane 8 i + r holds the address of row r of matrix i.
static void store_bytes_transposed(Warp& w, const u64* registers, const u32* rows) {
    // stmatrix.m16n8.trans.b8: a 16x8 byte tile stored as 8 rows of 16
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 4; e++) {
            const u32 a = rows[(lane % 4) * 2 + (e & 1)] + lane / 4 + 8 * (e >> 1);
            *shared_pointer(w, a, 1) = (u8)(registers[lane] >> (8 * e));
            note_generic_write(w, lane, a, 1);
        }
}
static void move_matrix(Warp& w, const Instruction& in, u64* registers, const u32* rows) {
    const bool transposed = in.flags & F_TRANS;
    for (int lane = 0; lane < 32; lane++)
        for (int half = 0; half < 2; half++) {
            const int pair = (lane % 4) * 2 + half;
            const u32 a = rows[transposed ? pair : lane / 4] + 2 * (transposed ? lane / 4 : pair);
            u8* p = shared_pointer(w, a, 2);
            if (in.op == STMATRIX) {
                const u16 v = (u16)(registers[lane] >> (16 * half));
                memcpy(p, &v, 2);
                note_generic_write(w, lane, a, 2);
            } else {
                u16 v;
                race_shared(w, a, 2, false);
                memcpy(&v, p, 2);
                registers[lane] = half ? (registers[lane] & 0xffff) | (u32)v << 16 : v;
            }
        }
}

INSTRUCTION(Status, matrix_load_store, LDMATRIX, STMATRIX) {
    const bool store = in.op == STMATRIX;
    if (Status s = need_full_warp(w, mask, store ? "stmatrix" : "ldmatrix")) return s;
    u32 address[32];
    for (int lane = 0; lane < 32; lane++)
        address[lane] = shared_address(w, in, store ? 0 : 1, lane);
    const Operand& values = operand(in, store ? 1 : 0);
    for (int i = 0; i < in.vec; i++) {
        const u32* rows = address + 8 * i;
        for (int r = 0; r < 8; r++)
            if (rows[r] % 16)
                fail("%s row address %#x is not 16-byte aligned", store ? "stmatrix" : "ldmatrix",
                     rows[r]);
        machine.stats.smem_accesses++;
        machine.stats.smem_wavefronts += wavefronts([&](auto add) {
            for (int r = 0; r < 8; r++)
                for (int word = 0; word < 4; word++) add((rows[r] >> 2) + word);
        });
        u64* registers = w.reg(element(values, i).reg);
        if (in.type == T_B8)
            store_bytes_transposed(w, registers, rows);
        else
            move_matrix(w, in, registers, rows);
    }
    if (store) machine.epoch++;
    return OK;
}
