"""Dot products of the rows of two operands, before the epilogue: what decides which, and its bits.

Values are codes times block scales. Without a tensor core:

- Plain operands, FP8, MXFP8, plain operands beside quantized ones, and codes of a byte beside NVFP4
  (W4A8): values, exact in fp64, are multiplied and added there; the sum is rounded to fp32 once.
- NVFP4: values have at most 6 significant bits, so the products of one block of 16 add exactly in
  fp32 in any order. The accumulator takes one block after the other in ascending order, each with
  one fp32 rounding.
- FP8Block: the codes of every 128 of K are multiplied and added exactly, the sum ``partial`` is
  rounded to fp32 once, and the accumulator takes one after the other in ascending order:

      y = fma(fl(partial * s), t, y)

  with s the scale of the operand that has a scale for each row (A's if both have) and t that of the
  other, of 128x128 blocks or not. This is the order of TransformerEngine's reference and of cuBLAS.

With one, the accumulator has the bits of that GPU (``reference.tensor_core``):

========  ================================  ====================================================
          sm_90a                            sm_100a
========  ================================  ====================================================
plain     one chain of instructions         one chain
FP8       one chain, or if ``split`` a      one chain: its accumulator is a full fp32, so there
          fresh accumulator every 128 of    is nothing to split
          K, added to an fp32 sum
FP8Block  ``partial`` of 128 from a fresh   pow2_scales in both operands: mxf8f6f4, each scale as
          accumulator, then as above, or    E8M0 of four blocks of 32; else as sm_90a does it
          folded, see below
MXFP8     a fresh accumulator for each      mxf8f6f4
          block of 32, then y = fl(partial
          * 2^(ea + eb - 254) + y)
NVFP4     fp16 instructions, see below      mxf4nvf4
========  ================================  ====================================================

Codes beside plain operands are decoded to the dtype of these, and both operands of W4A8 on sm_100a
to bf16 (a code of NVFP4 times its scale has 6 significant bits, E4M3 has 4): each product of a code
and its block scale is rounded to fp32 and then to that dtype, as ``grouped_dequantize`` does it
without a second level; then all of K is one chain. That is exact for FP8 and NVFP4, and in bf16 for
powers of two within its range. sm_90a takes NVFP4 in another order, see below.

Folded is y = fma(partial, fl(s * t), y): of powers of two in both operands, where one has blocks of
128x128. These are the bits above unless something overflows or a product of two factors is
subnormal.

No fp32 number is as large or small as the power of two in the cell of MXFP8 may be; it is exact
here. sm_90a has no instructions for NVFP4: fp16 ones multiply the values, which are exact in fp16.
How the kernels feed them decides two things:

- The side that they decode in registers (the weights; A of a k_grouped product) is 2^-14 times its
  values (``layout.pieces``), beside bf16 activations 2^-7 times; the sum is multiplied by the
  inverse. A value below 1 then is subnormal in fp16 and its exponent counts as that of 1, so E may
  come out too high, by 10 at most. The products cannot lose bits to that: they are multiples of
  2^(E - 25) all the same. An accumulator far smaller than the other side's values can.
- The order of K is that of ``layout.pieces``.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..formats import E4M3, E8M0, F32, ElementType
from ..layout.lane_chunks import DECODED_SCALE, in_pieces
from ..layout.shapes import ceil_div
from .fma import fma, rounded_sum, two_sum
from .operands import Rows
from .tensor_core import slices, tensor_core_gemm, with_one_nan

#: K of the partial sums of FP8 with a split accumulator.
_SPLIT_K = 128
#: Blocks of K that share an E8M0 scale.
_MX_BLOCK = 32
#: Rows of A, and outputs, that are promoted at a time: what is made of them stays in the cache.
_TILE_M, _TILE_OUTPUTS = 256, 1 << 16


class Adder(NamedTuple):
    """How products are added.

    Attributes:
        tensor_core: None, or the architecture whose tensor core gives the bits.
        decoded: the side that kernels for sm_90a decode in registers, where one is NVFP4.
        split: FP8 without block scales moves its sums to fp32 every 128 of K.
    """

    tensor_core: str | None = None
    decoded: Literal["a", "b"] = "b"
    split: bool = False


def dot(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """A (M, K) @ B (N, K)^T, block scales included, (M, N) fp32."""
    if a.fmt is None and b.fmt is None and adder.tensor_core is not None:
        return tensor_core_gemm(adder.tensor_core, a.codes, b.codes)
    if a.fmt is None or b.fmt is None or a.fmt.element.bits != b.fmt.element.bits:
        return _mixed(a, b, adder)
    scale = a.fmt.scale
    return _DOTS[adder.tensor_core, None if scale is None else scale.element](a, b, adder)


def _fp64(a: Rows, b: Rows, adder: Adder) -> Tensor:
    return (a.values() @ b.values().T).float()


def _mixed(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """Of plain operands beside codes, or of codes of two widths."""
    if adder.tensor_core is None:
        return _fp64(a, b, adder)
    dtype = next((x.codes.dtype for x in (a, b) if x.fmt is None), torch.bfloat16)
    left, right = a.values(torch.float32), b.values(torch.float32)
    if adder.tensor_core == "sm_90a" and any(
        x.fmt and x.fmt.decoder_kind == "nibbles" for x in (a, b)
    ):
        return _hopper(left, right, dtype)
    return tensor_core_gemm(adder.tensor_core, left.to(dtype), right.to(dtype))


# ---- FP8, MXFP8


def _chain(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """All of K in one accumulator of a tensor core that takes no block scales."""
    assert adder.tensor_core is not None
    return tensor_core_gemm(adder.tensor_core, a.elements, b.elements)


def _chain_or_split(a: Rows, b: Rows, adder: Adder) -> Tensor:
    if not adder.split:
        return _chain(a, b, adder)
    total = _zeros(a.codes, b.codes)
    for part in _parts(a, _SPLIT_K):
        total += _chain(_cut(a, part), _cut(b, part), adder)
    return with_one_nan(total)


def _block_scaled(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """As a tensor core multiplies that takes block scales."""
    assert adder.tensor_core is not None
    a_scales, b_scales = _stored_scales(a), _stored_scales(b)
    return tensor_core_gemm(
        adder.tensor_core, a.elements, b.elements, a_scales=a_scales, b_scales=b_scales
    )


def _stored_scales(x: Rows) -> Tensor:
    assert x.scales is not None
    if x.scale.element != F32:
        return x.scales.view(x.scale.element.dtype)
    # The exponent of fp32 has the bias of E8M0; that of 2^-127, a subnormal, is 0 in both.
    exponent = x.scales.contiguous().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    each = exponent.to(torch.uint8).repeat_interleave(x.scale.vec_size // _MX_BLOCK, dim=1)
    return each[:, : ceil_div(x.codes.shape[1], _MX_BLOCK)].view(E8M0.dtype)


# ---- FP8Block, promotion


def _promoted(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """Partial sums of each block of K, scaled and added in fp32 or as if they were."""
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
            left, right = _of_rows(a, m), _of_rows(b, n)
            scales = left.scale_values(), right.scale_values()
            total = _zeros(left.codes, right.codes)
            for i, part in enumerate(_parts(a, a.scale.vec_size)):
                found = partial(_cut(left, part), _cut(right, part), adder)
                of_a, of_b = scales[0][:, i, None], scales[1][None, :, i]
                total = add(found, (of_b, of_a) if a.fmt.is_2d else (of_a, of_b), total)
            out[m, n] = total
    return out if adder.tensor_core is None else with_one_nan(out)


def _add_fp32_scaled(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    return fma(partial * scales[0], scales[1], total)


def _add_folded(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    return fma(partial, scales[0] * scales[1], total)


def _add_pow2_scaled(partial: Tensor, scales: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    return rounded_sum(partial.double() * (scales[0].double() * scales[1].double()), total.double())


def _block_scaled_or_promoted(a: Rows, b: Rows, adder: Adder) -> Tensor:
    return (_block_scaled if _have_powers(a, b) else _promoted)(a, b, adder)


def _have_powers(a: Rows, b: Rows) -> bool:
    assert a.fmt is not None and b.fmt is not None
    return a.fmt.has_pow2_scales and b.fmt.has_pow2_scales


def _exact(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """The exact sum over at most 128 products of FP8 codes, rounded to fp32 once."""
    left, right = a.elements.double(), b.elements.double()
    plain = left @ right.T
    if a.elements.dtype == b.elements.dtype == E4M3.dtype:
        return plain.float()  # multiples of 2^-18 below 2^25
    # E5M2 reaches from 2^-16 to 2^16, too far for fp64. Of codes cut at 1, sums of products of
    # large ones are multiples of 2^-5 below 2^39, of large and small ones multiples of 2^-19 below
    # 2^23, and of small ones multiples of 2^-32 below 2^7. So each of the four is exact, the middle
    # two together are, and so is what a rounded sum of these leaves, below 2^-14, with the last.
    (a_large, a_small), (b_large, b_small) = _cut_at_one(left), _cut_at_one(right)
    middle = a_large @ b_small.T + a_small @ b_large.T
    total, rest = two_sum(a_large @ b_large.T, middle)
    # Zeros in place of the other codes are no zeros beside Inf and NaN.
    return torch.where(
        plain.isfinite(), rounded_sum(total, rest + a_small @ b_small.T), plain.float()
    )


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    """(M, N) fp32 sums of nothing, whatever torch's default dtype is."""
    return torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)


