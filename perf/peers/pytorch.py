"""PyTorch: grouped products, and quantizers as its compiler makes them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.reference.conversions import unpack_codes

from ..contender import Contender, Run, relative_error
from ..operands import Operands
from ..suites.layer import LayerWork, Step, swiglu
from ..suites.moe import PEER_BOUND, ExpertsWork, MoEWork, compiled
from ..suites.quantize import Input, Quantization
from .base import NOISE, Peer

_FP8_MAX = 448.0


class PyTorch(Peer):
    """Its products, and its compiler."""

    name = "torch"
    module = "torch"
    kinds = ("gpu", "cpu")

    def products(self, work: Operands) -> Iterator[Contender]:
        plain = partial(_grouped_mm, work)
        yield self.product(work, "bfloat16", lambda: plain)
        if work.device.type == "cuda" and work.product == "fprop":
            yield self.product(work, "fp8 rowwise", partial(_rowwise, work), 1.0, 1.0)

    def quantizers(self, data: Input, asked: Quantization) -> Iterator[Contender]:
        """NVFP4 and MXFP8 rows; scales are not swizzled."""
        if asked.directions != "row":
            return
        if asked.gives_amax:
            yield self._compiled(data, "nvfp4", nvfp4_given, nvfp4_values)
        else:
            yield self._compiled(data, "nvfp4:row_scaled", nvfp4_rows, nvfp4_values)
            yield self._compiled(data, "mxfp8", mxfp8_rows, mxfp8_values)

    def _compiled(
        self, data: Input, text: str, quantize: Callable[..., Any], decode: Callable[..., Tensor]
    ) -> Contender:
        def prepare() -> Run:
            return partial(torch.compile(quantize, dynamic=False), data.x, data.amax.amax().view(1))

        made = self.quantizer(data, text, prepare, lambda got: relative_error(decode(*got), data.x))
        return dataclasses.replace(made, name="torch.compile")

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        yield self._step(work, swiglu)

    def experts(self, work: ExpertsWork) -> Iterator[Contender]:
        """With SwiGLU by its compiler."""
        yield self._step(work, compiled(swiglu, work.device))

    def _step(self, work: LayerWork, activate: Callable[[Tensor], Tensor]) -> Contender:
        product = partial(torch._grouped_mm, offs=work.offs)
        make = partial(plain_layer, work, product, activate)
        return work.contender("torch", "BF16", make, 3 * NOISE["bfloat16"])

    def mixtures(self, work: MoEWork) -> Iterator[Contender]:
        """The layer in bf16, with the activation and the sum by its compiler."""
        yield work.contender("torch", "BF16", lambda: _mixture(work), PEER_BOUND)


def combine(h: Tensor, order: Tensor, p: Tensor) -> Tensor:
    """Of rows (T k, H) in an order; a copy by index has a gradient without sums."""
    pairs = torch.empty_like(h).index_copy(0, order, h).view(*p.shape, -1)
    return (pairs.float() * p.unsqueeze(-1)).sum(1).to(h.dtype)


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of a token and one of its experts sorted by expert, and where each expert's end."""
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    ones = torch.ones_like(order, dtype=torch.int32)
    return order, counts.scatter_add(0, ids.flatten(), ones).cumsum(0).int()


def _mixture(work: MoEWork) -> Step:
    act = work.activate
    activate = compiled(lambda z, b, expert: act(z if b is None else z + b[expert]), work.device)
    add = compiled(
        lambda h, b, expert, *rest: combine(h if b is None else h + b[expert], *rest), work.device
    )

    def experts(
        x: Tensor, p: Tensor, ids: Tensor, up: Tensor, down: Tensor, *biases: Tensor
    ) -> Tensor:
        order, offs = by_expert(ids, len(up))
        of_up, of_down = biases or (None, None)
        expert = ids.flatten()[order]
        rows = x.index_select(0, order // work.shape.top_k)
        a = activate(torch._grouped_mm(rows, up.transpose(1, 2), offs=offs), of_up, expert)
        return add(torch._grouped_mm(a, down.transpose(1, 2), offs=offs), of_down, expert, order, p)

    return work.plain(experts)


def _grouped_mm(work: Operands) -> Tensor:
    return torch._grouped_mm(*work.factors, offs=work.offs)


def _to_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1).float().clamp(min=1e-12) / _FP8_MAX
    return (x.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def _rowwise(work: Operands) -> Callable[[], Tensor]:
    a, a_scale = _to_fp8_rows(work.a)
    # Expert by expert: fp32 copies of all weights may be too much.
    pairs = [_to_fp8_rows(weight) for weight in work.b]
    b, b_scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(
        torch._scaled_grouped_mm, a, b.transpose(1, 2), a_scale, b_scale, offs=work.offs, **options
    )


def nvfp4_given(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and second level of rows of given amaxes, as PyTorch users write it."""
    blocks = x.float().unflatten(-1, (-1, 16))
    level = (2688.0 / amax).view(-1, 1)
    scales = (blocks.abs().amax(-1) / 6.0 * level).clamp(max=448.0).to(torch.float8_e4m3fn)
    y = blocks * (level / scales.float()).unsqueeze(-1)
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8) + (magnitude >= 0.75) + (magnitude > 1.25)
    code = code + (magnitude >= 1.75) + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0)
    code = (code | (y < 0).to(torch.uint8) << 3).flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, scales, level


def nvfp4_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return nvfp4_given(x, x.abs().amax(-1).float())


def nvfp4_values(codes: Tensor, scales: Tensor, level: Tensor) -> Tensor:
    blocks = unpack_codes(codes).unflatten(-1, (-1, 16)) * scales.float().unsqueeze(-1)
    return blocks.flatten(-2) / level


def mxfp8_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 rows: E4M3 codes and the exponent of each block, rounded up."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126) / _FP8_MAX))
    codes = (blocks * torch.exp2(-exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (exponent + 127).to(torch.uint8)


def mxfp8_values(codes: Tensor, exponents: Tensor) -> Tensor:
    scale = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return (codes.float().unflatten(-1, (-1, 32)) * scale).flatten(-2)


def grouped_mlp(
    product: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    weights: Sequence[Any],
    activate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """A linear layer; with a second weight, of the way down, an MLP with SwiGLU."""
    y = product(x, weights[0])
    return y if len(weights) == 1 else product(activate(y), weights[1])


def plain_layer(
    work: LayerWork,
    multiply: Callable[[Tensor, Tensor], Tensor],
    activate: Callable[[Tensor], Tensor] = swiglu,
) -> Step:
    """The layer of a differentiable product of rows and (G, K, N) weights in bf16."""
    weights = work.leaves()

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return multiply(rows, weight.transpose(1, 2))

    return work.step(lambda x: grouped_mlp(product, x, weights, activate), [[w] for w in weights])


PEER = PyTorch
