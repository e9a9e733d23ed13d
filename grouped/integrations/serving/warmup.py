"""Kernels of the experts are compiled, or loaded from disk, before the server is ready.

The kernel of a product depends on the number of tokens, so one call is not enough. ``warm_up``
plans the calls of many token counts without running them, compiles their kernels in several
processes, and then runs a few calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from logging import Logger
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cute_kernels import active_backend, precompile
from cute_kernels.runtime.planning import KernelNotes

from ...tensor.grouped_tensor import GroupedTensor

#: Token counts up to this one are all planned; larger ones in steps of a 32nd part.
_ALL_UP_TO = 256
#: Calls that are warm: sizes, formats and counts.
_warm: set[Any] = set()


class TokenCounts(NamedTuple):
    """Numbers of tokens with which an engine calls the experts.

    Attributes:
        largest: Largest number.
        captured: Numbers for which CUDA graphs are captured.
    """

    largest: int
    captured: tuple[int, ...]

    def planned(self) -> Iterator[int]:
        """Yield the numbers whose calls are planned, from small to large."""
        count = 1
        while count < self.largest:
            yield count
            count += max(1, count // 32 if count >= _ALL_UP_TO else 1)
        yield self.largest

    def run(self) -> list[int]:
        """Return the numbers whose calls are run: captured ones, powers of two and the largest."""
        powers = (1 << i for i in range(self.largest.bit_length()))
        return sorted({*self.captured, *powers, self.largest})


def warm_up(
    method: Any, call: Callable[[int], Tensor], counts: TokenCounts, key: Any, logger: Logger
) -> None:
    """Compile and load the kernels of a layer's calls, unless an equal layer did.

    Args:
        method: The layer's method, whose attribute ``_operands`` is the pair of weights.
        call: Calls the experts with a number of tokens, and returns the output.
        counts: Numbers of tokens in calls.
        key: Hashable facts of the layer, besides its weights, on which its kernels depend.
        logger: Gets one line after the kernels are ready.
    """
    operands = method._operands
    device = operands[0].device
    if active_backend(device).arch == "reference":
        return  # Nothing is compiled.
    shapes = tuple((tuple(t.shape), t.dtype, getattr(t, "_layout", None)) for t in operands)
    key = (shapes, device, counts, key)
    if key in _warm:
        return
    started = time.perf_counter()
    notes = planned_kernels(method, call, counts)
    result = precompile(notes.specs, arch=notes.architecture, jobs=_num_jobs(), progress=False)
    with torch.inference_mode():
        for count in counts.run():
            call(count)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _warm.add(key)
    logger.info(
        "grouped-kernels: %d kernels for up to %d tokens, %d of them compiled, in %.1f s",
        len(notes.specs),
        counts.largest,
        result.compiled,
        time.perf_counter() - started,
    )


def _num_jobs() -> int:
    """Return this rank's share of the CPUs: the ranks of a host compile at the same time."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return max(1, (os.cpu_count() or 1) // ranks)


def planned_kernels(method: Any, call: Callable[[int], Tensor], counts: TokenCounts) -> KernelNotes:
    """Return the kernels that calls launch, from plans on fake tensors."""
    notes = KernelNotes()
    real = method._operands
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            method._operands = tuple(_fake(t, mode) for t in real)
            with notes, torch.no_grad():
                for count in counts.planned():
                    call(count)
        finally:
            method._operands = real
    return notes


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a weight without data."""
    if isinstance(t, GroupedTensor):
        return t._apply_inner(mode.from_tensor)
    return mode.from_tensor(t)


def spread_tokens(
    count: int, hidden_size: int, top_k: int, num_experts: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, routing weights and expert ids, spread evenly over the experts.

    Args:
        count: Number of tokens.
        hidden_size: Size of a token.
        top_k: Number of experts of a token.
        num_experts: Number of experts.
        like: Tensor with the tokens' dtype and device.
    """
    x = torch.zeros(count, hidden_size, dtype=like.dtype, device=like.device)
    pairs = torch.arange(count * top_k, dtype=torch.int32, device=like.device)
    ids = (pairs % num_experts).view(count, top_k)
    return x, torch.ones(count, top_k, device=like.device), ids
