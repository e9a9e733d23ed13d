"""bf16 operands of a grouped product, and the check of its result."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .cases import PRODUCTS, GroupedShape, end_rows_of, split_rows
from .contender import relative_error


def generator_of(device: torch.device, seed: int, copy: int) -> torch.Generator:
    """Return the generator of one set of operands. The sets ``copy`` = 0, 1, ... differ."""
    return torch.Generator(device).manual_seed(seed + 1000 * copy)


class Operands:
    """Random bf16 operands of one product of a layer.

    ``fprop`` multiplies ``a`` (T, K) and ``b`` (G, N, K) to (T, N). ``dgrad`` multiplies (T, N) and
    (G, N, K) to (T, K). ``wgrad`` multiplies (T, N) and (T, K) to (G, N, K).

    Args:
        shape: Weights (G, N, K).
        rows: Rows T of all groups.
        product: One of ``cases.PRODUCTS``.
        routing: See ``cases.split_rows``.
        device: Device of the operands.
        seed: Seed of the case.
        copy: Number of the set of operands.
    """

    def __init__(
        self,
        shape: GroupedShape,
        rows: int,
        product: str,
        routing: str,
        device: torch.device,
        seed: int = 0,
        copy: int = 0,
    ) -> None:
        if product not in PRODUCTS:
            raise ValueError(f"product must be one of {', '.join(PRODUCTS)}, got {product!r}")
        self.shape, self.rows, self.product = shape, rows, product
        self.device = device
        self.sizes = split_rows(routing, shape.experts, rows, seed)
        self.end_rows = end_rows_of(self.sizes)
        self.offs = torch.tensor(self.end_rows, dtype=torch.int32, device=device)
        generator = generator_of(device, seed, copy)
        draw = functools.partial(
            torch.randn, dtype=torch.bfloat16, device=device, generator=generator
        )
        self.a = draw(rows, shape.k if product == "fprop" else shape.n)
        self.b = (
            draw(rows, shape.k) if product == "wgrad" else draw(shape.experts, shape.n, shape.k)
        )

    @property
    def flops(self) -> float:
        """Useful operations."""
        return 2.0 * self.rows * self.shape.n * self.shape.k

    @property
    def is_wgrad(self) -> bool:
        """True for a gradient of the weights."""
        return self.product == "wgrad"

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Operands in the shapes of a matrix product: rows x inner and inner x columns."""
        if self.is_wgrad:
            return self.a.t(), self.b
        return self.a, self.b if self.product == "dgrad" else self.b.transpose(1, 2)

    def least_bytes(self, a_bytes: float, b_bytes: float, out_bytes: float = 2.0) -> float:
        """Return the bytes of operands and output, each moved once.

        The arguments are bytes per element, scales included.
        """
        weights = self.shape.n * self.shape.k
        if self.is_wgrad:
            out = out_bytes * self.shape.experts * weights
            return self.a.numel() * a_bytes + self.b.numel() * b_bytes + out
        cols = self.shape.n if self.product == "fprop" else self.shape.k
        tokens = self.a.numel() * a_bytes + out_bytes * self.rows * cols
        # Weights of groups without rows are not read.
        return tokens + sum(map(bool, self.sizes)) * weights * b_bytes

    def error(self, out: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> float:
        """Return the largest relative error of ``out`` over some groups.

        These are the first, the last and the largest group with rows, and for wgrad also an empty
        one. ``a`` and ``b`` replace the operands, for example by decoded ones.
        """
        a, b = self.a if a is None else a, self.b if b is None else b
        errors = [0.0]
        for group, rows in self._checked_groups():
            a_group = a[rows].float()
            if self.is_wgrad:
                actual, expected = out[group], a_group.T @ b[rows].float()
            else:
                weight = b[group].float()
                actual = out[rows]
                expected = a_group @ (weight if self.product == "dgrad" else weight.T)
            errors.append(relative_error(actual, expected))
        if self.is_wgrad and 0 in self.sizes:
            errors.append(float(out[self.sizes.index(0)].abs().max()))
        return float(np.max(errors))  # np.max keeps NaN.

    def _checked_groups(self) -> Iterator[tuple[int, slice]]:
        """Yield the groups to check and their rows."""
        filled = [g for g, size in enumerate(self.sizes) if size]
        if not filled:
            return
        for group in {filled[0], filled[-1], self.sizes.index(max(self.sizes))}:
            yield group, slice(self.end_rows[group] - self.sizes[group], self.end_rows[group])
