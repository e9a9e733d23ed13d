"""Dot products of the rows of two operands, before the epilogue: the rules and their exact bits.

Values are codes times block scales. Without a tensor core:

- Plain operands, FP8, MXFP8, plain operands with quantized ones, and byte codes with NVFP4 (W4A8):
  values, which are exact in fp64, are multiplied and added in fp64. The sum is rounded to fp32
  once.
- NVFP4: values have at most 6 significant bits, so the products of one block of 16 add exactly in
  fp32 in any order. The accumulator adds the blocks in ascending order, each with one fp32
  rounding.
- FP8Block: the codes of every 128 of K are multiplied and added exactly. The sum ``partial`` is
  rounded to fp32 once. The accumulator adds the sums in ascending order:

      y = fma(fl(partial * s), t, y)

  Here s is the scale of the operand that has one scale per row (A if both have), and t is the scale
  of the other operand. This is the order of TransformerEngine's reference and of cuBLAS.

With a tensor core, the accumulator has the bits of that GPU (``reference.tensor_core``):

========  ================================  ====================================================
          sm_90a                            sm_100a
========  ================================  ====================================================
plain     one chain of instructions         one chain
FP8       one chain; or with ``split`` a    one chain: its accumulator is a full fp32, so there
          fresh accumulator every 128 of    is nothing to split
          K, added to an fp32 sum
FP8Block  ``partial`` of 128 from a fresh   pow2_scales in both operands: mxf8f6f4, each scale as
          accumulator, then as above, or    E8M0 of four blocks of 32; else as on sm_90a
          folded, see below
MXFP8     a fresh accumulator for each      mxf8f6f4
          block of 32, then y = fl(partial
          * 2^(ea + eb - 254) + y)
NVFP4     fp16 instructions, see below      mxf4nvf4
========  ================================  ====================================================

Codes with a plain operand are decoded to its dtype. Both operands of W4A8 on sm_100a are decoded to
bf16 (an NVFP4 code times its scale has 6 significant bits, E4M3 has 4). Each product of a code and
its block scale is rounded to fp32 and then to that dtype, as in ``grouped_dequantize`` without a
global scale. Then all of K is one chain. This is exact for FP8 and NVFP4, and in bf16 for powers of
two within its range. sm_90a adds NVFP4 in another order, see below.

The folded form is y = fma(partial, fl(s * t), y). It applies if both operands have power-of-two
scales and one has 128x128 blocks. It gives the bits above unless something overflows or a product
of two factors is subnormal.

The power of two in the MXFP8 cell may leave the range of fp32; it is exact here. sm_90a has no
instructions for NVFP4: fp16 instructions multiply the values, which are exact in fp16. The kernels
that feed them decide two things:

- The operand that they decode in registers (the weights; A of a k_grouped product) is scaled by
  2^-14 (``layout.lane_chunks``), or by 2^-7 if the activations are bf16. The sum is multiplied by
  the inverse. A value below 1 is then subnormal in fp16 and its exponent counts as that of 1, so E
  may be too high, by 10 at most. The products lose no bits: they are still multiples of 2^(E - 25).
  An accumulator far smaller than the other operand's values can lose bits.
- The order of K is the order of ``layout.lane_chunks``.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..formats import E4M3, E8M0, F32, ElementType
from ..layout.lane_chunks import DECODED_SCALE, in_lane_order
from ..layout.shapes import ceil_div
from .fma import fma, rounded_sum, two_sum
from .operands import Rows
from .tensor_core import slices, tensor_core_gemm, with_one_nan

#: K of the partial sums of FP8 with a split accumulator.
_SPLIT_K = 128
#: Blocks of K that share an E8M0 scale.
_MX_BLOCK = 32
#: Rows of A, and outputs, that are promoted at a time, so that intermediate results stay in cache.
_TILE_M, _TILE_OUTPUTS = 256, 1 << 16


class AccumulationModel(NamedTuple):
    """How products are accumulated.

    Attributes:
        tensor_core: Architecture whose tensor core defines the bits. None without a tensor core.
        decoded: Operand that kernels for sm_90a decode in registers, if one is NVFP4.
        split: True if FP8 without block scales moves its sums to fp32 every 128 of K.
    """

    tensor_core: str | None = None
    decoded: Literal["a", "b"] = "b"
    split: bool = False


def dot(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Return A (M, K) @ B (N, K)^T with block scales, (M, N) fp32."""
    if a.fmt is None and b.fmt is None and adder.tensor_core is not None:
        return tensor_core_gemm(adder.tensor_core, a.codes, b.codes)
    if a.fmt is None or b.fmt is None or a.fmt.element.bits != b.fmt.element.bits:
        return _mixed(a, b, adder)
    scale = a.fmt.scale
    return _DOTS[adder.tensor_core, None if scale is None else scale.element](a, b, adder)


