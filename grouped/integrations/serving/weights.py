"""Expert weights: parameters that an engine's loader fills, and GroupedTensors made of them.

A layer's first product has the weight ``w13`` (E, 2I, H): the rows of the gate, then those of the
up projection; or (E, I, H) without a gate. The second one has ``w2`` (E, H, I).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.formats import Format
from cute_kernels.layout.shapes import ceil_div

from ...checkpoint.layouts import Layout
from ...checkpoint.plain_tensors import WeightTensors, reconcile
from ...functional.quantization import quantize
from ...tensor.grouped_tensor import GroupedTensor

#: Kinds of parameters, by which the loaders of engines cut the tensors of a checkpoint.
WEIGHT, BLOCK, TENSOR = "weight", "block", "tensor"
#: NaN in E4M3, and in E8M0.
_NAN_BYTE, _NAN_EXPONENT = 0x7F, 0xFF
#: Names of vLLM's parameters for suffixes of layouts that have no dot.
_NAMES = {"_blocks": "_weight", "_scales": "_weight_scale"}
#: A number of columns that blocks of all sizes divide.
_MANY = 1 << 12


class Sizes(NamedTuple):
    """Sizes of one of the two weights of a layer.

    Attributes:
        name: ``"w13"`` or ``"w2"``.
        experts: Number of experts on this rank.
        rows: Rows of the weight.
        columns: Columns of the weight.
        projections: Number of projections in the rows.
    """

    name: str
    experts: int
    rows: int
    columns: int
    projections: int


class ParameterSpec(NamedTuple):
    """A parameter that the engine's loader fills.

    Attributes:
        name: Name in the layer.
        shape: Its shape.
        dtype: Its dtype.
        kind: ``WEIGHT``, ``BLOCK`` for scales of blocks, or ``TENSOR`` for a number per projection.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str


def parameter_specs(
    sizes: Sizes, layout: Layout | None, dtype: torch.dtype, has_input_scale: bool = False
) -> Iterator[ParameterSpec]:
    """Yield the parameters of a weight as the checkpoint stores it.

    Args:
        sizes: Sizes of the weight.
        layout: Layout in the checkpoint. None for a plain weight.
        dtype: Dtype of a plain weight.
        has_input_scale: True if the checkpoint has static scales of activations.
    """
    name, experts, rows, columns, projections = sizes
    if layout is None:
        yield ParameterSpec(f"{name}_weight", (experts, rows, columns), dtype, WEIGHT)
        return
    fmt = layout.fmt
    assert fmt.scale is not None
    codes, scales, *global_scales = parameter_names(name, layout)
    yield ParameterSpec(
        codes, (experts, rows, fmt.element.width(columns)), fmt.element.dtype, WEIGHT
    )
    if layout.shapes is not None:
        # Exponents, as bytes: a copy from bytes would convert their values.
        shape = (experts, *layout.shapes(rows, columns)[1])
        yield ParameterSpec(scales, shape, torch.uint8, BLOCK)
    else:
        block = fmt.scale.vec_size
        num_rows = ceil_div(rows, block) if fmt.has_squares else rows
        shape = (experts, num_rows, ceil_div(columns, block))
        yield ParameterSpec(scales, shape, fmt.scale.element.dtype, BLOCK)
    count = (experts, projections) if projections > 1 else (experts,)
    for global_scale in global_scales:
        yield ParameterSpec(global_scale, count, torch.float32, TENSOR)
    if has_input_scale and layout.input_scale is not None:
        # ModelOpt's ``input_scale`` is one number per expert in the loaders of vLLM and SGLang.
        input_scale = name + layout.input_scale.replace(".", "_", 1)
        is_single = input_scale.endswith("_input_scale")
        yield ParameterSpec(input_scale, (experts,) if is_single else count, torch.float32, TENSOR)


def parameter_names(name: str, layout: Layout) -> list[str]:
    """Return the names of a weight's parameters, in the order of the layout's suffixes."""
    return [name + _NAMES.get(suffix, suffix.replace(".", "_", 1)) for suffix in layout.suffixes]


def check_sizes(
    sizes: Sizes, fmt: Format, prefix: str, advice: str, layout: Layout | None = None
) -> None:
    """Raise ValueError if this rank's part of a weight has no whole blocks of the format.

    Args:
        sizes: Sizes of the weight.
        fmt: Format of the weight in memory.
        prefix: Name of the layer.
        advice: Options of the engine that make the part larger.
        layout: Layout in the checkpoint. None for a plain weight.
    """
    block = fmt.scale.vec_size if fmt.scale is not None and fmt.has_squares else 1
    rows = sizes.rows // sizes.projections
    for dim, size, multiple in (
        ("rows", rows, block if sizes.projections > 1 else 1),
        ("columns", sizes.columns, max(block, fmt.k_multiple, _stored_block(layout))),
    ):
        if size % multiple:
            raise ValueError(
                f"{prefix}: {sizes.name} has {size} {dim} on each rank, but {fmt} needs a multiple "
                f"of {multiple}: {advice}"
            )


