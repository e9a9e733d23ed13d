"""Dequantization of formats of FP8 codes on the emulator, to the bit of the reference.

From arbitrary codes and scales, which no quantizer need have made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.formats import FP8, MXFP8, Format, FP8Block
from cute_kernels.layout.buffers import buffers
from cute_kernels.quantize import DequantizeConfig
from tests.helpers import DTYPES, dequantize_arguments, ends, many_groups, ops
from tests.kernels.op_support import ARCHITECTURES, MODE_IDS, MODES, check

FORMATS: dict[str, Format] = {
    fmt.text: fmt
    for fmt in (
        *(FP8Block(), FP8Block(dtype=torch.float8_e5m2), FP8Block(block=(128, 128))),
        *(MXFP8(), MXFP8(torch.float8_e5m2), MXFP8(block=(32, 32)), FP8(scaling="delayed")),
    )
}
#: (rows of the buffer, K, end rows).
RAGGED = {
    "one row": (1, 32, ends(1)),
    "odd rows, K past two strips": (300, 544, ends(7, 136, 137, 300)),
    "empty first, middle, last": (200, 96, ends(0, 0, 65, 65, 65, 190, 200, 200)),
    "all empty": (64, 32, ends(0, 0, 0)),
    "tail": (260, 160, ends(3, 131, 219)),
}


def arguments(
    shape: tuple[int, ...], offs: Tensor | None, fmt: Format, columnwise: bool, dtype: str
) -> tuple[Any, ...]:
    """What the op takes: random bytes, as fp32 scales finite numbers of all sizes."""
    generator = torch.Generator().manual_seed(sum(shape))
    groups = None if offs is None else len(offs)
    specs = buffers(fmt, shape, groups, rowwise=not columnwise, columnwise=columnwise)
    copy = []
    for name in fmt.operand_names(columnwise):
        spec = specs[name]
        if spec.dtype == torch.float32:
            exponents = torch.randint(-140, 120, spec.shape, generator=generator)
            copy.append(torch.rand(spec.shape, generator=generator) * exponents.float().exp2())
        else:
            whole = (*spec.shape[:-1], spec.pitch or spec.shape[-1])
            made = torch.randint(0, 256, whole, generator=generator, dtype=torch.uint8)
            copy.append(made.view(spec.dtype)[..., : spec.shape[-1]])
    return dequantize_arguments(copy, fmt.text, shape[-2], DTYPES[dtype], offs, columnwise)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("text", FORMATS)
def test_ragged_groups(text: str, columnwise: bool) -> None:
    for i, (rows, cols, offs) in enumerate(RAGGED.values()):
        args = arguments((rows, cols), offs, FORMATS[text], columnwise, "float32")
        check(ARCHITECTURES[i % 2], lambda args=args: ops.grouped_dequantize(*args))


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("text", ["fp8_block", "fp8_block:block=128x128", "mxfp8"])
def test_uniform_groups_and_16_bits(text: str, columnwise: bool) -> None:
    for dtype, shape in (("bfloat16", (2, 100, 160)), ("float16", (3, 129, 32))):
        args = arguments(shape, None, FORMATS[text], columnwise, dtype)
        check("sm_90a", lambda args=args: ops.grouped_dequantize(*args))


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_any_order(columnwise: bool, mode: dict) -> None:
    offs = many_groups()
    shape = (int(offs[-1]) + 5, 32)
    for text in ("fp8_block", "mxfp8"):
        args = arguments(shape, offs, FORMATS[text], columnwise, "float32")
        check("sm_90a", lambda args=args: ops.grouped_dequantize(*args), **mode)


def test_formats_that_decode_alike_share_a_kernel() -> None:
    for fmt, other in (
        (FP8Block(pow2_scales=False, amax_epsilon=1e-4), FP8Block()),
        (FP8(scaling="delayed"), FP8()),
        (MXFP8(block=(32, 32)), MXFP8()),
    ):
        configs = [DequantizeConfig.choose(f, "bfloat16", "ragged", True) for f in (fmt, other)]
        assert configs[0] == configs[1]
