"""Lowerings of control flow, barriers, fences and mbarriers."""

from .isa import Flag
from .lexer import literal
from .opcode import Lowering, NotModelledError, Opcode
from .program import NO_OPERAND


def _bra(op: Opcode, operands: list[str]) -> None:
    """Lower ``bra``."""
    op.builder.branch_to(operands[0])
    op.emit("BRA")


def _brx(op: Opcode, operands: list[str]) -> None:
    """Lower ``brx.idx``."""
    b = op.builder
    op.emit("BRX", [operands[0], b.table(b.branch_tables[operands[1]])])


def _call(op: Opcode, operands: list[str]) -> None:
    """Lower ``call``: a failed assertion traps, and device printf prints nothing."""
    if "__assertfail" in op.builder.statement:
        op.emit("TRAP")
    elif "vprintf" in op.builder.statement:
        op.emit("NOP")
    else:
        raise NotModelledError("a call of a device function")


def _bar(op: Opcode, operands: list[str]) -> None:
    """Lower ``bar`` and ``barrier``."""
    if op.modifiers[0] == "warp":
        return op.emit("BARWARP", operands[:1])
    if op.modifiers[0] == "cluster":
        return op.emit("CLUSTER_ARRIVE" if op.modifiers[1] == "arrive" else "CLUSTER_WAIT")
    op.refuse("red")
    no_count = [NO_OPERAND] if len(operands) == 1 else []
    op.emit("BAR", [*operands, *no_count], sub=int(op.has("arrive")))


def _fence(op: Opcode, operands: list[str]) -> None:
    """Lower ``fence``: the engine tracks proxy fences of shared memory and ignores all others."""
    proxy = op.modifiers[1] if op.name == "fence" and op.modifiers[0] == "proxy" else ""
    op.emit("FENCE_PROXY_ASYNC" if proxy.startswith("async") and not op.has("global") else "FENCE")


def _mbarrier_arrive(op: Opcode, operands: list[str]) -> None:
    """Lower ``mbarrier.arrive``, with or without ``expect_tx``."""
    op.refuse("noComplete")
    state = [NO_OPERAND] if operands[0].startswith("[") else []
    op.emit(
        "MBAR_ARRIVE", [*state, *operands], flags=op.flags | op.flag("expect_tx", Flag.EXPECT_TX)
    )


def _mbarrier(op: Opcode, operands: list[str]) -> None:
    """Lower ``mbarrier``."""
    kind = op.modifiers[0]
    if kind == "arrive":
        return _mbarrier_arrive(op, operands)
    if kind in ("init", "expect_tx"):
        return op.emit(f"MBAR_{kind.upper()}", operands[:2])
    if kind in ("try_wait", "test_wait"):
        flags = op.flags | op.flag("try_wait", Flag.TRY)
        return op.emit("MBAR_WAIT", operands[:3], flags=flags)
    raise ValueError(kind)


SYNC: dict[str, Lowering] = {
    "bra": _bra,
    "brx": _brx,
    "call": _call,
    "bar": _bar,
    "barrier": _bar,
    "membar": _fence,
    "fence": _fence,
    "mbarrier": _mbarrier,
    "ret": lambda op, _: op.emit("EXIT"),
    "exit": lambda op, _: op.emit("EXIT"),
    "trap": lambda op, _: op.emit("TRAP"),
    "nanosleep": lambda op, _: op.emit("NANOSLEEP"),
    "setmaxnreg": lambda op, a: op.emit("SETMAXNREG", aux=literal(a[0])),
}
# Hints, and ordering between grids, which run one after the other.
SYNC |= dict.fromkeys(
    ("griddepcontrol", "prefetch", "prefetchu", "applypriority", "pmevent"),
    lambda op, _: op.emit("NOP"),
)
