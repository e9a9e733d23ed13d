"""Control flow, barriers, fences, mbarriers, cluster launch control."""

from .isa import Flag
from .lexer import literal
from .opcode import Lowering, NotModelledError, Opcode
from .program import NO_OPERAND


def _bra(op: Opcode, operands: list[str]) -> None:
	op.builder.branch_to(operands[0])
	op.emit("BRA")


def _brx(op: Opcode, operands: list[str]) -> None:
	b = op.builder
	labels = b.branch_tables[operands[1]]
	op.emit("BRX", [b.value(operands[0]), b.table(labels)])


def _call(op: Opcode, operands: list[str]) -> None:
	"""A failed assertion traps; device printf prints nothing."""
	if "__assertfail" in op.builder.statement:
		op.emit("TRAP")
	elif "vprintf" in op.builder.statement:
		op.emit("NOP")
	else:
		raise NotModelledError("a call of a device function")


def _bar(op: Opcode, operands: list[str]) -> None:
	b = op.builder
	if op.modifiers[0] == "warp":
		return op.emit("BARWARP", [b.value(operands[0])])
	if op.modifiers[0] == "cluster":
		return op.emit("CLUSTER_ARRIVE" if op.modifiers[1] == "arrive" else "CLUSTER_WAIT")
	op.refuse("red")
	values = [b.value(text) for text in operands]
	op.emit("BAR", [values[0], *(values[1:] or [NO_OPERAND])], sub=int(op.has("arrive")))


def _fence(op: Opcode, operands: list[str]) -> None:
	"""The proxy fences of shared memory are followed; all other fences order nothing here."""
	proxy = op.modifiers[1] if op.name == "fence" and op.modifiers[0] == "proxy" else ""
	only_global = op.has("global")
	op.emit("FENCE_PROXY_ASYNC" if proxy.startswith("async") and not only_global else "FENCE")


def _mbarrier_arrive(op: Opcode, operands: list[str]) -> None:
	b = op.builder
	op.refuse("noComplete")
	flags = op.flags | op.flag("expect_tx", Flag.EXPECT_TX)
	has_state = not operands[0].startswith("[")
	state = b.value(operands[0]) if has_state else NO_OPERAND
	address, *count = operands[1:] if has_state else operands
	op.emit("MBAR_ARRIVE", [state, b.address(address), *map(b.value, count)], flags=flags)


def _mbarrier(op: Opcode, operands: list[str]) -> None:
	b, kind = op.builder, op.modifiers[0]
	if kind == "arrive":
		return _mbarrier_arrive(op, operands)
	if kind in ("init", "expect_tx"):
		return op.emit(f"MBAR_{kind.upper()}", [b.address(operands[0]), b.value(operands[1])])
	if kind in ("try_wait", "test_wait"):
		flags = op.flags | op.flag("try_wait", Flag.TRY)
		values = [b.value(operands[0]), b.address(operands[1]), b.value(operands[2])]
		return op.emit("MBAR_WAIT", values, flags=flags)
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
# Hints, and the order between grids: grids run one after the other.
SYNC |= dict.fromkeys(
	("griddepcontrol", "prefetch", "prefetchu", "applypriority", "pmevent"), lambda op, _: op.emit("NOP")
)
