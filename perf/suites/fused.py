"""Fused ops of a mixture of experts, and the ops that they replace; tasks of ``counts``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cute_kernels
from cute_kernels.formats import parse

from ..contender import Contender, Run, Task, same_for_all_copies
from ..measure import Meter
from ..operands import generator_of
from .base import Options
from .gemm import Pair
from .quantize import Quantization, bit_error, dequantize_copies, quantized_operand

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
#: Router of DeepSeek-V3: experts; then k, score, renormalize, groups, top groups, factor.
_EXPERTS, _ROUTER = 256, (8, "sigmoid", True, 8, 4, 2.5)
_OPS: Any = torch.ops.cute_kernels


class _Calls:
    """Contenders of each call, on one set of operands."""

    def __init__(self, meter: Meter, options: Options) -> None:
        generator = generator_of(meter.device, options.seed, 0)
        tokens, top_k, experts, hidden, intermediate = _SIZES.values()

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=meter.device, generator=generator).bfloat16()

        self.arch = meter.arch
        self.contenders: dict[str, list[Contender]] = {}
        self.logits, self.x = draw(tokens, _EXPERTS).float(), draw(tokens, hidden)
        self.weight = draw(experts, 2 * intermediate, hidden)
        widths = (2 * intermediate, intermediate, hidden)
        self.preactivation, self.grad_activation, self.expert_output = (
            draw(tokens * top_k, width) for width in widths
        )
        self.p = draw(tokens, top_k).float().softmax(-1)
        ids = self.logits[:, :experts].topk(top_k).indices
        self.offs, self.token, self.pair, self.row = _OPS.compute_routing(ids, experts)

    def add(
        self,
        call: str,
        fused: Run,
        separate: Run | None = None,
        text: str = "bfloat16",
        *copies: Quantization,
        to: str = "",
        saving: Run | None = None,
    ) -> None:
        """Add the contenders of a call.

        Args:
            call: Name of the call.
            fused: The fused op.
            separate: The ops that it replaces.
            text: Format of the contender.
            *copies: Quantized copies at the beginning of the results, which are compared decoded.
            to: Format of the copies, by default ``text``.
            saving: The fused op that also stores the preactivation.
        """

        def error(result: Any) -> float:
            with cute_kernels.backend(f"reference:{self.arch}"):
                results = [
                    [r] if isinstance(r, Tensor) else r for r in (result, (separate or fused)())
                ]
                for request in copies:
                    results = [self._dequantize(r, to or text, request) for r in results]
                # Separate ops may return more than the fused one.
                return max(map(bit_error, *results))

        for name, run in {"ours": fused, "ours, z kept": saving, "ours, apart": separate}.items():
            if run is not None:
                contender = Contender(name, text, partial(partial, run), error)
                self.contenders.setdefault(call, []).append(contender)

    def _dequantize(self, buffers: list[Tensor], text: str, request: Quantization) -> list[Tensor]:
        rows = len(self.preactivation)
        return dequantize_copies(parse(text), request, buffers, self.offs, rows, torch.float32)

    def add_routing(self) -> None:
        """Add the router, its gradient, the routing, gather, combine and the SwiGLU gradient."""
        logits = self.logits
        weights, ids, scores = _OPS.moe_route(logits, None, None, *_ROUTER)
        _, score, renormalize, _, _, factor = _ROUTER
        gradient = partial(
            _OPS.moe_route_gradient,
            weights,
            None,
            ids,
            scores,
            score=score,
            renormalize=renormalize,
            factor=factor,
            in_parts=True,
        )
        self.add("route", partial(_OPS.moe_route, logits, None, None, *_ROUTER))
        self.add("route gradient", gradient)
        self.add("routing", partial(_OPS.compute_routing, ids, _EXPERTS))
        self.add("gather", self.gather)
        self.add("combine", partial(_OPS.moe_combine, self.expert_output, self.row, self.p))
        self.add("swiglu gradient", self.activation_gradient)

    def gather(self) -> Tensor:
        """Gather the rows of the experts."""
        rows: Tensor = _OPS.moe_gather(self.x, self.token, self.row)
        return rows

    def activation_gradient(self) -> list[Tensor]:
        """Compute the gradients of the preactivation and of p, and the weighted activation."""
        results: list[Tensor] = _OPS.moe_activate_gradient(
            self.preactivation, self.grad_activation, "swiglu", self.offs, False, self.p, self.pair
        )
        return results

    def add_gathering(self, call: str, run: Callable[..., Any], *checks: Any) -> None:
        """Add an op that gathers its rows, and the gather followed by the op."""
        self.add(
            f"gather+{call}",
            partial(run, self.x, rows=self.token, inverse=self.row),
            lambda: run(self.gather()),
            *checks,
        )

    def add_gathered_ops(self) -> None:
        """Add products and quantizers that gather rows."""
        fprop = partial(_OPS.m_grouped_gemm, b=self.weight, offs=self.offs)
        self.add_gathering("fprop", fprop)
        self.add_gathering(
            "wgrad", partial(_OPS.k_grouped_gemm, self.preactivation, offs=self.offs)
        )
        for text in ("mxfp8", "fp8_block", "nvfp4:row_scaled"):
            quantize = partial(_OPS.grouped_quantize, format=text, offs=self.offs)
            self.add_gathering("quantize", quantize, text, _ROW)

    def add_training(self, text: str) -> None:
        """Add the quantizers of SwiGLU and of its gradient."""
        experts = _SIZES["experts"]
        z, offs = self.preactivation, self.offs
        scale = torch.full((experts,), 16.0) if parse(text).has_given_scale else None
        quantize = partial(
            _OPS.grouped_quantize, format=text, offs=offs, columnwise=True, scale=scale
        )

        def separate() -> list[Tensor]:
            grad_z, weighted_activation, grad_p = self.activation_gradient()
            return [*quantize(grad_z), *quantize(weighted_activation, rowwise=False), grad_p]

        if scale is None:
            self.add(
                "swiglu+quantize",
                partial(quantize, z, activation="swiglu"),
                lambda: quantize(_OPS.moe_activate(z, "swiglu", offs)),
                text,
                _BOTH,
            )
        fused = partial(
            _OPS.moe_quantize_gradient,
            z,
            self.grad_activation,
            format=text,
            scaled_format=text,
            activation="swiglu",
            offs=offs,
            interleaved=False,
            weight=self.p,
            pair=self.pair,
            scale=scale,
            scaled_scale=scale,
        )
        self.add("swiglu gradient+quantize", fused, separate, text, _BOTH, _COLUMN)

    def add_products(self, formats: Pair) -> None:
        """Add products that activate their results, and that also quantize them."""
        experts, offs = _SIZES["experts"], self.offs
        (a, a_scales), (b, b_scales) = map(
            quantized_operand, formats.formats, (self.expert_output, self.weight), (offs, None)
        )
        operands = {
            "a": a,
            "b": b,
            "offs": offs,
            "a_scales": a_scales,
            "b_scales": b_scales,
            "a_format": formats.a,
            "b_format": formats.b,
        }
        multiply, text = partial(_OPS.m_grouped_gemm, **operands), formats.text("fprop")
        fused = partial(_OPS.m_grouped_gemm_activate, **operands, epilogue="swiglu")

        def separate() -> list[Tensor]:
            z = multiply()
            return [_OPS.moe_activate(z, "swiglu", offs), z]

        self.add("fprop+swiglu", fused, separate, text, saving=partial(fused, keeps_z=True))
        if formats.a:
            to = formats.a.partition(":")[0]
            amax = None if parse(to).global_scale is None else torch.full((experts,), 900.0)
            quantize = partial(
                _OPS.grouped_quantize, format=to, offs=offs, amax=amax, activation="swiglu"
            )
            fused = partial(fused, quantize_to=to, amax=amax)
            self.add(
                "fprop+swiglu+quantize", fused, lambda: quantize(multiply()), text, _ROW, to=to
            )


def tasks(meter: Meter, options: Options) -> list[Task]:
    """Return a task per call."""
    calls = _Calls(meter, options)
    calls.add_routing()
    calls.add_gathered_ops()
    for text in ("mxfp8", "fp8_block", "fp8:scaling=delayed"):
        calls.add_training(text)
    for formats in _PAIRS:
        calls.add_products(formats)
    return [
        Task("counts", {"call": call, **_SIZES}, same_for_all_copies(contenders))
        for call, contenders in calls.contenders.items()
    ]
