"""Time training steps of the layers on an H200 beside torch._grouped_mm, results checked first.

    python -m perf.step_h200 [--layer linear mlp] [--tokens 128 512 2048] [--json results.jsonl]

A step is forward and backward, with gradients of the input and of the weights, of a layer with bf16
parameters and without bias; ``torch`` is the same layer written with bf16 ``torch._grouped_mm``.
"graph us" is sustained time in a CUDA graph of many steps, "eager us" the time of a step among many
without one, and "kernels" where the time goes: microseconds of one step by kind of kernel. ``kept``
is a step whose weight was quantized in an earlier one (``is_first_microbatch=False``).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cute_kernels
import grouped
from cute_kernels.gemm.problem import GemmConfig
from cute_kernels.gemm.sm90.fp4.config import ExpandConfig
from cute_kernels.runtime.aot import declared_specs
from cute_kernels.runtime.arch import device_architecture
from cute_kernels.runtime.spec import short_name
from perf.measure import machine_facts, median_us, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable

#: (experts, hidden size, intermediate size) of the MLPs; a linear layer is the first of the MLP.
SIZES = {"dsv3": (32, 7168, 2048), "small": (8, 1024, 512)}
_KEPT = " kept"
RECIPES = ("BF16", "NVFP4", "NVFP4RowScaled", "NVFP4RowScaled" + _KEPT)
_EAGER_SECONDS = 0.15
#: The largest relative error of a step's results beside bf16's. NVFP4 gives 0.15 for the linear
#: layer and 0.26 for the MLP.
_BOUNDS = {"torch": 0.0, "BF16": 0.01, **dict.fromkeys(RECIPES[1:], 0.4)}


class TorchLinear(nn.Module):
    """``GroupedLinear`` in bf16 by torch alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Rows of each group times its weight."""
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=offs)


class TorchMLP(nn.Module):
    """``GroupedMLP`` in bf16 by torch alone."""

    def __init__(self, layer: grouped.nn.GroupedMLP) -> None:
        super().__init__()
        self.gate_up, self.down = (
            TorchLinear(getattr(layer, name).weight) for name in ("gate_up", "down")
        )

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Apply the experts."""
        gate, up = self.gate_up(x, offs).chunk(2, dim=-1)
        y: Tensor = self.down((F.silu(gate.float()) * up.float()).to(gate.dtype), offs)
        return y


@dataclasses.dataclass
class Step:
    """Forward and backward of one layer.

    Attributes:
        layer: the layer.
        x: (T, K) input that takes a gradient.
        offs: (G,) end rows.
        dy: gradient of the output.
        options: options of the forward pass.
    """

    layer: nn.Module
    x: Tensor
    offs: Tensor
    dy: Tensor
    options: dict[str, bool] = dataclasses.field(default_factory=dict)

    def run(self) -> Tensor:
        """One step into fresh gradients; returns the output."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        y: Tensor = self.layer(self.x, self.offs, **self.options)
        y.backward(self.dy)
        return y

    def results(self) -> list[Tensor]:
        """Output and gradients of one step."""
        y = self.run().detach()
        gradients = [self.x.grad, *(p.grad for p in self.layer.parameters())]
        return [y, *(g for g in gradients if g is not None)]

    def eager_us(self) -> float:
        """Microseconds of a step among many."""
        calls, elapsed = 2, 0.0
        while elapsed < _EAGER_SECONDS:
            calls *= 2
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                self.run()
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        return elapsed / calls * 1e6


def make_layer(layer: str, size: str, recipe: str) -> nn.Module:
    """A layer in one recipe, or by torch; the same weights in all."""
    groups, hidden, intermediate = SIZES[size]
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    if recipe != "torch":
        options["recipe"] = getattr(grouped.recipes, recipe)()
    if layer == "linear":
        linear = grouped.nn.GroupedLinear(groups, hidden, 2 * intermediate, **options)
        assert isinstance(linear.weight, Tensor)
        return TorchLinear(linear.weight) if recipe == "torch" else linear
    mlp = grouped.nn.GroupedMLP(groups, hidden, intermediate, **options)
    return TorchMLP(mlp) if recipe == "torch" else mlp


@functools.cache
def _kinds() -> dict[str, str]:
    """What the kernels of this package are for, by the names that profiles have."""
    kinds = {}
    for spec in declared_specs(device_architecture(torch.cuda.current_device())):
        kind = "quantize"
        if isinstance(spec, GemmConfig):
            kind = "GEMM fprop, dgrad" if spec.grouping == "m_grouped" else "GEMM wgrad"
        elif isinstance(spec, ExpandConfig):
            kind = "expand"
        kinds[short_name(spec)] = kind
    return kinds


def _kind(kernel: str) -> str:
    for name, kind in _kinds().items():
        if name in kernel:
            # A quantizer that finds the amaxes itself launches three kernels.
            is_amax = "_cutlass_reduce_" in kernel or "_cutlass_clear_" in kernel
            return "amax" if is_amax else kind
    return "GEMM of torch" if "gemm" in kernel.lower() or "cutlass" in kernel else "elementwise"


def time_by_kind(step: Step) -> dict[str, float]:
    """Microseconds of kernels in one step, the median of three, by kind."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            step.run()
        torch.cuda.synchronize()
    total: dict[str, float] = collections.defaultdict(float)
    for event in profile.key_averages():
        total[_kind(event.key)] += event.device_time_total / 3
    return {kind: round(us, 1) for kind, us in sorted(total.items())}


def measure(layer: str, size: str, tokens: int) -> list[dict[str, Any]]:
    """Results of all recipes, torch first."""
    groups, hidden, intermediate = SIZES[size]
    generator = torch.Generator("cuda").manual_seed(1)
    draw = functools.partial(torch.randn, device="cuda", generator=generator, dtype=torch.bfloat16)
    x = draw(groups * tokens, hidden).requires_grad_()
    dy = draw(groups * tokens, 2 * intermediate if layer == "linear" else hidden)
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * tokens
    want: list[Tensor] = []
    results: list[dict[str, Any]] = []
    for recipe in ("torch", *RECIPES):
        step = Step(make_layer(layer, size, recipe.removesuffix(_KEPT)), x, offs, dy)
        if recipe.endswith(_KEPT):
            step.layer(x, offs, is_first_microbatch=True)
            step.options = {"is_first_microbatch": False}
        got = step.results()
        want = want or got
        errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
        assert max(errors) <= _BOUNDS[recipe], f"{recipe}: relative errors {errors}"
        del got
        graph = median_us(_discard(step.run), seconds=0.1)
        result = {
            "layer": layer,
            "size": size,
            "tokens": tokens,
            "recipe": recipe,
            "graph us": round(graph, 1),
            "eager us": round(step.eager_us(), 1),
            "of torch": round(graph / results[0]["graph us"], 3) if results else 1.0,
            "errors": [round(error, 4) for error in errors],
            "kernels": time_by_kind(step),
        }
        print(json.dumps(result), flush=True)
        results.append(result)
        del step
        torch.cuda.empty_cache()
    return results


def _discard(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` without its result, which a capture must not keep."""

    def call() -> None:
        run()

    return call


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", nargs="+", default=["linear", "mlp"], choices=["linear", "mlp"])
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--json", type=Path, help="append results to this file")
    options = parser.parse_args()
    facts = machine_facts() | {"backend": cute_kernels.active_backend(torch.device("cuda", 0)).name}
    for size in options.size:
        for layer in options.layer:
            for tokens in options.tokens:
                results = measure(layer, size, tokens)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.writelines(json.dumps(r | facts) + "\n" for r in results)


if __name__ == "__main__":
    main()
