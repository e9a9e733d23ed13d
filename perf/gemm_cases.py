"""Operands of the grouped GEMMs that ``gemm_h200`` times, and what their products are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.gemm.config import GemmProblem
from cute_kernels.reference.nvfp4 import block_values, linear_column_scales, linear_row_scales
from cute_kernels.shapes import TILE_ROWS, ceil_div, num_slot_tiles, scale_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Parts = tuple[Tensor, Tensor, Tensor]

__all__ = ["CASES", "PRODUCTS", "Case"]

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
    """One product of a layer with ``tokens`` rows in every group, or that many on average.

    fprop is (T, K) x (G, N, K) to (T, N), dgrad (T, N) x (G, N, K) to (T, K), and wgrad (T, N) and
    (T, K) to (G, N, K). NVFP4 operands are random codes and block scales; those of dgrad and wgrad
    are the columnwise copies that they contract. Skewed groups have log-normal sizes.
    """

    name: str
    tokens: int
    product: str = "fprop"
    skewed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.groups, self.n, self.k = CASES[self.name]
        self.rows = self.groups * self.tokens
        sizes = torch.full((self.groups,), float(self.tokens), dtype=torch.float64)
        if self.skewed:
            normal = torch.randn(self.groups, generator=torch.Generator().manual_seed(self.seed))
            sizes = normal.double().softmax(0) * self.rows
        ends = sizes.cumsum(0).round().long()
        #: First row of each group, and behind the last.
        self.bounds = [0, *ends.tolist()]
        self.offs = ends.to("cuda", torch.int32)
        self.generator = torch.Generator("cuda").manual_seed(self.seed)
        #: Columns of the output and what is contracted, of an m_grouped product.
        self.cols, self.depth = self.n, self.k
        if self.product == "dgrad":
            self.cols, self.depth = self.k, self.n

    @property
    def is_wgrad(self) -> bool:
        """Whether the product is k_grouped."""
        return self.product == "wgrad"

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

    def _parts(self, codes: tuple[int, ...], tiles: tuple[int, ...], amax: int) -> Parts:
        """Random codes, block scales between 2^-2 and 2^6, and amaxes."""
        second = torch.rand(amax, device="cuda", generator=self.generator) + 0.5
        return self._bytes(0, 256, *codes), self._bytes(0x28, 0x68, *tiles, 512), second

    def nvfp4(self) -> tuple[Parts, Parts]:
        """Codes, block scales and amaxes of both operands."""
        tiles = self.slot_tiles
        if self.is_wgrad:
            first, second = (
                self._parts((cols, 64 * tiles), (ceil_div(cols, 128), 2 * tiles), self.groups)
                for cols in (self.n, self.k)
            )
            for group in range(self.groups):
                # Slots behind the last row hold zeros.
                rows, slots = self._slots(group)
                for codes in (first[0], second[0]):
                    codes[:, slots.start // 2 + rows // 2 : slots.stop // 2] = 0
            return first, second
        k_tiles = scale_tiles(self.depth, 16)
        b_tiles = (self.groups, ceil_div(self.cols, 128), k_tiles)
        return (
            self._parts((self.rows, self.depth // 2), (tiles, k_tiles), self.rows),
            self._parts((self.groups, self.cols, self.depth // 2), b_tiles, self.groups),
        )

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

    def expected_nvfp4(self, a: Parts, b: Parts) -> Iterator[tuple[Any, Tensor]]:
        """Where in the output, and the fp32 product there, of the first and the last group."""
        for group in (0, self.groups - 1):
            start, end = self.bounds[group : group + 2]
            part = slice(start, end)
            if self.is_wgrad:
                left, right = (self._columns(*x[:2], group) for x in (a, b))
                factor = a[2][group] / 2688 * (b[2][group] / 2688)
                at: Any = group
            else:
                first = self._slots(group)[1].start
                slots = torch.arange(first, first + end - start, device="cuda")
                left = block_values(a[0][part], linear_row_scales(a[1], slots, self.depth))
                rows = torch.arange(self.cols, device="cuda")
                scales = linear_row_scales(b[1][group], rows, self.depth)
                right = block_values(b[0][group], scales)
                factor = (a[2][part, None] / 2688) * (b[2][group] / 2688)
                at = part
            # Both are exact in fp16; the products are added in fp32.
            yield at, torch.mm(left.half(), right.half().T, out_dtype=torch.float32) * factor

    def _slots(self, group: int) -> tuple[int, slice]:
        """Rows of a group, and its slots: whole tiles."""
        start, end = self.bounds[group : group + 2]
        first = (start // TILE_ROWS + group) * TILE_ROWS
        slots = ceil_div(end - start, TILE_ROWS) * TILE_ROWS
        return end - start, slice(first, first + slots)

    def _columns(self, codes: Tensor, scales: Tensor, group: int) -> Tensor:
        """A group's values of a columnwise copy, (columns, rows of the group)."""
        rows, slots = self._slots(group)
        codes = codes[:, slots.start // 2 : slots.stop // 2]
        # A scale tile is of 64 slots.
        linear = linear_column_scales(codes, scales[:, slots.start // 64 : slots.stop // 64])
        return block_values(codes, linear)[:, :rows]
