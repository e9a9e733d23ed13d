"""Quantized weights as plain tensors of a file: quantize, join, split and reconcile them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.formats import Format

from ..functional.quantization import quantize
from ..tensor.grouped_tensor import GroupedTensor


class WeightTensors(NamedTuple):
    """The tensors of a weight (N, K), or of the weights (G, N, K) of all experts.

    Attributes:
        codes: ([G,] N, K) FP8, or ([G,] N, K / 2) uint8 with the even column in the low nibble.
        scales: Linear scales, see ``GroupedTensor.from_parts``.
        amax: () or (G,) fp32, or None for a format without a global scale.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor | None = None

    def expert(self, group: int) -> "WeightTensors":
        """Return the tensors of one expert."""
        return WeightTensors(
            self.codes[group], self.scales[group], None if self.amax is None else self.amax[group]
        )

    def decoded(self, fmt: Format) -> Tensor:
        """Decode a weight (N, K) to fp32."""
        with_group = (t if t is None else t[None] for t in self)
        return GroupedTensor.from_parts(fmt, *with_group, dtype=torch.float32).dequantize()[0]  # type: ignore[arg-type]


def weight_tensors(weight: GroupedTensor) -> WeightTensors:
    """Return the tensors of a weight (G, N, K)."""
    tensors = weight.to_parts()
    return WeightTensors(tensors["codes"], tensors["scales"], tensors.get("amax"))


def check_finite(name: str, weight: Tensor) -> None:
    """Raise ValueError for a plain weight with a NaN or an infinity.

    Quantization would turn them into other numbers.
    """
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name} has a NaN or an infinity, and cannot be quantized")


def quantize_weight(weight: Tensor, fmt: Format, amax: Tensor | None = None) -> WeightTensors:
    """Quantize a plain weight (G, N, K), with the amaxes (G,) if they are not None."""
    return weight_tensors(quantize(weight.contiguous(), fmt, amax=amax))


def stack_experts(weights: Sequence[WeightTensors]) -> WeightTensors:
    """Stack G weights (N, K) to one (G, N, K)."""
    amaxes = [p.amax for p in weights if p.amax is not None]
    codes, scales = (_apply_to_bytes(torch.stack, [p[i] for p in weights]) for i in range(2))  # type: ignore[misc]
    return WeightTensors(codes, scales, torch.stack(amaxes) if amaxes else None)


def split_rows(t: Tensor, count: int, interleaved: bool) -> list[Tensor]:
    """Split the rows of a weight (..., N, K), or a bias (N,), into ``count`` projections."""
    dim = max(0, t.dim() - 2)
    return (
        list(t.unflatten(dim, (-1, count)).unbind(dim + 1))
        if interleaved
        else list(t.chunk(count, dim))
    )


def join_rows(projections: Sequence[Tensor], interleaved: bool) -> Tensor:
    """Undo ``split_rows``."""
    dim = max(0, projections[0].dim() - 2)
    if interleaved:
        return _apply_to_bytes(
            lambda raw: torch.stack(raw, dim + 1).flatten(dim, dim + 1), projections
        )
    return _apply_to_bytes(lambda raw: torch.cat(raw, dim), projections)


def signal_to_noise(x: Tensor, quantized: WeightTensors, fmt: Format) -> float:
    """Return the signal-to-noise ratio in dB of a weight (N, K) after quantization."""
    noise = (x.double() - quantized.decoded(fmt).double()).square().sum().item()
    ratio = math.inf if noise == 0 else x.double().square().sum().item() / noise
    return -math.inf if ratio == 0 else 10 * math.log10(ratio)


def reconcile(
    projections: Sequence[WeightTensors], fmt: Format, interleaved: bool
) -> tuple[WeightTensors, float | None]:
    """Join the projections of an expert to one weight with one global scale.

    Projections with the largest global scale keep their bytes. The others are quantized again with
    that scale. If square blocks would span projections, all are quantized again.

    Returns:
        The weight, and the lowest SNR in dB of the projections that were quantized again, or None
        if there are none.
    """
    if len(projections) == 1:
        return projections[0], None
    amaxes = [p.amax for p in projections if p.amax is not None]
    if not amaxes:
        block = fmt.scale.vec_size if fmt.is_2d and fmt.scale is not None else 1
        if block > 1 and (interleaved or any(p.codes.shape[0] % block for p in projections[:-1])):
            whole = join_rows([p.decoded(fmt) for p in projections], interleaved)
            joined = quantize_weight(whole[None], fmt).expert(0)
            return joined, signal_to_noise(whole, joined, fmt)
        return _join(projections, None, interleaved), None
    amax, reconciled, noise = torch.stack(amaxes).amax(), [], []
    for p in projections:
        if p.amax != amax:
            dense = p.decoded(fmt)
            p = quantize_weight(dense[None], fmt, amax[None]).expert(0)
            noise.append(signal_to_noise(dense, p, fmt))
        reconciled.append(p)
    return _join(reconciled, amax, interleaved), min(noise, default=None)


def _join(
    projections: Sequence[WeightTensors], amax: Tensor | None, interleaved: bool
) -> WeightTensors:
    """Join the rows of projections that have one global scale."""
    codes, scales = (join_rows([p[i] for p in projections], interleaved) for i in range(2))  # type: ignore[misc]
    return WeightTensors(codes, scales, amax)


def _apply_to_bytes(join: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Apply ``join`` to the bytes of FP8 tensors, since few functions support FP8."""
    dtype = tensors[0].dtype
    out: Tensor = join(
        [t.view(torch.uint8) for t in tensors] if dtype.itemsize == 1 else list(tensors)
    )
    return out.view(dtype)