def _cut_at_one(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of at least 1 and the others, each with zeros in place of the other, 0 for NaN."""
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    small = finite.masked_fill(finite.abs() >= 1, 0.0)
    return finite - small, small


def _parts(x: Rows, depth: int) -> Iterator[slice]:
    """Parts of K, of codes that share no byte."""
    return slices(x.codes.shape[1], depth)


def _cut(x: Rows, part: slice) -> Rows:
    return x._replace(codes=x.codes[:, part], scales=None)


def _of_rows(x: Rows, rows: slice) -> Rows:
    assert x.scales is not None
    return x._replace(codes=x.codes[rows], scales=x.scales[rows])


# ---- NVFP4


def _blocks_in_order(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """Exact blocks, added in fp32 ascending."""
    left, right = a.values(torch.float32), b.values(torch.float32)
    acc = _zeros(left, right)
    for part in slices(left.shape[1], a.scale.vec_size):
        acc += left[:, part] @ right[:, part].T
    return acc


def _decoded(a: Rows, b: Rows, adder: Adder) -> Tensor:
    """The values as fp16 operands of sm_90a."""
    left, right = a.values(torch.float32), b.values(torch.float32)
    return (
        _hopper(right, left, torch.float16).T
        if adder.decoded == "a"
        else _hopper(left, right, torch.float16)
    )


def _hopper(other: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """``other`` (M, K) @ ``decoded`` (N, K)^T of fp32 values as kernels for sm_90a add them."""
    scale = DECODED_SCALE[str(dtype).removeprefix("torch.")]
    left, right = in_pieces(other), in_pieces(decoded) * scale
    return tensor_core_gemm("sm_90a", left.to(dtype), right.to(dtype)) / scale


#: By tensor core and the element of block scales, None where there are none.
_DOTS: dict[tuple[str | None, ElementType | None], Callable[[Rows, Rows, Adder], Tensor]] = {
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
