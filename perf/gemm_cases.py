"""Operands of the grouped GEMMs that ``gemm_h200`` times, and what their products are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4
from cute_kernels.gemm.problem import GemmProblem
from cute_kernels.layout.buffers import BufferSpec, buffers
from cute_kernels.layout.shapes import ceil_div
from cute_kernels.layout.slots import TILE_ROWS, num_slot_tiles
from cute_kernels.reference.codecs import codec_of
from cute_kernels.reference.scales import linear_column_scales, linear_row_scales
from perf.routing import split_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Parts = tuple[Tensor, Tensor, Tensor]

__all__ = ["A_FORMAT", "B_FORMAT", "CASES", "PRODUCTS", "Case"]

#: Of NVFP4 rows, and of what is multiplied by them; both operands of wgrad are as ``B_FORMAT``.
A_FORMAT, B_FORMAT = NVFP4(row_scaled=True), NVFP4()
_CODEC = codec_of(B_FORMAT)

#: (experts, N, K) of layers.
CASES = {
    "dsv3-up": (32, 4096, 7168),
    "dsv3-down": (32, 7168, 2048),
    "mixtral-up": (8, 28672, 4096),
    "qwen3-up": (128, 1536, 2048),
}
PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass
class Case:
    """One product of a layer with ``tokens`` rows in a group on average.

    fprop is (T, K) x (G, N, K) to (T, N), dgrad (T, N) x (G, N, K) to (T, K), and wgrad (T, N) and
    (T, K) to (G, N, K). NVFP4 operands are random codes and block scales; those of dgrad and wgrad
    are the columnwise copies that they contract.
    """

    name: str
    tokens: int
    product: str = "fprop"
    routing: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        self.groups, self.n, self.k = CASES[self.name]
        self.rows = self.groups * self.tokens
        self.splits = split_rows(self.routing, self.groups, self.rows, self.seed)
        self.ends = list(itertools.accumulate(self.splits))
        self.offs = torch.tensor(self.ends, dtype=torch.int32, device="cuda")
        self.generator = torch.Generator("cuda").manual_seed(self.seed)
        #: Columns of the output and what is contracted, of an m_grouped product.
        self.cols, self.depth = self.n, self.k
        if self.is_dgrad:
            self.cols, self.depth = self.k, self.n

    @property
    def is_wgrad(self) -> bool:
        """Whether the product is k_grouped."""
        return self.product == "wgrad"

    @property
    def is_dgrad(self) -> bool:
        """Whether the product contracts over the rows of the weights."""
        return self.product == "dgrad"

    @property
    def flops(self) -> float:
        """Useful operations."""
        return 2.0 * self.rows * self.n * self.k

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (self.groups, self.n, self.k) if self.is_wgrad else (self.rows, self.cols)

    @property
    def slot_tiles(self) -> int:
        """Tiles of 128 slots that the rows take."""
        return num_slot_tiles(self.rows, self.groups)

    def problem(self, operand: str) -> GemmProblem:
        """The sizes as kernels see them."""
        sizes = (self.groups, self.rows)
        if self.is_wgrad:
            return GemmProblem(operand, "k_grouped", "bfloat16", *sizes, self.k, m=self.n)
        return GemmProblem(operand, "m_grouped", "bfloat16", *sizes, self.cols, k=self.depth)

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        options: dict[str, Any] = {"device": "cuda", "generator": self.generator}
        out: Tensor = torch.randint(low, high, shape, dtype=torch.uint8, **options)
        return out

    def _parts(self, specs: dict[str, BufferSpec]) -> Parts:
        """Random codes, block scales between 2^-2 and 2^6, and amaxes of one direction."""
        codes, scales, amax = (spec.shape for spec in specs.values())
        second = torch.rand(amax, device="cuda", generator=self.generator) + 0.5
        return self._bytes(0, 256, *codes), self._bytes(0x28, 0x68, *scales), second

    def nvfp4(self) -> tuple[Parts, Parts]:
        """Codes, block scales and amaxes of both operands."""
        if self.is_wgrad:
            first, second = (
                self._parts(buffers(B_FORMAT, shape, self.groups, rowwise=False, columnwise=True))
                for shape in ((self.rows, self.n), (self.rows, self.k))
            )
            for codes in (first[0], second[0]):
                codes &= self._slot_mask()
            return first, second
        weight, dgrad = (self.groups, self.n, self.k), self.is_dgrad
        return (
            self._parts(buffers(A_FORMAT, (self.rows, self.depth), self.groups)),
            self._parts(buffers(B_FORMAT, weight, None, rowwise=not dgrad, columnwise=dgrad)),
        )

    def call(
        self, a: Tensor | Parts, b: Parts, prepacked: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """The out form of the op that multiplies these operands, and its arguments.

        Args:
            a: NVFP4 parts, or a plain tensor beside NVFP4 weights.
            b: NVFP4 parts.
            prepacked: the codes of ``b`` are.
        """
        ops: Any = torch.ops.cute_kernels
        b_text = B_FORMAT.text
        if self.is_wgrad:
            scales = (list(a[1:]), list(b[1:]), b_text, b_text)
            return ops.k_grouped_gemm_out, (a[0], b[0], self.offs, None, torch.bfloat16, *scales)
        options = (self.offs, None, None, self.is_dgrad, torch.bfloat16)
        codes, a_scales, a_text = a, None, None
        if not isinstance(a, Tensor):
            codes, a_scales, a_text = a[0], list(a[1:]), A_FORMAT.text
        formats = (a_scales, list(b[1:]), a_text, b_text, prepacked)
        return ops.m_grouped_gemm_out, (codes, b[0], *options, *formats)

    def _slot_mask(self) -> Tensor:
        """For each byte of columnwise codes the bits of slots with rows; the others are zeros."""
        filled = torch.zeros(self.slot_tiles * TILE_ROWS, dtype=torch.uint8, device="cuda")
        for group, (end, size) in enumerate(zip(self.ends, self.splits, strict=True)):
            slot = ((end - size) // TILE_ROWS + group) * TILE_ROWS
            filled[slot : slot + size] = 0xF
        return filled[::2] | filled[1::2] << 4

    def plain(self) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """bf16 operands as our kernels take them, and torch's product of them."""

        def randn(*shape: int) -> Tensor:
            options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
            return torch.randn(*shape, generator=self.generator, **options)

        if self.is_wgrad:
            a, b = randn(self.rows, self.n), randn(self.rows, self.k)
            return a, b, lambda: torch._grouped_mm(a.t(), b, offs=self.offs)
        a, b = randn(self.rows, self.depth), randn(self.groups, self.n, self.k)
        right = b if self.product == "dgrad" else b.transpose(1, 2)
        return a, b, lambda: torch._grouped_mm(a, right, offs=self.offs)

    def fp8(self) -> tuple[Callable[[], Tensor], Callable[[slice, int], Tensor]]:
        """Torch's m_grouped product of FP8 operands with a scale a row; and in fp32, by group."""

        def operand(*shape: int) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"device": "cuda", "generator": self.generator}
            scales = torch.rand(*shape[:-1], **options) + 0.5
            values = torch.randn(*shape, dtype=torch.bfloat16, **options)
            return values.to(torch.float8_e4m3fn), scales

        a, a_scale = operand(self.rows, self.depth)
        b, b_scale = operand(self.groups, self.cols, self.depth)

        def run() -> Tensor:
            return torch._scaled_grouped_mm(
                *(a, b.transpose(1, 2), a_scale, b_scale),
                offs=self.offs,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        def expected(part: slice, group: int) -> Tensor:
            product = torch.mm(a[part].half(), b[group].half().T, out_dtype=torch.float32)
            return product * a_scale[part, None] * b_scale[group]

        return run, expected

    def expected_nvfp4(self, a: Parts, b: Parts) -> Iterator[tuple[Any, Tensor]]:
        """Where in the output, and the fp32 product there, of the groups that are checked."""
        for group, part in self._checked():
            start, size = part.start, self.splits[group]
            if self.is_wgrad:
                left, right = (self._slots(*x[:2], group) for x in (a, b))
                factor = a[2][group] / 2688 * (b[2][group] / 2688)
                at: Any = group
            else:
                slot = start // TILE_ROWS * TILE_ROWS + group * TILE_ROWS
                slots = torch.arange(slot, slot + size, device="cuda")
                scales = linear_row_scales(A_FORMAT, a[1], slots, self.depth)
                left = _CODEC.values(a[0][part], scales)
                right = self._weights(b, group)
                factor = (a[2][part, None] / 2688) * (b[2][group] / 2688)
                at = part
            # Both are exact in fp16; the products are added in fp32.
            yield at, torch.mm(left.half(), right.half().T, out_dtype=torch.float32) * factor

    def expected_w4a16(self, x: Tensor, b: Parts) -> Iterator[tuple[Any, Tensor]]:
        """The same beside bf16 activations."""
        for group, part in self._checked():
            right = self._weights(b, group).bfloat16()
            yield part, torch.mm(x[part], right.T, out_dtype=torch.float32) * (b[2][group] / 2688)

    def _checked(self) -> Iterator[tuple[int, slice]]:
        """The first, the last and the largest of the groups that have rows, and their rows."""
        filled = [g for g, size in enumerate(self.splits) if size]
        for group in {filled[0], filled[-1], self.splits.index(max(self.splits))}:
            yield group, slice(self.ends[group] - self.splits[group], self.ends[group])

    def _weights(self, b: Parts, group: int) -> Tensor:
        """A group's matrix of B, code times block scale."""
        rows = torch.arange(self.cols, device="cuda")
        scales = linear_row_scales(B_FORMAT, b[1][group], rows, self.depth)
        return _CODEC.values(b[0][group], scales)

    def _slots(self, codes: Tensor, scales: Tensor, group: int) -> Tensor:
        """A group's values of a columnwise copy, (columns, rows of the group)."""
        size = self.splits[group]
        tile = (self.ends[group] - size) // TILE_ROWS + group
        tiles = slice(tile, tile + ceil_div(size, TILE_ROWS))
        codes = codes[:, 64 * tiles.start : 64 * tiles.stop]
        linear = linear_column_scales(B_FORMAT, scales, len(codes), tiles)
        return _CODEC.values(codes, linear)[:, :size]
