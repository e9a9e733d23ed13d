"""A quantized weight as the plain tensors of a file."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grouped
from cute_kernels.formats import Format

from ..tensor.grouped_tensor import GroupedTensor


class WeightTensors(NamedTuple):
    """A weight (N, K), or those of all experts (G, N, K).

    Attributes:
        codes: ([G,] N, K) FP8, or ([G,] N, K / 2) uint8 with the even column in the low nibble.
        scales: linear scales, as ``GroupedTensor.from_parts`` takes them.
        amax: fp32 second level, () or (G,), where the format has one.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor | None = None

    def expert(self, group: int) -> "WeightTensors":
        """The weight of one expert."""
        return WeightTensors(
            self.codes[group], self.scales[group], None if self.amax is None else self.amax[group]
        )

    def decoded(self, fmt: Format) -> Tensor:
        """A weight (N, K) in fp32."""
        one = (t if t is None else t[None] for t in self)
        return GroupedTensor.from_parts(fmt, *one, dtype=torch.float32).dequantize()[0]  # type: ignore[arg-type]


def weight_tensors(weight: GroupedTensor) -> WeightTensors:
    """The parts of a weight (G, N, K)."""
    found = weight.to_parts()
    return WeightTensors(found["codes"], found["scales"], found.get("amax"))


def check_finite(name: str, weight: Tensor) -> None:
    """Raise ValueError for a plain weight with a NaN or an infinity, which codes would turn into
    other numbers.
    """
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name} has a NaN or an infinity, and cannot be quantized")


def quantize_weight(weight: Tensor, fmt: Format, amax: Tensor | None = None) -> WeightTensors:
    """Quantize a plain weight (G, N, K); amaxes (G,) may be given."""
    return weight_tensors(grouped.quantize(weight.contiguous(), fmt, amax=amax))


def stack_experts(parts: Sequence[WeightTensors]) -> WeightTensors:
    """Weights (N, K) as one (G, N, K)."""
    amaxes = [p.amax for p in parts if p.amax is not None]
    codes, scales = (_as_bytes(torch.stack, [p[i] for p in parts]) for i in range(2))  # type: ignore[misc]
    return WeightTensors(codes, scales, torch.stack(amaxes) if amaxes else None)


def split_rows(t: Tensor, count: int, interleaved: bool) -> list[Tensor]:
    """The projections that the rows of a weight (..., N, K), or the numbers of a bias (N,), are."""
    dim = max(0, t.dim() - 2)
    return (
        list(t.unflatten(dim, (-1, count)).unbind(dim + 1))
        if interleaved
        else list(t.chunk(count, dim))
    )


def join_rows(parts: Sequence[Tensor], interleaved: bool) -> Tensor:
    """Undo ``split_rows``."""
    dim = max(0, parts[0].dim() - 2)
    if interleaved:
        return _as_bytes(lambda raw: torch.stack(raw, dim + 1).flatten(dim, dim + 1), parts)
    return _as_bytes(lambda raw: torch.cat(raw, dim), parts)


def signal_to_noise(x: Tensor, parts: WeightTensors, fmt: Format) -> float:
    """The ratio in dB for a weight (N, K) and what was made of it."""
    noise = (x.double() - parts.decoded(fmt).double()).square().sum().item()
    ratio = math.inf if noise == 0 else x.double().square().sum().item() / noise
    return -math.inf if ratio == 0 else 10 * math.log10(ratio)


def reconcile(
    parts: Sequence[WeightTensors], fmt: Format, interleaved: bool
) -> tuple[WeightTensors, float | None]:
    """One weight of the projections of an expert.

    Projections that have the largest second level keep their bytes, the others are quantized again
    under it. Where square blocks span projections, all are quantized again.

    Returns:
        The weight, and the lowest SNR in dB of what was quantized again, None if nothing was.
    """
    if len(parts) == 1:
        return parts[0], None
    amaxes = [p.amax for p in parts if p.amax is not None]
    if not amaxes:
        block = fmt.scale.vec_size if fmt.is_2d and fmt.scale is not None else 1
        if block > 1 and (interleaved or any(p.codes.shape[0] % block for p in parts[:-1])):
            whole = join_rows([p.decoded(fmt) for p in parts], interleaved)
            made = quantize_weight(whole[None], fmt).expert(0)
            return made, signal_to_noise(whole, made, fmt)
        return _joined(parts, None, interleaved), None
    amax, found, noise = torch.stack(amaxes).amax(), [], []
    for p in parts:
        if p.amax != amax:
            dense = p.decoded(fmt)
            p = quantize_weight(dense[None], fmt, amax[None]).expert(0)
            noise.append(signal_to_noise(dense, p, fmt))
        found.append(p)
    return _joined(found, amax, interleaved), min(noise, default=None)


def _joined(
    parts: Sequence[WeightTensors], amax: Tensor | None, interleaved: bool
) -> WeightTensors:
    codes, scales = (join_rows([p[i] for p in parts], interleaved) for i in range(2))  # type: ignore[misc]
    return WeightTensors(codes, scales, amax)


def _as_bytes(join: Any, tensors: Sequence[Tensor]) -> Tensor:
    """``join`` for tensors of FP8, too, which few functions take."""
    dtype = tensors[0].dtype
    out: Tensor = join(
        [t.view(torch.uint8) for t in tensors] if dtype.itemsize == 1 else list(tensors)
    )
    return out.view(dtype)
