"""FlashInfer 0.7: quantizers on Blackwell, and grouped bf16 products.

On the emulator its CuTe DSL quantizers run from a checkout (``--path FlashInfer=FOLDER``).
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contender import Contender, Prepare, Run, relative_error
from ..measure.emulator import EmulatorMeter, installed
from ..operands import Operands
from ..suites.quantize import Input, Quantization
from .base import Peer, row_scales
from .pytorch import mxfp8_values, nvfp4_values

_LARGEST = 6.0 * 448.0
_BLACKWELL = 10
_PACKAGES = ("", ".quantization", ".quantization.kernels", ".jit", ".cute_dsl")
_KERNELS = "flashinfer.quantization.kernels.nvfp4_quantize"


class FlashInfer(Peer):
    """FlashInfer. Its quantizers have one global scale for all rows, or one per row."""

    name = "FlashInfer"
    module = "flashinfer"
    distribution = "flashinfer-python"
    kinds = ("gpu", "emulator")
    sources = "flashinfer"

    def quantizers(self, data: Input, request: Quantization) -> Iterator[Contender]:
        """Yield rowwise quantizers to NVFP4 and MXFP8."""
        if request.directions != "row":
            return
        if self.path is not None and self.meter.kind == "emulator":
            text = "nvfp4" if request.gives_amax else "nvfp4:row_scaled"
            assert isinstance(self.meter, EmulatorMeter)
            prepare = partial(
                _emulated, self.path, data, not request.gives_amax, self.meter.num_sms
            )
            yield self._quantizer(data, text, prepare)
        elif torch.cuda.get_device_capability()[0] == _BLACKWELL:
            if request.gives_amax:
                yield self._quantizer(data, "nvfp4", partial(_nvfp4, data, False))
                return
            yield self._quantizer(data, "nvfp4:row_scaled", partial(_nvfp4, data, True))
            yield self._quantizer(data, "mxfp8", partial(_mxfp8, data))

    def _quantizer(self, data: Input, text: str, prepare: Prepare) -> Contender:
        return self.quantizer(data, text, prepare, partial(_error, data))

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield the bf16 forward product."""
        if self.meter.kind == "emulator" or work.product != "fprop":
            return

        def prepare() -> Callable[[], Tensor]:
            multiply = importlib.import_module("flashinfer.grouped_mm").grouped_mm_bf16
            return partial(multiply, work.a, work.b, F.pad(work.offs, (1, 0)))

        yield self.product(work, "bfloat16", prepare)


def _nvfp4(data: Input, per_row: bool) -> Run:
    quantize = importlib.import_module("flashinfer").nvfp4_quantize
    if per_row:
        scale = torch.tensor([1 / _LARGEST], device=data.x.device)
        return partial(quantize, data.x, scale, per_token_activation=True)
    return partial(quantize, data.x, _LARGEST / data.amax.amax().view(1))


def _mxfp8(data: Input) -> Run:
    return partial(importlib.import_module("flashinfer").mxfp8_quantize, data.x)


def _error(data: Input, result: tuple[Tensor, ...]) -> float:
    """Return the error of decoded rows, which may have a global scale per row."""
    codes, tiles, *global_scales = result
    rows, cols = data.x.shape
    if codes.shape[-1] == cols:
        exponents = row_scales(tiles, rows, cols // 32)
        return relative_error(mxfp8_values(codes.view(torch.float8_e4m3fn), exponents), data.x)
    scales = row_scales(tiles, rows, cols // 16).view(torch.float8_e4m3fn)
    encode_scale = _LARGEST / data.amax.amax()
    if global_scales:
        encode_scale = 1 / global_scales[0].float().view(-1, 1)
    return relative_error(nvfp4_values(codes.view(torch.uint8), scales, encode_scale), data.x)


class _OnDevice(Tensor):
    """A CPU tensor that claims to be on a GPU, which the library asserts."""

    is_cuda = True


def _emulated(path: Path, data: Input, per_row: bool, num_sms: int) -> Run:
    """Return a call of its CuTe DSL quantizer on the emulator."""
    kernels = _import_kernels(path)
    kernels.get_num_sm = lambda device: num_sms
    name = "nvfp4_quantize_per_token_cute_dsl" if per_row else "nvfp4_quantize_cute_dsl"
    x, scale = data.x.as_subclass(_OnDevice), _LARGEST / data.amax.amax().view(1)
    if per_row:
        scale = torch.tensor([1 / _LARGEST])

    def run() -> Any:
        with installed("sm_100a", num_sms):
            return getattr(kernels, name)(x, scale, enable_pdl=False)

    return run


def _import_kernels(path: Path) -> Any:
    """Import the module of its kernels without its packages, which import CUDA libraries."""
    for name in _PACKAGES:
        full = f"flashinfer{name}"
        if full not in sys.modules:
            package = types.ModuleType(full)
            package.__path__ = [str(path.joinpath(*full.split(".")))]
            sys.modules[full] = package
    # The kernels import it, but do not use it here.
    sys.modules.setdefault("pynvml", types.ModuleType("pynvml"))
    os.environ["FLASHINFER_CUTE_DSL_DISABLE_CACHE"] = "1"
    return importlib.import_module(_KERNELS)


PEER = FlashInfer
