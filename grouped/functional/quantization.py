"""``quantize``, and offsets from group sizes."""

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.capability import require
from cute_kernels.formats import Format
from cute_kernels.formats.activations import Activation
from cute_kernels.ops.activation_prologue import result_shape
from cute_kernels.ops.checks import check_tensor
from cute_kernels.ops.derivatives import refuse_derivatives
from cute_kernels.records import check_kind

from ..tensor.dispatch import handler
from ..tensor.dtensor_parts import is_distributed
from ..tensor.grouped_tensor import GroupedTensor, assemble
from ..tensor.offsets import Offsets, parse_offs
from ..tensor.seeds import seed_tensor
from ..tensor.shapes import MemberShapes, Shapes, flat_shapes, parse_shapes
from ..tensor.validation import check_format, check_is_tensor
from ..tracing import constant_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["compute_offsets", "quantize"]


def compute_offsets(
    splits: Tensor, *, multiplier: int = 1, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Return the end offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes, on the device.
        multiplier: Elements counted for each unit of ``splits``; an integer of at least 1 that
            ``dtype`` holds.
        dtype: Int32 or int64.

    Returns:
        (G,) offsets on the device of ``splits``. Offsets beyond ``dtype`` saturate: they are its
        largest number, and never wrap around.

    Raises:
        TypeError: A dtype is not supported, or the multiplier is not an integer.
        ValueError: ``splits`` is not one-dimensional, or the multiplier is out of range.
    """
    # Check here, too: 2.0 equals 2 and True equals 1, so cached plans of the op accept them.
    if isinstance(multiplier, bool) or not isinstance(multiplier, (int, torch.SymInt)):
        raise TypeError(f"multiplier must be an integer, got {multiplier!r}")
    return ops.compute_offsets(splits, multiplier, dtype)


class _Options(TypedDict, total=False):
    """Keyword arguments of ``quantize`` without ``dbias``, for its overloads."""

    offs: Offsets | None
    shapes: Shapes | None
    rowwise: bool
    columnwise: bool
    activation: str | Activation | None
    grad: Tensor | None
    amax: Tensor | None
    scale: Tensor | None
    seed: int | Tensor | None
    out: GroupedTensor | None


@overload
def quantize(
    x: Tensor, fmt: Format, *, dbias: Literal[False] = ..., **options: "Unpack[_Options]"
) -> GroupedTensor: ...


@overload
def quantize(
    x: Tensor, fmt: Format, *, dbias: Literal[True], **options: "Unpack[_Options]"
) -> tuple[GroupedTensor, Tensor]: ...


@overload
def quantize(
    x: Tensor, fmt: Format, *, dbias: bool, **options: "Unpack[_Options]"
) -> GroupedTensor | tuple[GroupedTensor, Tensor]: ...


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    offs: Offsets | None = None,
    shapes: Shapes | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    activation: str | Activation | None = None,
    grad: Tensor | None = None,
    dbias: bool = False,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    seed: int | Tensor | None = None,
    out: GroupedTensor | None = None,
) -> GroupedTensor | tuple[GroupedTensor, Tensor]:
    """Quantize the groups of ``x``.

    The amax reduction ignores NaN. FP8 codes keep a NaN; E2M1 has no NaN encoding, so under NVFP4 a
    NaN in ``x`` decodes to a finite number. An infinity saturates. Under NVFP4 it makes the amax of
    its group or row infinite, and their decoded values non-finite. Under MXFP8 it decodes to
    itself, and values that share its scale to zeros. Under FP8 and FP8Block such values have the
    scale 1, and an infinity decodes to the largest code. With ``fmt.nan_scales``, which recipes set
    for training, no value that shares a scale with an infinity decodes to a finite number; nor,
    under NVFP4, one that shares a scale with a NaN.
    ``NVFP4(hadamard=True)`` spreads a NaN or an infinity over its 16 rows of the columnwise copy.

    Args:
        x: (T, K) with ``offs``, (capacity,) with ``shapes``, or uniform (G, N, K) without; bf16,
            fp16 or fp32. K is a multiple of ``Format.k_multiple``, 16 for NVFP4. (..., 2K) for a
            gated activation without ``grad``.
        fmt: The format, such as ``grouped.NVFP4(row_scaled=True)``.
        offs: (G,). End row of each group, non-decreasing: an int32 or int64 tensor on the device of
            ``x``, never read on the host, or a host list. Rows from the last end on are the tail of
            a capacity buffer: neither read nor written.
        shapes: (m, n) of each group if the last dimension varies, or both do: a host list, or an
            integer tensor (G, 2) on the CPU. Group i is contiguous and row-major in ``x``, from
            element m_0 * n_0 + ... + m_(i-1) * n_(i-1) on. Each n is a multiple of
            ``Format.k_multiple``, m may be 0. Elements after the last group are a tail that is
            never read. Each group has the codes and scales that it would have alone. No product
            supports such tensors.
        rowwise: Make the copy with blocks along K, which fprop and dgrad read.
        columnwise: Make the copy with blocks along the rows of each group, which wgrad (ragged)
            and dgrad (weights) read.
        activation: Activation of ``x`` before it is quantized, a name such as ``"silu"`` or a
            ``grouped.Activation``. A gated one such as ``"swiglu"`` makes K columns of the halves
            [A | B] of 2K. Its fp32 result is rounded to the dtype of ``x`` first, except under
            FP8. ``cute_kernels.reference.activations`` defines the bits.
        grad: Gradient of the activation's result, of its shape and of the dtype of ``x``. The
            gradient with respect to ``x``, of the shape of ``x``, is quantized instead; a kernel
            computes it first. Not with ``shapes``.
        dbias: Also return the column sums of each group of the quantized values, before they are
            rounded. Not with ``shapes``.
        amax: (G,) fp32. Amax of each group, instead of computing it. Its sign is ignored. With
            ``NVFP4(hadamard=True)`` and both directions (2, G), rowwise and columnwise, since the
            columnwise copy has transformed values.
        scale: (G,) fp32. Factor of each group, which ``FP8(scaling="delayed")`` requires instead of
            an amax and other formats refuse: elements are multiplied by it and saturate. The result
            has it, its reciprocal ``scale_inv``, and the amax of this ``x``, from which
            ``delayed_scaling_update`` makes the next scale.
        seed: An int, or a (2,) int64 tensor on the device of ``x``, for
            ``NVFP4(stochastic_rounding=True)`` only. Codes depend on it, on the element and on the
            direction alone. None draws one from torch's default generator of that device, which
            ``torch.manual_seed`` controls.
        out: Tensor of the same shape, format, groups and directions to quantize into. One that
            requires a gradient only under ``torch.no_grad()``.

    Returns:
        A GroupedTensor of the shape of the quantized values, not differentiable; with ``dbias``
        also the (G, K) sums, which are the gradient of a bias and have the dtype of ``x``.
        ``torch.ops.cute_kernels.grouped_dbias`` returns them in fp32, in which they are summed.

    Raises:
        TypeError: ``fmt`` is not a format record, or a dtype is not supported.
        ValueError: A shape, a device, offs, an activation or a combination of arguments breaks a
            rule.
        RuntimeError: ``out`` requires a gradient and gradients are enabled.
        cute_kernels.UnsupportedError: The backend does not run the format.
    """
    check_format("fmt", fmt)
    check_is_tensor("x", x)
    if grad is not None:
        check_is_tensor("grad", grad)
    if not (type(rowwise) is type(columnwise) is type(dbias) is bool):
        check_kind(bool, rowwise=rowwise, columnwise=columnwise, dbias=dbias)
    if torch._C._functorch.is_batchedtensor(x):
        raise TypeError(
            "vmap over grouped.quantize: a GroupedTensor has its groups as the batch; stack x to "
            "(G, N, K), or call quantize on all rows with offs, outside of vmap"
        )
    if type(x) is not Tensor and is_distributed(x):
        from . import dtensor_ops

        if any(t is not None for t in (shapes, activation, grad, amax, scale, seed, out)) or dbias:
            raise ValueError(
                "x that is a DTensor goes with offs, rowwise and columnwise alone: "
                "pass to_local() of it"
            )
        distributed: Any = dtensor_ops.quantize(
            quantize, x, fmt, offs, rowwise=rowwise, columnwise=columnwise
        )
        return distributed
    x, grad = x.detach(), None if grad is None else grad.detach()
    text = _activation_text(activation)
    shape = tuple(x.shape) if grad is not None else result_shape(x.shape, text)
    # Formats that no backend runs. The op checks whether this backend runs it.
    require("grouped_quantize", fmt, "reference", columnwise=columnwise)
    _check_grouping(x, offs, shapes, text, grad, dbias)
    members = None if shapes is None else parse_shapes(shapes)
    end_rows = None if offs is None else parse_offs(offs, x.shape[0], x.device)
    if end_rows is offs and end_rows is not None and out is None:
        # The result owns its end rows: ``out=`` writes them, and the caller may reuse its buffer.
        end_rows = end_rows.clone()
    seed_numbers = seed_tensor(seed, fmt, x.device)
    dtype, summed = x.dtype, x
    if text is not None and (dbias or grad is not None):
        result_dtype = dtype if fmt.rounds_activation and not dbias else torch.float32
        summed = _apply_activation(x, grad, text, end_rows, result_dtype).view(shape)
        x, text = summed.to(dtype) if fmt.rounds_activation else summed, None
    if out is None:
        buffers = ops.grouped_quantize(
            x,
            fmt.text,
            end_rows,
            amax,
            rowwise,
            columnwise,
            scale,
            seed_numbers,
            text,
            flat_shapes(members),
        )
        if torch.compiler.is_compiling():
            _allow_assemble()
        out = assemble(shape, dtype, fmt.text, end_rows, buffers, rowwise, columnwise, members)
    else:
        if fmt.has_given_scale and scale is None:
            raise ValueError(f"scale is missing: {fmt.text} takes (G,) fp32 scales")
        _check_out(out, fmt, shape, end_rows, members, rowwise, columnwise)
        refuse_derivatives("quantize(out=)", [("out", out)], "write it under torch.no_grad()")
        torch.ops.grouped.quantize_out(x, end_rows, amax, out, scale, seed_numbers, text)
    if not dbias:
        return out
    sums: Tensor = ops.grouped_dbias(summed, end_rows)
    return out, sums.to(dtype)


def _check_grouping(
    x: Tensor,
    offs: Offsets | None,
    shapes: Shapes | None,
    activation: str | None,
    grad: Tensor | None,
    dbias: bool,
) -> None:
    """Raise ValueError for options that the grouping of ``x`` does not allow."""
    if offs is None and shapes is None and x.dim() in (1, 2):
        name, kind = ("shapes", "(capacity,)") if x.dim() == 1 else ("offs", "(T, K)")
        raise ValueError(f"{name} is missing: x of shape {kind} needs {name}; uniform x is 3D")
    if offs is not None and shapes is not None:
        raise ValueError("offs and shapes are both given: pass only one of them")
    if dbias and shapes is not None:
        raise ValueError(
            "dbias has no meaning with shapes: the last dimension varies, and with it how many "
            "sums a group has"
        )
    if grad is not None and activation is None:
        raise ValueError("grad needs an activation: it is the gradient of the activation's result")
    if grad is not None and shapes is not None:
        raise ValueError("grad goes with offs or uniform x, not with shapes")


def _apply_activation(
    x: Tensor, grad: Tensor | None, activation: str, offs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the activation of ``x``, or its gradient if ``grad`` is given, rounded once."""
    rows = x.to(dtype).flatten(0, -2)
    if grad is None:
        return ops.moe_activate(rows, activation, offs)
    check_tensor("grad", grad, dtypes=(x.dtype,), ndim=(x.dim(),))
    grad_rows = grad.to(dtype).flatten(0, -2)
    (gradient,) = ops.moe_activate_gradient(rows, grad_rows, activation, offs)
    return gradient


@constant_call
def _allow_assemble() -> None:
    """Make Dynamo, which is loaded when this is called, trace ``assemble`` as one node."""
    torch.compiler.allow_in_graph(assemble)


def _activation_text(activation: str | Activation | None) -> str | None:
    """Return the text of an activation."""
    if isinstance(activation, Activation):
        return activation.text
    if activation is None or isinstance(activation, str):
        return activation
    raise TypeError(
        f"activation must be a name such as 'swiglu' or a grouped.Activation, got {activation!r}"
    )


def _check_out(
    out: GroupedTensor,
    fmt: Format,
    shape: tuple[int, ...],
    end_rows: Tensor | None,
    shapes: MemberShapes | None,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Raise unless the result fits ``out``."""
    if not isinstance(out, GroupedTensor):
        raise TypeError(f"out must be a GroupedTensor, got {type(out).__name__}")
    for name, value, expected in (
        ("format", fmt, out.format),
        ("shape", shape, tuple(out.shape)),
        ("rowwise", rowwise, out.rowwise is not None),
        ("columnwise", columnwise, out.columnwise is not None),
        ("offs", end_rows is None, out.offs is None),
        ("shapes", shapes, out.member_shapes),
    ):
        if value != expected:
            raise ValueError(f"out was made with another {name}: {expected}, not {value}")
    if end_rows is not None and end_rows.shape[0] != out.num_groups:
        raise ValueError(f"out has {out.num_groups} groups, offs has {end_rows.shape[0]} entries")


_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "quantize_out(Tensor x, Tensor? offs, Tensor? amax, Tensor(o!) out, Tensor? scale=None, "
    "Tensor? seed=None, str? activation=None) -> ()"
)


@handler(torch.ops.grouped.quantize_out.default)
def _quantize_out(
    func: Any,
    x: Tensor,
    offs: Tensor | None,
    amax: Tensor | None,
    out: GroupedTensor,
    *options: Any,
) -> None:
    out._quantize_into(x, offs, amax, *options)
