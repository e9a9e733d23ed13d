"""GEMM with the accumulation of a GPU's tensor core, exact to the bit.

A tensor core multiplies in instructions of a fixed K. One instruction adds its products to the
accumulator c. It aligns all terms to the largest exponent, truncates them there, adds exactly, and
truncates the sum:

1. The exponent of a value is floor(log2 |v|), but no less than that of the smallest normal number
   of its format. The exponent of a product is the sum of the exponents of its operands and of their
   block scales, not renormalised.
2. E is the largest exponent among the products and c. Each term is truncated toward zero to a
   multiple of 2^(E - F).
3. The terms are added exactly. The sum is truncated toward zero to fp32 (for FP8 on sm_90a to 13
   fraction bits), or rounded once to nearest even if the accumulator is fp16.

FP4 differs in step 2: sixteen neighbouring products and their block scales are first multiplied and
added exactly. They form one term, whose exponent is the sum of the exponents of the two scales.

=================  ============  ===============  ====  ===  ==============================
operands           block scales  tensor cores     K     F    accumulator
=================  ============  ===============  ====  ===  ==============================
fp16, bf16         none          sm_90a, sm_100a  16    25   fp32; fp16 for fp16
fp32 read as tf32  none          sm_90a, sm_100a  8     25   fp32
e4m3, e5m2         none          sm_90a           32    13   fp32 of 13 fraction bits, fp16
e4m3, e5m2         none          sm_100a          32    25   fp32, fp16
e4m3, e5m2         E8M0 of 32    sm_100a          32    25   fp32
e2m1               E8M0 of 32    sm_100a          64    35   fp32 (mxf4)
e2m1               E4M3 of 16    sm_100a          64    35   fp32 (mxf4nvf4)
=================  ============  ===============  ====  ===  ==============================

So the bits of a GEMM depend only on how K is divided into instructions and on their order, which is
ascending here. They do not depend on tiles, clusters, groups or the batch. If K is not a multiple
of the instruction's K, it is padded with zeros, which do not change the result.

Zeros: on sm_90a a zero product or accumulator has no exponent, E is no less than -133, and a sum of
zero is +0. On sm_100a the exponent of a zero factor or accumulator is -126, and a negative sum that
is truncated to zero is -0. That matters only near the bottom of the range of fp32 or fp16, or where
a zero meets a factor more than 2^100 times the other products.

Infinities follow IEEE. Every NaN result is 0x7fffffff (0x7fff in fp16).

The rules of sm_90a were measured on an H200, which agreed with this module in all of 3.2 million
results (every row of the table, including subnormals, zeros, Inf and NaN). The rules of sm_100a
were measured on a B200 by arXiv 2511.10909, whose authors left the handling of zeros open.
"""

# Why fp64 is exact here. A product has at most 22 significant bits and lies, block scales included,
# between 2^-286 and 2^286. In units of 2^(E - F) it is below 4 * 2^F = 2^27, the accumulator below
# 2 * 2^F = 2^26, and the sum of 32 truncated products and the accumulator is an integer below 2^33.
# FP4: code times scale has 6 significant bits. A term is a multiple of 2^-8 of its two scales'
# power of two and below 16 * 6 * 6 * 2 * 2 = 2304 of them: 20 bits. In units of 2^(E - 35) it is
# below 2^47, the accumulator below 2^36, and the sum of four terms and the accumulator below 2^50.
# All of this stays below 2^53, so the order in which torch adds does not matter.
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout.shapes import ceil_div
from .conversions import unpack_codes

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Packed E2M1 codes, two a byte.
_FP4 = torch.uint8
#: Elements that share a scale of this type.
_BLOCK = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
_FP32_MIN_EXPONENT = -126
#: Exponent of the smallest normal number of each dtype that tensor cores multiply or add.
_MIN_EXPONENT = {
    **dict.fromkeys((torch.float32, torch.bfloat16), _FP32_MIN_EXPONENT),
    torch.float16: -14,
    torch.float8_e5m2: -14,
    torch.float8_e4m3fn: -6,
}
_FP32_FRACTION_BITS = 23
#: E is no less than this.
_LOWEST_E = -133
#: So low that it never determines E, even after additions.
_NO_EXPONENT = -1000
#: The NaN of GPUs by dtype.
NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF}

