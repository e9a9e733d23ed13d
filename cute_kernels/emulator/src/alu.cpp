// Moves, selections and the dispatch of arithmetic.
#include "alu.h"

#include "memory.h"
#include "numbers.h"

static void move(Warp& w, const Instruction& in, u32 mask) {
	const int bits = type_bits(in.type);
	each_lane(w, in, mask, [=](u64 a) { return zero_extend(a, bits); });
}

static void convert_address(Warp& w, const Instruction& in, u32 mask) {
	const u64 window = in.space == SHARED ? SHARED_WINDOW : in.space == LOCAL ? LOCAL_WINDOW : 0;
	const bool from_generic = in.sub;
	each_lane(w, in, mask, [=](u64 a) { return from_generic ? a - window : a + window; });
}

// mov.bN d, {a, b, ...}.
static void pack(Warp& w, const Instruction& in, u32 mask) {
	const Operand& parts = operand(in, 1);
	const int bits = type_bits(in.type) / parts.count;
	u64* d = w.reg(operand(in, 0).reg);
	u64 packed[32] = {};
	for (int i = 0; i < parts.count; i++) {
		u64 scratch[32];
		const Source s = source(w, element(parts, i), scratch);
		FOR_LANES (lane, mask) packed[lane] |= zero_extend(s[lane], bits) << (i * bits);
	}
	FOR_LANES (lane, mask) d[lane] = packed[lane];
}
static void unpack(Warp& w, const Instruction& in, u32 mask) {
	const Operand& parts = operand(in, 0);
	const int bits = type_bits(in.type) / parts.count;
	u64 scratch[32], packed[32] = {};
	const Source s = source(w, operand(in, 1), scratch);
	FOR_LANES (lane, mask) packed[lane] = s[lane];  // a part may be the source
	for (int i = 0; i < parts.count; i++)
		if (u64* d = target(w, element(parts, i)))
			FOR_LANES (lane, mask) d[lane] = zero_extend(packed[lane] >> (i * bits), bits);
}

static void select(Warp& w, const Instruction& in, u32 mask) {
	const int bits = type_bits(in.type);
	const bool negated = operand(in, 3).negated;
	each_lane(w, in, mask, [=](u64 a, u64 b, u64 p) { return zero_extend(((p & 1) ^ negated) ? a : b, bits); });
}
static void map_to_rank(Warp& w, const Instruction& in, u32 mask) {
	const u32 ranks = machine.cluster_size();
	each_lane(w, in, mask, [=](u64 a, u64 rank) {
		if ((u32)rank >= ranks) fail("mapa to CTA rank %u of a cluster of %u", (u32)rank, ranks);
		return (a & ~0xff000000ull) | (u64)(u32)rank << 24;
	});
}
static bool is_packed_float(u8 type) { return type == T_F16X2 || type == T_BF16X2 || type == T_F32X2; }

Status execute_alu(Warp& w, const Instruction& in, u32 mask) {
	switch (in.op) {
		case MOV: move(w, in, mask); return OK;
		case CVTA: convert_address(w, in, mask); return OK;
		case PACK: pack(w, in, mask); return OK;
		case UNPACK: unpack(w, in, mask); return OK;
		case ADD:
		case SUB:
		case MUL:
		case MAD:
		case DIV:
		case REM:
		case ABS:
		case NEG:
		case MIN:
		case MAX:
			if (is_float(in.type) || is_packed_float(in.type))
				float_arithmetic(w, in, mask);
			else
				integer_arithmetic(w, in, mask);
			return OK;
		case FMA:
		case RCP:
		case SQRT:
		case RSQRT:
		case EX2:
		case LG2:
		case TANH: float_arithmetic(w, in, mask); return OK;
		case CVT: convert(w, in, mask); return OK;
		case SETP: set_predicate(w, in, mask); return OK;
		case SELP: select(w, in, mask); return OK;
		case MAPA: map_to_rank(w, in, mask); return OK;
		case SHFL:
		case VOTE:
		case MATCH:
		case ELECT:
		case REDUX:
		case ACTIVEMASK: return execute_exchange(w, in, mask);
	}
	if (bit_manipulation(w, in, mask)) return OK;
	fail("instruction class %d is not an ALU instruction", in.op);
}
