"""Ops of a mixture of experts between its products: routing, gather, activation and combine."""

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

_INT32, _FP32 = (torch.int32,), (torch.float32,)


class Plain(Op):
    """An op of plain tensors."""

    alignment: ClassVar[int] = 16


@register
@dataclass
class ComputeRouting(Plain):
    """Rows of tokens sorted by expert, and where each token went: a stable counting sort.

    Token t has one row for each of its k experts. Rows of expert 0 come first, in the order of
    tokens, then those of expert 1, and so on. An id that is not in [0, E), such as the -1 of an
    expert on another rank, has no row. Nothing is read on the host.

    Args:
        expert_ids: (T, k) int32 or int64.
        num_experts: E, at least 1.

    Returns:
        offs (E,), the END row of each expert; token (T * k,), the token of each row; pair (T *
        k,), t * k + j of each row, whose weight is ``weights.flatten()[pair]``; row (T, k), the
        inverse: the row of each of a token's experts. All int32. ``row`` is -1 of an id without
        a row, ``token`` and ``pair`` are -1 from row ``offs[-1]`` on.
    """

    expert_ids: Tensor
    num_experts: int

    name: ClassVar[str] = "compute_routing"
    returns_list: ClassVar[bool] = True

    def check(self) -> None:
        check_tensor("expert_ids", self.expert_ids, dtypes=(torch.int32, torch.int64), ndim=(2,))
        if self.num_experts < 1:
            raise ValueError(f"num_experts must be positive, got {self.num_experts}")

    def outputs(self) -> list[BufferSpec]:
        tokens, top_k = self.expert_ids.shape
        shapes = (self.num_experts,), (tokens * top_k,), (tokens * top_k,), (tokens, top_k)
        return [BufferSpec(shape, torch.int32) for shape in shapes]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.compute_routing(self.expert_ids, *outputs)


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, row = inputs
    if row is None:
        raise RuntimeError("the gradient of moe_gather needs row, the inverse of index")
    ctx.save_for_backward(row)
    ctx.dtype = x.dtype


def _gather_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (row,) = ctx.saved_tensors
    return torch.ops.cute_kernels.moe_combine(dy, row, None, ctx.dtype), None, None


@register
@dataclass
class MoeGather(Plain):
    """Rows of ``x`` by an index: ``out[r] = x[index[r]]``.

    Args:
        x: (T, H) bf16, fp16 or fp32.
        index: (R,) int32; where it is none of the rows of ``x``, ``out`` is zeros.
        row: (T, k) int32, the inverse: the rows of ``out`` that each row of ``x`` went to, -1
            for none. The gradient has to have it, and with it and k > 1 kernels read ``x``
            once, not k times.

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
    row, h, weight = ctx.saved_tensors
    there = (row >= 0) & (row < ctx.shape[0])
    # Rows that are there have one token each; the others go to one that is dropped.
    place = torch.where(there, row, ctx.shape[0]).long()
    dh = dweight = None
    if ctx.needs_input_grad[0]:
        wide = dy.float().unsqueeze(1)
        wide = wide.expand(*row.shape, -1) if weight is None else wide * weight.unsqueeze(-1)
        into = dy.new_zeros(ctx.shape[0] + 1, ctx.shape[1], dtype=ctx.dtype)
        dh = into.index_put((place,), wide.to(ctx.dtype))[:-1]
    if ctx.needs_input_grad[2]:
        terms = torch.nn.functional.pad(h, (0, 0, 0, 1))[place].float() * dy.float().unsqueeze(1)
        dweight = torch.where(there, terms.sum(-1), 0)
    return dh, None, dweight, None


@register
@dataclass
class MoeCombine(Plain):
    """The weighted sum of each token's rows: ``y[t] = sum over k of weight[t, k] h[row[t, k]]``.

    In fp32, in ascending k from 0 on, each product and each sum rounded, and one cast at the end.

    Args:
        h: (R, H) bf16, fp16 or fp32.
        row: (T, k) int32, no row twice; what is none of the rows of ``h`` is left out.
        weight: (T, k) fp32; None for ones.
        out_dtype: dtype of ``y``; that of ``h`` by default.

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
        check_tensor("h", self.h, dtypes=INPUT_DTYPES, ndim=(2,))
        check_tensor("row", self.row, dtypes=_INT32, ndim=(2,))
        if self.weight is not None:
            check_tensor("weight", self.weight, dtypes=_FP32, shape=self.row.shape)
        check_dtype("out_dtype", self.out_dtype or self.h.dtype, INPUT_DTYPES)
        same_device("h", self.device, row=self.row, weight=self.weight)

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec((self.row.shape[0], self.h.shape[1]), self.out_dtype or self.h.dtype)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        reference.combine(self.h, self.row, self.weight, outputs[0])


