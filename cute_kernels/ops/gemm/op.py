"""Grouped GEMM ops.

An ``m_grouped`` product multiplies the rows of each ragged group by one matrix per group (fprop and
dgrad). A ``k_grouped`` product multiplies two ragged operands over their common rows (wgrad). The
names follow DeepGEMM. An operand is a plain tensor, or the codes of one direction of a quantized
tensor. The other tensors of that direction are in a list beside the codes, and the text of the
format says how to read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.layout.slots import TILE_ROWS, most_rows
from cute_kernels.reference.groups import Groups

from ..checks import (
    INPUT_DTYPES,
    check_copy,
    check_dtype,
    check_inverse,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from ..derivatives import not_differentiable
from ..format_pairs import check_transforms
from ..registration import register
from .base_op import GroupedGemm, MGrouped, check_vectors, reference_operand


def _sum_of_rows(rows: Tensor, terms: Tensor, like: Tensor) -> Tensor:
    """Return fp32 sums of the terms of each row of ``like``, added in the order of T.

    Args:
        rows: (T,) int32, the row of ``like`` to which each term is added. Indices out of range
            count for nothing.
        terms: (T, K).
        like: (S, K), gives the shape and dtype of the result.
    """
    target = torch.where((rows >= 0) & (rows < len(like)), rows, len(like)).long()
    sums = terms.new_zeros(len(like) + 1, terms.shape[1], dtype=torch.float32)
    return sums.index_put_((target,), terms.float(), accumulate=True)[:-1].to(like.dtype)


def _saved_tensors(
    ctx: Any, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors that ``setup_context`` saved.

    Raises:
        RuntimeError: The operands were quantized, so that nothing was saved.
    """
    if not ctx.saved_tensors:
        not_differentiable(f"{name} of quantized operands")(ctx)
    return ctx.saved_tensors


