"""Experts of a layer as kernels, and the memory of a training step."""

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
    """Experts of one rank.

    Attributes:
        sizes: Rows of each expert.
        hidden: Features of a token.
        intermediate: Features inside an expert.
        is_mlp: True for an MLP, False for its first product alone.
    """

    sizes: tuple[int, ...]
    hidden: int
    intermediate: int
    is_mlp: bool = True

    @property
    def linears(self) -> tuple[tuple[str, int, int], ...]:
        """Name, N and K of each product."""
        up = ("up", 2 * self.intermediate, self.hidden)
        return (up, ("down", self.hidden, self.intermediate)) if self.is_mlp else (up,)


def passes(layer: Layer, recipe: Recipe, gpu: Gpu, counts: Counts) -> dict[str, list[Kernel]]:
    """Return the kernels of each pass.

    Returns:
        ``"serving"``: forward in ``eval()`` with cached weights. ``"weights"``: quantizing the
        weights. ``"forward"`` and ``"backward"``: training, without quantizing the weights.
    """
    kernels: dict[str, list[Kernel]] = {
        name: [] for name in ("serving", "weights", "forward", "backward")
    }
    rows = sum(layer.sizes)
    x, w, dy = recipe.input, recipe.weight, recipe.grad_output
    quantize = functools.partial(quantization, counts=counts, directions="row+column")
    for name, n, k in layer.linears:
        shape = functools.partial(Product, sizes=layer.sizes, n=n, k=k)
        # If no copy is saved, one quantizer makes the values that a product would expand.
        is_fused = gpu.mma_operand(x)[1]
        if x is not None and w is not None and dy is not None:
            weight_elements = len(layer.sizes) * n * k
            kernels["weights"].append(quantize(f"quantize {name} weights", weight_elements, w))
            input_name = f"quantize {name} input"
            kernels["serving"].append(
                quantize(input_name, rows * k, x, directions="row", to_values=is_fused)
            )
            kernels["forward"].append(quantize(input_name, rows * k, x))
            kernels["backward"].append(quantize(f"quantize {name} gradient", rows * n, dy))
        for pass_name, is_decoded in (("serving", is_fused), ("forward", False)):
            work = shape("fprop", a=x, b=w, a_is_decoded=is_decoded)
            kernels[pass_name] += product(work, gpu, f"{name} fprop")
        for gradient, a, b in (("dgrad", dy, w), ("wgrad", dy, x)):
            kernels["backward"] += product(shape(gradient, a=a, b=b), gpu, f"{name} {gradient}")
    if layer.is_mlp:
        elements = rows * layer.intermediate
        for pass_name in ("serving", "forward"):
            kernels[pass_name].append(gate("SwiGLU forward", elements, "forward"))
        kernels["backward"].append(gate("SwiGLU backward", elements, "backward"))
    return kernels


def step_of(kernels: Mapping[str, list[Kernel]], weights_cached: bool = False) -> list[Kernel]:
    """Return the kernels of a training step, from those of ``passes``."""
    weights = [] if weights_cached else kernels["weights"]
    return [*weights, *kernels["forward"], *kernels["backward"]]


def missing_kernels(recipe: Recipe, gpu: Gpu) -> str:
    """Return why the package does not run a recipe on a GPU, or '' if it does."""
    for fmt in (recipe.input, recipe.weight, recipe.grad_output):
        for op in ("grouped_quantize", "grouped_gemm") if fmt is not None else ("grouped_gemm",):
            status = support(op, fmt, gpu.arch, columnwise=fmt is not None)
            if not status:
                return status.reason
    return ""


def memory(layer: Layer, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of a training step of ``GroupedMLP``, run on fake tensors.

    Returns:
        ``"weights"``: bf16 weights. ``"quantized"``: both their quantized copies. Then the entries
        of ``measure.memory.bytes_of_step``, and ``"total"``: peak and weights.
    """
    experts = len(layer.sizes)
    rows = ceil_div(sum(layer.sizes), experts)
    step = bytes_of_step(recipe, Sizes(experts, layer.hidden, layer.intermediate, rows))
    weights = quantized = 0
    for _, n, k in layer.linears:
        weights += 2 * experts * n * k
        if recipe.weight is not None:
            specs = buffers(recipe.weight, (experts, n, k), None, columnwise=True).values()
            quantized += sum(spec.extent * spec.dtype.itemsize for spec in specs)
    return {"weights": weights, "quantized": quantized, **step, "total": weights + step["peak"]}
