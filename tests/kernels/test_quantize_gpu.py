"""The quantization ops on a GPU: bytes of the reference, no synchronization, graphs, streams."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cute_kernels import UnsupportedError, ops, support
from cute_kernels.formats import parse
from cute_kernels.runtime.arch import device_architecture
from tests.helpers import NVFP4_TEXTS, assert_same_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator


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

ROWS = 1200
Variant = tuple[str, bool, bool]
#: Text of the format, rowwise, columnwise.
VARIANTS: list[Variant] = [
    (text, rowwise, columnwise)
    for text, (rowwise, columnwise) in itertools.product(
        NVFP4_TEXTS.values(), ((True, False), (False, True), (True, True))
    )
    if rowwise or text != NVFP4_TEXTS["row-scaled"]
]


def quantize(x: Tensor, offs: Tensor | None, variant: Variant) -> dict[str, Tensor]:
    """Buffers by name."""
    text, rowwise, columnwise = variant
    fmt = parse(text)
    names = fmt.buffer_names(False) * rowwise + fmt.buffer_names(True) * columnwise
    found = ops.grouped_quantize(x, text, offs, None, rowwise, columnwise)
    return dict(zip(names, found, strict=True))


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
    x = torch.randn(ROWS, 528, generator=generator)
    x *= torch.exp2(torch.randint(-9, 9, (ROWS, 33), generator=generator)).repeat_interleave(16, 1)
    x[int(offs[-1]) :] = float("nan")
    return x.to(dtype), offs


def assert_same_live(got: dict[str, Tensor], want: dict[str, Tensor], offs: Tensor) -> None:
    """Compare results; what no group owns may hold anything."""
    assert_same_buffers(
        *({name: owned(name, t.cpu(), offs) for name, t in found.items()} for found in (got, want))
    )


def owned(name: str, buffer: Tensor, offs: Tensor) -> Tensor:
    """What groups own of a buffer of NVFP4."""
    tiles = live_tiles(offs)
    if name == "scales":
        return buffer[tiles]
    if name == "codes_t":
        return buffer.unflatten(1, (-1, 64))[:, tiles]
    if name == "scales_t":
        return buffer.unflatten(1, (-1, 2))[:, tiles]
    return buffer[: int(offs[-1])] if len(buffer) == ROWS else buffer


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
            got = quantize(*there, variant)
        assert_same_live(got, quantize(x, offs, variant), offs)


def test_uniform_groups() -> None:
    x = torch.randn(3, 140, 272).bfloat16()
    there = x.cuda()
    for variant in VARIANTS:
        with no_synchronization():
            got = quantize(there, None, variant)
        assert_same_buffers({name: t.cpu() for name, t in got.items()}, quantize(x, None, variant))


def test_amax_and_offsets() -> None:
    x, offs = inputs(2)
    sizes = offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    there = x.cuda(), offs.cuda(), sizes.cuda()
    with no_synchronization():
        amax = ops.grouped_amax(there[0], there[1])
        ends = ops.compute_offsets(there[2])
    assert torch.equal(amax.cpu(), ops.grouped_amax(x, offs))
    assert torch.equal(ends.cpu(), offs)


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[-1]], ids=str)
def test_graph_replay_with_other_offsets(variant: Variant) -> None:
    x, offs = (t.cuda() for t in inputs(3))
    quantize(x, offs, variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(x, offs, variant)
    for seed in (4, 5, 6):
        new_x, new_offs = inputs(seed)
        x.copy_(new_x)
        offs.copy_(new_offs)
        graph.replay()
        assert_same_live(got, quantize(new_x, new_offs, variant), new_offs)


def test_two_streams() -> None:
    """Kernels of two streams at once do not disturb each other."""
    problems = [inputs(seed) for seed in (7, 8)]
    there = [(x.cuda(), offs.cuda()) for x, offs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got, both = [], ("nvfp4", True, True)
    with no_synchronization():
        for _ in range(20):
            got = []
            for stream, arguments in zip(streams, there, strict=True):
                with torch.cuda.stream(stream):
                    got.append(quantize(*arguments, both))
    torch.cuda.synchronize()
    for result, (x, offs) in zip(got, problems, strict=True):
        assert_same_live(result, quantize(x, offs, both), offs)
