"""The grouped GEMM ops on CuTe DSL kernels: the choice of a kernel, and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...arch import get_arch
from ...kernels.gemm.choose import (
    choose_config,
    preferred_tiles,
    prefers_activation,
    split_launches,
)
from ...kernels.gemm.common.config import GemmConfig
from ...kernels.gemm.common.problem import GemmProblem, TileShape
from ...kernels.gemm.variants import CONFIG_CLASSES
from ...layout.shapes import PITCH_ALIGNMENT
from ...records import UnsupportedError
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ...runtime.plan_cache import clear_plan_cache
from ..arguments import aligned, dense, dtype_name, readable
from ..op import launched_by
from ..plan import Runner
from .base_op import GroupedGemm, MGrouped
from .decoded import decodes_first, multiply_decoded
from .fused_op import MGroupedQuantizeGemm
from .gathered import gathers_first, multiply_gathered
from .op import KGroupedGemm, MGroupedGemm
from .operand_tensors import OperandFields, OperandTensors, Prepare
from .operands_sm90 import sm90_operand_fields, sm90_preparation, values_config
from .operands_sm100 import sm100_operand_fields, sm100_preparation


class _Operands(NamedTuple):
    """Operands on the kernels of one architecture.

    Attributes:
        fields: Returns the fields of a configuration that describe both operands of a product.
        prepare: Returns a function that prepares the operands of calls like an op; None if none
            is needed.
    """

    fields: Callable[[GroupedGemm], dict[str, Any]]
    prepare: Callable[[GroupedGemm, Any, Launcher], Prepare | None]


#: By architecture, as ``kernels.gemm.variants.CONFIG_CLASSES``.
_OPERAND_FUNCTIONS = {
    "sm_90a": _Operands(sm90_operand_fields, sm90_preparation),
    "sm_100a": _Operands(sm100_operand_fields, sm100_preparation),
}
_forced: list[TileShape] = []


@contextlib.contextmanager
def force_tile(tile: TileShape) -> Iterator[None]:
    """Make grouped GEMMs use ``tile`` whatever their sizes, in all threads; for measurements.

    Every tile gives the same bits. A product that cannot have the tile raises UnsupportedError.

    Args:
        tile: One of ``SM100_TILES`` or ``SM90_TILES`` of ``cute_kernels.kernels.gemm``.
    """
    _forced.append(tile)
    clear_plan_cache()
    try:
        yield
    finally:
        _forced.pop()
        clear_plan_cache()


@launched_by(MGrouped)
def m_grouped(op: MGrouped, launch: Launcher) -> Runner:
    """Build the runner of an ``m_grouped`` GEMM."""
    if op.num_rows == 0 or op.cols == 0:
        return _write_global_scale
    if gathers_first(op, "a", launch.arch):
        return multiply_gathered(op, "a", launch, m_grouped)
    if decodes_first(op, launch.arch):
        return multiply_decoded(op, launch, m_grouped)
    base, problem = _m_grouped_problem(op, launch.arch)
    return _runner(op, _choose(base, problem, launch), problem, launch)


def _m_grouped_problem(op: MGrouped, arch: str) -> tuple[GemmConfig, GemmProblem]:
    """Return the configuration of an ``m_grouped`` product, with any tile, and its sizes."""
    cls, fields = CONFIG_CLASSES[arch], _OPERAND_FUNCTIONS[arch].fields(op)
    # An activation, its form, and the format of the result; none for a plain product.
    names = ("activation", "interleaved", "stores_preactivation", "quantizes_to")
    epilogue = dict(zip(names, op.epilogue_fields, strict=False))
    base = cls(
        tile=cls.any_tile("m_grouped"),
        out_dtype=dtype_name(op.result_dtype),
        row_scaled=op.row_scaled,
        bias_dtype=None if op.bias is None else dtype_name(op.bias.dtype),
        has_alpha=op.alpha is not None,
        transpose_b=op.is_b_mn_major,
        # A plain A beside codes is gathered when it is rearranged.
        gathered=op.index is not None and "activations" not in fields,
        **epilogue,
        **fields,
    )
    problem = GemmProblem(
        operand=base.operand,
        grouping="m_grouped",
        out_dtype=base.out_dtype,
        groups=op.offs.shape[0],
        rows=op.num_rows,
        n=op.cols,
        k=op.depth,
    )
    return base, problem


def activates(op: MGrouped, arch: str, quantizer: bool) -> bool:
    """Return True if a kernel should apply the activation in the epilogue of products like ``op``.

    Only formats, dtypes and shapes of ``op`` count. There must be a kernel that can compute the
    product, and the architecture must prefer it, see ``prefers_activation``.

    Args:
        op: The product with its activation.
        arch: Architecture of the kernels.
        quantizer: True if a quantizer follows that could apply the activation as well.
    """
    if decodes_first(op, arch):
        op = dataclasses.replace(cast("MGroupedGemm", op), b=op.b.to(op.a.dtype), b_format=None)
    base, problem = _m_grouped_problem(op, arch)
    if not prefers_activation(base, op.num_rows, quantizer):
        return False
    tiles = preferred_tiles(base)
    return any(dataclasses.replace(base, tile=tile).can_implement(problem) for tile in tiles)


@launched_by(MGroupedQuantizeGemm)
def quantize_and_multiply(op: MGroupedQuantizeGemm, launch: Launcher) -> Runner:
    """Build the runner of ``m_grouped_quantize_gemm``.

    A becomes fp16 values without codes if a kernel can do that, and otherwise codes in memory.
    """
    return run_as_values(op, launch) or _run_two_ops(op, launch)


def _run_two_ops(op: MGroupedQuantizeGemm, launch: Launcher) -> Runner:
    """Build the runner that quantizes A to codes in memory and multiplies the codes."""
    quantizer = op.quantizer()
    quantize = quantizer.build_runner(launch)
    codes = Allocator(quantizer.outputs(), op.device)
    multiply = op.product(codes.make()).build_runner(launch)

    def run(op: MGroupedQuantizeGemm, outputs: Sequence[Tensor], **options: bool) -> None:
        a = codes.make()
        quantize(op.quantizer(), a)
        multiply(op.product(a), outputs, **options)

    return run


def run_as_values(op: MGroupedQuantizeGemm, launch: Launcher) -> Runner | None:
    """Build the runner that quantizes A to values, or None if no kernel can do that."""
    multiplies_codes = get_arch(launch.arch).has_block_scaled_mma
    if multiplies_codes or not op.a.numel() or values_config(op, launch) is None:
        return None
    return m_grouped(op, launch)


@launched_by(KGroupedGemm)
def k_grouped(op: KGroupedGemm, launch: Launcher) -> Runner:
    """Build the runner of a ``k_grouped`` GEMM."""
    (spec,) = op.outputs()
    groups, m, n = spec.shape
    if op.num_rows == 0 or m == 0 or n == 0:
        return _zero
    if gathers_first(op, "b", launch.arch):
        return multiply_gathered(op, "b", launch, k_grouped)
    cls = CONFIG_CLASSES[launch.arch]
    base = cls(
        grouping="k_grouped",
        tile=cls.any_tile("k_grouped"),
        out_dtype=dtype_name(spec.dtype),
        has_alpha=op.alpha is not None,
        gathered=op.index is not None,
        **_OPERAND_FUNCTIONS[launch.arch].fields(op),
    )
    problem = GemmProblem(
        operand=base.operand,
        grouping="k_grouped",
        out_dtype=base.out_dtype,
        groups=groups,
        rows=op.num_rows,
        n=n,
        m=m,
    )
    return _runner(op, _choose(base, problem, launch), problem, launch)


def _write_global_scale(
    op: object, outputs: Sequence[Tensor], accumulate: bool = False, fresh: bool = False
) -> None:
    """Write the global scale per group of a quantized result: the magnitudes of the given amaxes.

    Results without a global scale per group stay as they are.
    """
    if (amax := getattr(op, "amax", None)) is not None:
        torch.abs(amax, out=outputs[-1])


def _zero(op: object, outputs: Sequence[Tensor], accumulate: bool = False) -> None:
    """Fill the output of a product without rows or columns with zeros, unless it accumulates."""
    if not accumulate:
        outputs[0].zero_()


def _choose(base: GemmConfig, problem: GemmProblem, launch: Launcher) -> GemmConfig:
    """Return ``base`` with the chosen tile, or the forced one.

    Raises:
        UnsupportedError: No tile, or not the forced one, can compute the problem.
    """
    try:
        tile = _forced[-1] if _forced else None
        return choose_config(base, problem, launch.num_sms, tile, launch.bandwidth)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None


def _runner(op: GroupedGemm, config: GemmConfig, problem: GemmProblem, launch: Launcher) -> Runner:
    """Build the runner of a product whose configuration is chosen.

    Args:
        op: The product; the runner takes ops of the same metadata.
        config: Configuration with its tile.
        problem: Sizes of the product.
        launch: Launcher of kernels.
    """
    prepare = _OPERAND_FUNCTIONS[config.arch].prepare(op, config, launch)
    # Strides are the same in every call; addresses are not.
    read = op.reader()
    is_addressable = all(map(_is_addressable, read(op)))
    vectors = (op.offs, op.index, getattr(op, "bias", None), op.alpha)
    is_dense = all(v is None or v.is_contiguous() for v in vectors)

    stores_z, is_quantized = config.stores_preactivation, config.quantizes_to is not None
    configs: tuple[GemmConfig, ...] = (config,)
    if not _forced:
        configs = split_launches(config, problem, launch.num_sms, launch.bandwidth)

    @functools.cache
    def kernels(accumulate: bool, zero_tail: bool) -> list[Callable[..., object]]:
        zero_tail = zero_tail and not is_quantized
        return [
            launch.kernel(dataclasses.replace(config, accumulate=accumulate, zero_tail=zero_tail))
            for config in configs
        ]

    def run(
        op: GroupedGemm, outputs: Sequence[Tensor], accumulate: bool = False, fresh: bool = False
    ) -> None:
        """Launch the kernels of one call."""
        a, b = read(op)
        if not is_addressable or _is_misaligned(a) or _is_misaligned(b):
            a, b = _addressable_tensors(a), _addressable_tensors(b)
        offs, rows, bias, alpha = op.offs, op.index, getattr(op, "bias", None), op.alpha
        if not is_dense:
            offs, rows, bias, alpha = offs.contiguous(), dense(rows), dense(bias), dense(alpha)
        # Parameters may be views of one flat buffer, at any element of it.
        bias = aligned(bias, PITCH_ALIGNMENT)
        if prepare is not None:
            a, b = prepare(op, OperandTensors(*a), OperandTensors(*b), offs, rows)
        if not config.gathered:
            rows = None
        out, z = outputs if stores_z else (outputs[0], None)
        out_scales, out_global_scale = (*outputs[1:], None)[:2] if is_quantized else (None, None)
        if out_global_scale is not None:
            _write_global_scale(op, outputs)
            out_global_scale = dense(out_global_scale)
        for kernel in kernels(accumulate, fresh):
            # In the order of GemmArguments. Creating one would take half a microsecond per call.
            kernel(
                *a,
                *b,
                offs,
                rows,
                bias,
                alpha,
                out,
                launch.num_sms,
                z,
                out_scales,
                out_global_scale,
                None,
            )

    return run


def _is_misaligned(operand: OperandFields) -> bool:
    """Return True if a tensor of the operand begins at an address that kernels cannot read."""
    codes, scales, global_scale = operand
    address = codes.data_ptr()
    if scales is not None:
        address |= scales.data_ptr()
    if global_scale is not None:
        address |= global_scale.data_ptr()
    return address % PITCH_ALIGNMENT != 0


def _is_addressable(operand: OperandFields) -> bool:
    """Return True if kernels can read an operand with its strides.

    Scale tiles and global scales must be contiguous.
    """
    codes, *scales = operand
    return _has_pitches(codes) and all(x is None or x.is_contiguous() for x in scales)


def _has_pitches(x: Tensor) -> bool:
    """Return True if TMA can read rows with the pitch of ``x``."""
    size = x.element_size()
    return x.stride(-1) == 1 and all(s * size % PITCH_ALIGNMENT == 0 for s in x.stride()[:-1])


def _addressable_tensors(operand: OperandFields) -> OperandFields:
    """Return an operand that kernels can read, copied where needed."""
    codes, *scales = operand
    block_scales, global_scale = (None if x is None else readable(x) for x in scales)
    return _addressable(codes), block_scales, global_scale


def _addressable(x: Tensor) -> Tensor:
    """Return ``x``, copied if TMA cannot read its rows where they are."""
    if _has_pitches(x) and x.data_ptr() % PITCH_ALIGNMENT == 0:
        return x
    size = x.element_size()
    pitch = -(-x.shape[-1] * size // PITCH_ALIGNMENT) * PITCH_ALIGNMENT // size
    return x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
