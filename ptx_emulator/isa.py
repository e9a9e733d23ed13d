"""Binary layout and codes of the engine's instructions; ``src/isa.h`` is the C++ counterpart.

The parser asks the engine for the names of opcodes and types, so they are not repeated here.
"""

import enum

import numpy as np

INSTRUCTION = np.dtype(
    {
        "names": [
            "op", "type", "type2", "space", "vec", "rounding", "sub", "guard", "guard_negated",
            "num_operands", "flags", "operands", "line", "aux", "aux2",
        ],
        "formats": [
            "u2", "u1", "u1", "u1", "u1", "u1", "u1", "i4",
            "u1", "u2", "u4", "i4", "i4", "i8", "i8",
        ],
    },
    align=True,
)  # fmt: skip
OPERAND = np.dtype(
    {
        "names": ["kind", "negated", "count", "reg", "imm"],
        "formats": ["u1", "u1", "u2", "i4", "i8"],
    },
    align=True,
)


#: Kinds of operands.
Kind = enum.IntEnum(
    "Kind",
    "NONE REG IMM SPECIAL VEC ADDR_REG ADDR_ABS SHARED_SYM PARAM_SYM GLOBAL_SYM LOCAL_SYM",
    start=0,
)
#: Modifiers of an instruction, one bit each.
Flag = enum.IntFlag(
    "Flag",
    "SAT FTZ HI WIDE NANPROP RELU SATFINITE WRAP LEFT ABS XORSIGN TRY MULTICAST CTA2"
    " READ TRANS EXPECT_TX BLOCKSCALE ATMEM RELAXED LOAD IGNORE GATHER",
)

# Modifiers that are flags of any instruction that carries them.
MODIFIER_FLAGS = {
    name: Flag[name.upper()]
    for name in (
        "sat",
        "ftz",
        "hi",
        "wide",
        "relu",
        "satfinite",
        "wrap",
        "abs",
        "xorsign",
        "relaxed",
    )
}
MODIFIER_FLAGS["NaN"] = Flag.NANPROP
SPACES = {"generic": 0, "global": 1, "shared": 2, "local": 3, "param": 4, "const": 5}
ROUNDINGS = ["rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "rs"]
COMPARISONS = [
    "eq", "ne", "lt", "le", "gt", "ge",
    "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
]  # fmt: skip
REDUCTIONS = ["add", "min", "max", "and", "or", "xor", "exch", "cas"]
SPECIAL_REGISTERS = [
    *(f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "laneid", "warpid", "nwarpid", "smid", "nsmid",
    *(
        f"{name}.{axis}"
        for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ),
    "cluster_ctarank", "cluster_nctarank",
    "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt",
    "clock", "dynamic_smem_size", "total_smem_size", "is_explicit_cluster", "gridid", "clock_hi",
]  # fmt: skip
_SPECIAL_ALIASES = {
    "clock64": "clock",
    "globaltimer": "clock",
    "globaltimer_lo": "clock",
    "globaltimer_hi": "clock_hi",
    "aggr_smem_size": "total_smem_size",
}
SPECIAL_IDS = {f"%{name}": i for i, name in enumerate(SPECIAL_REGISTERS)}
SPECIAL_IDS |= {f"%{alias}": SPECIAL_IDS[f"%{name}"] for alias, name in _SPECIAL_ALIASES.items()}
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip
