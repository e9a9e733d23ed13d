"""Kernels that expand codes or arrange activations before a GEMM of sm_90a."""

import pytest
import torch

from cute_kernels.formats import NVFP4
from cute_kernels.kernels.gemm.sm90.fp4.config import ArrangeConfig, ExpandConfig
from tests.helpers import BF16, F16, U8, offs_tensor

from .gemm_support import compiled, quantize, randn
from .op_support import array_of, check_touched, watching

#: Rows of the buffer, K, end rows, and the slot tiles up to the last row of a group.
ROWS, COLS, OFFS, TILES = 400, 320, offs_tensor(100, 100, 230), 4
LIVE = 230
INVALID_END_ROWS = {
    "falling": offs_tensor(100, 20, 7),
    "negative": offs_tensor(-5, -(2**31), 30),
    "past the buffer": offs_tensor(10, 401, 2**31 - 1),
    "all of it": offs_tensor(-(2**31), 2**31 - 1, 50, 401, -1, 400),
}


def make_output(dtype):
    return torch.full((ROWS, 384), -7.0, dtype=dtype)


def codes_and_scales():
    operand = quantize(randn(ROWS, COLS, seed=0), OFFS, NVFP4())
    assert operand.scales is not None
    return operand.codes.contiguous(), operand.scales


def test_expand_leaves_the_tail_unchanged():
    """Check that the expanding kernel leaves the tail unchanged."""
    codes, scales = codes_and_scales()
    assert codes.shape == (ROWS, 160) and len(scales) > TILES
    out = make_output(F16)
    kernel = compiled(ExpandConfig(is_ragged=True), "sm_90a")
    needed = [codes[:LIVE], scales[:TILES], OFFS, out[:LIVE]]
    check_touched(lambda: kernel(codes, scales, OFFS, out, 2), [*map(array_of, needed)])
    assert (out[LIVE:] == -7).all() and not (out[:LIVE] == -7).all(1).any()


def test_arrange_leaves_the_tail_unchanged():
    """Check that the arranging kernel leaves the tail unchanged."""
    x, out = randn(ROWS, COLS, seed=0).bfloat16(), make_output(BF16)
    kernel = compiled(ArrangeConfig("bfloat16"), "sm_90a")
    check_touched(
        lambda: kernel(x, None, OFFS, out, 2), [*map(array_of, [x[:LIVE], OFFS, out[:LIVE]])]
    )
    assert (out[LIVE:] == -7).all()


def test_gathered_rows_are_arranged_like_copied_rows():
    """Compare gathered rows with a copy of the rows, also for invalid indices."""
    x, plain, out = randn(50, COLS, seed=0).bfloat16(), make_output(BF16), make_output(BF16)
    index = torch.randint(0, 50, (ROWS,), generator=torch.Generator().manual_seed(0)).int()
    index[[0, 3, 9, 229]] = torch.tensor([-1, 50, 2**31 - 1, -(2**31)], dtype=torch.int32)
    is_token = (index >= 0) & (index < 50)
    copied = x[torch.where(is_token, index, 0).long()] * is_token[:, None]
    compiled(ArrangeConfig("bfloat16"), "sm_90a")(copied, None, OFFS, plain, 2)
    kernel = compiled(ArrangeConfig("bfloat16", gathered=True), "sm_90a")
    needed = [x, index[:LIVE], OFFS, out[:LIVE]]
    check_touched(lambda: kernel(x, index, OFFS, out, 2), [*map(array_of, needed)])
    assert torch.equal(out, plain)


@pytest.mark.parametrize("case", [*INVALID_END_ROWS])
def test_invalid_end_rows_stay_in_the_buffers(case):
    """Check that invalid end rows cause no access outside of the buffers."""
    offs = INVALID_END_ROWS[case]
    codes = quantize(randn(ROWS, COLS, seed=0), OFFS, NVFP4()).codes.contiguous()
    scales = torch.zeros(ROWS // 128 + len(offs), 5, 512, dtype=U8)
    x, out = randn(ROWS, COLS, seed=0).bfloat16(), make_output(BF16)
    values, index = make_output(F16), offs.new_full((ROWS,), 2)
    with watching(codes, scales, offs, values, x, out, index):
        compiled(ExpandConfig(is_ragged=True), "sm_90a")(codes, scales, offs, values, 2)
        compiled(ArrangeConfig("bfloat16"), "sm_90a")(x, None, offs, out, 2)
        compiled(ArrangeConfig("bfloat16", gathered=True), "sm_90a")(x[:3], index, offs, out, 2)
