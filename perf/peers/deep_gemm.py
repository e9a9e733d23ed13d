"""DeepGEMM 2.6: m_grouped bf16 and FP8 (1x128 rows, 128x128 weights), contiguous and masked."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels.layout.shapes import ceil_div, round_up

from ..contender import Contender
from ..operands import Operands
from .base import Peer, padded_rows, unpadded_rows

_BLOCK = 128
#: Mean rows per expert below which its masked layout is faster.
_MASKED_BELOW = 64
_HOPPER = 9


class DeepGemm(Peer):
    """DeepGEMM. Experts are padded to blocks of rows, or to the largest expert (masked)."""

    name = "DeepGEMM"
    module = "deep_gemm"
    capabilities = (9, 10)

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield forward products; padding and conversion are not timed."""
        if work.product != "fprop":
            return
        layout = "masked" if work.rows < _MASKED_BELOW * work.shape.experts else "contiguous"
        for text, is_fp8, sizes in (
            ("bfloat16", False, (2.0, 2.0)),
            ("fp8 1x128 x 128x128", True, (1 + 4 / _BLOCK, 1.0)),
        ):
            call = _Call(work, is_fp8, layout)
            yield self.product(
                work, text, call.prepare, *sizes, error=call.error, note=f"{layout}, padded before"
            )


@dataclasses.dataclass
class _Call:
    """A call of DeepGEMM.

    Attributes:
        work: Operands in bf16.
        is_fp8: True for FP8, False for bf16.
        layout: ``"masked"`` or ``"contiguous"``.
        library: The module, after ``prepare``.
        alignment: Multiple to which contiguous groups are padded.
    """

    work: Operands
    is_fp8: bool
    layout: str
    library: Any = None
    alignment: int = 0

    def prepare(self) -> Callable[[], Tensor]:
        """Pad and convert the operands, and return the call."""
        work, library = self.work, importlib.import_module("deep_gemm")
        self.library = library
        # Only on Blackwell block scales are packed powers of two.
        self.pow2 = torch.cuda.get_device_capability()[0] > _HOPPER
        options: dict[str, Any] = {"disable_ue8m0_cast": not self.pow2} if self.is_fp8 else {}
        multiply = getattr(
            library, f"m_grouped_{'fp8' if self.is_fp8 else 'bf16'}_gemm_nt_{self.layout}"
        )
        routing: tuple[Any, ...]
        if self.layout == "masked":
            a = work.a.new_zeros(
                work.shape.experts, round_up(max(work.sizes), _BLOCK), work.shape.k
            )
            for group, group_rows in enumerate(work.a.split(work.sizes)):
                a[group, : len(group_rows)] = group_rows
            sizes = torch.tensor(work.sizes, dtype=torch.int32, device=a.device)
            routing = (sizes, max(1, ceil_div(work.rows, work.shape.experts)))
        else:
            self.alignment = int(library.get_theoretical_mk_alignment_for_contiguous_layout())
            library.set_mk_alignment_for_contiguous_layout(self.alignment)
            a, owner = padded_rows(work.a, work.sizes, self.alignment)
            routing = (owner,)
        rows, weights = self.rows(a), self.weights()
        out = torch.empty(*a.shape[:-1], work.shape.n, dtype=torch.bfloat16, device=a.device)

        def run() -> Tensor:
            multiply(rows, weights, out, *routing, **options)
            return out

        return run

    def weights(self) -> Any:
        """Return the weights, for FP8 with a scale per 128 x 128 block."""
        if not self.is_fp8:
            return self.work.b
        cast = self.library.utils.per_block_cast_to_fp8
        pairs = [cast(weight, use_ue8m0=self.pow2) for weight in self.work.b]
        return tuple(torch.stack(tensors) for tensors in zip(*pairs, strict=True))

    def rows(self, x: Tensor) -> Any:
        """Return the rows, for FP8 with a scale per 1 x 128 block."""
        if not self.is_fp8:
            return x
        values, scales = self.library.utils.per_token_cast_to_fp8(
            x.flatten(0, -2), use_ue8m0=self.pow2
        )
        return values.view(x.shape), scales.view(*x.shape[:-1], -1)

    def error(self, out: Tensor) -> float:
        """Return the error without the padding."""
        sizes = self.work.sizes
        if out.dim() == 3:
            rows = torch.cat([group[:n] for group, n in zip(out, sizes, strict=True)])
        else:
            rows = unpadded_rows(out, sizes, self.alignment)
        return self.work.error(rows)


PEER = DeepGemm
