"""The grouped GEMM ops on CuTe DSL kernels: the choice of a kernel, and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from cute_kernels.capability import UnsupportedError
from cute_kernels.gemm.config import GemmConfig, GemmProblem
from cute_kernels.gemm.heuristics import choose_config, estimated_cycles
from cute_kernels.gemm.hopper.config import ArrangeConfig, ExpandConfig, HopperGemmConfig
from cute_kernels.gemm.hopper.heuristics import estimated_hopper_cycles
from cute_kernels.layout.shapes import PIECE_K, PITCH_ALIGNMENT, ceil_div
from cute_kernels.ops import registry
from cute_kernels.ops.arguments import aligned, dense, dtype_name, readable
from cute_kernels.ops.registry import Allocator, OutputSpec, sole
from cute_kernels.quantize.config import AmaxConfig, QuantizeProblem, RowScaledConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from cute_kernels.gemm.config import TileShape
    from cute_kernels.ops.fused import MGroupedQuantizeGemmNVFP4
    from cute_kernels.ops.gemm import (
        KGroupedGemm,
        KGroupedGemmNVFP4,
        MGroupedGemm,
        MGroupedGemmNVFP4,
        MGroupedGemmW4A16,
    )
    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

    Parts: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
    Kernel: TypeAlias = Callable[..., object]
    #: Turns both operands, given with offs, into what the GEMM takes.
    Prepare: TypeAlias = Callable[[Parts, Parts, Tensor], tuple[Parts, Parts]]
    AnyMGrouped: TypeAlias = (
        MGroupedGemm | MGroupedGemmNVFP4 | MGroupedGemmW4A16 | MGroupedQuantizeGemmNVFP4
    )
    AnyGemm: TypeAlias = AnyMGrouped | KGroupedGemm | KGroupedGemmNVFP4

__all__ = ["force_tile", "k_grouped", "m_grouped", "quantizing"]

_CONFIGS = {"sm_90a": HopperGemmConfig, "sm_100a": GemmConfig}
_COSTS: dict[str, Callable[[Any, GemmProblem, int], float]] = {
    "sm_90a": estimated_hopper_cycles,
    "sm_100a": estimated_cycles,
}


_forced: list[TileShape] = []


@contextlib.contextmanager
def force_tile(tile: TileShape) -> Iterator[None]:
    """Have grouped GEMMs use ``tile`` whatever their sizes, in all threads; for measurements.

    Every tile gives the same bits. A product that cannot have the tile raises UnsupportedError.

    Args:
        tile: one of ``cute_kernels.gemm.config.TILE_SHAPES``, or on sm_90a one of
            ``cute_kernels.gemm.hopper.config.HOPPER_TILE_SHAPES``.
    """
    _forced.append(tile)
    registry.forget_plans()
    try:
        yield
    finally:
        _forced.pop()
        registry.forget_plans()


def _operand(op: AnyGemm) -> str:
    """Name of the kind of the operands, as GEMM configurations have it."""
    if op.operand_format is not None:
        return op.operand_format.name
    return dtype_name(op.operands()[0][0].dtype)


def _hopper_fields(op: AnyMGrouped) -> dict[str, Any]:
    """Fields of a configuration that only sm_90a has: of products with NVFP4 weights."""
    a, b = op.operands()
    if (a[1] is None) != (b[1] is None) and not op.quantizes_a:
        return {"activations": dtype_name(a[0].dtype)}
    return {"prepacked": True} if getattr(op, "prepacked", False) else {}


def m_grouped(op: AnyMGrouped, launch: Launcher) -> Runner:
    """How the ``m_grouped`` GEMMs run."""
    spec = sole(op.outputs())
    rows, cols = spec.shape
    if rows == 0 or cols == 0:
        return _nothing
    cls = _CONFIGS[launch.arch]
    base = cls(
        _operand(op),
        tile=cls.any_tile("m_grouped"),
        out_dtype=dtype_name(spec.dtype),
        row_scaled=op.row_scaled,
        bias_dtype=None if op.bias is None else dtype_name(op.bias.dtype),
        has_alpha=op.alpha is not None,
        transpose_b=op.transpose_b,
        **_hopper_fields(op),
    )
    problem = GemmProblem(
        base.operand, "m_grouped", base.out_dtype, op.offs.shape[0], rows, cols, k=op.depth
    )
    return _runner(op, _choose(base, problem, launch), launch)


def quantizing(op: MGroupedQuantizeGemmNVFP4, launch: Launcher) -> Runner | None:
    """How ``m_grouped_quantize_gemm_nvfp4`` runs where A becomes values; None where it does not."""
    if launch.arch != "sm_90a" or not op.a.numel() or _values_config(op, launch) is None:
        return None
    return m_grouped(op, launch)


def _values_config(op: MGroupedQuantizeGemmNVFP4, launch: Launcher) -> RowScaledConfig | None:
    """The quantizer of A to values; None where no kernel can."""
    problem = QuantizeProblem(dtype_name(op.a.dtype), op.a.shape[1])
    config = RowScaledConfig.choose(
        problem, launch.arch, group_amax=not op.row_scaled, as_values=True
    )
    return config if config.can_implement(problem) else None


def k_grouped(op: KGroupedGemm | KGroupedGemmNVFP4, launch: Launcher) -> Runner:
    """How ``k_grouped_gemm`` and ``k_grouped_gemm_nvfp4`` run."""
    spec = sole(op.outputs())
    groups, m, n = spec.shape
    if op.rows == 0 or m == 0 or n == 0:
        return _zero
    cls = _CONFIGS[launch.arch]
    base = cls(
        _operand(op),
        "k_grouped",
        tile=cls.any_tile("k_grouped"),
        out_dtype=dtype_name(spec.dtype),
        has_alpha=op.alpha is not None,
    )
    problem = GemmProblem(base.operand, "k_grouped", base.out_dtype, groups, op.rows, n, m=m)
    return _runner(op, _choose(base, problem, launch), launch)


def _nothing(
    op: object, outputs: Sequence[Tensor | None], accumulate: bool = False, fresh: bool = False
) -> None:
    """There is nothing to write."""


def _zero(op: object, outputs: Sequence[Tensor | None], accumulate: bool = False) -> None:
    """All groups are empty."""
    if outputs[0] is not None and not accumulate:
        outputs[0].zero_()


def _choose(base: GemmConfig, problem: GemmProblem, launch: Launcher) -> GemmConfig:
    try:
        tile = _forced[-1] if _forced else None
        return choose_config(base, problem, launch.num_sms, tile, cost=_COSTS[launch.arch])
    except ValueError as error:
        raise UnsupportedError(str(error)) from None


def _runner(op: AnyGemm, config: GemmConfig, launch: Launcher) -> Runner:
    prepare: Prepare | None = None
    if op.quantizes_a:
        prepare = _quantizer(cast("MGroupedQuantizeGemmNVFP4", op), launch)
    elif config.activations is not None:
        prepare = _arranger(op, config.activations, launch)
    elif config.expanded is not None:
        prepare = _expander(op, config.expanded, launch)
    # Strides are the same in every call; addresses are not.
    has_pitches = all(map(_has_pitches, _tensors(op.operands())))
    vectors = (op.offs, getattr(op, "bias", None), op.alpha)
    is_dense = all(v is None or v.is_contiguous() for v in vectors)

    @functools.cache
    def kernel(accumulate: bool, zero_tail: bool) -> Kernel:
        return launch.kernel(
            dataclasses.replace(config, accumulate=accumulate, zero_tail=zero_tail)
        )

    def run(
        op: AnyGemm,
        outputs: Sequence[Tensor | None],
        accumulate: bool = False,
        fresh: bool = False,
    ) -> None:
        left, right = op.operands()
        if not has_pitches or _any_misaligned(left) or _any_misaligned(right):
            left, right = _addressable_parts(left), _addressable_parts(right)
        offs, bias, alpha = op.offs, getattr(op, "bias", None), op.alpha
        if not is_dense:
            offs, bias, alpha = offs.contiguous(), dense(bias), dense(alpha)
        # Parameters may be views of one flat buffer, at any element of it.
        bias = aligned(bias, PITCH_ALIGNMENT)
        if prepare is not None:
            left, right = prepare(left, right, offs)
        kernel(accumulate, fresh)(*left, *right, offs, bias, alpha, outputs[0], launch.num_sms)

    return run


def _expander(op: AnyGemm, side: str, launch: Launcher) -> Prepare:
    """What turns codes into fp16 values, in the order that Hopper kernels take, of one operand.

    Args:
        op: a call.
        side: the operand, "a" or "b".
        launch: the launcher.
    """
    kernel = launch.kernel(ExpandConfig(is_ragged=side == "a"))
    rows, width = op.operands()["ab".index(side)][0].shape
    workspace = Allocator([_pieces(rows, width * 2, torch.float16)], op.device)

    def run(left: Parts, right: Parts, offs: Tensor) -> tuple[Parts, Parts]:
        values = sole(workspace.make())
        if side == "a":
            codes, scales, amax = left
            kernel(codes, scales, offs, values, launch.num_sms)
            return (values, None, amax), right
        codes, scales, amax = right
        kernel(codes, scales, None, values, launch.num_sms)
        return left, (values, None, amax)

    return run


def _quantizer(op: MGroupedQuantizeGemmNVFP4, launch: Launcher) -> Prepare:
    """What quantizes A to fp16 values, in the order that Hopper kernels take."""
    # There is one: ``quantizing`` has looked.
    config = cast("RowScaledConfig", _values_config(op, launch))
    kernel = launch.kernel(config)
    amax_kernel = None
    if config.group_amax:
        amax_kernel = launch.kernel(AmaxConfig(config.dtype, config.grouping, arch=config.arch))
    rows, depth = op.a.shape
    count = op.offs.shape[0] if config.group_amax else rows
    specs = [_pieces(rows, depth, torch.float16), OutputSpec((count,), torch.float32)]
    workspace = Allocator(specs, op.device)

    def run(left: Parts, right: Parts, offs: Tensor) -> tuple[Parts, Parts]:
        x = readable(left[0])
        buffers = workspace.make()
        values, amax = sole(buffers), buffers[1]
        if amax_kernel is not None:
            amax_kernel(x, offs, None, amax, launch.num_sms)
        kernel(x, offs, amax, values, None, launch.num_sms)
        return (values, None, amax), right

    return run


def _arranger(op: AnyGemm, dtype: str, launch: Launcher) -> Prepare:
    """What puts activations into the order that Hopper kernels take beside NVFP4 weights."""
    kernel = launch.kernel(ArrangeConfig(dtype))
    x = op.operands()[0][0]
    rows, depth = x.shape
    workspace = Allocator([_pieces(rows, depth, x.dtype)], op.device)

    def run(left: Parts, right: Parts, offs: Tensor) -> tuple[Parts, Parts]:
        values = sole(workspace.make())
        kernel(left[0], offs, values, launch.num_sms)
        return (values, None, None), right

    return run


def _pieces(rows: int, depth: int, dtype: torch.dtype) -> OutputSpec:
    """A buffer of rows of whole pieces of K."""
    return OutputSpec((rows, ceil_div(depth, PIECE_K) * PIECE_K), dtype)


def _tensors(operands: tuple[Parts, Parts]) -> list[Tensor]:
    return [x for parts in operands for x in parts if x is not None]


def _any_misaligned(parts: Parts) -> bool:
    """Whether TMA cannot address an operand where it is."""
    values, scales, amax = parts
    address = values.data_ptr()
    if scales is not None and amax is not None:
        address |= scales.data_ptr() | amax.data_ptr()
    return address % PITCH_ALIGNMENT != 0


def _has_pitches(x: Tensor) -> bool:
    """Whether TMA can address rows that are as far apart as those of ``x``."""
    size = x.element_size()
    return x.stride(-1) == 1 and all(s * size % PITCH_ALIGNMENT == 0 for s in x.stride()[:-1])


def _addressable_parts(parts: Parts) -> Parts:
    values, *rest = parts
    scales, amax = (None if x is None else _addressable(x) for x in rest)
    return _addressable(values), scales, amax


def _addressable(x: Tensor) -> Tensor:
    """``x``, copied if TMA cannot address its rows where they are."""
    if _has_pitches(x) and x.data_ptr() % PITCH_ALIGNMENT == 0:
        return x
    size = x.element_size()
    pitch = -(-x.shape[-1] * size // PITCH_ALIGNMENT) * PITCH_ALIGNMENT // size
    return x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
