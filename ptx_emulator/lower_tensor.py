"""Lowerings of tensor-core instructions: wgmma and tcgen05."""

import re

from .isa import Flag
from .lexer import literal
from .opcode import Lowering, NotModelledError, Opcode

_KINDS = ["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"]
_LOAD_SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]
_COPY_SHAPES = ["32x128b", "128x256b", "128x128b", "4x256b", "64x128b"]
_COPY_64_01_23 = 5  # 64x128b.warpx2::01_23
_SHAPE_WGMMA = re.compile(r"m64n(\d+)k(\d+)")


def _wgmma(op: Opcode, operands: list[str]) -> None:
    """Lower ``wgmma``."""
    b, kind = op.builder, op.modifiers[0]
    if kind == "fence":
        return op.emit("WGMMA_FENCE")
    if kind == "commit_group":
        return op.emit("WGMMA_COMMIT")
    if kind == "wait_group":
        return op.emit("WGMMA_WAIT", aux=literal(operands[0]))
    if kind != "mma_async" or op.has("sp"):
        raise NotModelledError("sparse wgmma")
    n, k = next(m for x in op.modifiers if (m := _SHAPE_WGMMA.fullmatch(x))).groups()
    d, type_a, type_b = op.types[:3]
    if d not in ("f16", "f32"):
        raise NotModelledError(f"wgmma with {d} accumulators")
    op.emit(
        "WGMMA",
        operands,
        type=b.types[d],
        type2=b.types[type_a],
        sub=b.types[type_b],
        aux=int(n),
        aux2=int(k),
    )


def _pair(op: Opcode) -> Flag:
    """Return the flag of ``cta_group::2``."""
    return op.flag("cta_group::2", Flag.CTA2)


def _alloc(op: Opcode, operands: list[str]) -> None:
    """Lower ``tcgen05.alloc`` and ``tcgen05.dealloc``."""
    op.emit(f"TC_{op.modifiers[0].upper()}", operands, flags=_pair(op))


def _load_store(op: Opcode, operands: list[str]) -> None:
    """Lower ``tcgen05.ld`` and ``tcgen05.st``."""
    op.refuse("red", "spp", "pack::16b", "unpack::16b")
    repetitions = next(int(m[1:]) for m in op.modifiers if re.fullmatch(r"x\d+", m))
    op.emit(f"TC_{op.modifiers[0].upper()}", operands, sub=op.choose(_LOAD_SHAPES), aux=repetitions)


def _copy(op: Opcode, operands: list[str]) -> None:
    """Lower ``tcgen05.cp``."""
    if any(m.startswith("b8x16") for m in op.modifiers):
        raise NotModelledError("decompressing tcgen05.cp")
    shape = op.choose(_COPY_SHAPES)
    if _COPY_SHAPES[shape] == "64x128b" and op.has("warpx2::01_23"):
        shape = _COPY_64_01_23
    op.emit("TC_CP", operands, sub=shape, flags=_pair(op))


def _commit(op: Opcode, operands: list[str]) -> None:
    """Lower ``tcgen05.commit``."""
    multicast = op.flag("multicast::cluster", Flag.MULTICAST)
    op.emit("TC_COMMIT", operands[: 2 if multicast else 1], flags=_pair(op) | multicast)


def _scale_block(op: Opcode, kind: str) -> int:
    """Return the number of elements that share a block scale."""
    k = 32 if kind == "mxf8f6f4" else 64
    sizes = {
        "block16": 16,
        "block32": 32,
        "scale_vec::1X": k,
        "scale_vec::2X": k // 2,
        "scale_vec::4X": k // 4,
    }
    return next((sizes[m] for m in op.modifiers if m in sizes), 32)


def _mma(op: Opcode, operands: list[str]) -> None:
    """Lower ``tcgen05.mma``."""
    op.refuse("ws", "sp", "ashift")
    kind = next(m for m in op.modifiers if m.startswith("kind::"))[len("kind::") :]
    fields = {
        "sub": _KINDS.index(kind),
        "flags": _pair(op) | (Flag.ATMEM if operands[1].startswith("[") else Flag(0)),
    }
    if op.has("block_scale"):
        fields["flags"] |= Flag.BLOCKSCALE
        fields["aux"] = _scale_block(op, kind)
    elif len(operands) > 5:
        raise NotModelledError("disable-output-lane and scale-input-d")
    op.emit("TC_MMA", operands[:7], **fields)


_TCGEN05: dict[str, Lowering] = {
    "alloc": _alloc,
    "dealloc": _alloc,
    "relinquish_alloc_permit": lambda op, _: op.emit("TC_RELINQUISH"),
    "ld": _load_store,
    "st": _load_store,
    "wait::ld": lambda op, _: op.emit("TC_WAIT", flags=Flag.LOAD),
    "wait::st": lambda op, _: op.emit("TC_WAIT"),
    "fence::before_thread_sync": lambda op, _: op.emit("TC_FENCE"),
    "fence::after_thread_sync": lambda op, _: op.emit("TC_FENCE"),
    "cp": _copy,
    "commit": _commit,
    "mma": _mma,
}

TENSOR: dict[str, Lowering] = {
    "wgmma": _wgmma,
    "tcgen05": lambda op, operands: _TCGEN05[op.modifiers[0]](op, operands),
}
