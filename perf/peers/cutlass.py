"""NVIDIA's CuTe DSL example of a scaled grouped GEMM for MoE, on the emulator.

It runs from a checkout of CUTLASS (``--path CUTLASS=FOLDER``). Its groups have multiples of 16
rows, and it has no scale per row.
"""

import dataclasses
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grouped
from cute_kernels.formats import MXFP8, NVFP4, Format
from cute_kernels.layout.shapes import ceil_div, round_up
from cute_kernels.layout.slots import slot_tile

from ..contender import Contender
from ..measure.emulator import EmulatorMeter, installed
from ..operands import Operands
from ..suites.base import element_bytes
from .base import NOISE, Peer, padded_rows, unpadded_rows

_ROW_MULTIPLE = 16
_FORMATS: tuple[Format, ...] = (NVFP4(), MXFP8())
_MODULE = "blackwell.kernel.moe.torch_scaled_grouped_mm"
#: Tiles of the example by name: M and N, and CTAs.
_TILES = {"256x256": (256, 256, 2), "256x128": (256, 128, 2), "128x128": (128, 128, 1)}


class CutlassExample(Peer):
    """NVIDIA's example. Its records are in the repository, so that comparing needs no checkout."""

    name = "CUTLASS"
    module = "cutlass"
    distribution = "nvidia-cutlass-dsl"
    kinds = ("emulator",)
    sources = "examples/python/CuTeDSL/cute"

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield the forward product in NVFP4 and MXFP8, in three tiles."""
        if work.product != "fprop" or self.path is None:
            return
        assert isinstance(self.meter, EmulatorMeter)
        for fmt, tile in itertools.product(_FORMATS, _TILES):
            call = _Call(self.path, work, fmt, tile, self.meter.num_sms)
            bits, text = element_bytes(fmt), f"{fmt.text} x {fmt.text}"
            note = "groups rounded up to 16 rows; no factor a row"
            contender = self.product(
                work, text, call.prepare, bits, bits, error=call.error, note=note
            )
            # Its error is relative to the decoded operands, so that of bf16 is the bound.
            name, bound = f"CUTLASS example, tile {tile}", NOISE["bfloat16"]
            yield dataclasses.replace(contender, name=name, bound=bound)


@dataclasses.dataclass
class _Call:
    """A call of the example.

    Attributes:
        path: Checkout of CUTLASS.
        work: Operands in bf16.
        fmt: Format of both operands.
        tile: A key of ``_TILES``.
        num_sms: SMs of the emulated GPU.
        operands: Quantized operands, with padded groups. None before ``prepare``.
    """

    path: Path
    work: Operands
    fmt: Format
    tile: str
    num_sms: int
    operands: tuple[grouped.GroupedTensor, grouped.GroupedTensor] | None = None

    def error(self, out: Tensor) -> float:
        """Return the error relative to the fp32 product of the decoded operands."""
        assert self.operands is not None
        a, b = (x.dequantize(torch.float32) for x in self.operands)
        actual, a = (unpadded_rows(x, self.work.sizes, _ROW_MULTIPLE) for x in (out, a))
        return self.work.error(actual, a, b)

    def prepare(self) -> Callable[[], Tensor]:
        """Quantize the operands and return the call of the kernel."""
        from cutlass import Float32, cute

        work, fmt = self.work, self.fmt
        assert fmt.scale is not None
        a, _ = padded_rows(work.a, work.sizes, _ROW_MULTIPLE)
        offs = torch.tensor([round_up(n, _ROW_MULTIPLE) for n in work.sizes]).cumsum(0).int()
        operands, self.operands = _quantized(a, offs, work.b, fmt)
        m, n, ctas = _TILES[self.tile]
        kernel = self._example().ScaledGroupedGemmKernel(
            scenario="2Dx3D",
            sf_vec_size=fmt.scale.vec_size,
            accumulate_on_output=False,
            separate_tensormap_init=True,
            consistent_token_padding=False,
            acc_dtype=Float32,
            mma_tiler_mnk=(m, n, 1024 // fmt.element.bits),
            cluster_shape_mnk=(ctas, 1, 1),
            use_2cta_instrs=ctas == 2,
            fixed_expert_cnt=None,
        )
        groups = len(work.b)
        out = torch.empty(len(a), work.shape.n, dtype=torch.bfloat16)
        workspace = torch.full((kernel.get_workspace_size(groups),), 255, dtype=torch.uint8)
        arguments = (*operands, out, offs, workspace)
        ones = [torch.ones(groups) for _ in range(2 if fmt.global_scale else 0)]

        @functools.cache
        def compiled() -> tuple[Any, tuple[Any, ...]]:
            """Return the compiled kernel and its arguments.

            The DSL accepts CPU tensors only while the emulator is installed.
            """
            tensors = [_cute_tensor(x) for x in arguments]
            stream = importlib.import_module("cuda.bindings.driver").CUstream(0)
            global_scales = [_cute_tensor(x) for x in ones]
            clusters = self.num_sms // ctas
            function = cute.compile(kernel, *tensors, clusters, stream, *global_scales)
            return function, (*tensors, stream, *global_scales)

        def run() -> Tensor:
            with installed("sm_100a", self.num_sms):
                function, kernel_arguments = compiled()
                function(*kernel_arguments)
            return out

        return run

    def _example(self) -> Any:
        folder = str(self.path / CutlassExample.sources)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(_MODULE)


def _quantized(
    a: Tensor, offs: Tensor, b: Tensor, fmt: Format
) -> tuple[tuple[Tensor, ...], tuple[grouped.GroupedTensor, grouped.GroupedTensor]]:
    """Return the operands of the example and those of this package, with global scales of 1."""
    unit = torch.full((len(offs),), 2688.0) if fmt.global_scale else None
    a_quantized = grouped.quantize(a, fmt, offs=offs, amax=unit)
    b_quantized = grouped.quantize(b, fmt, amax=unit)
    assert fmt.scale is not None
    assert a_quantized.rowwise is not None and b_quantized.rowwise is not None
    # The example expects the scale tiles of all groups one after the other, without slots.
    starts = [0, *offs.tolist()]
    tiles = [
        a_quantized.rowwise.scales[slot_tile(start, g) :][: ceil_div(end - start, 128)]
        for g, (start, end) in enumerate(itertools.pairwise(starts))
    ]
    width = a.shape[1] // fmt.scale.vec_size
    scales = (torch.cat(tiles).view(-1, width), b_quantized.rowwise.scales.reshape(len(b), -1))
    codes = (a_quantized.rowwise.codes.contiguous(), b_quantized.rowwise.codes.contiguous())
    is_packed = fmt.element.per_byte > 1
    packed = [x.view(torch.float4_e2m1fn_x2) if is_packed else x for x in codes]
    factors = [x.view(fmt.scale.element.dtype) for x in scales]
    return (packed[0], packed[1].transpose(1, 2), *factors), (a_quantized, b_quantized)


def _cute_tensor(x: Tensor) -> Any:
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(x).mark_layout_dynamic(leading_dim=x.stride().index(1))


PEER = CutlassExample
