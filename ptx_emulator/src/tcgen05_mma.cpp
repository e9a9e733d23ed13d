// tcgen05.mma: one or two CTAs, with or without block scales; and tcgen05.commit.
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "races.h"
#include "tensor.h"

namespace {
enum Kind { F16_KIND, TF32_KIND, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4 };

struct MmaArguments {
    Kind kind;
    u32 d;  // tensor memory address
    u64 a;  // descriptor, or tensor memory address
    u64 b;  // descriptor
    u32 scale_a, scale_b;
    bool a_in_tmem, scaled, pair, accumulate;
    u32 scale_block;
    u64 fenced;
    u32 descriptor;  // instruction descriptor

    u32 bits(int shift, int count) const { return (descriptor >> shift) & ((1u << count) - 1); }
    u32 m() const { return bits(24, 5) << 4; }
    u32 n() const { return bits(17, 6) << 3; }
    u32 k() const { return kind == F16_KIND ? 16 : kind == TF32_KIND ? 8 : kind >= MXF4 ? 64 : 32; }
    u32 rows() const { return m() / (pair ? 2 : 1); }  // in each CTA
    bool fp16_accumulators() const { return !scaled && bits(4, 2) == 0; }
};

u8 operand_type(Kind kind, u32 format) {
    switch (kind) {
        case F16_KIND:
            if (format == 0) return T_F16;
            if (format == 1) return T_BF16;
            break;
        case TF32_KIND:
            if (format == 2) return T_TF32;
            break;
        case F8F6F4:
        case MXF8F6F4:
            if (format == 0) return T_E4M3;
            if (format == 1) return T_E5M2;
            if (format <= 5) fail("tcgen05.mma: unpacked 4- and 6-bit operands are not modelled");
            break;
        case MXF4:
        case MXF4NVF4:
            if (format == 1) return T_E2M1;
            break;
        default:
            fail("tcgen05.mma kind %d is not modelled", kind);
    }
    fail("tcgen05.mma: operand format %u of kind %d", format, kind);
}

void check(const CTA* lead, const MmaArguments& m) {
    const u32 n = m.n(), rows = m.rows();
    if (m.bits(2, 1)) fail("tcgen05.mma: sparse operands are not modelled");
    if (m.bits(13, 2)) fail("tcgen05.mma: negated operands are not modelled");
    if (m.bits(31, 1) && m.kind >= MXF4) fail("tcgen05.mma: K = 96 is not modelled");
    if (!m.scaled && m.bits(4, 2) > 1) fail("tcgen05.mma: integer accumulators are not modelled");
    if (m.fp16_accumulators() && m.kind == TF32_KIND)
        fail("tcgen05.mma kind::tf32 needs FP32 accumulators");
    if (rows != 128 && !(rows == 64 && !m.pair))
        fail("tcgen05.mma: M = %u with cta_group::%d is not modelled", m.m(), m.pair ? 2 : 1);
    if (n < 8 || n > 256 || (m.pair && n % 16)) fail("tcgen05.mma: N = %u", n);
    if (m.pair && (lead->rank & 1))
        fail("tcgen05.mma.cta_group::2 must be issued by the even CTA of the pair");
}

std::vector<float> load_a(CTA* c, const MmaArguments& m, u8 type) {
    const u32 rows = m.rows(), depth = m.k();
    std::vector<float> a((size_t)rows * depth);
    if (!m.a_in_tmem) {
        load_tile(c, m.a, m.bits(15, 1), type, rows, depth, a.data(), m.fenced, "tcgen05.mma A");
        return a;
    }
    const u32 column = (u32)m.a & 0xffff, bits = type_bits(type), per_cell = 32 / bits;
    if (rows != 128) fail("tcgen05.mma: A in tensor memory with M = %u is not modelled", rows);
    need_columns(c, column, depth / per_cell, "tcgen05.mma A");
    if (acting) race_tmem(c, column, depth / per_cell, -1, false, *acting);
    for (u32 r = 0; r < rows; r++)
        for (u32 k = 0; k < depth; k++) {
            const u32 word = *c->tmem_cell(r, column + k / per_cell);
            const u32 x = (u32)zero_extend(word >> (k % per_cell * bits), bits);
            a[r * depth + k] = decode_element(type, (const u8*)&x, 0);
        }
    return a;
}

// The scales of one operand: a 32-lane column holds those of 32 rows, one byte each.
std::vector<Scale> load_scales(CTA* c, const MmaArguments& m, u32 address, u32 rows, u32 id,
                               const char* what) {
    const u32 column = address & 0xffff, columns = (rows + 31) / 32;
    const u32 per_row = m.k() / m.scale_block, first = per_row == 4 ? 0 : id;
    const u8 type = m.bits(23, 1) ? T_UE8M0 : T_E4M3;
    need_columns(c, column, columns, what);
    if (acting) race_tmem(c, column, columns, -1, false, *acting);
    std::vector<Scale> scales;
    for (u32 r = 0; r < rows; r++) {
        const u32 word = *c->tmem_cell(r % 32, column + r / 32);
        for (u32 k = 0; k < per_row; k++)
            scales.push_back(decode_scale(type, (word >> (8 * (first + k))) & 0xff));
    }
    return scales;
}
std::vector<i32> scale_exponents(const std::vector<Scale>& scales) {
    std::vector<i32> e;
    for (const Scale& s : scales) e.push_back(std::isnan(s.significand) ? 4096 : s.exponent);
    return e;
}

void multiply_scaled(CTA* c, const MmaArguments& m, const Operands& ops, double* acc) {
    const auto scale_a = load_scales(c, m, m.scale_a, ops.m, m.bits(29, 2), "tcgen05.mma scale A");
    const auto scale_b = load_scales(c, m, m.scale_b, ops.n, m.bits(4, 2), "tcgen05.mma scale B");
    if (m.kind >= MXF4)
        multiply_add_fp4(ops, scale_a.data(), scale_b.data(), m.scale_block, acc);
    else
        multiply_add(ops, acc, BLACKWELL, scale_exponents(scale_a).data(),
                     scale_exponents(scale_b).data());
}

// The work of one CTA: its rows of A and D, all of B.
void run_in(CTA* c, const MmaArguments& m, const std::vector<float>& b, u8 type_a, u8 type_b) {
    const u32 rows = m.rows(), n = m.n(), column = m.d & 0xffff;
    const bool fp16 = m.fp16_accumulators();
    need_columns(c, column, n, "tcgen05.mma D");
    if (acting) race_tmem(c, column, n, -1, true, *acting);
    const std::vector<float> a = load_a(c, m, type_a);
    std::vector<double> acc((size_t)rows * n);
    auto each_output = [&](auto f) {
        for (u32 r = 0; r < rows; r++) {
            const u32 lane = rows == 128 ? r : (r / 16) * 32 + r % 16;
            for (u32 j = 0; j < n; j++) f(acc[(size_t)r * n + j], *c->tmem_cell(lane, column + j));
        }
    };
    // FP16 accumulators sit in the low half of each cell.
    if (m.accumulate)
        each_output(
            [&](double& sum, u32& d) { sum = fp16 ? half_to_float((u16)d) : bits_float(d); });
    const Operands ops{a.data(), b.data(), type_a, type_b, rows, n, m.k()};
    if (m.scaled)
        multiply_scaled(c, m, ops, acc.data());
    else
        multiply_add(ops, acc.data(), fp16 ? with_fp16(BLACKWELL) : BLACKWELL);
    each_output([&](double& sum, u32& d) {
        if (fp16)
            d = (d & 0xffff0000) | float_to_half((float)sum);
        else
            d = std::isnan(sum) ? 0x7fffffff : float_bits((float)sum);
    });
}

void run(CTA* lead, const MmaArguments& m) {
    check(lead, m);
    const u8 type_a = operand_type(m.kind, m.bits(7, 3)),
             type_b = operand_type(m.kind, m.bits(10, 3));
    const u32 ctas = m.pair ? 2 : 1, rows_b = m.n() / ctas, depth = m.k();
    CTA* cta[2] = {lead, m.pair ? pair_peer(lead, "tcgen05.mma.cta_group::2") : nullptr};
    std::vector<float> b((size_t)m.n() * depth);  // each CTA of a pair stores half of B
    for (u32 i = 0; i < ctas; i++)
        load_tile(cta[i], m.b, m.bits(16, 1), type_b, rows_b, depth, &b[(size_t)i * rows_b * depth],
                  m.fenced, "tcgen05.mma B");
    for (u32 i = 0; i < ctas; i++) run_in(cta[i], m, b, type_a, type_b);
}
}  // namespace