@register
@dataclasses.dataclass
class MGroupedGemm(MGrouped):
    """Multiply the rows of each group of A by the group's matrix of B.

    The op is differentiable in a, b and bias if both operands are plain. A plain ``a`` with a
    quantized ``b`` is multiplied by the decoded values of ``b`` (W4A16). Codes of 8 bits with codes
    of 4 bits are multiplied as decoded values, too (W4A8).

    Args:
        a: (T, K), bf16, fp16 or fp32. Or the codes of the rowwise copy of a ragged tensor.
        b: (G, N, K) of the dtype of ``a``, or (G, K, N) with ``transpose_b``. Or the codes of a
            uniform tensor: of its rowwise copy (fprop), or with ``transpose_b`` of its columnwise
            copy (dgrad). The rows of a columnwise copy are padded to whole tiles, so that K of
            ``b`` cannot be checked against ``a``.
        offs: (G,) int32. End rows.
        bias: (G, N). Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: Contract over the rows of the groups of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32. By default the dtype of a plain ``a``, or bf16 for codes,
            which have no dtype to follow.
        a_scales: The other tensors of the copy of ``a`` (``Format.operand_names``), such as its
            block scales and global scale. None if ``a`` is plain.
        b_scales: The other tensors of the copy of ``b``, as for ``a``.
        a_format: Text of the format of ``a``. None if it is plain.
        b_format: Text of the format of ``b``. None if it is plain.
        prepacked: True if ``b`` has the bit order of ``cute_kernels.prepack``. Kernels for sm_90a
            and the reference support that.
        accumulation: How a tensor core adds products of operands without block scales (FP8). "fast"
            adds all of K in one accumulator. "split" uses a fresh accumulator every 128 of K, and
            adds each to an fp32 sum. The default is "fast" for fprop and "split" for dgrad. The
            bits differ on sm_90a, whose accumulators keep 13 fraction bits of FP8 sums. Elsewhere
            the accumulator is as exact as "split" anyway. Other operands raise ValueError.
        rows: (T,) int32. The row of ``a`` for each row of the product, such as ``token`` of
            ``compute_routing``. Then ``a`` (S, K) has any number of rows, and one group if it is
            quantized, to a format with scales of single rows. The result has the bits of the
            product of ``moe_gather(a, rows)``: an index out of range stands for zeros. Kernels of
            two plain operands read rows of ``a`` by the index, on sm_90a if that is faster
            (``ops.gemm.gathered``). Other kernels gather the rows into memory first.
        inverse: (S, k) int32, as for ``grouped_quantize``, for rows that are gathered into memory.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form does not write rows of the tail.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None
    transpose_b: bool = False
    out_dtype: torch.dtype | None = None
    a_scales: list[Tensor] | None = None
    b_scales: list[Tensor] | None = None
    a_format: str | None = None
    b_format: str | None = None
    prepacked: bool = False
    accumulation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "m_grouped_gemm"

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save plain operands for the backward pass."""
        a, b, offs, bias, alpha, transpose_b, _, a_scales, b_scales, *_, rows, inverse = inputs
        if a_scales is not None or b_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)
        ctx.transpose_b = transpose_b
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``a``, ``b`` and ``bias``."""
        a, b, offs, alpha, rows, inverse = _saved_tensors(ctx, "m_grouped_gemm")
        if alpha is not None and ctx.needs_input_grad[4]:
            raise RuntimeError("alpha of m_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dy_a = dy.to(a.dtype)
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(dy_a, b, offs, None, alpha, not ctx.transpose_b, a.dtype)
            if rows is not None:
                da = _sum_of_rows(rows, da, a)
        if ctx.needs_input_grad[1]:
            if ctx.transpose_b:
                gathered = a if rows is None else ops.moe_gather(a, rows, inverse)
                db = ops.k_grouped_gemm(gathered, dy_a, offs, alpha, b.dtype)
            else:
                db = ops.k_grouped_gemm(dy_a, a, offs, alpha, b.dtype, rows=rows, inverse=inverse)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            dbias = ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        return da, db, None, dbias, *(None,) * 11


@register
@dataclasses.dataclass
class KGroupedGemm(GroupedGemm):
    """Multiply the transposed rows of each group of A by the rows of the group of B.

    The op is differentiable in a and b if both operands are plain.

    Args:
        a: (T, N), bf16, fp16 or fp32. Or the codes of the columnwise copy of a ragged tensor.
        b: (T, K) of the dtype of ``a``. Or the codes of the columnwise copy of a tensor with the
            same offs.
        offs: (G,) int32. End rows.
        alpha: (G,) fp32. Factors.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``; "split" by default.
        rows: (T,) int32. The row of ``b`` (S, K) for each row of ``a``, as for ``m_grouped_gemm``.
            Only for plain operands.
        inverse: (S, k) int32, as for ``m_grouped_gemm``.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form does not write empty groups when it
        accumulates.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    alpha: Tensor | None = None
    out_dtype: torch.dtype | None = None
    a_scales: list[Tensor] | None = None
    b_scales: list[Tensor] | None = None
    a_format: str | None = None
    b_format: str | None = None
    accumulation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "k_grouped_gemm"

    @property
    def uses_columnwise(self) -> bool:
        """True if B is a columnwise copy, as A is."""
        return self.a_format is not None

    @property
    def is_split(self) -> bool:
        return self.accumulation != "fast"

    def _slots(self) -> int:
        """Return the number of slot rows of a quantized A."""
        fmt = self.a_record
        assert fmt is not None
        return (
            fmt.element.count(self.a.shape[1])
            if fmt.columnwise == "transposed"
            else self.a.shape[0]
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, T. For slots, whose shapes do not determine T, it is their capacity."""
        if self.a_format is None:
            return self.a.shape[0]
        return most_rows(self._slots() // TILE_ROWS, self.offs.shape[0])

    def width(self, side: str) -> int:
        """Return N for ``side="a"`` or K for ``side="b"``."""
        fmt, codes = getattr(self, f"{side}_record"), getattr(self, side)
        transposed = fmt is not None and fmt.columnwise == "transposed"
        return codes.shape[0 if transposed else 1]

    def check(self) -> None:
        """Check the operands, their scales and the factors."""
        check_tensor("a", self.a, ndim=(2,))
        check_offs(self.offs)
        self._check_formats()
        if self.a_format is None:
            self._check_plain()
        else:
            self._check_quantized()
        check_vectors(self.offs.shape[0], 0, None, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def _check_plain(self) -> None:
        """Check plain operands and the row index."""
        check_dtype("a", self.a.dtype, INPUT_DTYPES)
        rows = self.num_rows
        shape = (rows if self.rows is None else None, None)
        check_tensor("b", self.b, dtypes=(self.a.dtype,), shape=shape)
        if self.rows is not None:
            check_tensor("rows", self.rows, dtypes=(torch.int32,), shape=(rows,))
        check_inverse(self.inverse, self.rows, "b", self.b)

    def _check_quantized(self) -> None:
        """Check quantized operands and their slots."""
        groups = self.offs.shape[0]
        if self.rows is not None or self.inverse is not None:
            raise ValueError(
                "rows and inverse need plain operands: blocks of "
                f"a_format={self.a_format!r} run along the rows of a group"
            )
        check_multiple("slot rows", self._slots(), TILE_ROWS, "a is a columnwise copy")
        if self._slots() // TILE_ROWS < groups:
            raise ValueError(
                f"a must have at least one tile for each of the {groups} groups of offs, "
                f"got shape {tuple(self.a.shape)}"
            )
        check_tensor("b", self.b, ndim=(2,))
        for side in "ab":
            fmt, shape = getattr(self, f"{side}_record"), (self.num_rows, self.width(side))
            copy = (getattr(self, side), getattr(self, f"{side}_scales"))
            check_copy(side, f"{side}_scales", copy, fmt, shape, groups, columnwise=True)

    def _check_formats(self) -> None:
        """Raise ValueError unless the formats can be multiplied over rows."""
        super()._check_formats()
        if self.a_format is None and self.b_format is not None:
            raise ValueError(f"a must be quantized if b is, got b_format={self.b_format!r} alone")
        check_transforms(self.a_record, self.b_record)

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec((self.offs.shape[0], self.width("a"), self.width("b")), self.result_dtype)
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Compute the product with the reference backend into ``outputs[0]``."""
        (out,) = outputs
        reference.k_grouped_gemm(
            reference_operand(self.a, self.a_scales, self.a_record, columnwise=True),
            reference_operand(self.b, self.b_scales, self.b_record, True, self.rows),
            Groups.ragged(self.offs, self.num_rows),
            out,
            alpha=self.alpha,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
            split=self.is_split,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save plain operands for the backward pass."""
        a, b, offs, alpha, _, a_scales, *_, rows, inverse = inputs
        if a_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``a`` and ``b``."""
        a, b, offs, alpha, rows, inverse = _saved_tensors(ctx, "k_grouped_gemm")
        if alpha is not None and ctx.needs_input_grad[3]:
            raise RuntimeError("alpha of k_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dw = dw.to(a.dtype)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(
                b, dw, offs, None, alpha, False, a.dtype, rows=rows, inverse=inverse
            )
        if ctx.needs_input_grad[1]:
            db = ops.m_grouped_gemm(a, dw, offs, None, alpha, True, b.dtype)
            if rows is not None:
                db = _sum_of_rows(rows, db, b)
        return da, db, *(None,) * 10
