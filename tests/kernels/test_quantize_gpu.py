"""The quantization ops on a GPU: bytes of the reference, no synchronization, graphs, streams."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cute_kernels import UnsupportedError, ops, support
from cute_kernels.runtime.arch import device_architecture
from tests.helpers import assert_same_bytes


def _reason() -> str:
    """Why the tests cannot run here, if they cannot."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    try:
        arch = device_architecture(0).name
    except UnsupportedError as error:
        return str(error)
    return support("grouped_amax", None, arch).reason


pytestmark = pytest.mark.skipif(bool(_reason()), reason=_reason())

Variant = tuple[bool, ...]
Results = Sequence[Tensor | None]
#: row_scaled, block_2d, rowwise, columnwise.
VARIANTS: list[Variant] = [
    (row_scaled, block_2d, rowwise, columnwise)
    for (row_scaled, block_2d), (rowwise, columnwise) in itertools.product(
        ((False, False), (True, False), (False, True)), ((True, False), (False, True), (True, True))
    )
    if rowwise or not row_scaled
]


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows with capacity to spare, its tail poisoned, in groups of which some are empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 90, (12,), generator=generator)
    sizes[::5] = 0
    offs = sizes.cumsum(0).int()
    x = torch.randn(1200, 528, generator=generator)
    x *= torch.exp2(torch.randint(-9, 9, (1200, 33), generator=generator)).repeat_interleave(16, 1)
    x[int(offs[-1]) :] = float("nan")
    return x.to(dtype), offs


def assert_same_results(got: Results, want: Results, offs: Tensor) -> None:
    """Compare results; what no group owns may hold anything."""
    names = ("codes", "scales", "amax", "codes_t", "scales_t", "amax_t")
    live = int(offs[-1])
    tiles = live_tiles(offs)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        a = a.cpu()
        if i in (0, 2) and len(b) == 1200:
            a, b = a[:live], b[:live]
        elif i == 1:
            a, b = a[tiles], b[tiles]
        elif i == 3:
            a, b = (t.unflatten(1, (-1, 64))[:, tiles] for t in (a, b))
        elif i == 4:
            a, b = (t.unflatten(1, (-1, 2))[:, tiles] for t in (a, b))
        assert_same_bytes(a, b, names[i])


def live_tiles(offs: Tensor) -> list[int]:
    """The slot tiles that hold rows."""
    starts = [0, *offs.tolist()]
    tiles = []
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        first = start // 128 + group
        tiles += range(first, first + (end - start + 127) // 128)
    return tiles


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bytes_of_the_reference(variant: Variant) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, offs = inputs(1, dtype)
        there = x.cuda(), offs.cuda()
        with no_synchronization():
            got = ops.grouped_quantize_nvfp4(*there, None, *variant)
        assert_same_results(got, ops.grouped_quantize_nvfp4(x, offs, None, *variant), offs)


def test_uniform_groups() -> None:
    x = torch.randn(3, 140, 272).bfloat16()
    there = x.cuda()
    for variant in VARIANTS:
        with no_synchronization():
            got = ops.grouped_quantize_nvfp4(there, None, None, *variant)
        want = ops.grouped_quantize_nvfp4(x, None, None, *variant)
        for a, b in zip(got, want, strict=True):
            assert a is b is None or torch.equal(a.cpu(), b)


def test_amax_and_offsets() -> None:
    x, offs = inputs(2)
    sizes = offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    there = x.cuda(), offs.cuda(), sizes.cuda()
    with no_synchronization():
        amax = ops.grouped_amax(there[0], there[1])
        ends = ops.compute_offsets(there[2])
    assert torch.equal(amax.cpu(), ops.grouped_amax(x, offs))
    assert torch.equal(ends.cpu(), offs)


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[4]], ids=str)
def test_graph_replay_with_other_offsets(variant: Variant) -> None:
    x, offs = (t.cuda() for t in inputs(3))
    ops.grouped_quantize_nvfp4(x, offs, None, *variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.grouped_quantize_nvfp4(x, offs, None, *variant)
    for seed in (4, 5, 6):
        new_x, new_offs = inputs(seed)
        x.copy_(new_x)
        offs.copy_(new_offs)
        graph.replay()
        want = ops.grouped_quantize_nvfp4(new_x, new_offs, None, *variant)
        assert_same_results(got, want, new_offs)


def test_two_streams() -> None:
    """Kernels of two streams at once do not disturb each other."""
    problems = [inputs(seed) for seed in (7, 8)]
    there = [(x.cuda(), offs.cuda()) for x, offs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got = []
    with no_synchronization():
        for _ in range(20):
            got = []
            for stream, arguments in zip(streams, there, strict=True):
                with torch.cuda.stream(stream):
                    got.append(
                        ops.grouped_quantize_nvfp4(*arguments, None, False, False, True, True)
                    )
    torch.cuda.synchronize()
    for result, (x, offs) in zip(got, problems, strict=True):
        want = ops.grouped_quantize_nvfp4(x, offs, None, False, False, True, True)
        assert_same_results(result, want, offs)
