// The instruction set that the parser emits: opcodes, types, operands.
// The parser reads the opcode and type names from the library, so only the flags, the operand
// kinds, the address spaces and the roundings are spelt in both places (isa.py).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;  // the type of printf's %llu
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = long long;

// By class: arithmetic, memory, tensor cores, synchronization, flow.
// clang-format off
#define OPCODES(X) \
  X(MOV) X(PACK) X(UNPACK) X(CVTA) X(MAPA) X(ADD) X(SUB) X(MUL) X(MAD) X(FMA) X(DIV) X(REM) \
  X(ABS) X(NEG) X(MIN) X(MAX) X(AND) X(OR) X(XOR) X(NOT) X(LOP3) X(SHL) X(SHR) X(SHF) X(PRMT) \
  X(POPC) X(CLZ) X(BREV) X(BFE) X(BFI) X(SETP) X(SELP) X(CVT) X(RCP) X(SQRT) X(RSQRT) X(EX2) \
  X(LG2) X(TANH) X(SHFL) X(VOTE) X(MATCH) X(ELECT) X(REDUX) X(ACTIVEMASK) \
  X(LD) X(ST) X(ATOM) X(RED) X(FENCE_PROXY_ASYNC) X(MBAR_INIT) X(MBAR_ARRIVE) X(MBAR_EXPECT_TX) \
  X(MBAR_WAIT) X(CP_ASYNC) X(CP_ASYNC_COMMIT) X(CP_ASYNC_WAIT) X(CP_ASYNC_MBAR) X(BULK_G2S) \
  X(BULK_S2G) X(TMA_G2S) X(TMA_S2G) X(BULK_COMMIT) X(BULK_WAIT) X(TMAP_ADDRESS) X(LDMATRIX) \
  X(STMATRIX) \
  X(WGMMA) X(WGMMA_FENCE) X(WGMMA_COMMIT) X(WGMMA_WAIT) X(TC_ALLOC) X(TC_DEALLOC) \
  X(TC_RELINQUISH) X(TC_LD) X(TC_ST) X(TC_WAIT) X(TC_CP) X(TC_MMA) X(TC_COMMIT) X(TC_FENCE) \
  X(TRAP) X(NOP) X(NANOSLEEP) X(BAR) X(BARWARP) X(CLUSTER_ARRIVE) X(CLUSTER_WAIT) X(FENCE) \
  X(SETMAXNREG) X(UNSUPPORTED) \
  X(BRA) X(BRX) X(EXIT)
// clang-format on
enum Opcode : u16 {
#define X(name) name,
    OPCODES(X)
#undef X
        NUM_OPCODES
};

// The packed narrow floats are in the order of their elements.
// clang-format off
#define TYPES(X) \
  X(NONE) X(PRED) X(B8) X(B16) X(B32) X(B64) X(U8) X(U16) X(U32) X(U64) X(S8) X(S16) \
  X(S32) X(S64) X(F16) X(BF16) X(F32) X(TF32) X(F16X2) X(BF16X2) X(F32X2) \
  X(E4M3) X(E5M2) X(E2M1) X(E2M3) X(E3M2) X(UE8M0) X(E4M3X2) X(E5M2X2) X(E2M1X2) X(E2M3X2) \
  X(E3M2X2) X(UE8M0X2) X(E4M3X4) X(E5M2X4) X(E2M1X4) X(E2M3X4) X(E3M2X4)
// clang-format on
enum Type : u8 {
#define X(name) T_##name,
    TYPES(X)
#undef X
        NUM_TYPES
};

