"""sm_90a kernels that round activations to NVFP4 values without storing codes."""

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels import backend
from cute_kernels.formats import NVFP4
from cute_kernels.kernels.gemm.sm90.fp4.config import ExpandConfig
from cute_kernels.kernels.quantize.choose import choose_row_config
from cute_kernels.kernels.quantize.config import QuantizeProblem, ValuesConfig
from tests.helpers import (
    DTYPES,
    F16,
    F32,
    I32,
    each_arch,
    m_grouped_arguments,
    offs_of_many_groups,
    offs_tensor,
    ops,
    sample,
)

from .gemm_support import compiled, on_device_of
from .op_support import each_mode

NUM_SMS = 3
#: (rows of each group, rows of the tail, K).
SHAPES = {
    "one row": ([1], 0, 16),
    "part of a lane chunk": ([3, 0, 6], 2, 144),
    "several rows per warp": ([9, 0, 130], 5, 512),
    "one row per warp": ([0, 20, 0], 0, 1056),
    "two warps per row": ([5, 1], 1, 4096),
    "all empty": ([0, 0], 4, 64),
}


def values(x, offs, amax, row_scaled):
    """Return the NVFP4 values of x as fp16, by the kernel under test."""
    problem = QuantizeProblem(str(x.dtype).removeprefix("torch."), x.shape[1])
    config = choose_row_config(NVFP4(row_scaled=row_scaled), problem, "sm_90a", ValuesConfig)
    assert config.can_implement(problem)
    out = torch.full((len(x), -(-x.shape[1] // 128) * 128), torch.nan, dtype=F16, device=x.device)
    compiled(config, "sm_90a", x.device.type)(x, None, offs, amax, out, None, None, None, NUM_SMS)
    return out


def expand_codes(copy, offs, k):
    """Return the fp16 values of quantized codes, by the expanding kernel."""
    codes, scales = copy[:2]
    out = torch.full((len(codes), -(-k // 128) * 128), torch.nan, dtype=F16, device=codes.device)
    compiled(ExpandConfig(is_ragged=True), "sm_90a", codes.device.type)(
        codes, scales, offs, out, NUM_SMS
    )
    return out


def check_values(x, offs, row_scaled, device):
    """Compare the values with quantizing and expanding, and the amaxes of rows."""
    with backend("reference"):
        copy = ops.grouped_quantize(x, NVFP4(row_scaled=row_scaled).text, offs)
    x, offs = x.to(device), offs.to(device)
    # Copies keep the pitch of codes.
    copy = [on_device_of(x, tensor) for tensor in copy]
    amax = copy[2].clone()
    if row_scaled:
        amax.fill_(torch.nan)
    got = values(x, offs, amax, row_scaled)
    assert got.view(torch.int16).equal(expand_codes(copy, offs, x.shape[1]).view(torch.int16))
    live = int(offs[-1])
    if row_scaled:
        assert amax[:live].view(I32).equal(copy[2][:live].view(I32))
        assert amax[live:].isnan().all()


@pytest.mark.parametrize("row_scaled", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES])
def test_values_equal_expanded_codes(shape, dtype, row_scaled, device):
    """Compare the values from the quantizer with expanded codes."""
    sizes, tail, k = SHAPES[shape]
    x = sample(sum(sizes) + tail, k, dtype=dtype)
    x[sum(sizes) :] = torch.nan
    check_values(x, torch.tensor(sizes).cumsum(0).int(), row_scaled, device)


def test_many_groups(device):
    offs = offs_of_many_groups()
    check_values(sample(int(offs[-1]) + 3, 48), offs, True, device)


@pytest.mark.parametrize("row_scaled", [False, True], ids=["groups", "rows"])
def test_special_values(row_scaled, device):
    """Compare the values of infinity, NaN and subnormal inputs with expanded codes."""
    x = sample(12, 256)
    x[0] = 0
    x[1] *= 1e-39
    x[2] = 3e38
    x[3, 5] = torch.nan
    x[4, 7] = torch.inf
    x[5, 200:] = float("-inf")
    x[6, 1:] = 0
    x[7] = -0.0
    check_values(x, offs_tensor(4, 4, 12), row_scaled, device)


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    for k in (272, 2064):
        with emulator.options(**mode):
            check_values(sample(45, k), offs_tensor(7, 7, 40), True, "cpu")


@each_arch
@pytest.mark.parametrize("row_scaled", [False, True], ids=["groups", "rows"])
def test_the_fused_op_has_the_bits_of_both_steps(arch, row_scaled):
    """Compare the op that quantizes and multiplies with two separate ops."""
    x, offs = sample(45, 144), offs_tensor(7, 7, 40)
    w, text = ops.grouped_quantize(sample(3, 40, 144), "nvfp4"), NVFP4(row_scaled=row_scaled).text
    options = (sample(3, 40), torch.rand(3), False, F32)
    arguments = (x, w[0], offs, w[1:], text, "nvfp4", *options)

    def fused():
        return ops.m_grouped_quantize_gemm(*arguments)

    def steps():
        a = ops.grouped_quantize(x, text, offs)
        return ops.m_grouped_gemm(*m_grouped_arguments(a, w, offs, *options, a_format=text))

    with backend(f"reference:{arch}"):
        want = steps()
        assert fused().equal(want)
    with backend(f"emulated:{arch}"):
        assert fused().equal(want)
        out = torch.full((45, 40), 2.0)
        ops.m_grouped_quantize_gemm_out(*arguments, out=out)
        assert out[:40].equal(want[:40]) and (out[40:] == 2).all()
