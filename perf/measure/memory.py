"""Bytes that a training step of ``GroupedMLP`` or ``MoE`` keeps for its backward pass, and its
peak.

On a CPU nothing is computed: the step runs on fake tensors, and torch's ``MemTracker`` adds up the
storages that live, without temporaries inside an op and what an allocator rounds up. "Saved" is
what autograd keeps between forward and backward, without the parameters. "Peak" is the most that
lives at once above parameters, input and output gradient, gradients that are there after the step
included.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.reductions import StorageWeakRef

from grouped import recipes
from grouped.nn import GroupedMLP, MoE


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the step; ``tokens`` are rows of each expert, or with a ``top_k`` those of a mixture."""

    experts: int
    hidden: int
    intermediate: int
    tokens: int
    top_k: int = 0


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that is kept for the backward pass, and the bytes of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@contextlib.contextmanager
def saved_by(module: nn.Module) -> Iterator[list[Saved]]:
    """The tensors that calls inside keep for their backward passes, each storage once."""
    # Weakly held, so that no other storage comes to have the same address.
    seen = {StorageWeakRef(p.untyped_storage()) for p in module.parameters()}
    found: list[Saved] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in seen:
            seen.add(reference)
            found.append(Saved(tuple(t.shape), t.dtype, storage.nbytes()))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield found


def measure(
    recipe: recipes.Recipe, sizes: Sizes, device: str = "cpu", recompute: bool = False
) -> tuple[list[Saved], int]:
    """What a step keeps, and its peak in bytes above what is there before it; on a CPU of fake
    tensors.

    ``recompute`` is that of a mixture.
    """
    fake = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
    with fake, torch.device(device):
        experts, widths = sizes.experts, (sizes.hidden, sizes.intermediate)
        options: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16}
        module: nn.Module
        rows, ends = sizes.tokens, []
        if sizes.top_k:
            module = MoE(*widths, experts, sizes.top_k, recompute=recompute, **options)
        else:
            module = GroupedMLP(experts, *widths, **options)
            ends, rows = [torch.full((experts,), rows).cumsum(0).to(torch.int32)], experts * rows
        x, dy = (torch.randn(rows, sizes.hidden, dtype=torch.bfloat16) for _ in range(2))
        x.requires_grad_()

        with saved_by(module) as saved:
            module(x, *ends)

        def step() -> None:
            module(x, *ends).backward(dy)

        leaves = [*module.parameters(), x]
        if device == "cuda":
            return saved, _peak_on_gpu(step, leaves)
        return saved, _peak_of_fakes(step, [*leaves, dy, *ends])


def bytes_of_step(
    recipe: recipes.Recipe, sizes: Sizes, device: str = "cpu", recompute: bool = False
) -> dict[str, int]:
    """What ``measure`` finds, in sums: of activations, of weights, and the peak."""
    saved, peak = measure(recipe, sizes, device, recompute)
    of_weights = sum(t.nbytes for t in saved if len(t.shape) > 2)
    of_activations = sum(t.nbytes for t in saved) - of_weights
    return {"saved of activations": of_activations, "saved of weights": of_weights, "peak": peak}


def _peak_of_fakes(step: Callable[[], None], before: list[Tensor]) -> int:
    tracker = MemTracker()
    tracker.track_external(*before)
    with tracker:
        step()
    totals = tracker.get_tracker_snapshot("peak").values()
    return sum(int(total["Total"]) for total in totals) - sum(t.nbytes for t in before)


def _peak_on_gpu(step: Callable[[], None], leaves: list[Tensor]) -> int:
    step()  # Compiles kernels, and makes what lives on.
    for leaf in leaves:
        leaf.grad = None
    return peak_of(step)


def peak_of(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
