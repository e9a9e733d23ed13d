"""Operands of grouped products: quantized copies, rows that are computed lazily, saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import Format
from cute_kernels.reference.codecs import codec_of

from ..recipes import ROLES
from ..tensor.members import QuantizedCopy


class OperandCopy(NamedTuple):
    """One orientation of an operand, as the GEMM ops read it.

    Attributes:
        codes: Codes of a quantized operand. Values of a plain one, bf16 or fp16.
        block_scales: Scales of the blocks, for formats that have them.
        global_scale: Fp32 tensor that the global scale follows from, for formats that have one:
            the amax of NVFP4, ``scale_inv`` of FP8.
    """

    codes: Tensor
    block_scales: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def scales(self) -> list[Tensor]:
        """The scales that the operand has, in the order in which ops take them."""
        return [t for t in self[1:] if t is not None]

    @classmethod
    def from_tensors(cls, fmt: Format, codes: Tensor, *scales: Tensor) -> OperandCopy:
        """Name the tensors of a quantized copy, which are in the order of ``operand_names``."""
        if fmt.scale is None:
            return cls(codes, None, *scales)
        return cls(codes, *scales)

    @classmethod
    def from_quantized_copy(cls, fmt: Format, copy: QuantizedCopy) -> OperandCopy:
        """Return what a product reads of one direction of a GroupedTensor."""
        codes, scales = copy.operand
        return cls.from_tensors(fmt, codes, *scales)


class QuantizedOperand(NamedTuple):
    """An operand that was quantized in one or both orientations.

    Attributes:
        rowwise: The copy with blocks along K. None if absent.
        columnwise: The copy with blocks along the rows of each group. None if absent.
        amax: (G,) fp32. Amax of the values, if the caller gave the scales: the next scales follow
            from it.
    """

    rowwise: OperandCopy | None = None
    columnwise: OperandCopy | None = None
    amax: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors of both copies."""
        copies = (copy for copy in (self.rowwise, self.columnwise) if copy is not None)
        return [t for copy in copies for t in copy if t is not None]


class OperandProbe(Protocol):
    """Hook of an inspector in one layer: it compares operands with their quantized copies."""

    def observe(
        self,
        role: str,
        x: Tensor | Sequence[Tensor],
        quantized: QuantizedOperand,
        fmt: Format | None,
        offs: Tensor | None = None,
    ) -> None:
        """Record the statistics of an operand. See ``grouped.inspect.Probe``."""


class Scaling(NamedTuple):
    """Scales of one call under delayed scaling, and the amaxes that the call updates.

    Attributes:
        scales: (G,) fp32 for each of input, weight and grad_output. A scale of 0 means that the
            group has none yet: it uses the scale of its current amax.
        amaxes: (G,) fp32 for each role, the largest amax of the step so far. They are written when
            the gradients of the call are computed. None if the call does not count.
        may_be_zero: For each role, False if no scale is 0. Then no amax is computed first.
    """

    scales: Sequence[Tensor]
    amaxes: Sequence[Tensor] | None = None
    may_be_zero: Sequence[bool] = (True, True, True)

    def record(self, call_amaxes: Sequence[Tensor | None]) -> None:
        """Raise the amaxes of the step to those of a call, one per role. None changes nothing."""
        for step_amax, amax in zip(self.amaxes or (), call_amaxes, strict=False):
            if amax is not None:
                step_amax.copy_(torch.maximum(step_amax, amax))

    def operand_scale(self, role: str) -> OperandScale:
        """Return the scales of one role."""
        index = ROLES.index(role)
        return OperandScale(self.scales[index], self.may_be_zero[index])


class OperandScale(NamedTuple):
    """Scales of one operand, (G,) fp32, and whether some of them may be 0. See ``Scaling``."""

    value: Tensor
    may_be_zero: bool

    def resolve(self, x: Tensor, offs: Tensor | None, fmt: Format) -> Tensor:
        """Return the scales for ``x``. Zeros become the scales of ``FP8(scaling="current")``."""
        _, current, _ = codec_of(fmt).global_scale_vectors(ops.grouped_amax(x, offs))
        return torch.where(self.value == 0, current, self.value)


