"""Single PTX instructions and short sequences as traced expressions.

The DSL contracts ``a * b + c`` into an FMA and offers no spelling for several instructions that the
quantizers need. So their arithmetic goes through ``asm``, which runs exactly what is written.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, Uint64
from cutlass._mlir.dialects import arith, llvm

_CONSTRAINTS = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l", Uint64: "l", Uint16: "h"}


def _constraints(results: Sequence[type], operands: Sequence[Any]) -> list[str]:
    """Return the inline-assembly constraints of results and operands."""
    out = ["=" + _CONSTRAINTS[t] for t in results]
    return out + [_CONSTRAINTS[type(v)] for v in operands]


def asm(text: str, results: Sequence[type], operands: Sequence[Any]) -> Any:
    """Emit PTX without side effects.

    Args:
        text: PTX. The results are ``$0``, ``$1``, ..., the operands follow. Braces open a scope for
            registers.
        results: DSL types of the results.
        operands: DSL scalars.

    Returns:
        The result, or a tuple if there are several.
    """
    values = [v.ir_value() for v in operands]
    types = [t.mlir_type for t in results]
    out = llvm.inline_asm(
        types[0] if len(types) == 1 else llvm.StructType.get_literal(types),
        values,
        text,
        ",".join(_constraints(results, operands)),
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) == 1:
        return results[0](out)
    return tuple(t(llvm.extractvalue(t.mlir_type, out, [i])) for i, t in enumerate(results))


def asm_volatile(text: str, operands: Sequence[Any]) -> None:
    """Emit PTX that reads or writes memory and returns nothing. It is never moved or dropped."""
    llvm.inline_asm(
        None,
        [v.ir_value() for v in operands],
        text,
        ",".join([*_constraints((), operands), "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def mul_rn(a: Float32, b: Float32) -> Float32:
    """Return ``a * b``, which is never contracted."""
    return asm("mul.rn.f32 $0, $1, $2;", [Float32], [a, b])  # type: ignore[no-any-return]


def add_rn(a: Float32, b: Float32) -> Float32:
    """Return ``a + b``, which is never contracted."""
    return asm("add.rn.f32 $0, $1, $2;", [Float32], [a, b])  # type: ignore[no-any-return]


def in_place(value: Int32) -> Int32:
    """Return ``value`` in a way that the compiler cannot see through.

    Nothing is then computed from it ahead of a loop and kept in registers.
    """
    out = llvm.inline_asm(
        Int32.mlir_type,
        [value.ir_value()],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(out)


def bits_as_f32(bits: Uint32) -> Float32:
    """Return the fp32 number with these bits."""
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))


def f32_as_bits(value: Float32) -> Uint32:
    """Return the bits of an fp32 number."""
    return Uint32(llvm.bitcast(Uint32.mlir_type, value.ir_value()))


def select(condition: Boolean, a: Any, b: Any) -> Any:
    """Return ``a`` if the condition holds, else ``b`` of the same type; never a branch."""
    return type(a)(arith.select(condition.ir_value(), a.ir_value(), b.ir_value()))