def _check_activation(x: Tensor, activation: str, offs: Tensor | None, interleaved: bool) -> None:
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
    given = (x, dy.to(x.dtype), ctx.activation, offs, ctx.interleaved)
    return torch.ops.cute_kernels.moe_activate_gradient(*given)[0], None, None, None


@register
@dataclass
class MoeActivate(Plain):
    """An activation of the rows of experts, in fp32 and rounded once to the dtype of ``x``.

    ``cute_kernels.reference.activations`` states its bits.

    Args:
        x: (R, W) bf16, fp16 or fp32; W = 2 N of a gated activation.
        activation: its text, as ``grouped_quantize`` takes it.
        offs: (G,) int32 end rows: rows from the last on are neither read nor written.
        interleaved: columns of a gated activation's two inputs alternate, A first, instead of
            being halves [A | B].

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
class MoeActivateGradient(Plain):
    """The gradient of ``moe_activate``, and of the weights of rows if there are some.

    A token's output is the sum of its rows, each with a weight p, of a second product of what
    ``moe_activate`` gives. The gradient of that product's input without p, ``grad``, is enough for
    the gradient of p: it is <grad, a>, so that the rows that p multiplied need not be kept
    (SonicMoE, arXiv 2512.14080). ``cute_kernels.reference.moe`` states the bits. Other arguments
    are those of ``moe_activate``.

    Args:
        grad: (R, N) of the dtype of ``x``: the gradient of its result, without the weight.
        weight: (T, k) fp32, p of each pair of a token and an expert.
        pair: (R,) int32, the pair of each row: with ``weight``.

    Returns:
        The gradient with respect to ``x`` of its shape, given ``p * grad``. With weights also
        ``p * a`` (R, N) of the dtype of ``x``, which the gradient of the second product's
        weight reads, and the gradient of ``weight`` (T, k) fp32, 0 where there is no row.
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
        _check_activation(self.x, self.activation, self.offs, self.interleaved)
        check_prologue("x", self.x, self.activation, self.grad)
        if (self.weight is None) != (self.pair is None):
            raise ValueError("weight and pair go together: give both or none")
        if self.weight is not None and self.pair is not None:
            check_tensor("weight", self.weight, dtypes=_FP32, ndim=(2,))
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
    """``moe_activate_gradient``, then ``grouped_quantize``, to the bit, where tiles allow it from
    one read.

    What is quantized is rounded to the dtype of ``x`` first, but need not be in memory. The other
    arguments are those of ``moe_activate_gradient``, all given.

    Args:
        x: (R, W), what enters the activation; bf16, fp16 or fp32.
        grad: (R, N) of the dtype of ``x``: the gradient of its result, without the weight.
        format: the text of the format of the gradient of ``x``: MXFP8, FP8Block, or FP8 with
            delayed scaling.
        scaled_format: likewise, of ``p * a``.
        scale: as ``grouped_quantize`` takes it, of the gradient of ``x`` if its format does.
        scaled_scale: likewise, of ``p * a``.

    Returns:
        The buffers of the gradient of ``x`` in both directions and of ``p * a`` columnwise as
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
        """What it does, by way of ``dx`` and ``scaled``."""
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
        """The outputs of each of ``passes``."""
        count = len(self.passes(dx, scaled)[1].specs())
        return [dx, scaled, outputs[-1]], outputs[:count], outputs[count:-1]

    def check(self) -> None:
        first, *others = self.passes(self.x, self.grad)
        for op in others:
            require(self.name, op.record, "reference")  # other formats ask for more arguments
            op.check("scale" if op is others[0] else "scaled_scale")
        first.check()
        same_device("x", self.device, offs=self.offs)

    def require(self, backend: Backend) -> None:
        for op in self.passes(self.x, self.grad)[1:]:
            require(self.name, op.record, backend.arch, dtype=self.x.dtype)

    def capability(self) -> tuple[str, Format | None]:
        return self.name, parse(self.format)

    def outputs(self) -> list[BufferSpec]:
        first, *others = self.passes(self.x, self.grad)
        return [spec for op in others for spec in op.outputs()] + first.outputs()[-1:]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        made = torch.zeros_like(self.x), torch.zeros_like(self.grad)
        for op, into in zip(self.passes(*made), self.outputs_of(outputs, *made), strict=True):
            op.run_reference(into)
