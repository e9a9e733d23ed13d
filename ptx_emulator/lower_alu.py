"""Lowerings of arithmetic, logic, conversions and exchanges within a warp."""

from .isa import COMPARISONS, REDUCTIONS, SPACES, Flag, Kind
from .lexer import literal
from .opcode import Lowering, NotModelledError, Opcode


def _plain(op: Opcode, operands: list[str]) -> None:
    """Lower an instruction whose operands and modifiers need no change."""
    op.emit(op.name.upper(), operands)


#: Mask of the bits 4 to 56, which hold a tensor map's global address. If a kernel makes the map
#: (the DSL's ``make_tiled_tma_atom`` in device code), ordinary instructions encode it and apply
#: this mask.
_TENSOR_MAP_ADDRESS_BITS = (1 << 57) - 16


def _and(op: Opcode, operands: list[str]) -> None:
    """Lower ``and``. The mask of a tensor map's address gets a check of the address."""
    is_address = op.types == ["b64"] and literal(operands[-1]) == _TENSOR_MAP_ADDRESS_BITS
    op.emit("TMAP_ADDRESS" if is_address else "AND", operands)


def _mov(op: Opcode, operands: list[str]) -> None:
    """Lower ``mov``."""
    b = op.builder
    to, text = operands
    if "{" in to + text:
        return op.emit("UNPACK" if to.startswith("{") else "PACK", operands)
    source = b.value(text)
    is_place = source[0] in (Kind.SHARED_SYM, Kind.LOCAL_SYM)
    op.emit("MOV", [to, source], type=b.types["b64"] if is_place else op.type_id(0))


def _cvta(op: Opcode, operands: list[str]) -> None:
    if op.space == SPACES["param"]:
        return op.emit("MOV", operands, type=op.builder.types["b64"])
    op.emit("CVTA", operands, sub=int(op.has("to")))


def _arithmetic(op: Opcode, operands: list[str]) -> None:
    """Lower arithmetic instructions."""
    if op.name in ("add", "sub", "fma") and len(op.types) > 1 and op.types[0] == "f32":
        raise NotModelledError("mixed-precision arithmetic")
    op.refuse("cc", "u16x2", "s16x2")
    if not op.types[0].endswith(("f16", "f32", "f16x2", "f32x2")):
        op.refuse("sat")
    _plain(op, operands)


def _lop3(op: Opcode, operands: list[str]) -> None:
    """Lower ``lop3``."""
    op.refuse("and", "or")
    table = literal(operands[4])
    if table is None:
        raise ValueError(operands[4])
    op.emit("LOP3", operands[:4], sub=table)


def _prmt(op: Opcode, operands: list[str]) -> None:
    """Lower ``prmt``."""
    op.refuse("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    _plain(op, operands)


def _setp(op: Opcode, operands: list[str]) -> None:
    """Lower ``setp``."""
    op.refuse("f16x2", "bf16x2")
    destinations = op.builder.pair(operands[0])
    combine = 1 if op.has("and") else 2 if op.has("or") else 3 if op.has("xor") else 0
    op.emit("SETP", [*destinations, *operands[1:]], sub=op.choose(COMPARISONS), aux=combine)


def _cvt(op: Opcode, operands: list[str]) -> None:
    """Lower ``cvt``."""
    op.refuse("pack")
    if any("scale" in m for m in op.modifiers):
        raise NotModelledError("scaled cvt")
    op.emit("CVT", operands)


def _shfl(op: Opcode, operands: list[str]) -> None:
    """Lower ``shfl``."""
    modes = ["idx", "up", "down", "bfly"]
    op.emit(
        "SHFL", [*op.builder.pair(operands[0]), *operands[1:]], sub=modes.index(op.modifiers[1])
    )


def _vote(op: Opcode, operands: list[str]) -> None:
    """Lower ``vote``."""
    op.emit("VOTE", operands, sub=["all", "any", "uni", "ballot"].index(op.modifiers[1]))


def _match(op: Opcode, operands: list[str]) -> None:
    """Lower ``match``."""
    op.emit("MATCH", [*op.builder.pair(operands[0]), *operands[1:]], sub=int(op.has("all")))


def _elect(op: Opcode, operands: list[str]) -> None:
    """Lower ``elect``."""
    op.emit("ELECT", [*op.builder.pair(operands[0]), operands[1]])


def _redux(op: Opcode, operands: list[str]) -> None:
    """Lower ``redux``."""
    op.emit("REDUX", operands, sub=op.choose(REDUCTIONS))


_ARITHMETIC = (
    "add", "sub", "mul", "div", "rem", "abs", "neg", "min", "max", "mad", "fma", "rcp", "sqrt",
    "rsqrt", "ex2", "lg2", "tanh",
)  # fmt: skip
_PLAIN = (
    "or", "xor", "not", "shl", "shr", "popc", "clz", "brev", "bfe", "bfi", "selp", "mapa",
    "activemask",
)  # fmt: skip
ALU: dict[str, Lowering] = {
    "and": _and,
    "mov": _mov,
    "cvta": _cvta,
    "lop3": _lop3,
    "prmt": _prmt,
    "setp": _setp,
    "cvt": _cvt,
    "shfl": _shfl,
    "vote": _vote,
    "match": _match,
    "elect": _elect,
    "redux": _redux,
    "shf": lambda op, a: op.emit("SHF", a, flags=op.flags | op.flag("l", Flag.LEFT)),
}
ALU |= dict.fromkeys(_ARITHMETIC, _arithmetic)
ALU |= dict.fromkeys(_PLAIN, _plain)
