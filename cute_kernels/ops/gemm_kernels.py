"""The grouped GEMM ops on CuTe DSL kernels: the choice of a kernel, and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cute_kernels.capability import UnsupportedError
from cute_kernels.gemm.config import OPERANDS, GemmConfig, GemmProblem
from cute_kernels.gemm.heuristics import choose_config, estimated_cycles
from cute_kernels.gemm.hopper.config import ArrangeConfig, ExpandConfig, HopperGemmConfig
from cute_kernels.gemm.hopper.heuristics import estimated_hopper_cycles
from cute_kernels.ops import registry
from cute_kernels.ops.arguments import dense, dtype_name
from cute_kernels.shapes import PIECE_K, PITCH_ALIGNMENT, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from cute_kernels.gemm.config import TileShape
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
    AnyMGrouped: TypeAlias = MGroupedGemm | MGroupedGemmNVFP4 | MGroupedGemmW4A16
    AnyGemm: TypeAlias = AnyMGrouped | KGroupedGemm | KGroupedGemmNVFP4

__all__ = ["force_tile", "k_grouped", "m_grouped"]

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
    name = dtype_name(op.operands()[0][0].dtype)
    if name not in OPERANDS:
        raise UnsupportedError(
            f"grouped_gemm kernels take bf16 and fp16 operands, got {name}: a tensor core would "
            "cut fp32 to tf32; convert them, or use the backend reference"
        )
    return name


def _hopper_fields(op: AnyMGrouped, arch: str) -> dict[str, Any]:
    """Fields of a configuration that only sm_90a has: of products with NVFP4 weights."""
    a, b = op.operands()
    if (a[1] is None) != (b[1] is None):
        return {"activations": dtype_name(a[0].dtype)}
    if not getattr(op, "prepacked", False):
        return {}
    if arch != "sm_90a":
        raise UnsupportedError(f"prepacked weights are for sm_90a, not {arch}: unpack() them")
    return {"prepacked": True}


def m_grouped(op: AnyMGrouped, launch: Launcher) -> Runner:
    """How the ``m_grouped`` GEMMs run."""
    (spec,) = op.outputs()
    assert spec is not None
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
        **_hopper_fields(op, launch.arch),
    )
    problem = GemmProblem(
        base.operand, "m_grouped", base.out_dtype, op.offs.shape[0], rows, cols, k=op.depth
    )
    return _runner(_choose(base, problem, launch), launch)


def k_grouped(op: KGroupedGemm | KGroupedGemmNVFP4, launch: Launcher) -> Runner:
    """How ``k_grouped_gemm`` and ``k_grouped_gemm_nvfp4`` run."""
    (spec,) = op.outputs()
    assert spec is not None
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
    return _runner(_choose(base, problem, launch), launch)


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


def _runner(config: GemmConfig, launch: Launcher) -> Runner:
    arrange = expand = None
    if config.activations is not None:
        arrange = launch.kernel(ArrangeConfig(config.activations))
    elif config.expanded is not None:
        expand = launch.kernel(ExpandConfig(is_ragged=config.expanded == "a"))

    @functools.cache
    def kernel(accumulate: bool, zero_tail: bool) -> Callable[..., object]:
        return launch.kernel(
            dataclasses.replace(config, accumulate=accumulate, zero_tail=zero_tail)
        )

    def run(
        op: AnyGemm,
        outputs: Sequence[Tensor | None],
        accumulate: bool = False,
        fresh: bool = False,
    ) -> None:
        left, right = map(_addressable_parts, op.operands())
        if arrange is not None:
            left = _arranged(arrange, left, dense(op.offs), launch.num_sms)
        elif expand is not None and config.expanded == "a":
            left = _expanded(expand, left, dense(op.offs), launch.num_sms)
        elif expand is not None:
            right = _expanded(expand, right, None, launch.num_sms)
        bias: Tensor | None = getattr(op, "bias", None)
        kernel(accumulate, fresh)(
            *left,
            *right,
            dense(op.offs),
            dense(bias),
            dense(op.alpha),
            outputs[0],
            launch.num_sms,
        )

    return run


def _expanded(
    expand: Callable[..., object], parts: Parts, offs: Tensor | None, num_sms: int
) -> Parts:
    """An operand with the fp16 values of its codes, in the order that Hopper kernels take."""
    codes, scales, amax = parts
    depth = ceil_div(codes.shape[1] * 2, PIECE_K) * PIECE_K
    values = torch.empty(codes.shape[0], depth, dtype=torch.float16, device=codes.device)
    expand(codes, scales, offs, values, num_sms)
    return values, None, amax


def _arranged(
    arrange: Callable[..., object], parts: Parts, offs: Tensor | None, num_sms: int
) -> Parts:
    """Activations in the order that Hopper kernels take beside NVFP4 weights."""
    x = parts[0]
    depth = ceil_div(x.shape[1], PIECE_K) * PIECE_K
    values = x.new_empty(x.shape[0], depth)
    arrange(x, offs, values, num_sms)
    return values, None, None


def _addressable_parts(parts: Parts) -> Parts:
    values, *rest = parts
    scales, amax = (None if x is None else _addressable(x) for x in rest)
    return _addressable(values), scales, amax


def _addressable(x: Tensor) -> Tensor:
    """``x``, copied if TMA cannot address its rows where they are."""
    size = x.element_size()
    if (
        x.stride(-1) == 1
        and x.data_ptr() % PITCH_ALIGNMENT == 0
        and all(stride * size % PITCH_ALIGNMENT == 0 for stride in x.stride()[:-1])
    ):
        return x
    pitch = -(-x.shape[-1] * size // PITCH_ALIGNMENT) * PITCH_ALIGNMENT // size
    return x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