class LazyRows(NamedTuple):
    """Rows that are computed when they are read.

    The rows are gathered from a tensor, optionally passed through an activation.

    Attributes:
        x: (T, W). Tensor that the rows come from.
        offs: (G,) int32. End rows of the groups.
        row_index: (R,) int32. Row of ``x`` for each row. None for all rows in order.
        inverse: (T, k) int32. Rows that each row of ``x`` is copied to. It is given with
            ``row_index``.
        activation: Text of an activation that is applied to the rows. None if absent.
        interleaved: True if the two inputs of a gated activation alternate.
    """

    x: Tensor
    offs: Tensor
    row_index: Tensor | None = None
    inverse: Tensor | None = None
    activation: str | None = None
    interleaved: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        return self.x.dtype

    def materialize(self) -> Tensor:
        """Return the rows as a tensor."""
        x = (
            self.x
            if self.row_index is None
            else ops.moe_gather(self.x, self.row_index, self.inverse)
        )
        if self.activation is None:
            return x
        return ops.moe_activate(x, self.activation, self.offs, self.interleaved)

    def for_quantizer(self, fmt: Format) -> LazyRows:
        """Return rows that a quantizer for ``fmt`` can read, with the same codes.

        The activation is computed here if the quantizer cannot compute it: it has no interleaved
        activations, and must round their results to their dtype.
        """
        if self.activation is not None and (self.interleaved or not fmt.rounds_activation):
            return LazyRows(self.materialize(), self.offs)
        return self


class QuantizedRows(NamedTuple):
    """Rows that the preceding product quantized, and the dtype that they had.

    Attributes:
        copy: Rowwise copy of the rows.
        dtype: Data type of the rows before they were quantized.
    """

    copy: OperandCopy
    dtype: torch.dtype


def materialize(x: Tensor | LazyRows) -> Tensor:
    """Return ``x`` as a tensor, and compute its rows if they are lazy."""
    return x.materialize() if isinstance(x, LazyRows) else x


class SavedOperands(NamedTuple):
    """Tensors that a product saves for its backward pass. Unneeded ones are None or empty.

    Attributes:
        x: The input that wgrad reads: its columnwise copy, or its values if the recipe is plain.
        weight: Columnwise copy of the weight, which dgrad reads. None if the recipe is plain.
        parameters: Parameters of the weight, which dgrad reads if the recipe is plain.
        amax_x: (G,). Amax of the input under delayed scaling.
        amax_weight: (G,). Amax of the weight under delayed scaling, if the call quantized it.
    """

    x: OperandCopy | None = None
    weight: OperandCopy | None = None
    parameters: Sequence[Tensor] = ()
    amax_x: Tensor | None = None
    amax_weight: Tensor | None = None

    def flatten(self) -> list[Tensor | None]:
        """Return all tensors in a list; ``unflatten`` undoes it."""
        copies = [*(self.x or _NO_COPY), *(self.weight or _NO_COPY)]
        return [*copies, self.amax_x, self.amax_weight, *self.parameters]

    @classmethod
    def unflatten(cls, tensors: Sequence[Tensor | None]) -> SavedOperands:
        """Rebuild the record from the list that ``flatten`` returned."""
        amax_x, amax_weight, *parameters = tensors[6:]
        x = None if tensors[0] is None else OperandCopy(*tensors[:3])  # type: ignore[arg-type]
        weight = None if tensors[3] is None else OperandCopy(*tensors[3:6])  # type: ignore[arg-type]
        return cls(x, weight, parameters, amax_x, amax_weight)  # type: ignore[arg-type]


#: The record of a call that saves nothing.
NOTHING_SAVED = SavedOperands()
_NO_COPY = (None, None, None)


class WgradOperands(NamedTuple):
    """Operands of the product that computes the gradient of a weight.

    Attributes:
        dy: Columnwise copy of the gradient of the output, or its values if plain.
        x: Columnwise copy of the input, or its values if plain. None until the caller sets it, if
            the forward pass did not save it.
        offs: (G,) int32. End rows.
        row_index: (R,) int32. Row of a plain ``x`` for each row of ``dy``. None if absent.
        inverse: (T, k) int32. The inverse of ``row_index``.
    """

    dy: OperandCopy
    x: OperandCopy | None
    offs: Tensor
    row_index: Tensor | None = None
    inverse: Tensor | None = None


class Gradients(NamedTuple):
    """Results of a backward pass, or None if no gradient needs them.

    Attributes:
        dx: (T, K). Gradient of the input.
        wgrad: Operands of the product that computes the gradient of the weight.
        dbias: (G, N). Gradient of the bias.
        amax: (G,). Amax of the gradient of the output, if its scales were given.
    """

    dx: Tensor | None
    wgrad: WgradOperands | None
    dbias: Tensor | None
    amax: Tensor | None = None


class Epilogue(NamedTuple):
    """Activation that a product applies to its result. See ``m_grouped_gemm_activate``.

    Attributes:
        activation: Text of the activation.
        interleaved: True if the two inputs of a gated activation alternate.
        keeps_z: Also return z, the input of the activation.
        quantize_to: Text of the format that the result is quantized to, or None.
    """

    activation: str
    interleaved: bool
    keeps_z: bool
    quantize_to: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the ``_activate`` ops."""
        return {
            "epilogue": self.activation,
            "interleaved": self.interleaved,
            "keeps_z": self.keeps_z,
            "quantize_to": self.quantize_to,
        }