// Operands: d, a, b, instruction descriptor, [scale A, scale B,] accumulate.
INSTRUCTION(void, tensor_mma, TC_MMA) {
    FOR_LANES (lane, mask) {
        auto value = [&](int i) { return value_of(w, in, i, lane); };
        auto address = [&](int i) { return address_of(w, in, i, lane); };
        MmaArguments m{};
        m.kind = (Kind)in.sub;
        m.d = (u32)address(0);
        m.a_in_tmem = in.flags & F_ATMEM;
        m.a = m.a_in_tmem ? address(1) : value(1);
        m.b = value(2);
        m.descriptor = (u32)value(3);
        m.scaled = in.flags & F_BLOCKSCALE;
        m.pair = in.flags & F_CTA2;
        m.scale_block = (u32)in.aux;
        m.fenced = w.fenced[lane];
        int next = 4;
        if (m.scaled) {
            m.scale_a = (u32)address(4);
            m.scale_b = (u32)address(5);
            next = 6;
        }
        m.accumulate = (value(next) & 1) ^ operand(in, next).negated;
        machine.stats.mma_insns++;
        machine.stats.mma_flops += 2ull * m.m() * m.n() * m.k();
        CTA* c = w.cta;
        const Actor me = issue_tensor(w);
        machine.post(
            [=] {
                ActingScope scope(me);
                run(c, m);
            },
            &c->tensor_core_time);
    }
}

// Arrives on an mbarrier once all earlier tensor-core work of this CTA is done.
INSTRUCTION(void, commit, TC_COMMIT) {
    Cluster* cluster = w.cta->cluster;
    FOR_LANES (lane, mask) {
        const u32 address = shared_address(w, in, 0, lane);
        const u32 offset = offset_of(address),
                  ranks = destinations(w, in, 1, lane, address, "tcgen05.commit");
        const Actor me = issue_tensor(w);
        machine.post(
            [=] {
                FOR_LANES (rank, ranks) {
                    CTA* c = cluster->ctas[rank].get();
                    if (races_on) race_join(c->mbarrier_sync[offset].gathering, me.clock);
                    mbarrier_arrive(c, offset, 1);
                }
            },
            &w.cta->tensor_core_time);
    }
}
