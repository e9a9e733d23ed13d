"""Ops of a mixture of experts between its GEMMs: routing, gather, activation and combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.capability import require
from cute_kernels.formats import Format, parse
from cute_kernels.formats.activations import parse_activation
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.reference import moe as reference
from cute_kernels.runtime.backend import Backend

from ..activation_prologue import check_prologue, result_columns
from ..checks import INPUT_DTYPES, check_dtype, check_offs, check_tensor, same_device
from ..op import Op
from ..quantize.op import GroupedQuantize
from ..registration import register

_INT32 = (torch.int32,)


class PlainTensorOp(Op):
    """Base class of ops on plain tensors."""

    alignment: ClassVar[int] = 16


@register
@dataclass
class ComputeRouting(PlainTensorOp):
    """Sort the rows of tokens by expert, and return the row of each token: a stable counting sort.

    Token t has one row for each of its k experts. Rows of expert 0 come first, in the order of
    tokens, then rows of expert 1, and so on. An id outside [0, E), such as -1 for an expert on
    another rank, has no row. Nothing is read on the host.

    Args:
        expert_ids: (T, k) int32 or int64.
        num_experts: E, at least 1.
        expert_map: (N,) int32. Expert of each id: id i means expert ``expert_map[i]``. An id
            outside [0, N) and an expert outside [0, E) have no row. None maps each id to itself.

    Returns:
        Four int32 tensors. offs (E,): The end row of each expert. token (T * k,): token of each
        row.
        pair (T * k,): t * k + j of each row, whose weight is ``weights.flatten()[pair]``. row (T,
        k), the inverse: row of each of a token's experts. ``row`` is -1 for an id without a row;
        ``token`` and ``pair`` are -1 from row ``offs[-1]`` on.
    """

    expert_ids: Tensor
    num_experts: int
    expert_map: Tensor | None = None

    name: ClassVar[str] = "compute_routing"
    returns_list: ClassVar[bool] = True

    def check(self) -> None:
        """Check the arguments."""
        check_tensor("expert_ids", self.expert_ids, dtypes=(torch.int32, torch.int64), ndim=(2,))
        if self.num_experts < 1:
            raise ValueError(f"num_experts must be positive, got {self.num_experts}")
        if self.expert_map is not None:
            check_tensor("expert_map", self.expert_map, dtypes=_INT32, ndim=(1,))
            same_device("expert_ids", self.device, expert_map=self.expert_map)

    def outputs(self) -> list[BufferSpec]:
        tokens, top_k = self.expert_ids.shape
        shapes = (self.num_experts,), (tokens * top_k,), (tokens * top_k,), (tokens, top_k)
        return [BufferSpec(shape, torch.int32) for shape in shapes]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.compute_routing(self.expert_ids, self.expert_map, *outputs)


def _check_routing_weight(op: str, weight: Tensor) -> None:
    """Raise TypeError unless the routing weights of ``op`` are fp32."""
    if weight.dtype != torch.float32:
        raise TypeError(
            f"weight must be float32, got {str(weight.dtype).removeprefix('torch.')}: {op} "
            "multiplies by the routing weights (tokens, k) in fp32, so pass weight.float()"
        )


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inverse of the index for ``_gather_backward``."""
    x, _, row = inputs
    if row is None:
        raise RuntimeError(
            "the gradient of moe_gather needs row, the inverse of index: pass "
            "grouped.compute_routing(...).row"
        )
    ctx.save_for_backward(row)
    ctx.dtype = x.dtype


def _gather_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (row,) = ctx.saved_tensors
    return torch.ops.cute_kernels.moe_combine(dy, row, None, ctx.dtype), None, None


