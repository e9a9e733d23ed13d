"""Saved tensors and peak memory of a training step of ``GroupedMLP`` or ``MoE``.

*Saved* are the tensors that autograd saves for the backward pass, without the parameters. *Peak* is
the most memory at any time above parameters, input and output gradient. It includes the gradients
that the step leaves behind.

On a CPU the step runs on fake tensors, see ``cute_kernels.testing.memory``.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from cute_kernels.testing.memory import SavedTensor, fake_peak_bytes, record_saved_tensors
from grouped import recipes
from grouped.nn import GroupedMLP, MoE


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a step.

    Attributes:
        experts: Number of experts.
        hidden: Features of a token.
        intermediate: Features inside an expert.
        tokens: Rows of each expert of an MLP, or tokens of a mixture.
        top_k: Experts per token of a mixture. It is 0 for an MLP.
    """

    experts: int
    hidden: int
    intermediate: int
    tokens: int
    top_k: int = 0


def measure(
    recipe: recipes.Recipe, sizes: Sizes, device: str = "cpu", recompute: bool = False
) -> tuple[list[SavedTensor], int]:
    """Run a training step and return its saved tensors and its peak memory in bytes.

    Args:
        recipe: Recipe of the layer.
        sizes: Sizes of the step.
        device: ``"cuda"``, or ``"cpu"`` for fake tensors.
        recompute: Option of ``MoE``.
    """
    fake = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
    with fake, torch.device(device):
        experts, widths = sizes.experts, (sizes.hidden, sizes.intermediate)
        options: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16}
        module: nn.Module
        rows, end_rows = sizes.tokens, []
        if sizes.top_k:
            module = MoE(*widths, experts, sizes.top_k, recompute=recompute, **options)
        else:
            module = GroupedMLP(experts, *widths, **options)
            end_rows = [torch.full((experts,), rows).cumsum(0).to(torch.int32)]
            rows = experts * rows
        x, dy = (torch.randn(rows, sizes.hidden, dtype=torch.bfloat16) for _ in range(2))
        x.requires_grad_()

        with record_saved_tensors(module) as saved:
            module(x, *end_rows)

        def step() -> None:
            module(x, *end_rows).backward(dy)

        leaves = [*module.parameters(), x]
        if device == "cuda":
            return saved, _peak_on_gpu(step, leaves)
        return saved, fake_peak_bytes(step, [*leaves, dy, *end_rows])


def bytes_of_step(
    recipe: recipes.Recipe, sizes: Sizes, device: str = "cpu", recompute: bool = False
) -> dict[str, int]:
    """Return the sums of ``measure``: bytes saved of activations and of weights, and the peak."""
    saved, peak = measure(recipe, sizes, device, recompute)
    weights = sum(t.nbytes for t in saved if len(t.shape) > 2)
    activations = sum(t.nbytes for t in saved) - weights
    return {"saved of activations": activations, "saved of weights": weights, "peak": peak}


def _peak_on_gpu(step: Callable[[], None], leaves: list[Tensor]) -> int:
    """Return the peak of the allocator in the second step."""
    step()  # Compiles kernels and allocates persistent buffers.
    for leaf in leaves:
        leaf.grad = None
    return peak_of(step)


def peak_of(run: Callable[[], object]) -> int:
    """Return the peak bytes that a call allocates on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
