// Arithmetic, lane by lane.
#pragma once
#include <type_traits>

#include "machine.h"

void float_arithmetic(Warp& w, const Instruction& in, u32 mask);  // float.cpp
float float_minmax(const Instruction& in, float a, float b, bool minimum);
bool compare(const Instruction& in, u8 type, u64 a, u64 b);         // compare.cpp
double number_of(u8 type, u64 bits);                                // convert.cpp
void integer_arithmetic(Warp& w, const Instruction& in, u32 mask);  // integer.cpp
// The result of atom, red and redux for two integers (atomics.cpp).
u64 integer_reduced(u8 op, u8 type, u64 a, u64 b, u64 swap = 0);

// d = f(a, b, c, e, lane) for every lane of the mask, from operands 1..count.
template <class F>
void each_lane(Warp& w, const Instruction& in, u32 mask, int count, F f) {
    u64 scratch[4][32];
    Source s[4];
    for (int i = 0; i < 4; i++) {
        if (i < count) {
            s[i] = source(w, operand(in, i + 1), scratch[i]);
        } else {
            scratch[i][0] = 0;
            s[i] = {scratch[i], 0};
        }
    }
    static u64 discarded[32];
    u64* d = target(w, operand(in, 0));
    if (!d) d = discarded;
    FOR_LANES (lane, mask) d[lane] = f(s[0][lane], s[1][lane], s[2][lane], s[3][lane], (int)lane);
}

// d = f(a), f(a, b), f(a, b, c) or f(a, b, c, e) from as many operands as f takes.
template <class F>
void each_lane(Warp& w, const Instruction& in, u32 mask, F f) {
    if constexpr (std::is_invocable_v<F, u64>)
        each_lane(w, in, mask, 1, [&](u64 a, u64, u64, u64, int) -> u64 { return f(a); });
    else if constexpr (std::is_invocable_v<F, u64, u64>)
        each_lane(w, in, mask, 2, [&](u64 a, u64 b, u64, u64, int) -> u64 { return f(a, b); });
    else if constexpr (std::is_invocable_v<F, u64, u64, u64>)
        each_lane(w, in, mask, 3, [&](u64 a, u64 b, u64 c, u64, int) -> u64 { return f(a, b, c); });
    else
        each_lane(w, in, mask, 4, [&](u64 a, u64 b, u64 c, u64 e, int) { return f(a, b, c, e); });
}