# Output elements and K of one tile: the buffers stay in the L2 cache, and reading the operands
# again for every tile costs little compared with the products.
_TILE_M, _TILE_N, _TILE_K = 128, 256, 4096


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """Accumulation rule of one instruction.

    Attributes:
        k: Number of products of one instruction.
        term: Number of neighbouring products that are added exactly before alignment.
        fraction_bits: F, the bits of a term that are kept below 2^E.
        accumulator_bits: Fraction bits of an fp32 accumulator.
        fp16: True if the accumulator may be fp16.
        zero_exponent: Exponent of a zero factor or accumulator.
        negative_zero: True if a negative sum that is truncated to zero is -0.
    """

    k: int
    term: int = 1
    fraction_bits: int = 25
    accumulator_bits: int = _FP32_FRACTION_BITS
    fp16: bool = False
    zero_exponent: int = _FP32_MIN_EXPONENT
    negative_zero: bool = True


#: Rules by (dtype of the operands, True if they have block scales).
_COMMON = {
    (torch.float16, False): _Instruction(16, fp16=True),
    (torch.bfloat16, False): _Instruction(16),
    (torch.float32, False): _Instruction(8),
}
_HOPPER_FP8 = _Instruction(32, fraction_bits=13, accumulator_bits=13, fp16=True)
_INSTRUCTIONS = {
    "sm_90a": {
        key: dataclasses.replace(instruction, zero_exponent=_NO_EXPONENT, negative_zero=False)
        for key, instruction in (_COMMON | {(dtype, False): _HOPPER_FP8 for dtype in _FP8}).items()
    },
    "sm_100a": _COMMON
    | {(dtype, False): _Instruction(32, fp16=True) for dtype in _FP8}
    | {(dtype, True): _Instruction(32) for dtype in _FP8}
    | {(_FP4, True): _Instruction(64, term=16, fraction_bits=35)},
}
#: Architectures whose tensor cores are known.
TENSOR_CORES = tuple(_INSTRUCTIONS)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Rows of A or of B: their elements, and block scales if they have any."""

    elements: Tensor
    scales: Tensor | None

    @property
    def k(self) -> int:
        return self.elements.shape[1] * (2 if self.elements.dtype == _FP4 else 1)


def tensor_core_gemm(
    arch: str,
    a: Tensor,
    b: Tensor,
    *,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    acc: Tensor | None = None,
    acc_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return A B^T with the bits of ``arch``'s tensor core, over all of K in ascending order.

    Args:
        arch: ``"sm_90a"`` or ``"sm_100a"``.
        a: (M, K) fp16, bf16, fp32 (read as tf32: the low 13 bits are ignored), float8_e4m3fn or
            float8_e5m2. Or (M, K / 2) uint8, packed E2M1 codes, the even index in the low nibble.
        b: (N, K) or (N, K / 2), of the dtype of ``a``; E4M3 and E5M2 may be mixed.
        a_scales: Block scales (M, ceil(K / 32)) float8_e8m0fnu for FP8 and E2M1, or (M, ceil(K /
            16)) float8_e4m3fn for E2M1, whose sign bit is ignored.
        b_scales: Block scales of ``b``.
        acc: (M, N). Accumulator to start from. Zero if None. It is not changed.
        acc_dtype: Dtype of the accumulator if ``acc`` is None: fp32 or fp16.

    Returns:
        (M, N) accumulator.

    Raises:
        ValueError: ``arch`` has no such instruction, or shapes do not match.
    """
    a_operand, b_operand = _Operand(a, a_scales), _Operand(b, b_scales)
    if acc is None:
        acc = torch.zeros(len(a), len(b), dtype=acc_dtype, device=a.device)
    instruction = _check(arch, a_operand, b_operand, acc)
    out = torch.empty_like(acc)
    for m in slices(len(a), _TILE_M):
        for n in slices(len(b), _TILE_N):
            tile = acc[m, n]
            for k in slices(a_operand.k, _TILE_K):
                x, x_exponent = _terms(instruction, a_operand, m, k)
                y, y_exponent = _terms(instruction, b_operand, n, k)
                for terms in slices(len(x), instruction.k // instruction.term):
                    tile = _mma(
                        instruction, x[terms], x_exponent[terms], y[terms], y_exponent[terms], tile
                    )
            out[m, n] = tile
    return with_one_nan(out)


def with_one_nan(acc: Tensor) -> Tensor:
    """Replace the NaNs of ``acc`` by the NaN of GPUs, in place, and return it."""
    acc.view(torch.int32 if acc.dtype == torch.float32 else torch.int16).masked_fill_(
        acc.isnan(), NAN_BITS[acc.dtype]
    )
    return acc


def _check(arch: str, a: _Operand, b: _Operand, acc: Tensor) -> _Instruction:
    """Check the operands and return their instruction."""
    dtypes = (a.elements.dtype, b.elements.dtype)
    if dtypes[0] != dtypes[1] and not set(dtypes) <= set(_FP8):
        raise ValueError(f"a and b must be of one dtype, got {dtypes[0]} and {dtypes[1]}")
    scales = {None if x.scales is None else x.scales.dtype for x in (a, b)}
    if len(scales) > 1:
        raise ValueError("a_scales and b_scales must be of one dtype, or both be None")
    if arch not in TENSOR_CORES:
        raise ValueError(f"arch must be one of {', '.join(TENSOR_CORES)}, got {arch!r}")
    instruction = _INSTRUCTIONS[arch].get((dtypes[0], a.scales is not None))
    if instruction is None:
        preposition = "without" if a.scales is None else "with"
        raise ValueError(f"{arch} multiplies no {dtypes[0]} operands {preposition} block scales")
    if a.k != b.k:
        raise ValueError(f"a and b must have one K, got {a.k} and {b.k}")
    for name, operand in (("a_scales", a), ("b_scales", b)):
        if operand.scales is not None:
            _check_scales(name, operand, operand.scales)
    shape = (len(a.elements), len(b.elements))
    if tuple(acc.shape) != shape:
        raise ValueError(f"acc must have shape {shape}, got {tuple(acc.shape)}")
    if acc.dtype not in ((torch.float32, torch.float16) if instruction.fp16 else (torch.float32,)):
        raise ValueError(f"{arch} has no {acc.dtype} accumulator for these {dtypes[0]} operands")
    return instruction


def _check_scales(name: str, operand: _Operand, scales: Tensor) -> None:
    """Raise ValueError if the dtype or shape of block scales is invalid."""
    dtypes = [d for d in _BLOCK if operand.elements.dtype == _FP4 or d == torch.float8_e8m0fnu]
    if scales.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {scales.dtype}")
    shape = (len(operand.elements), ceil_div(operand.k, _BLOCK[scales.dtype]))
    if tuple(scales.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(scales.shape)}")


def slices(size: int, step: int) -> Iterator[slice]:
    """Yield slices of ``step`` items."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _exponent(v: Tensor, lowest: int, zero: int) -> Tensor:
    """Return exponents (int32) of fp32 values, ``zero`` for zeros and 128 for Inf and NaN."""
    biased = v.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    return biased.sub_(127).clamp_min_(lowest).masked_fill_(v == 0, zero)


def _pow2(exponent: Tensor) -> Tensor:
    """Return powers of two in fp64."""
    return exponent.long().add_(1023).bitwise_left_shift_(52).view(torch.float64)


def _scale_values(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (fp64) and exponents (int32) of block scales."""
    codes = scales.view(torch.uint8)
    if scales.dtype == torch.float8_e8m0fnu:
        exponent = codes.int().sub_(127)
        return _pow2(exponent).masked_fill_(codes == 0xFF, torch.nan), exponent
    value = codes.bitwise_and(0x7F).view(torch.float8_e4m3fn).float()
    return value.double(), _exponent(value, _MIN_EXPONENT[torch.float8_e4m3fn], _FP32_MIN_EXPONENT)


def _terms(
    instruction: _Instruction, operand: _Operand, rows: slice, ks: slice
) -> tuple[Tensor, Tensor]:
    """Return the factors of terms in rows ``rows`` and elements ``ks``, padded with zeros.

    Returns:
        Values (terms, rows, products of a term) fp64 and exponents (terms, rows) int32.
    """
    elements, scales = operand.elements, operand.scales
    if elements.dtype == _FP4:
        v = unpack_codes(elements[rows, ks.start // 2 : ks.stop // 2])
    else:
        v = elements[rows, ks].float()
    if elements.dtype == torch.float32:
        v = v.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)  # tf32
    v = torch.nn.functional.pad(v, (0, -v.shape[1] % instruction.k))
    count = v.shape[1] // instruction.term
    if instruction.term == 1:
        exponent = _exponent(v, _MIN_EXPONENT[elements.dtype], instruction.zero_exponent)
    else:
        exponent = torch.zeros(len(v), count, dtype=torch.int32, device=v.device)
    value = v.double().unflatten(1, (count, instruction.term))
    if scales is not None:
        block = _BLOCK[scales.dtype]
        block_scales = scales[rows, ks.start // block : ceil_div(ks.stop, block)]
        repeats = block // instruction.term
        missing = count - block_scales.shape[1] * repeats
        # A padded scale is so low that its (zero) terms never determine E.
        factor, power = (
            torch.nn.functional.pad(t.repeat_interleave(repeats, 1), (0, missing), value=fill)
            for t, fill in zip(_scale_values(block_scales), (0, _FP32_MIN_EXPONENT), strict=True)
        )
        value, exponent = value * factor.unsqueeze(-1), exponent + power
    return value.transpose(0, 1).contiguous(), exponent.T.contiguous()


def _mma(
    instruction: _Instruction,
    a: Tensor,
    a_exponent: Tensor,
    b: Tensor,
    b_exponent: Tensor,
    acc: Tensor,
) -> Tensor:
    """Execute one instruction: add the terms a[t] b[t]^T to ``acc``."""
    lowest = _MIN_EXPONENT[acc.dtype]
    top = _exponent(acc.float(), lowest, instruction.zero_exponent).clamp_min_(_LOWEST_E)
    exponent = torch.empty_like(top)
    for x, y in zip(a_exponent, b_exponent, strict=True):
        torch.maximum(top, torch.add(x[:, None], y, out=exponent), out=top)
    unit = _pow2(top - instruction.fraction_bits)
    # A power of two, so this is exact. Inf and NaN go through all of this by IEEE rules.
    per_unit = unit.reciprocal()
    # Adding 0.0 makes -0.0 positive.
    total = (acc.double() * per_unit).trunc_().add_(0.0)
    product = torch.empty_like(total)
    for x, y in zip(a, b, strict=True):
        if instruction.term == 1:
            torch.mul(x, y.T, out=product)
        else:
            torch.mm(x, y.T, out=product)
        total += product.mul_(per_unit).trunc_()
    total *= unit
    out = _round_fp16(total) if acc.dtype == torch.float16 else _truncate(instruction, total)
    return out if instruction.negative_zero else out + 0.0


def _truncate(instruction: _Instruction, total: Tensor) -> Tensor:
    """Truncate fp64 to fp32 with the accumulator's fraction bits."""
    bits = instruction.accumulator_bits
    normal = total.view(torch.int64).bitwise_and(-1 << (52 - bits)).view(torch.float64)
    ulp = 2.0 ** (_FP32_MIN_EXPONENT - bits)
    return torch.where(
        total.abs() < 2.0**_FP32_MIN_EXPONENT, (total / ulp).trunc_().mul_(ulp), normal
    ).float()


def _round_fp16(total: Tensor) -> Tensor:
    """Round fp64 to fp16 once, to nearest even."""
    # torch would convert through fp32 and round twice. frexp's exponent is floor(log2) + 1.
    exponent = torch.frexp(total.nan_to_num(0.0, 0.0, 0.0)).exponent.clamp_min_(-13)
    ulp = _pow2(exponent - 11)
    return (total / ulp).round_().mul_(ulp).half()
