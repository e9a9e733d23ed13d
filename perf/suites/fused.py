"""What a mixture of experts does between and in its products, by one op and by several: a part of
``counts``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cute_kernels
from cute_kernels.formats import parse

from ..contender import Contender, Run, Task, always
from ..measure import Meter
from ..operands import generator_of
from .base import Options
from .gemm import Pair
from .quantize import Quantization, bit_error, decoded, operand

_SIZES = {"tokens": 256, "top_k": 2, "experts": 4, "hidden": 256, "intermediate": 256}
_ROW, _COLUMN, _BOTH = (
    Quantization(directions, False) for directions in ("row", "column", "row+column")
)
_PAIRS = (
    Pair(None, None),
    Pair("mxfp8", "mxfp8"),
    Pair("fp8_block", "fp8_block:block=128x128"),
    Pair("nvfp4:row_scaled", "nvfp4"),
)
#: DeepSeek-V3's router: experts; k, score, renormalize, groups, best groups, factor.
_EXPERTS, _ROUTER = 256, (8, "sigmoid", True, 8, 4, 2.5)
_OPS: Any = torch.ops.cute_kernels


def tasks(meter: Meter, options: Options) -> list[Task]:
    """One of each call."""
    generator = generator_of(meter.device, options.seed, 0)
    tokens, top_k, experts, hidden, wide = _SIZES.values()

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=meter.device, generator=generator).bfloat16()

    logits, x, w = (
        draw(tokens, _EXPERTS).float(),
        draw(tokens, hidden),
        draw(experts, 2 * wide, hidden),
    )
    z, g, h = (draw(tokens * top_k, width) for width in (2 * wide, wide, hidden))
    p = draw(tokens, top_k).float().softmax(-1)
    offs, token, pair, row = _OPS.compute_routing(logits[:, :experts].topk(top_k).indices, experts)
    found: dict[str, list[Contender]] = {}

    def add(
        call: str,
        one: Run,
        apart: Run | None = None,
        text: str = "bfloat16",
        *copies: Quantization,
        to: str = "",
        kept: Run | None = None,
    ) -> None:
        def error(got: Any) -> float:
            with cute_kernels.backend(f"reference:{meter.arch}"):
                both = [[t] if isinstance(t, Tensor) else t for t in (got, (apart or one)())]
                for asked in copies:
                    both = [
                        decoded(parse(to or text), asked, t, offs, len(z), torch.float32)
                        for t in both
                    ]
                return max(map(bit_error, *both))  # Several ops may return more.

        for name, run in {"ours": one, "ours, z kept": kept, "ours, apart": apart}.items():
            if run is not None:
                found.setdefault(call, []).append(
                    Contender(name, text, partial(partial, run), error)
                )

    weights, ids, scores = _OPS.moe_route(logits, None, None, *_ROUTER)
    chosen = (weights, None, ids, scores, *_ROUTER[1:3], _ROUTER[-1], True)
    gather = partial(_OPS.moe_gather, x, token, row)
    gradient = partial(_OPS.moe_activate_gradient, z, g, "swiglu", offs, False, p, pair)
    add("route", partial(_OPS.moe_route, logits, None, None, *_ROUTER))
    add("route gradient", partial(_OPS.moe_route_gradient, *chosen))
    add("routing", partial(_OPS.compute_routing, ids, _EXPERTS))
    add("gather", gather)
    add("combine", partial(_OPS.moe_combine, h, row, p))
    add("swiglu gradient", gradient)

    def gathering(call: str, run: Callable[..., Any], *more: Any) -> None:
        add(
            f"gather+{call}", partial(run, x, rows=token, inverse=row), lambda: run(gather()), *more
        )

    gathering("fprop", partial(_OPS.m_grouped_gemm, b=w, offs=offs))
    gathering("wgrad", partial(_OPS.k_grouped_gemm, z, offs=offs))
    for text in ("mxfp8", "fp8_block", "nvfp4:row_scaled"):
        gathering("quantize", partial(_OPS.grouped_quantize, format=text, offs=offs), text, _ROW)

    def training(text: str) -> None:
        scale = torch.full((experts,), 16.0) if parse(text).has_given_scale else None
        quantize = partial(
            _OPS.grouped_quantize, format=text, offs=offs, columnwise=True, scale=scale
        )

        def passes() -> list[Tensor]:
            dz, pa, dp = gradient()
            return [*quantize(dz), *quantize(pa, rowwise=False), dp]

        if scale is None:
            one = partial(quantize, z, activation="swiglu")
            add(
                "swiglu+quantize",
                one,
                lambda: quantize(_OPS.moe_activate(z, "swiglu", offs)),
                text,
                _BOTH,
            )
        one = partial(
            _OPS.moe_quantize_gradient,
            z,
            g,
            text,
            text,
            "swiglu",
            offs,
            False,
            p,
            pair,
            scale,
            scale,
        )
        add("swiglu gradient+quantize", one, passes, text, _BOTH, _COLUMN)

    training("mxfp8")
    training("fp8_block")
    training("fp8:scaling=delayed")

    def product(pair: Pair) -> None:
        (a, of_a), (b, of_b) = map(operand, pair.formats, (h, w), (offs, None))
        given = (a, b, offs, None, None, False, None, of_a, of_b, pair.a, pair.b)
        multiply, text = partial(_OPS.m_grouped_gemm, *given), pair.text("fprop")
        one = partial(_OPS.m_grouped_gemm_activate, *given, epilogue="swiglu")

        def apart() -> list[Tensor]:
            z = multiply()
            return [_OPS.moe_activate(z, "swiglu", offs), z]

        add("fprop+swiglu", one, apart, text, kept=partial(one, keeps_z=True))
        if pair.a:
            to = pair.a.partition(":")[0]
            amax = None if parse(to).global_scale is None else torch.full((experts,), 900.0)
            quantize = partial(
                _OPS.grouped_quantize, format=to, offs=offs, amax=amax, activation="swiglu"
            )
            one = partial(one, quantize_to=to, amax=amax)
            add("fprop+swiglu+quantize", one, lambda: quantize(multiply()), text, _ROW, to=to)

    for formats in _PAIRS:
        product(formats)
    return [
        Task("counts", {"call": call, **_SIZES}, always(calls)) for call, calls in found.items()
    ]
