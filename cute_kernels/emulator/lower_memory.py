"""Loads, stores, atomics, copies, tensor maps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cute_kernels.emulator.isa import REDUCTIONS, SPACES, Flag
from cute_kernels.emulator.lexer import literal
from cute_kernels.emulator.opcode import NotModelledError
from cute_kernels.emulator.program import immediate

if TYPE_CHECKING:
    from cute_kernels.emulator.opcode import Lowering, Opcode
    from cute_kernels.emulator.program import Operand

_NAME_IN_ADDRESS = re.compile(r"\[\s*([\w$]+)")


def _is_call_param(op: Opcode, address: str) -> bool:
    """Whether the address is that of an argument of a call, which nothing here reads."""
    m = _NAME_IN_ADDRESS.match(address)
    is_param = op.space == SPACES["param"]
    return is_param and m is not None and m.group(1) in op.builder.call_params


def _load(op: Opcode, operands: list[str]) -> None:
    b = op.builder
    to = b.value(operands[0])
    if _is_call_param(op, operands[1]):
        return op.emit("MOV", [to, immediate(0)])
    first = operands[0].strip("{} ").split(",")[0]
    # A signed value fills the register, however wide it is.
    wide = Flag.WIDE if b.register_type(first).endswith("64") else Flag(0)
    op.emit("LD", [to, b.address(operands[1])], vec=op.vector_width, flags=op.flags | wide)


def _store(op: Opcode, operands: list[str]) -> None:
    b = op.builder
    op.refuse("async", "bulk")
    if _is_call_param(op, operands[0]):
        return op.emit("NOP")
    op.emit("ST", [b.address(operands[0]), b.value(operands[1])], vec=op.vector_width)


def _atomic(op: Opcode, operands: list[str]) -> None:
    b = op.builder
    op.refuse("async", "b128")
    sub = op.choose(REDUCTIONS)
    has_result = op.name == "atom"
    result = [b.value(operands[0])] if has_result else []
    address, *values = operands[1:] if has_result else operands
    count = 2 if REDUCTIONS[sub] == "cas" else 1  # behind them: a cache policy
    op.emit(
        op.name.upper(),
        [*result, b.address(address), *map(b.value, values[:count])],
        sub=sub,
        vec=op.vector_width,
    )


def _matrix(op: Opcode, operands: list[str]) -> None:
    b, load = op.builder, op.name == "ldmatrix"
    bytes_transposed = not load and op.has("m16n8") and op.has("trans")
    if not op.has("m8n8") and not bytes_transposed:
        raise NotModelledError("8-bit ldmatrix")
    count = next(int(m[1]) for m in op.modifiers if re.fullmatch(r"x[124]", m))
    values, address = operands if load else reversed(operands)
    pair = [b.value(values), b.address(address)]
    op.emit(
        op.name.upper(),
        pair if load else pair[::-1],
        vec=count,
        flags=op.flag("trans", Flag.TRANS),
        type=b.types["b8" if bytes_transposed else "b16"],
    )


def _copy_async(op: Opcode, operands: list[str]) -> None:
    """``cp.async [to], [from], size{, source size or ignore-src}{, policy}``."""
    b = op.builder
    if any("cache_hint" in m for m in op.modifiers):
        operands = operands[:-1]
    to, source, *sizes = operands
    ignore = len(sizes) > 1 and b.register_type(sizes[1]) == "pred"
    op.emit(
        "CP_ASYNC",
        [b.address(to), b.address(source), *map(b.value, sizes)],
        flags=Flag.IGNORE if ignore else Flag(0),
    )


def _wait_group(op: Opcode, operands: list[str]) -> int:
    groups = literal(operands[0])
    if groups is None:
        raise ValueError(operands[0])
    return groups


def _tensor_copy(op: Opcode, operands: list[str], to_shared: bool, flags: Flag, sub: int) -> None:
    b = op.builder
    if any(m.startswith(("im2col", "tile::gather4", "tile::scatter4")) for m in op.modifiers):
        raise NotModelledError("im2col and gather TMA")
    if to_shared:
        tensor_map, coordinates = b.tensor_address(operands[1])
        mask = [b.value(operands[3])] if flags & Flag.MULTICAST else []
        loads = [b.address(operands[0]), tensor_map, coordinates, b.address(operands[2]), *mask]
        return op.emit("TMA_G2S", loads, flags=flags)
    tensor_map, coordinates = b.tensor_address(operands[0])
    op.emit("TMA_S2G", [tensor_map, coordinates, b.address(operands[1])], flags=flags, sub=sub)


def _contiguous_copy(
    op: Opcode, operands: list[str], to_shared: bool, from_global: bool, flags: Flag, sub: int
) -> None:
    b = op.builder
    op.refuse("cp_mask", "ignore_oob")
    head = [b.address(operands[0]), b.address(operands[1]), b.value(operands[2])]
    if not to_shared:
        return op.emit("BULK_S2G", head, flags=flags, sub=sub)
    head.append(b.address(operands[3]))
    if from_global:
        mask = [b.value(operands[4])] if flags & Flag.MULTICAST else []
        return op.emit("BULK_G2S", head + mask, flags=flags)
    if flags & Flag.REDUCE:
        raise NotModelledError("cp.reduce.async.bulk to shared memory")
    op.emit("BULK_S2S", head, flags=flags)


def _bulk(op: Opcode, operands: list[str], modifiers: list[str], reduce: bool) -> None:
    """``modifiers`` are those behind ``cp.async.bulk``."""
    if modifiers[0] == "commit_group":
        return op.emit("BULK_COMMIT")
    if modifiers[0] == "wait_group":
        return op.emit("BULK_WAIT", aux=_wait_group(op, operands), flags=op.flag("read", Flag.READ))
    if "prefetch" in modifiers[:3]:
        return op.emit("NOP")
    flags = (
        op.flag("multicast::cluster", Flag.MULTICAST)
        | op.flag("cta_group::2", Flag.CTA2)
        | (Flag.REDUCE if reduce else Flag(0))
    )
    sub = op.choose(REDUCTIONS) if reduce else 0
    tensor = modifiers[0] == "tensor"
    destination, source = modifiers[2:4] if tensor else modifiers[:2]
    to_shared = destination.startswith("shared")
    if tensor:
        return _tensor_copy(op, operands, to_shared, flags, sub)
    _contiguous_copy(op, operands, to_shared, source.startswith("global"), flags, sub)


def _cp(op: Opcode, operands: list[str]) -> None:
    reduce = op.modifiers[0] == "reduce"
    kind, *modifiers = op.modifiers[1:] if reduce else op.modifiers
    if kind != "async":
        raise ValueError(kind)
    if modifiers[0] == "bulk":
        return _bulk(op, operands, modifiers[1:], reduce)
    if modifiers[0] == "commit_group":
        return op.emit("CP_ASYNC_COMMIT")
    if modifiers[0] == "wait_group":
        return op.emit("CP_ASYNC_WAIT", aux=_wait_group(op, operands))
    if modifiers[0] == "wait_all":
        return op.emit("CP_ASYNC_WAIT", aux=-1)
    if modifiers[0] == "mbarrier":
        return op.emit("CP_ASYNC_MBAR", [op.builder.address(operands[0])], sub=int(op.has("noinc")))
    _copy_async(op, operands)


_REPLACED_FIELDS = [
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride",
    "elemtype", "interleave_layout", "swizzle_mode", "fill_mode",
]  # fmt: skip
#: Fields of one value for each dimension, and how many there are.
_INDEXED_FIELDS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}


def _tensormap(op: Opcode, operands: list[str]) -> None:
    b = op.builder
    if op.modifiers[0] == "cp_fenceproxy":
        return op.emit("TMAP_CP", [b.address(operands[0]), b.address(operands[1])])
    op.refuse("swizzle_atomicity")
    sub = op.choose(_REPLACED_FIELDS)
    shared = any(m.startswith("shared") for m in op.modifiers)
    count = _INDEXED_FIELDS.get(_REPLACED_FIELDS[sub])
    index = 0 if count is None else literal(operands[1])
    if index is None or not 0 <= index < (count or 1):
        raise ValueError(f"{_REPLACED_FIELDS[sub]} has no index {operands[1]}")
    fields: list[Operand] = [b.address(operands[0]), b.value(operands[-1])]
    op.emit(
        "TMAP_REPLACE",
        fields,
        sub=sub,
        aux=index,
        space=SPACES["shared" if shared else "global"],
    )


MEMORY: dict[str, Lowering] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "cp": _cp,
    "tensormap": _tensormap,
    # A cache policy decides nothing here.
    "createpolicy": lambda op, a: op.emit(
        "MOV", [op.builder.value(a[0]), immediate(0)], type=op.builder.types["b64"]
    ),
}