def _stored_block(layout: Layout | None) -> int:
    """Return the number of columns with one scale in a layout of its own shapes, else 1."""
    if layout is None or layout.shapes is None:
        return 1
    return _MANY // layout.shapes(1, _MANY)[1][1]


def load_weight(layer: nn.Module, sizes: Sizes, layout: Layout, prefix: str) -> GroupedTensor:
    """Return the weight that a checkpoint stores in a layout, and remove its parameters.

    Codes keep their memory. Only the projections of an expert whose global scales differ are
    decoded, one expert at a time.

    Raises:
        ValueError: The checkpoint lacks a scale of an expert, or has one that is no finite number.
    """
    names = parameter_names(sizes.name, layout)
    codes, scales, *global_scales = (getattr(layer, name).data for name in names)
    if layout.scale is not None:
        scales = scales.view(layout.scale)
    for name, t in zip(names[1:], (scales, *global_scales), strict=True):
        check_loaded(t, f"{prefix}.{name}")
    amax = None
    if layout.shapes is not None:
        stored = codes.view(len(codes), *layout.shapes(sizes.rows, sizes.columns)[0])
        codes, scales, amax = layout.weight_tensors(stored, scales)
    elif global_scales:
        amaxes = layout.amax(global_scales[0]).reshape(sizes.experts, sizes.projections)
        amax = amaxes.amax(1)
        differ = (amaxes != amax[:, None]).any(1).nonzero().flatten().tolist()
        for expert in differ:
            _join_projections(codes[expert], scales[expert], amaxes[expert], layout.fmt)
    weight = GroupedTensor.from_parts(layout.fmt, codes, scales, amax, dtype=torch.bfloat16)
    remove_parameters(layer, names)
    return weight


def _join_projections(codes: Tensor, scales: Tensor, amaxes: Tensor, fmt: Format) -> None:
    """Give the projections of an expert the largest of their global scales, in place."""
    count = len(amaxes)
    projections = [
        WeightTensors(*tensors)
        for tensors in zip(codes.chunk(count), scales.chunk(count), amaxes, strict=True)
    ]
    joined, _ = reconcile(projections, fmt, interleaved=False)
    codes.view(torch.uint8).copy_(joined.codes.view(torch.uint8))
    scales.view(torch.uint8).copy_(joined.scales.view(torch.uint8))


def quantize_weight(layer: nn.Module, sizes: Sizes, fmt: Format, prefix: str) -> GroupedTensor:
    """Return the plain weight of a layer, quantized, and remove its parameter."""
    name = f"{sizes.name}_weight"
    weight = getattr(layer, name).data
    check_loaded(weight, f"{prefix}.{name}")
    quantized = quantize(weight, fmt)
    remove_parameters(layer, [name])
    return quantized


def check_loaded(t: Tensor, name: str) -> None:
    """Raise ValueError for a parameter with a NaN, which it has before it is loaded."""
    # One expert at a time: the mask of all would take half the memory of a plain weight.
    for expert, numbers in enumerate(t):
        if not bool(numbers.float().isfinite().all()):
            raise ValueError(
                f"{name} of local expert {expert} is not complete in the checkpoint, or has a NaN "
                "or an infinity"
            )


def remove_parameters(layer: nn.Module, names: list[str]) -> None:
    """Remove parameters from a layer, which frees their memory if nothing else refers to it."""
    for name in names:
        delattr(layer, name)


def set_buffers(layer: nn.Module, name: str, weight: GroupedTensor) -> None:
    """Make the plain tensors of a weight parameters of the layer.

    Engines move, measure and rebalance (EPLB) parameters: plain tensors whose first dimension is
    that of the experts.
    """
    for attribute, t in weight._inner().items():
        parameter = nn.Parameter(t, requires_grad=False)
        # A layer may be quantized before vLLM has read those of other ranks, for which it
        # calls the loader of the parameter that it knows. The loader skips them.
        parameter.weight_loader = getattr(layer, "weight_loader", None)  # type: ignore[attr-defined]
        layer.register_parameter(buffer_name(name, attribute), parameter)


def buffer_name(name: str, attribute: str) -> str:
    """Return the parameter's name of a plain tensor; codes are ``w13_weight`` or ``w2_weight``."""
    return name + {"_codes": "_weight"}.get(attribute, attribute)


def wrap_buffers(layer: nn.Module, name: str, like: GroupedTensor) -> GroupedTensor:
    """Return a weight around the parameters that ``set_buffers`` made."""
    inner = {
        attribute: getattr(layer, buffer_name(name, attribute)).data for attribute in like._names
    }
    return like._rewrap(inner)


def allocate(spec: ParameterSpec, device: torch.device) -> Tensor:
    """Return the memory of a parameter; numbers that can be NaN are, so that gaps are found."""
    t = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if spec.kind == BLOCK and spec.dtype == torch.uint8:
        return t.fill_(_NAN_EXPONENT)
    if spec.dtype.is_floating_point and not t.is_meta:
        if t.itemsize == 1:
            t.view(torch.uint8).fill_(_NAN_BYTE)
        else:
            t.fill_(float("nan"))
    return t
