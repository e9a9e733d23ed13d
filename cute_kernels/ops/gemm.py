"""Grouped GEMM ops.

``m_grouped``: rows of ragged groups times one matrix a group (fprop and dgrad). ``k_grouped``: two
ragged operands multiplied over their common rows (wgrad). Names follow DeepGEMM.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.capability import require
from cute_kernels.formats import NVFP4, Format
from cute_kernels.gemm.hopper.prepack import unpack
from cute_kernels.layout.shapes import (
    PITCH_ALIGNMENT,
    SF_TILE_BYTES,
    SF_TILE_ROWS,
    TILE_ROWS,
    ceil_div,
    num_slot_tiles,
    scale_tiles,
)
from cute_kernels.ops import gemm_kernels
from cute_kernels.ops.checks import (
    INPUT_DTYPES,
    check_dtype,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from cute_kernels.ops.registry import Op, OutputSpec, register, sole
from cute_kernels.reference.groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.backend import Backend
    from cute_kernels.runtime.launch import Launcher

__all__ = [
    "GroupedGemm",
    "KGroupedGemm",
    "KGroupedGemmNVFP4",
    "MGroupedGemm",
    "MGroupedGemmNVFP4",
    "MGroupedGemmW4A16",
    "MixedInputGemm",
]

_BLOCK = NVFP4.sf_vec_size
_BYTE = (torch.uint8,)
Parts = tuple[Tensor, "Tensor | None", "Tensor | None"]
_FP32 = (torch.float32,)


def check_vectors(num_groups: int, cols: int, bias: Tensor | None, alpha: Tensor | None) -> None:
    """Check the vectors of each group that an epilogue takes."""
    if bias is not None:
        check_tensor("bias", bias, dtypes=INPUT_DTYPES, shape=(num_groups, cols))
    if alpha is not None:
        check_tensor("alpha", alpha, dtypes=_FP32, shape=(num_groups,))


def check_b(a_name: str, depth: int, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
    """Check the quantized B beside an A of ``depth`` columns."""
    check_tensor("b_codes", codes, dtypes=_BYTE, ndim=(3,))
    groups, cols, given = codes.shape
    check_multiple("K", depth, _BLOCK, f"blocks of {_BLOCK} along the columns of {a_name}")
    if given * 2 not in (depth, ceil_div(depth, TILE_ROWS) * TILE_ROWS):
        raise ValueError(
            f"b_codes must be blocked along the K = {depth} of {a_name}, got shape "
            f"{tuple(codes.shape)}"
        )
    tiles = (groups, ceil_div(cols, SF_TILE_ROWS), scale_tiles(given * 2, _BLOCK), SF_TILE_BYTES)
    check_tensor("b_scales", scales, dtypes=_BYTE, shape=tiles)
    check_tensor("b_amax", amax, dtypes=_FP32, shape=(groups,))


class GroupedGemm(Op):
    """What the GEMMs share."""

    accumulates: ClassVar[bool] = True
    alignment: ClassVar[int] = PITCH_ALIGNMENT
    output_names: ClassVar[tuple[str, ...]] = ("out",)
    #: The format of both operands; None if plain.
    operand_format: ClassVar[Format | None] = None
    #: Whether A is plain and quantized on the way.
    quantizes_a: ClassVar[bool] = False

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_gemm", self.operand_format

    def require(self, backend: Backend) -> None:
        name, fmt = self.capability()
        plain = None if self.operand_format is not None else self.operands()[0][0].dtype
        # What adds like a tensor core takes what the kernels do that it stands for.
        arch = backend.tensor_core or backend.arch
        require(name, fmt, arch, dtype=plain)
        if getattr(self, "prepacked", False):
            require(name, NVFP4(prepacked=True), arch)

    @abc.abstractmethod
    def operands(self) -> tuple[Parts, Parts]:
        """Codes, scales and amax of A and of B; plain operands have only the first."""


@register
@dataclasses.dataclass
class MGroupedGemm(GroupedGemm):
    """Rows of each group of ``a`` times its matrix of ``b``; differentiable in a, b and bias.

    Args:
        a: (T, K) bf16, fp16 or fp32.
        b: (G, N, K), of the dtype of ``a``; (G, K, N) with ``transpose_b``.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        transpose_b: contract over the second dimension of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32; the dtype of ``a`` by default.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None
    transpose_b: bool = False
    out_dtype: torch.dtype | None = None

    row_scaled: ClassVar[bool] = False
    name: ClassVar[str] = "m_grouped_gemm"
    fills_fresh: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def cols(self) -> int:
        """N."""
        return self.b.shape[2 if self.transpose_b else 1]

    def check(self) -> None:
        check_tensor("a", self.a, dtypes=INPUT_DTYPES, ndim=(2,))
        groups, depth = self.b.shape[0] if self.b.dim() else 0, self.a.shape[1]
        shape = (None, depth, None) if self.transpose_b else (None, None, depth)
        check_tensor("b", self.b, dtypes=(self.a.dtype,), shape=shape)
        check_offs(self.offs, groups)
        check_vectors(groups, self.cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.out_dtype or self.a.dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        return [
            OutputSpec((self.a.shape[0], self.cols), self.out_dtype or self.a.dtype, zeroed=True)
        ]

    @property
    def depth(self) -> int:
        """K."""
        return self.a.shape[1]

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a, None, None), (self.b, None, None)

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.m_grouped(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        out = sole(outputs)
        reference.m_grouped_gemm(
            self.a,
            self.b,
            Groups.ragged(self.offs, self.a.shape[0]),
            out,
            transpose_b=self.transpose_b,
            alpha=self.alpha,
            bias=self.bias,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, offs, bias, alpha, transpose_b, _ = inputs
        ctx.save_for_backward(a, b, offs, alpha)
        ctx.transpose_b = transpose_b
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, alpha = ctx.saved_tensors
        if alpha is not None and ctx.needs_input_grad[4]:
            raise RuntimeError("alpha of m_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dy_a = dy.to(a.dtype)
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(dy_a, b, offs, None, alpha, not ctx.transpose_b, a.dtype)
        if ctx.needs_input_grad[1]:
            left, right = (a, dy_a) if ctx.transpose_b else (dy_a, a)
            db = ops.k_grouped_gemm(left, right, offs, alpha, b.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            dbias = ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        return da, db, None, dbias, None, None, None


@register
@dataclasses.dataclass
class KGroupedGemm(GroupedGemm):
    """Rows of each group of ``a``, transposed, times those of ``b``; differentiable in a and b.

    Args:
        a: (T, N) bf16, fp16 or fp32.
        b: (T, K) of the dtype of ``a``.
        offs: (G,) int32 end rows.
        alpha: (G,) fp32 factors.
        out_dtype: bf16, fp16 or fp32; the dtype of ``a`` by default.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form leaves those alone when accumulating.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    alpha: Tensor | None = None
    out_dtype: torch.dtype | None = None

    name: ClassVar[str] = "k_grouped_gemm"

    @property
    def device(self) -> torch.device:
        return self.a.device

    def check(self) -> None:
        check_tensor("a", self.a, dtypes=INPUT_DTYPES, ndim=(2,))
        check_tensor("b", self.b, dtypes=(self.a.dtype,), shape=(self.a.shape[0], None))
        check_offs(self.offs)
        check_vectors(self.offs.shape[0], 0, None, self.alpha)
        check_dtype("out_dtype", self.out_dtype or self.a.dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        shape = (self.offs.shape[0], self.a.shape[1], self.b.shape[1])
        return [OutputSpec(shape, self.out_dtype or self.a.dtype)]

    @property
    def rows(self) -> int:
        """T."""
        return self.a.shape[0]

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a, None, None), (self.b, None, None)

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.k_grouped(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        out = sole(outputs)
        reference.k_grouped_gemm(
            self.a,
            self.b,
            Groups.ragged(self.offs, self.a.shape[0]),
            out,
            alpha=self.alpha,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, offs, alpha, _ = inputs
        ctx.save_for_backward(a, b, offs, alpha)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, alpha = ctx.saved_tensors
        if alpha is not None and ctx.needs_input_grad[3]:
            raise RuntimeError("alpha of k_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dw = dw.to(a.dtype)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(b, dw, offs, None, alpha, False, a.dtype)
        if ctx.needs_input_grad[1]:
            db = ops.m_grouped_gemm(a, dw, offs, None, alpha, True, b.dtype)
        return da, db, None, None, None


@register
@dataclasses.dataclass
class MGroupedGemmNVFP4(GroupedGemm):
    """Rows of each group of a quantized A times its quantized matrix of B.

    Args:
        a_codes: (T, K / 2) uint8, the rowwise copy of a ragged tensor.
        a_scales: its (T // 128 + G, ceil(K / 64), 512) uint8 scale tiles.
        a_amax: its (G,) fp32 second level, or (T,) when ``row_scaled``.
        b_codes: (G, N, K / 2) uint8, the rowwise copy of a uniform tensor (fprop); or (G, N, 64 *
            ceil(K / 128)), its columnwise copy (dgrad).
        b_scales: its (G, ceil(N / 128), tiles, 512) uint8 scale tiles.
        b_amax: its (G,) fp32 second level.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        row_scaled: ``a_amax`` is per row.
        out_dtype: bf16, fp16 or fp32; bf16 by default: codes have no dtype that it could follow.
        prepacked: ``b_codes`` has the order of bits of ``cute_kernels.prepack``, which kernels for
            sm_90a and the reference take.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
    """

    a_codes: Tensor
    a_scales: Tensor
    a_amax: Tensor
    b_codes: Tensor
    b_scales: Tensor
    b_amax: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None
    row_scaled: bool = False
    out_dtype: torch.dtype | None = None
    prepacked: bool = False

    transpose_b: ClassVar[bool] = False
    name: ClassVar[str] = "m_grouped_gemm_nvfp4"
    fills_fresh: ClassVar[bool] = True
    operand_format: ClassVar[Format | None] = NVFP4()

    @property
    def device(self) -> torch.device:
        return self.a_codes.device

    def check(self) -> None:
        check_tensor("a_codes", self.a_codes, dtypes=_BYTE, ndim=(2,))
        rows, depth = self.a_codes.shape[0], self.depth
        check_b("a_codes", depth, self.b_codes, self.b_scales, self.b_amax)
        groups, cols, _ = self.b_codes.shape
        check_offs(self.offs, groups)
        tiles = (num_slot_tiles(rows, groups), scale_tiles(depth, _BLOCK), SF_TILE_BYTES)
        check_tensor("a_scales", self.a_scales, dtypes=_BYTE, shape=tiles)
        factors = (rows,) if self.row_scaled else (groups,)
        check_tensor("a_amax", self.a_amax, dtypes=_FP32, shape=factors)
        check_vectors(groups, cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.out_dtype or torch.bfloat16, INPUT_DTYPES)
        same_device("a_codes", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        shape = (self.a_codes.shape[0], self.b_codes.shape[1])
        return [OutputSpec(shape, self.out_dtype or torch.bfloat16, zeroed=True)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_gemm", NVFP4(row_scaled=self.row_scaled)

    @property
    def depth(self) -> int:
        """K."""
        return self.a_codes.shape[1] * 2

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a_codes, self.a_scales, self.a_amax), (
            self.b_codes,
            self.b_scales,
            self.b_amax,
        )

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.m_grouped(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        out = sole(outputs)
        reference.m_grouped_gemm_nvfp4(
            self.a_codes,
            self.a_scales,
            self.a_amax,
            unpack(self.b_codes) if self.prepacked else self.b_codes,
            self.b_scales,
            self.b_amax,
            Groups.ragged(self.offs, self.a_codes.shape[0]),
            out,
            row_scaled=self.row_scaled,
            alpha=self.alpha,
            bias=self.bias,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
        )


@dataclasses.dataclass
class MixedInputGemm(GroupedGemm):
    """What the GEMMs of a plain A and a quantized B share."""

    a: Tensor
    b_codes: Tensor
    b_scales: Tensor
    b_amax: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None

    transpose_b: ClassVar[bool] = False
    fills_fresh: ClassVar[bool] = True
    operand_format: ClassVar[Format | None] = NVFP4()
    a_dtypes: ClassVar[tuple[torch.dtype, ...]]

    @property
    @abc.abstractmethod
    def result_dtype(self) -> torch.dtype:
        """``out_dtype``, or what stands for None."""

    @property
    def device(self) -> torch.device:
        return self.a.device

    def check(self) -> None:
        check_tensor("a", self.a, dtypes=self.a_dtypes, ndim=(2,))
        check_b("a", self.depth, self.b_codes, self.b_scales, self.b_amax)
        groups, cols, _ = self.b_codes.shape
        check_offs(self.offs, groups)
        check_vectors(groups, cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        shape = (self.a.shape[0], self.b_codes.shape[1])
        return [OutputSpec(shape, self.result_dtype, zeroed=True)]

    @property
    def depth(self) -> int:
        """K."""
        return self.a.shape[1]

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a, None, None), (self.b_codes, self.b_scales, self.b_amax)


@register
@dataclasses.dataclass
class MGroupedGemmW4A16(MixedInputGemm):
    """Rows of each group of a plain A times its quantized matrix of B (NVFP4 weights, W4A16).

    Args:
        a: (T, K) bf16 or fp16.
        b_codes: (G, N, K / 2) uint8, the rowwise copy of a uniform tensor (fprop); or (G, N, 64 *
            ceil(K / 128)), its columnwise copy (dgrad).
        b_scales: its (G, ceil(N / 128), tiles, 512) uint8 scale tiles.
        b_amax: its (G,) fp32 second level.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        out_dtype: bf16, fp16 or fp32; the dtype of ``a`` by default.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
    """

    out_dtype: torch.dtype | None = None

    row_scaled: ClassVar[bool] = False
    name: ClassVar[str] = "m_grouped_gemm_w4a16"
    a_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.a.dtype

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_gemm_w4a16", NVFP4()

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.m_grouped(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        out = sole(outputs)
        reference.m_grouped_gemm_w4a16(
            self.a,
            self.b_codes,
            self.b_scales,
            self.b_amax,
            Groups.ragged(self.offs, self.a.shape[0]),
            out,
            alpha=self.alpha,
            bias=self.bias,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
        )


@register
@dataclasses.dataclass
class KGroupedGemmNVFP4(GroupedGemm):
    """Rows of each group of a quantized A, transposed, times those of a quantized B.

    Args:
        a_codes_t: (N, 64 * tiles) uint8, the columnwise copy of a ragged tensor, with tiles =
            T // 128 + G.
        a_scales_t: its (ceil(N / 128), 2 * tiles, 512) uint8 scale tiles.
        a_amax_t: its (G,) fp32 second level.
        b_codes_t: (K, 64 * tiles) uint8, the columnwise copy of a tensor with the same offs.
        b_scales_t: its (ceil(K / 128), 2 * tiles, 512) uint8 scale tiles.
        b_amax_t: its (G,) fp32 second level.
        offs: (G,) int32 end rows.
        alpha: (G,) fp32 factors.
        out_dtype: bf16, fp16 or fp32; bf16 by default: codes have no dtype that it could follow.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form leaves those alone when accumulating.
    """

    a_codes_t: Tensor
    a_scales_t: Tensor
    a_amax_t: Tensor
    b_codes_t: Tensor
    b_scales_t: Tensor
    b_amax_t: Tensor
    offs: Tensor
    alpha: Tensor | None = None
    out_dtype: torch.dtype | None = None

    name: ClassVar[str] = "k_grouped_gemm_nvfp4"
    operand_format: ClassVar[Format | None] = NVFP4()

    @property
    def device(self) -> torch.device:
        return self.a_codes_t.device

    def check(self) -> None:
        check_offs(self.offs)
        groups = self.offs.shape[0]
        check_tensor("a_codes_t", self.a_codes_t, dtypes=_BYTE, ndim=(2,))
        width = self.a_codes_t.shape[1]
        check_multiple("slot bytes", width, TILE_ROWS // 2, "a_codes_t is (N, 64 * tiles)")
        if width * 2 // TILE_ROWS < groups:
            raise ValueError(
                f"a_codes_t must have at least one tile for each of the {groups} groups of offs, "
                f"got shape {tuple(self.a_codes_t.shape)}"
            )
        tiles = scale_tiles(width * 2, _BLOCK)
        for side in "ab":
            codes = getattr(self, f"{side}_codes_t")
            check_tensor(f"{side}_codes_t", codes, dtypes=_BYTE, shape=(None, width))
            shape = (ceil_div(codes.shape[0], SF_TILE_ROWS), tiles, SF_TILE_BYTES)
            name = f"{side}_scales_t"
            check_tensor(name, getattr(self, name), dtypes=_BYTE, shape=shape)
            name = f"{side}_amax_t"
            check_tensor(name, getattr(self, name), dtypes=_FP32, shape=(groups,))
        check_vectors(groups, 0, None, self.alpha)
        check_dtype("out_dtype", self.out_dtype or torch.bfloat16, INPUT_DTYPES)
        same_device("a_codes_t", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        shape = (self.offs.shape[0], self.a_codes_t.shape[0], self.b_codes_t.shape[0])
        return [OutputSpec(shape, self.out_dtype or torch.bfloat16)]

    @property
    def rows(self) -> int:
        """The most rows that the slots hold; T itself is not known here, and has the same slots."""
        tiles = self.a_codes_t.shape[1] * 2 // TILE_ROWS
        return (tiles - self.offs.shape[0] + 1) * TILE_ROWS - 1

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a_codes_t, self.a_scales_t, self.a_amax_t), (
            self.b_codes_t,
            self.b_scales_t,
            self.b_amax_t,
        )

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.k_grouped(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        out = sole(outputs)
        reference.k_grouped_gemm_nvfp4(
            self.a_codes_t,
            self.a_scales_t,
            self.a_amax_t,
            self.b_codes_t,
            self.b_scales_t,
            self.b_amax_t,
            Groups.ragged(self.offs, self.rows),
            out,
            alpha=self.alpha,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
        )
