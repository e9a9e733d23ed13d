"""The experts of a layer as kernels, and what a training step of them takes in memory."""

import dataclasses
import functools
from collections.abc import Mapping

from cute_kernels.capability import support
from cute_kernels.layout.buffers import buffers
from cute_kernels.layout.shapes import ceil_div
from grouped.recipes import Recipe

from ..measure.memory import Sizes, bytes_of_step
from .gpus import Gpu
from .work import Counts, Kernel, Product, gate, product, quantization


@dataclasses.dataclass(frozen=True)
class Layer:
    """Experts of one rank, with so many rows each; without ``is_mlp`` the first product alone."""

    sizes: tuple[int, ...]
    hidden: int
    intermediate: int
    is_mlp: bool = True

    @property
    def linears(self) -> tuple[tuple[str, int, int], ...]:
        up = ("up", 2 * self.intermediate, self.hidden)
        return (up, ("down", self.hidden, self.intermediate)) if self.is_mlp else (up,)


def passes(layer: Layer, recipe: Recipe, gpu: Gpu, counts: Counts) -> dict[str, list[Kernel]]:
    """The kernels of each pass.

    Returns:
        ``"serving"``: forward in ``eval()``, weights quantized before. ``"weights"``:
        quantizing them. ``"forward"`` and ``"backward"`` of training, without that.
    """
    found: dict[str, list[Kernel]] = {n: [] for n in ("serving", "weights", "forward", "backward")}
    rows = sum(layer.sizes)
    x, w, dy = recipe.input, recipe.weight, recipe.grad_output
    quantize = functools.partial(quantization, counts=counts, directions="row+column")
    for name, n, k in layer.linears:
        shape = functools.partial(Product, sizes=layer.sizes, n=n, k=k)
        # Where no copy is kept, one quantizer gives what a product would expand.
        is_fused = gpu.multiplied(x)[1]
        if x is not None and w is not None and dy is not None:
            of_weights = len(layer.sizes) * n * k
            found["weights"].append(quantize(f"quantize {name} weights", of_weights, w))
            to_serve = quantize(
                *(f"quantize {name} input", rows * k, x), directions="row", to_values=is_fused
            )
            found["serving"].append(to_serve)
            found["forward"].append(quantize(f"quantize {name} input", rows * k, x))
            found["backward"].append(quantize(f"quantize {name} gradient", rows * n, dy))
        for where, ready in (("serving", is_fused), ("forward", False)):
            work = shape("fprop", a=x, b=w, ready=ready)
            found[where] += product(work, gpu, f"{name} fprop")
        for which, a, b in (("dgrad", dy, w), ("wgrad", dy, x)):
            found["backward"] += product(shape(which, a=a, b=b), gpu, f"{name} {which}")
    if layer.is_mlp:
        for where, which in (("serving", "forward"), ("forward", "forward"), ("backward",) * 2):
            elements = rows * layer.intermediate
            found[where].append(gate(f"SwiGLU {which}", elements, which))
    return found


def step_of(found: Mapping[str, list[Kernel]], kept: bool = False) -> list[Kernel]:
    """The kernels of a training step, of all ``passes``; without the weights' if those are kept."""
    return [*([] if kept else found["weights"]), *found["forward"], *found["backward"]]


def missing_kernels(recipe: Recipe, gpu: Gpu) -> str:
    """Why the package does not run a recipe there; empty if it does."""
    for fmt in (recipe.input, recipe.weight, recipe.grad_output):
        for op in ("grouped_quantize", "grouped_gemm") if fmt is not None else ("grouped_gemm",):
            status = support(op, fmt, gpu.arch, columnwise=fmt is not None)
            if not status:
                return status.reason
    return ""


def memory(layer: Layer, recipe: Recipe) -> dict[str, int]:
    """Bytes of a training step of ``GroupedMLP``: it runs on fake tensors, see ``measure.memory``.

    Returns:
        Of the bf16 weights and of both their quantized copies; what autograd keeps; the most
        that lives at once above parameters and input, gradients of both among it; that and the
        weights.
    """
    experts = len(layer.sizes)
    rows = ceil_div(sum(layer.sizes), experts)
    found = bytes_of_step(recipe, Sizes(experts, layer.hidden, layer.intermediate, rows))
    weights = quantized = 0
    for _, n, k in layer.linears:
        weights += 2 * experts * n * k
        if recipe.weight is not None:
            specs = buffers(recipe.weight, (experts, n, k), None, columnwise=True).values()
            quantized += sum(spec.extent * spec.dtype.itemsize for spec in specs)
    return {"weights": weights, "quantized": quantized, **found, "total": weights + found["peak"]}
