"""bf16 operands of a grouped product, and what it is."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .cases import PRODUCTS, GroupedShape, ends_of, split_rows
from .contender import relative_error


def generator_of(device: torch.device, seed: int, copy: int) -> torch.Generator:
    """What draws one set of operands, so that others differ."""
    return torch.Generator(device).manual_seed(seed + 1000 * copy)


class Operands:
    """Random bf16 operands of one product of a layer.

    ``fprop`` is ``a`` (T, K) x ``b`` (G, N, K) to (T, N), ``dgrad`` (T, N) x (G, N, K) to (T, K),
    and ``wgrad`` (T, N) and (T, K) to (G, N, K).

    ``routing`` is one of ``cases.ROUTINGS``, ``copy`` which set of operands of this case.
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
        self.ends = ends_of(self.sizes)
        self.offs = torch.tensor(self.ends, dtype=torch.int32, device=device)
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
        return 2.0 * self.rows * self.shape.n * self.shape.k

    @property
    def is_wgrad(self) -> bool:
        return self.product == "wgrad"

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The operands as matrices of a grouped product have them: rows x inner and inner x
        columns.
        """
        if self.is_wgrad:
            return self.a.t(), self.b
        return self.a, self.b if self.product == "dgrad" else self.b.transpose(1, 2)

    def least_bytes(self, a_bytes: float, b_bytes: float, out_bytes: float = 2.0) -> float:
        """Bytes of operands and output, each once, by those of their elements, scales included."""
        weights = self.shape.n * self.shape.k
        if self.is_wgrad:
            out = out_bytes * self.shape.experts * weights
            return self.a.numel() * a_bytes + self.b.numel() * b_bytes + out
        cols = self.shape.n if self.product == "fprop" else self.shape.k
        tokens = self.a.numel() * a_bytes + out_bytes * self.rows * cols
        # Weights of groups without rows are not read.
        return tokens + sum(map(bool, self.sizes)) * weights * b_bytes

    def error(self, out: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> float:
        """Largest relative error of ``out`` in the groups that are looked at.

        Those are the first, the last and the largest that have rows, and of a wgrad one without.
        """
        a, b = self.a if a is None else a, self.b if b is None else b
        errors = [0.0]
        for group, part in self._checked():
            left = a[part].float()
            if self.is_wgrad:
                got, want = out[group], left.T @ b[part].float()
            else:
                right = b[group].float()
                got, want = out[part], left @ (right if self.product == "dgrad" else right.T)
            errors.append(relative_error(got, want))
        if self.is_wgrad and 0 in self.sizes:
            errors.append(float(out[self.sizes.index(0)].abs().max()))
        return float(np.max(errors))  # NaN, if there is one.

    def _checked(self) -> Iterator[tuple[int, slice]]:
        filled = [g for g, size in enumerate(self.sizes) if size]
        if not filled:
            return
        for group in {filled[0], filled[-1], self.sizes.index(max(self.sizes))}:
            yield group, slice(self.ends[group] - self.sizes[group], self.ends[group])
