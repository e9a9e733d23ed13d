"""Lowerings of loads, stores, atomics, copies and tensor maps."""

import re

from .isa import REDUCTIONS, SPACES, Flag
from .lexer import literal
from .opcode import Lowering, NotModelledError, Opcode
from .program import immediate

_NAME_IN_ADDRESS = re.compile(r"\[\s*([\w$]+)")


def _is_call_param(op: Opcode, address: str) -> bool:
    """Return True if the address is an argument of a call, which the engine never reads."""
    m = _NAME_IN_ADDRESS.match(address)
    is_param = op.space == SPACES["param"]
    return is_param and m is not None and m.group(1) in op.builder.call_params


def _load(op: Opcode, operands: list[str]) -> None:
    """Lower ``ld`` and ``ldu``."""
    if _is_call_param(op, operands[1]):
        return op.emit("MOV", [operands[0], immediate(0)])
    register = operands[0].strip("{} ").split(",")[0]
    # A signed value is extended to the width of the register.
    wide = Flag.WIDE if op.builder.register_type(register).endswith("64") else Flag(0)
    op.emit("LD", operands[:2], vec=op.vector_width, flags=op.flags | wide)


def _store(op: Opcode, operands: list[str]) -> None:
    """Lower ``st``."""
    op.refuse("async", "bulk")
    if _is_call_param(op, operands[0]):
        return op.emit("NOP")
    op.emit("ST", operands[:2], vec=op.vector_width)


def _atomic(op: Opcode, operands: list[str]) -> None:
    """Lower ``atom`` and ``red``."""
    op.refuse("async")
    sub = op.choose(REDUCTIONS)
    count = 2 + (op.name == "atom") + (REDUCTIONS[sub] == "cas")  # a cache policy may follow
    op.emit(op.name.upper(), operands[:count], sub=sub, vec=op.vector_width)


def _matrix(op: Opcode, operands: list[str]) -> None:
    """Lower ``ldmatrix`` and ``stmatrix``."""
    bytes_transposed = op.name == "stmatrix" and op.has("m16n8") and op.has("trans")
    if not op.has("m8n8") and not bytes_transposed:
        raise NotModelledError("8-bit ldmatrix")
    count = next(int(m[1]) for m in op.modifiers if re.fullmatch(r"x[124]", m))
    kind = op.builder.types["b8" if bytes_transposed else "b16"]
    op.emit(op.name.upper(), operands, vec=count, flags=op.flag("trans", Flag.TRANS), type=kind)


def _copy_async(op: Opcode, operands: list[str]) -> None:
    """Lower ``cp.async [to], [from], size{, source size or ignore-src}{, policy}``."""
    if any("cache_hint" in m for m in op.modifiers):
        operands = operands[:-1]
    ignore = len(operands) > 3 and op.builder.register_type(operands[3]) == "pred"
    op.emit("CP_ASYNC", operands, flags=Flag.IGNORE if ignore else Flag(0))


def _wait_group(op: Opcode, operands: list[str]) -> int:
    """Return the number of groups that ``wait_group`` leaves pending."""
    groups = literal(operands[0])
    if groups is None:
        raise ValueError(operands[0])
    return groups


def _tensor_copy(op: Opcode, operands: list[str], to_shared: bool, flags: Flag) -> None:
    """Lower ``cp.async.bulk.tensor``."""
    if any(m.startswith(("im2col", "tile::scatter4")) for m in op.modifiers):
        raise NotModelledError("im2col and scatter TMA")
    flags |= op.flag("tile::gather4", Flag.GATHER)
    if to_shared:
        return op.emit("TMA_G2S", operands[: 4 if flags & Flag.MULTICAST else 3], flags=flags)
    op.emit("TMA_S2G", operands[:2], flags=flags)


def _contiguous_copy(
    op: Opcode, operands: list[str], to_shared: bool, from_global: bool, flags: Flag
) -> None:
    """Lower ``cp.async.bulk`` of contiguous bytes."""
    op.refuse("cp_mask", "ignore_oob")
    if not to_shared:
        return op.emit("BULK_S2G", operands[:3])
    if not from_global:
        raise NotModelledError("a bulk copy between CTAs")
    op.emit("BULK_G2S", operands[: 5 if flags & Flag.MULTICAST else 4], flags=flags)


def _bulk(op: Opcode, operands: list[str], modifiers: list[str]) -> None:
    """Lower ``cp.async.bulk``, where ``modifiers`` are the modifiers after it."""
    if modifiers[0] == "commit_group":
        return op.emit("BULK_COMMIT")
    if modifiers[0] == "wait_group":
        return op.emit("BULK_WAIT", aux=_wait_group(op, operands), flags=op.flag("read", Flag.READ))
    if "prefetch" in modifiers[:3]:
        return op.emit("NOP")
    flags = op.flag("multicast::cluster", Flag.MULTICAST) | op.flag("cta_group::2", Flag.CTA2)
    tensor = modifiers[0] == "tensor"
    destination, source = modifiers[2:4] if tensor else modifiers[:2]
    to_shared = destination.startswith("shared")
    if tensor:
        return _tensor_copy(op, operands, to_shared, flags)
    _contiguous_copy(op, operands, to_shared, source.startswith("global"), flags)


def _cp(op: Opcode, operands: list[str]) -> None:
    """Lower ``cp.async`` in all its forms."""
    kind, *modifiers = op.modifiers
    if kind != "async":
        raise ValueError(kind)
    if modifiers[0] == "bulk":
        return _bulk(op, operands, modifiers[1:])
    if modifiers[0] == "commit_group":
        return op.emit("CP_ASYNC_COMMIT")
    if modifiers[0] == "wait_group":
        return op.emit("CP_ASYNC_WAIT", aux=_wait_group(op, operands))
    if modifiers[0] == "wait_all":
        return op.emit("CP_ASYNC_WAIT", aux=-1)
    if modifiers[0] == "mbarrier":
        return op.emit("CP_ASYNC_MBAR", operands[:1], sub=int(op.has("noinc")))
    _copy_async(op, operands)


MEMORY: dict[str, Lowering] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "cp": _cp,
    # Cache policies have no effect in the emulator.
    "createpolicy": lambda op, a: op.emit(
        "MOV", [a[0], immediate(0)], type=op.builder.types["b64"]
    ),
}
