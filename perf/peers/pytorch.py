"""PyTorch: grouped products, layers, and compiled quantizers."""

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
    """PyTorch. Contenders of its compiler are named ``torch.compile``."""

    name = "torch"
    module = "torch"
    kinds = ("gpu", "cpu")

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield the bf16 product, and on a GPU the forward product in FP8."""
        plain = partial(_grouped_mm, work)
        yield self.product(work, "bfloat16", lambda: plain)
        if work.device.type == "cuda" and work.product == "fprop":
            yield self.product(work, "fp8 rowwise", partial(_rowwise, work), 1.0, 1.0)

    def quantizers(self, data: Input, request: Quantization) -> Iterator[Contender]:
        """Yield compiled rowwise quantizers to NVFP4 and MXFP8, without swizzled scales."""
        if request.directions != "row":
            return
        if request.gives_amax:
            yield self._compiled(data, "nvfp4", nvfp4_given, nvfp4_values)
        else:
            yield self._compiled(data, "nvfp4:row_scaled", nvfp4_rows, nvfp4_values)
            yield self._compiled(data, "mxfp8", mxfp8_rows, mxfp8_values)

    def _compiled(
        self, data: Input, text: str, quantize: Callable[..., Any], decode: Callable[..., Tensor]
    ) -> Contender:
        """Return a compiled quantizer."""

        def prepare() -> Run:
            return partial(torch.compile(quantize, dynamic=False), data.x, data.amax.amax().view(1))

        def error(result: Any) -> float:
            return relative_error(decode(*result), data.x)

        contender = self.quantizer(data, text, prepare, error)
        return dataclasses.replace(contender, name="torch.compile")

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """Yield the layer in bf16."""
        yield self._step(work, swiglu)

    def experts(self, work: ExpertsWork) -> Iterator[Contender]:
        """Yield the experts in bf16, with compiled SwiGLU."""
        yield self._step(work, compiled(swiglu, work.device))

    def _step(self, work: LayerWork, activate: Callable[[Tensor], Tensor]) -> Contender:
        product = partial(torch._grouped_mm, offs=work.offs)
        make = partial(plain_layer, work, product, activate)
        return work.contender("torch", "BF16", make, 3 * NOISE["bfloat16"])

    def mixtures(self, work: MoEWork) -> Iterator[Contender]:
        """Yield the layer in bf16, with compiled activation and sum."""
        yield work.contender("torch", "BF16", lambda: _mixture(work), PEER_BOUND)


def combine(h: Tensor, order: Tensor, p: Tensor) -> Tensor:
    """Return the weighted sums over the rows of each token.

    Args:
        h: Rows (T k, H), sorted by expert.
        order: Pair of a token and an expert of each row.
        p: Routing weights (T, k).
    """
    # The gradient of a copy by index needs no sums.
    pairs = torch.empty_like(h).index_copy(0, order, h).view(*p.shape, -1)
    return (pairs.float() * p.unsqueeze(-1)).sum(1).to(h.dtype)


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of a token and an expert sorted by expert, and the end row of each expert.

    Args:
        ids: Experts (T, k) of each token.
        experts: Number of experts.
    """
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    ones = torch.ones_like(order, dtype=torch.int32)
    return order, counts.scatter_add(0, ids.flatten(), ones).cumsum(0).int()


def _mixture(work: MoEWork) -> Step:
    """Return the pass of a mixture of experts."""
    act = work.activate
    activate = compiled(lambda z, b, expert: act(z if b is None else z + b[expert]), work.device)
    add = compiled(
        lambda h, b, expert, order, p: combine(h if b is None else h + b[expert], order, p),
        work.device,
    )

    def experts(
        x: Tensor, p: Tensor, ids: Tensor, up: Tensor, down: Tensor, *biases: Tensor
    ) -> Tensor:
        """Run the experts of a mixture and sum their results."""
        order, offs = sort_by_expert(ids, len(up))
        up_bias, down_bias = biases or (None, None)
        expert = ids.flatten()[order]
        rows = x.index_select(0, order // work.shape.top_k)
        a = activate(torch._grouped_mm(rows, up.transpose(1, 2), offs=offs), up_bias, expert)
        h = torch._grouped_mm(a, down.transpose(1, 2), offs=offs)
        return add(h, down_bias, expert, order, p)

    return work.plain(experts)


def _grouped_mm(work: Operands) -> Tensor:
    return torch._grouped_mm(*work.factors, offs=work.offs)


def _to_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1).float().clamp(min=1e-12) / _FP8_MAX
    return (x.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def _rowwise(work: Operands) -> Callable[[], Tensor]:
    """Quantize the operands with a scale per row, and return the call of the product."""
    a, a_scale = _to_fp8_rows(work.a)
    # Expert by expert, since fp32 copies of all weights may not fit into memory.
    pairs = [_to_fp8_rows(weight) for weight in work.b]
    b, b_scale = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(
        torch._scaled_grouped_mm, a, b.transpose(1, 2), a_scale, b_scale, offs=work.offs, **options
    )


def nvfp4_given(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows to NVFP4, in plain PyTorch.

    Args:
        x: Rows (T, K).
        amax: One amax, or one per row.

    Returns:
        Codes (T, K / 2), block scales (T, K / 16), and the global encode scales.
    """
    blocks = x.float().unflatten(-1, (-1, 16))
    encode_scale = (2688.0 / amax).view(-1, 1)
    scales = (blocks.abs().amax(-1) / 6.0 * encode_scale).clamp(max=448.0).to(torch.float8_e4m3fn)
    y = blocks * (encode_scale / scales.float()).unsqueeze(-1)
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8) + (magnitude >= 0.75) + (magnitude > 1.25)
    code = code + (magnitude >= 1.75) + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0)
    code = (code | (y < 0).to(torch.uint8) << 3).flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, scales, encode_scale


def nvfp4_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows to NVFP4 with the amax of each row; ``amax`` is ignored."""
    return nvfp4_given(x, x.abs().amax(-1).float())


def nvfp4_values(codes: Tensor, scales: Tensor, encode_scale: Tensor) -> Tensor:
    """Decode NVFP4 rows."""
    blocks = unpack_codes(codes).unflatten(-1, (-1, 16)) * scales.float().unsqueeze(-1)
    return blocks.flatten(-2) / encode_scale


def mxfp8_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to MXFP8: E4M3 codes, and block exponents that are rounded up."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126) / _FP8_MAX))
    codes = (blocks * torch.exp2(-exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (exponent + 127).to(torch.uint8)


def mxfp8_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Decode MXFP8 rows."""
    scale = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return (codes.float().unflatten(-1, (-1, 32)) * scale).flatten(-2)


def grouped_mlp(
    product: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    weights: Sequence[Any],
    activate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Return the output of a linear layer, or with a second weight of an MLP with SwiGLU."""
    y = product(x, weights[0])
    return y if len(weights) == 1 else product(activate(y), weights[1])


def plain_layer(
    work: LayerWork,
    multiply: Callable[[Tensor, Tensor], Tensor],
    activate: Callable[[Tensor], Tensor] = swiglu,
) -> Step:
    """Return the pass of a layer with a differentiable product of rows and weights (G, K, N)."""
    weights = work.leaves()

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return multiply(rows, weight.transpose(1, 2))

    return work.step(lambda x: grouped_mlp(product, x, weights, activate), [[w] for w in weights])


PEER = PyTorch