@register
@dataclass
class MoeGather(PlainTensorOp):
    """Gather rows of ``x`` by an index: ``out[r] = x[index[r]]``.

    Args:
        x: (T, H) bf16, fp16 or fp32.
        index: (R,) int32. Rows of ``out`` with an invalid index are zeros.
        row: (T, k) int32, the inverse: rows of ``out`` that each row of ``x`` is copied to, -1 for
            none. The gradient needs it. With it and k > 1, kernels read each row of ``x`` once,
            not k times.

    Returns:
        (R, H) of the dtype of ``x``.
    """

    x: Tensor
    index: Tensor
    row: Tensor | None = None

    name: ClassVar[str] = "moe_gather"
    setup_context = staticmethod(_gather_context)
    backward = staticmethod(_gather_backward)

    def check(self) -> None:
        """Check the arguments."""
        check_tensor("x", self.x, dtypes=INPUT_DTYPES, ndim=(2,))
        check_tensor("index", self.index, dtypes=_INT32, ndim=(1,))
        if self.row is not None:
            check_tensor("row", self.row, dtypes=_INT32, shape=(self.x.shape[0], None))
        same_device("x", self.device, index=self.index, row=self.row)

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec((self.index.shape[0], self.x.shape[1]), self.x.dtype)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.gather(self.x, self.index, outputs[0])


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, row, weight, _ = inputs
    ctx.save_for_backward(row, h if ctx.needs_input_grad[2] else None, weight)
    ctx.shape, ctx.dtype = h.shape, h.dtype


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``h`` and ``weight``."""
    row, h, weight = ctx.saved_tensors
    is_valid = (row >= 0) & (row < ctx.shape[0])
    # Rows that are there have one token each; the others go to one that is dropped.
    index = torch.where(is_valid, row, ctx.shape[0]).long()
    dh = dweight = None
    if ctx.needs_input_grad[0]:
        terms_of_rows = dy.float().unsqueeze(1)
        terms_of_rows = (
            terms_of_rows.expand(*row.shape, -1)
            if weight is None
            else terms_of_rows * weight.unsqueeze(-1)
        )
        buffer = dy.new_zeros(ctx.shape[0] + 1, ctx.shape[1], dtype=ctx.dtype)
        dh = buffer.index_put((index,), terms_of_rows.to(ctx.dtype))[:-1]
    if ctx.needs_input_grad[2]:
        terms = torch.nn.functional.pad(h, (0, 0, 0, 1))[index].float() * dy.float().unsqueeze(1)
        dweight = torch.where(is_valid, terms.sum(-1), 0)
    return dh, None, dweight, None


@register
@dataclass
class MoeCombine(PlainTensorOp):
    """Sum each token's weighted rows: ``y[t] = sum over k of weight[t, k] h[row[t, k]]``.

    The sum is in fp32, in ascending k from 0 on. Each product and each sum is rounded, with one
    cast at the end.

    Args:
        h: (R, H) bf16, fp16 or fp32.
        row: (T, k) int32, without repetitions; invalid rows are skipped.
        weight: (T, k) fp32. None for ones.
        out_dtype: Dtype of ``y``; by default the dtype of ``h``.

    Returns:
        (T, H).
    """

    h: Tensor
    row: Tensor
    weight: Tensor | None = None
    out_dtype: torch.dtype | None = None

    name: ClassVar[str] = "moe_combine"
    out_name: ClassVar[str] = "y"
    setup_context = staticmethod(_combine_context)
    backward = staticmethod(_combine_backward)

    def check(self) -> None:
        """Check the arguments."""
        check_tensor("h", self.h, dtypes=INPUT_DTYPES, ndim=(2,))
        check_tensor("row", self.row, dtypes=_INT32, ndim=(2,))
        if self.weight is not None:
            check_tensor("weight", self.weight, shape=self.row.shape)
            _check_routing_weight("moe_combine", self.weight)
        check_dtype("out_dtype", self.out_dtype or self.h.dtype, INPUT_DTYPES)
        same_device("h", self.device, row=self.row, weight=self.weight)

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec((self.row.shape[0], self.h.shape[1]), self.out_dtype or self.h.dtype)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.combine(self.h, self.row, self.weight, outputs[0])


def _check_activation(x: Tensor, activation: str, offs: Tensor | None, interleaved: bool) -> None:
    """Check the arguments that ops with an activation share."""
    check_tensor("x", x, dtypes=INPUT_DTYPES, ndim=(2,))
    check_prologue("x", x, activation)
    if interleaved and not parse_activation(activation).is_gated:
        raise ValueError(f"interleaved is of gated activations, which {activation} is not")
    if offs is not None:
        check_offs(offs)
        same_device("x", x.device, offs=offs)


def _activate_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation, offs, ctx.interleaved = inputs
    ctx.save_for_backward(x, offs)


def _activate_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, offs = ctx.saved_tensors
    arguments = (x, dy.to(x.dtype), ctx.activation, offs, ctx.interleaved)
    return torch.ops.cute_kernels.moe_activate_gradient(*arguments)[0], None, None, None


@register
@dataclass
class MoeActivate(PlainTensorOp):
    """Apply an activation to the rows of experts, in fp32, rounded once to the dtype of ``x``.

    ``cute_kernels.reference.activations`` states the bits.

    Args:
        x: (R, W) bf16, fp16 or fp32; W = 2 N for a gated activation.
        activation: Text of the activation, as for ``grouped_quantize``.
        offs: (G,) int32. End rows: rows from the last one on are neither read nor written.
        interleaved: True if the columns of a gated activation's two inputs alternate, A first,
            instead of forming halves [A | B].

    Returns:
        (R, N).
    """

    x: Tensor
    activation: str
    offs: Tensor | None = None
    interleaved: bool = False

    name: ClassVar[str] = "moe_activate"
    setup_context = staticmethod(_activate_context)
    backward = staticmethod(_activate_backward)

    def check(self) -> None:
        _check_activation(self.x, self.activation, self.offs, self.interleaved)

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec(
                (self.x.shape[0], result_columns(self.x.shape[1], self.activation)), self.x.dtype
            )
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.activate(
            self.x, parse_activation(self.activation), self.offs, self.interleaved, outputs[0]
        )


@register
@dataclass
class MoeActivateGradient(PlainTensorOp):
    """Return the gradient of ``moe_activate``, and of the weights of rows if they are given.

    A token's output is the sum of its rows of a second GEMM of the result a of ``moe_activate``,
    each with a weight p. ``grad`` is the gradient of that GEMM's input without p. It suffices for
    the gradient of p, which is <grad, a>, so the rows that p multiplied need not be saved
    (SonicMoE, arXiv 2512.14080). ``cute_kernels.reference.moe`` states the bits.

    Args:
        x: As for ``moe_activate``.
        grad: (R, N) of the dtype of ``x``: gradient of its result, without the weight.
        activation: As for ``moe_activate``.
        offs: As for ``moe_activate``.
        interleaved: As for ``moe_activate``.
        weight: (T, k) fp32, p of each pair of a token and an expert.
        pair: (R,) int32. The pair of each row. Required with ``weight``.

    Returns:
        The gradient with respect to ``x``, given ``p * grad``. With weights also ``p * a`` (R, N)
        of the dtype of ``x``, which the gradient of the second GEMM's weight needs, and the
        gradient of ``weight`` (T, k) fp32, 0 for pairs without a row.
    """

    x: Tensor
    grad: Tensor
    activation: str
    offs: Tensor | None = None
    interleaved: bool = False
    weight: Tensor | None = None
    pair: Tensor | None = None

    name: ClassVar[str] = "moe_activate_gradient"
    returns_list: ClassVar[bool] = True

    def check(self) -> None:
        """Check the arguments."""
        _check_activation(self.x, self.activation, self.offs, self.interleaved)
        check_prologue("x", self.x, self.activation, self.grad)
        if (self.weight is None) != (self.pair is None):
            raise ValueError("weight and pair go together: pass both or neither")
        if self.weight is not None and self.pair is not None:
            check_tensor("weight", self.weight, ndim=(2,))
            _check_routing_weight("moe_activate_gradient", self.weight)
            check_tensor("pair", self.pair, dtypes=_INT32, shape=(self.x.shape[0],))
        same_device("x", self.device, weight=self.weight, pair=self.pair)

    def outputs(self) -> list[BufferSpec]:
        specs = [BufferSpec(tuple(t.shape), t.dtype) for t in (self.x, self.grad)]
        if self.weight is None:
            return specs[:1]
        return [*specs, BufferSpec(tuple(self.weight.shape), torch.float32, zeroed=True)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        act = parse_activation(self.activation)
        reference.activate_gradient(
            self.x, self.grad, act, self.offs, self.interleaved, self.weight, self.pair, outputs
        )


@register
@dataclass
class MoeQuantizeGradient(Op):
    """Compute ``moe_activate_gradient``, then ``grouped_quantize``, with the same bits.

    One kernel does both from one read if the shapes allow it. The gradients are rounded to the
    dtype of ``x`` before they are quantized, but need not be written to memory.

    Args:
        x: (R, W). The input of the activation; bf16, fp16 or fp32.
        grad: (R, N) of the dtype of ``x``: gradient of the activation's result, without the
            weight.
        format: Text of the format of the gradient of ``x``: MXFP8, FP8Block, or FP8 with delayed
            scaling.
        scaled_format: Text of the format of ``p * a``, one of the same formats.
        activation: As for ``moe_activate``.
        offs: As for ``moe_activate``.
        interleaved: As for ``moe_activate``.
        weight: As for ``moe_activate_gradient``.
        pair: As for ``moe_activate_gradient``.
        scale: As for ``grouped_quantize``, for the gradient of ``x``, if its format takes it.
        scaled_scale: As for ``grouped_quantize``, for ``p * a``, if its format takes it.

    Returns:
        The buffers of the gradient of ``x`` in both directions and of ``p * a`` columnwise, as
        ``grouped_quantize`` returns them, such as codes, scales, codes_t, scales_t, codes_t and
        scales_t; and the gradient of ``weight``.
    """

    x: Tensor
    grad: Tensor
    format: str
    scaled_format: str
    activation: str
    offs: Tensor
    interleaved: bool
    weight: Tensor
    pair: Tensor
    scale: Tensor | None = None
    scaled_scale: Tensor | None = None

    name: ClassVar[str] = "moe_quantize_gradient"
    returns_list: ClassVar[bool] = True

    def passes(
        self, dx: Tensor, scaled: Tensor
    ) -> tuple[MoeActivateGradient, GroupedQuantize, GroupedQuantize]:
        """Return the three ops that compute the same with ``dx`` and ``scaled`` in memory."""
        return (
            MoeActivateGradient(
                self.x,
                self.grad,
                self.activation,
                self.offs,
                self.interleaved,
                self.weight,
                self.pair,
            ),
            GroupedQuantize(dx, self.format, self.offs, None, True, True, self.scale),
            GroupedQuantize(
                scaled, self.scaled_format, self.offs, None, False, True, self.scaled_scale
            ),
        )

    def outputs_of(
        self, outputs: Sequence[Tensor], dx: Tensor, scaled: Tensor
    ) -> tuple[Sequence[Tensor], ...]:
        """Return the outputs of each of ``passes``."""
        count = len(self.passes(dx, scaled)[1].specs())
        return [dx, scaled, outputs[-1]], outputs[:count], outputs[count:-1]

    def check(self) -> None:
        """Check the arguments of all passes."""
        activation_op, *quantize_ops = self.passes(self.x, self.grad)
        for op in quantize_ops:
            require(self.name, op.record, "reference")  # other formats ask for more arguments
            op.check("scale" if op is quantize_ops[0] else "scaled_scale")
        activation_op.check()
        same_device("x", self.device, offs=self.offs)

    def require(self, backend: Backend) -> None:
        for op in self.passes(self.x, self.grad)[1:]:
            require(self.name, op.record, backend.arch, dtype=self.x.dtype)

    def capability(self) -> tuple[str, Format | None]:
        return self.name, parse(self.format)

    def outputs(self) -> list[BufferSpec]:
        activation_op, *quantize_ops = self.passes(self.x, self.grad)
        return [spec for op in quantize_ops for spec in op.outputs()] + activation_op.outputs()[-1:]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        intermediate = torch.zeros_like(self.x), torch.zeros_like(self.grad)
        for op, targets in zip(
            self.passes(*intermediate), self.outputs_of(outputs, *intermediate), strict=True
        ):
            op.run_reference(targets)
