"""The grouped GEMM ops on CuTe DSL kernels: the choice of a kernel, and buffers as its arguments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.capability import UnsupportedError
from cute_kernels.formats import NVFP4
from cute_kernels.gemm.config import OPERANDS, GemmConfig, GemmProblem
from cute_kernels.gemm.heuristics import choose_config
from cute_kernels.shapes import PITCH_ALIGNMENT, TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.gemm import (
        KGroupedGemm,
        KGroupedGemmNVFP4,
        MGroupedGemm,
        MGroupedGemmNVFP4,
    )
    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = ["k_grouped", "m_grouped"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operand(op: MGroupedGemm | KGroupedGemm) -> str:
    name = _name(op.a.dtype)
    if name not in OPERANDS:
        raise UnsupportedError(
            f"grouped_gemm kernels take bf16 and fp16 operands, got {name}: a tensor core would "
            "cut fp32 to tf32; convert them, or use the backend reference"
        )
    return name


def m_grouped(op: MGroupedGemm | MGroupedGemmNVFP4, launch: Launcher) -> Runner:
    """How ``m_grouped_gemm`` and ``m_grouped_gemm_nvfp4`` run."""
    (spec,) = op.outputs()
    assert spec is not None
    rows, cols = spec.shape
    if rows == 0 or cols == 0:
        return lambda op, outputs, accumulate=False: None
    quantized = hasattr(op, "a_codes")
    base = GemmConfig(
        NVFP4.name if quantized else _operand(op),  # type: ignore[arg-type]
        out_dtype=_name(spec.dtype),
        row_scaled=quantized and op.row_scaled,  # type: ignore[union-attr]
        bias_dtype=None if op.bias is None else _name(op.bias.dtype),
        has_alpha=op.alpha is not None,
        transpose_b=not quantized and op.transpose_b,  # type: ignore[union-attr]
    )
    depth = op.a_codes.shape[1] * 2 if quantized else op.a.shape[1]  # type: ignore[union-attr]
    problem = GemmProblem(
        base.operand, "m_grouped", base.out_dtype, op.offs.shape[0], rows, cols, k=depth
    )
    return _runner(_choose(base, problem, launch), launch)


def k_grouped(op: KGroupedGemm | KGroupedGemmNVFP4, launch: Launcher) -> Runner:
    """How ``k_grouped_gemm`` and ``k_grouped_gemm_nvfp4`` run."""
    (spec,) = op.outputs()
    assert spec is not None
    groups, m, n = spec.shape
    quantized = hasattr(op, "a_codes_t")
    if quantized:
        # T itself is not known here; this many rows fit in the slots.
        rows = op.a_codes_t.shape[1] * 2 // TILE_ROWS * TILE_ROWS
    else:
        rows = op.a.shape[0]  # type: ignore[union-attr]
    if rows == 0 or m == 0 or n == 0:
        return _zero
    base = GemmConfig(
        NVFP4.name if quantized else _operand(op),  # type: ignore[arg-type]
        "k_grouped",
        out_dtype=_name(spec.dtype),
        has_alpha=op.alpha is not None,
    )
    problem = GemmProblem(base.operand, "k_grouped", base.out_dtype, groups, rows, n, m=m)
    return _runner(_choose(base, problem, launch), launch)


def _zero(op: object, outputs: Sequence[Tensor | None], accumulate: bool = False) -> None:
    """All groups are empty."""
    if outputs[0] is not None and not accumulate:
        outputs[0].zero_()


def _choose(base: GemmConfig, problem: GemmProblem, launch: Launcher) -> GemmConfig:
    try:
        return choose_config(base, problem, launch.num_sms)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None


def _runner(config: GemmConfig, launch: Launcher) -> Runner:
    kernel = launch.kernel(config)

    def run(
        op: MGroupedGemm | MGroupedGemmNVFP4 | KGroupedGemm | KGroupedGemmNVFP4,
        outputs: Sequence[Tensor | None],
        accumulate: bool = False,
    ) -> None:
        chosen = kernel
        if accumulate:
            chosen = launch.kernel(dataclasses.replace(config, accumulate=True))
        left, right = op.operands()
        bias = getattr(op, "bias", None)
        chosen(
            *map(_addressable, left),
            *map(_addressable, right),
            op.offs,
            None if bias is None else _addressable(bias),
            op.alpha,
            outputs[0],
            launch.num_sms,
        )

    return run


def _addressable(x: Tensor | None) -> Tensor | None:
    """``x``, copied if TMA cannot address its rows where they are."""
    if x is None:
        return None
    size = x.element_size()
    if (
        x.stride(-1) == 1
        and x.data_ptr() % PITCH_ALIGNMENT == 0
        and all(stride * size % PITCH_ALIGNMENT == 0 for stride in x.stride()[:-1])
    ):
        return x
    pitch = -(-x.shape[-1] * size // PITCH_ALIGNMENT) * PITCH_ALIGNMENT // size
    return x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
