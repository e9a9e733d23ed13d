// Hopper's wgmma: each of the four warps of a group computes its own 16 rows of D.
#include <cmath>
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "races.h"
#include "tensor.h"

namespace {
constexpr u32 WARP_ROWS = 16, GROUP_ROWS = 64;
struct WgmmaArguments {
    u64 descriptor_a, descriptor_b;
    bool accumulate, transpose_a, transpose_b;
};

void load_a_from_registers(Warp& w, const Operand& vector, u8 type, u32 depth, float* a) {
    const int bits = type_bits(type), per_register = 32 / bits;
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < 4; r++) {
            const u32 word = (u32)w.reg(element(vector, r).reg)[lane];
            const int row = lane / 4 + (r & 1) * 8;
            const int first = (lane % 4) * per_register + (r >> 1) * per_register * 4;
            for (int e = 0; e < per_register; e++) {
                const u32 x = (u32)zero_extend(word >> (e * bits % 32), bits);
                a[row * depth + first + e] = decode_element(type, (const u8*)&x, 0);
            }
        }
}

// Calls f(accumulator, register cell, half of the register) for every element of D.
template <class F>
void each_output(Warp& w, const Operand& d, u32 n, bool fp16, std::vector<double>& acc, F f) {
    for (int lane = 0; lane < 32; lane++)
        for (u32 j = 0; j < n / 8; j++)
            for (int h = 0; h < 2; h++)
                for (int e = 0; e < 2; e++) {
                    const u32 index = fp16 ? j * 2 + h : j * 4 + h * 2 + e;
                    u64* cell = w.reg(element(d, index).reg) + lane;
                    f(acc[(lane / 4 + h * 8) * n + j * 8 + (lane % 4) * 2 + e], cell, e);
                }
}

void run(Warp& w, const Instruction& in, const WgmmaArguments& args) {
    const u32 n = in.aux, depth = in.aux2;
    const u8 type_a = in.type2, type_b = in.sub;
    std::vector<float> a(WARP_ROWS * depth), b((size_t)n * depth);
    const Operand& operand_a = operand(in, 1);
    if (operand_a.kind == K_VEC) {
        load_a_from_registers(w, operand_a, type_a, depth, a.data());
    } else {
        std::vector<float> all(GROUP_ROWS * depth);
        load_tile(w.cta, args.descriptor_a, args.transpose_a, type_a, GROUP_ROWS, depth, all.data(),
                  w.fenced[0], "wgmma A");
        const auto first = all.begin() + (w.id % 4) * WARP_ROWS * depth;
        std::copy(first, first + WARP_ROWS * depth, a.begin());
    }
    load_tile(w.cta, args.descriptor_b, args.transpose_b, type_b, n, depth, b.data(), w.fenced[0],
              "wgmma B");
    const bool fp16 = in.type == T_F16, fp8 = type_a == T_E4M3 || type_a == T_E5M2;
    std::vector<double> acc(WARP_ROWS * n, 0.0);
    const Operand& d = operand(in, 0);
    if (args.accumulate)
        each_output(w, d, n, fp16, acc, [&](double& sum, u64* cell, int half) {
            sum = fp16 ? half_to_float((u16)(*cell >> (16 * half))) : bits_float((u32)*cell);
        });
    const AccumulationModel adder = fp8 ? HOPPER_FP8 : HOPPER;
    multiply_add({a.data(), b.data(), type_a, type_b, WARP_ROWS, n, depth}, acc.data(),
                 fp16 ? with_fp16(adder) : adder);
    each_output(w, d, n, fp16, acc, [&](double& sum, u64* cell, int half) {
        if (!fp16) {
            *cell = std::isnan(sum) ? 0x7fffffff : float_bits((float)sum);
            return;
        }
        const u32 v = float_to_half((float)sum);
        *cell = half ? (*cell & 0xffff) | v << 16 : (*cell & 0xffff0000) | v;
    });
}

// Operands: D, A (descriptor or registers), B, scale-d, scale-a, scale-b, [trans-a, trans-b].
INSTRUCTION(Status, issue, WGMMA) {
    if (Status s = need_full_warp(w, mask, "wgmma")) return s;
    auto value = [&](int i) { return value_of(w, in, i, 0); };
    const bool a_in_registers = operand(in, 1).kind == K_VEC;
    WgmmaArguments args{};
    args.descriptor_a = a_in_registers ? 0 : value(1);
    args.descriptor_b = value(2);
    args.accumulate = (value(3) & 1) ^ operand(in, 3).negated;
    if ((i64)value(4) < 0 || (i64)value(5) < 0) fail("wgmma: negated operands are not modelled");
    // With A in registers only B may be transposed.
    const int transposes = in.num_operands - 6;
    if (transposes == 2) args.transpose_a = value(6);
    if (transposes >= 1) args.transpose_b = value(in.num_operands - 1);
    machine.stats.mma_insns++;
    machine.stats.mma_flops += 2ull * WARP_ROWS * in.aux * in.aux2;
    Warp* warp = &w;
    const Instruction* instruction = &in;
    const Actor me = issue_async(w, WGMMA_AGENT);
    Deferred op = [=] {
        ActingScope scope(me);
        run(*warp, *instruction, args);
    };
    if (!machine.chaos() && w.open_wgmmas.empty() && w.wgmma_groups.empty())
        op();
    else
        w.open_wgmmas.push_back(op);
    return OK;
}

void drain(Warp& w, size_t keep) {
    while (w.wgmma_groups.size() > keep) {
        for (auto& op : w.wgmma_groups.front()) op();
        w.wgmma_groups.pop_front();
    }
}

INSTRUCTION(void, commit, WGMMA_COMMIT) {
    if (races_on) w.wgmma_clocks.push_back(w.cta->tensor_core.clock[agent_of(w, WGMMA_AGENT)]);
    w.wgmma_groups.push_back(std::move(w.open_wgmmas));
    w.open_wgmmas.clear();
    if (machine.chance(2)) drain(w, 0);
}

INSTRUCTION(void, wait, WGMMA_WAIT) {
    const size_t keep = in.aux;
    drain(w, keep);
    while (races_on && w.wgmma_clocks.size() > keep) {
        u32& known = w.clock[agent_of(w, WGMMA_AGENT)];
        known = std::max(known, w.wgmma_clocks.front());
        w.wgmma_clocks.pop_front();
    }
}
}  // namespace