enum Space : u8 { GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CONST };
enum OperandKind : u8 {
    K_NONE,
    K_REG,
    K_IMM,
    K_SPECIAL,
    K_VEC,
    K_ADDR_REG,
    K_ADDR_ABS,
    K_SHARED_SYM,
    K_PARAM_SYM,
    K_GLOBAL_SYM,
    K_LOCAL_SYM
};
enum Flag : u32 {
    F_SAT = 1,
    F_FTZ = 1 << 1,
    F_HI = 1 << 2,
    F_WIDE = 1 << 3,
    F_NANPROP = 1 << 4,
    F_RELU = 1 << 5,
    F_SATFINITE = 1 << 6,
    F_WRAP = 1 << 7,
    F_LEFT = 1 << 8,
    F_ABS = 1 << 9,
    F_XORSIGN = 1 << 10,
    F_TRY = 1 << 11,
    F_MULTICAST = 1 << 12,
    F_CTA2 = 1 << 13,
    F_READ = 1 << 14,
    F_TRANS = 1 << 15,
    F_EXPECT_TX = 1 << 16,
    F_BLOCKSCALE = 1 << 17,
    F_ATMEM = 1 << 18,
    F_RELAXED = 1 << 19,
    F_LOAD = 1 << 20,    // tcgen05.wait::ld
    F_IGNORE = 1 << 21,  // cp.async with an ignore-src predicate
    F_GATHER = 1 << 22,  // TMA of four rows
};
enum Rounding : u8 { RN, RZ, RM, RP, RNA, RNI, RZI, RMI, RPI, RS };
enum Comparison : u8 {
    CMP_EQ,
    CMP_NE,
    CMP_LT,
    CMP_LE,
    CMP_GT,
    CMP_GE,
    CMP_EQU,  // unordered comparisons, true if an operand is NaN; in the order of the ordered ones
    CMP_NEU,
    CMP_LTU,
    CMP_LEU,
    CMP_GTU,
    CMP_GEU,
    CMP_NUM,
    CMP_NAN
};
enum Reduction : u8 {
    ATOM_ADD,
    ATOM_MIN,
    ATOM_MAX,
    ATOM_AND,
    ATOM_OR,
    ATOM_XOR,
    ATOM_EXCH,
    ATOM_CAS
};

struct Operand {
    u8 kind, negated;
    u16 count;  // K_VEC: operands [reg, reg + count) of the program
    i32 reg;
    i64 imm;
};
struct Instruction {
    u16 op;
    u8 type, type2, space, vec, rounding, sub;
    i32 guard;  // predicate register, or -1
    u8 guard_negated, padding;
    u16 num_operands;
    u32 flags;
    i32 operands;  // index of the first one
    i32 line;      // of the PTX text
    i64 aux, aux2;
};
static_assert(sizeof(Operand) == 16 && sizeof(Instruction) == 48, "isa.py spells these layouts");

struct Program {
    std::string name;
    std::vector<Instruction> instructions;
    std::vector<Operand> operands;
    std::vector<std::string> text;  // PTX by instruction, for reports
    std::vector<u32> param_offset, param_size;
    u32 param_bytes = 0, num_regs = 0, static_smem = 0, local_bytes = 0;
};

inline int type_bits(u8 type) {
    switch (type) {
        case T_PRED:
            return 1;
        case T_E2M1:
            return 4;
        case T_E4M3:
        case T_E5M2:
        case T_E2M3:
        case T_E3M2:
        case T_UE8M0:
        case T_B8:
        case T_U8:
        case T_S8:
            return 8;
        case T_B16:
        case T_U16:
        case T_S16:
        case T_F16:
        case T_BF16:
            return 16;
        case T_B64:
        case T_U64:
        case T_S64:
        case T_F32X2:
            return 64;
        default:
            return 32;
    }
}
inline u8 half_of(u8 type) { return type == T_F16X2 ? T_F16 : type == T_BF16X2 ? T_BF16 : T_NONE; }
inline u32 type_bytes(u8 type) { return (type_bits(type) + 7) / 8; }
inline bool is_signed(u8 type) { return type >= T_S8 && type <= T_S64; }
inline bool is_float(u8 type) { return type >= T_F16 && type <= T_TF32; }
inline i64 sign_extend(u64 v, int bits) {
    return bits >= 64 ? (i64)v : (i64)(v << (64 - bits)) >> (64 - bits);
}
inline u64 zero_extend(u64 v, int bits) { return bits >= 64 ? v : v & ((1ull << bits) - 1); }
inline bool is_less(u8 type, u64 a, u64 b) {  // as integers
    const int bits = type_bits(type);
    return is_signed(type) ? sign_extend(a, bits) < sign_extend(b, bits)
                           : zero_extend(a, bits) < zero_extend(b, bits);
}