def _fp64(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Multiply in fp64 and round once."""
    return (a.values() @ b.values().T).float()


def _mixed(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Multiply plain operands by codes, or codes of two widths."""
    if adder.tensor_core is None:
        return _fp64(a, b, adder)
    dtype = next((x.codes.dtype for x in (a, b) if x.fmt is None), torch.bfloat16)
    a_values, b_values = a.values(torch.float32), b.values(torch.float32)
    if adder.tensor_core == "sm_90a" and any(
        x.fmt and x.fmt.decoder_kind == "nibbles" for x in (a, b)
    ):
        return _hopper(a_values, b_values, dtype)
    return tensor_core_gemm(adder.tensor_core, a_values.to(dtype), b_values.to(dtype))


# ---- FP8, MXFP8


def _chain(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Accumulate all of K in a tensor core, without block scales."""
    assert adder.tensor_core is not None
    return tensor_core_gemm(adder.tensor_core, a.elements, b.elements)


def _chain_or_split(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Accumulate all of K in one chain, or every 128 of K in a chain of its own."""
    if not adder.split:
        return _chain(a, b, adder)
    total = _zeros(a.codes, b.codes)
    for k_slice in _k_slices(a, _SPLIT_K):
        total += _chain(_cut(a, k_slice), _cut(b, k_slice), adder)
    return with_one_nan(total)


def _block_scaled(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Multiply with a tensor core that applies block scales."""
    assert adder.tensor_core is not None
    a_scales, b_scales = _stored_scales(a), _stored_scales(b)
    return tensor_core_gemm(
        adder.tensor_core, a.elements, b.elements, a_scales=a_scales, b_scales=b_scales
    )


def _stored_scales(x: Rows) -> Tensor:
    """Return the block scales as E8M0 or E4M3, as the tensor core reads them."""
    assert x.scales is not None
    if x.scale.element != F32:
        return x.scales.view(x.scale.element.dtype)
    # The exponent of fp32 has the bias of E8M0; that of 2^-127, a subnormal, is 0 in both.
    exponent = x.scales.contiguous().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    codes = exponent.to(torch.uint8).repeat_interleave(x.scale.vec_size // _MX_BLOCK, dim=1)
    return codes[:, : ceil_div(x.codes.shape[1], _MX_BLOCK)].view(E8M0.dtype)


# ---- FP8Block, promotion


def _promoted(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Add the partial sums of each block of K, scaled, to an fp32 accumulator."""
    assert a.fmt is not None and b.fmt is not None
    if a.scale.element != F32:
        add = _add_pow2_scaled
    elif adder.tensor_core == "sm_90a" and (a.fmt.is_2d or b.fmt.is_2d) and _have_powers(a, b):
        add = _add_folded
    else:
        add = _add_fp32_scaled
    partial = _exact if adder.tensor_core is None else _chain
    out = _zeros(a.codes, b.codes)
    for m in slices(len(a.codes), _TILE_M):
        for n in slices(len(b.codes), max(1, _TILE_OUTPUTS // (m.stop - m.start))):
            a_rows, b_rows = _select_rows(a, m), _select_rows(b, n)
            scales = a_rows.scale_values(), b_rows.scale_values()
            total = _zeros(a_rows.codes, b_rows.codes)
            for i, k_slice in enumerate(_k_slices(a, a.scale.vec_size)):
                partial_sum = partial(_cut(a_rows, k_slice), _cut(b_rows, k_slice), adder)
                a_scale, b_scale = scales[0][:, i, None], scales[1][None, :, i]
                total = add(
                    partial_sum, (b_scale, a_scale) if a.fmt.is_2d else (a_scale, b_scale), total
                )
            out[m, n] = total
    return out if adder.tensor_core is None else with_one_nan(out)


def _add_fp32_scaled(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    """Add a partial sum that fp32 scales multiply one after the other."""
    return fma(partial * scales[0], scales[1], total)


def _add_folded(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    """Add a partial sum that the product of its scales multiplies."""
    return fma(partial, scales[0] * scales[1], total)


def _add_pow2_scaled(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    """Add a partial sum that powers of two multiply exactly."""
    return rounded_sum(partial.double() * (scales[0].double() * scales[1].double()), total.double())


def _block_scaled_or_promoted(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Let the tensor core apply power-of-two scales. Otherwise promote partial sums."""
    return (_block_scaled if _have_powers(a, b) else _promoted)(a, b, adder)


def _have_powers(a: Rows, b: Rows) -> bool:
    """Return True if all block scales of both operands are powers of two."""
    assert a.fmt is not None and b.fmt is not None
    return a.fmt.has_pow2_scales and b.fmt.has_pow2_scales


def _exact(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Return exact sums of at most 128 products of FP8 codes, rounded to fp32 once."""
    a_values, b_values = a.elements.double(), b.elements.double()
    plain = a_values @ b_values.T
    if a.elements.dtype == b.elements.dtype == E4M3.dtype:
        return plain.float()  # multiples of 2^-18 below 2^25
    # E5M2 reaches from 2^-16 to 2^16, too far for fp64. Split the codes at 1. Sums of products of
    # large codes are multiples of 2^-5 below 2^39, of large and small codes multiples of 2^-19
    # below 2^23, and of small codes multiples of 2^-32 below 2^7. So each of the four sums is
    # exact, and so is the sum of the middle two. The remainder of the rounded sum of these, below
    # 2^-14, plus the last sum is exact, too.
    (a_large, a_small), (b_large, b_small) = _cut_at_one(a_values), _cut_at_one(b_values)
    middle = a_large @ b_small.T + a_small @ b_large.T
    total, remainder = two_sum(a_large @ b_large.T, middle)
    # The zeros that replace codes would be wrong next to Inf and NaN, so use the plain product.
    return torch.where(
        plain.isfinite(), rounded_sum(total, remainder + a_small @ b_small.T), plain.float()
    )


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    """Return (M, N) fp32 zeros, whatever torch's default dtype is."""
    return torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)


def _cut_at_one(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values into those of at least 1 and the others. Each tensor has zeros elsewhere."""
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    small = finite.masked_fill(finite.abs() >= 1, 0.0)
    return finite - small, small


def _k_slices(x: Rows, depth: int) -> Iterator[slice]:
    """Yield slices of K for codes that share no byte."""
    return slices(x.codes.shape[1], depth)


def _cut(x: Rows, k_slice: slice) -> Rows:
    """Return a slice of K, without scales."""
    return x._replace(codes=x.codes[:, k_slice], scales=None)


def _select_rows(x: Rows, rows: slice) -> Rows:
    """Return a slice of rows with their scales."""
    assert x.scales is not None
    return x._replace(codes=x.codes[rows], scales=x.scales[rows])


# ---- NVFP4


def _blocks_in_order(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Add exact blocks in fp32, in ascending order."""
    a_values, b_values = a.values(torch.float32), b.values(torch.float32)
    acc = _zeros(a_values, b_values)
    for block in slices(a_values.shape[1], a.scale.vec_size):
        acc += a_values[:, block] @ b_values[:, block].T
    return acc


def _decoded(a: Rows, b: Rows, adder: AccumulationModel) -> Tensor:
    """Multiply the values as fp16 operands of sm_90a."""
    a_values, b_values = a.values(torch.float32), b.values(torch.float32)
    return (
        _hopper(b_values, a_values, torch.float16).T
        if adder.decoded == "a"
        else _hopper(a_values, b_values, torch.float16)
    )


def _hopper(activations: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply fp32 values in the order of kernels for sm_90a.

    ``activations`` is (M, K), ``decoded`` (N, K); the result is (M, N).
    """
    scale = DECODED_SCALE[str(dtype).removeprefix("torch.")]
    a_operand, b_operand = in_lane_order(activations), in_lane_order(decoded) * scale
    return tensor_core_gemm("sm_90a", a_operand.to(dtype), b_operand.to(dtype)) / scale


#: By tensor core and element of the block scales, or None without them.
_DOTS: dict[
    tuple[str | None, ElementType | None], Callable[[Rows, Rows, AccumulationModel], Tensor]
] = {
    (None, None): _fp64,
    (None, E8M0): _fp64,
    (None, E4M3): _blocks_in_order,
    (None, F32): _promoted,
    ("sm_90a", None): _chain_or_split,
    ("sm_90a", E8M0): _promoted,
    ("sm_90a", E4M3): _decoded,
    ("sm_90a", F32): _promoted,
    ("sm_100a", None): _chain,
    ("sm_100a", E8M0): _block_scaled,
    ("sm_100a", E4M3): _block_scaled,
    ("sm_100a", F32): _block_scaled_or_promoted,
}
