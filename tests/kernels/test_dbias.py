"""Kernels of grouped_dbias, against the reference bit for bit."""

import pytest
import torch

from cute_kernels import backend
from cute_kernels.kernels.quantize.pass_config import DbiasConfig
from cute_kernels.ops.checks import unchecked_end_rows
from tests.helpers import (
    DTYPES,
    I32,
    assert_same_bytes,
    each_arch,
    offs_of_many_groups,
    offs_tensor,
    ops,
    seeded_generator,
)

from .op_support import array_of, check, check_code, check_touched, each_mode, watching

dbias = ops.grouped_dbias
#: (rows of the buffer, N, end rows).
CASES = {
    "one group": (256, 64, offs_tensor(256)),
    "one row": (1, 8, offs_tensor(1)),
    "odd rows, two strips and a part": (300, 136, offs_tensor(7, 136, 137, 300)),
    "odd columns": (300, 37, offs_tensor(7, 136, 137, 300)),
    "one column": (150, 1, offs_tensor(150)),
    "empty first, middle, last": (200, 48, offs_tensor(0, 0, 65, 65, 65, 190, 200, 200)),
    "all empty": (64, 16, offs_tensor(0, 0, 0)),
    "tail": (260, 16, offs_tensor(3, 131, 219)),
    "tiles for two rounds and a part": (1500, 16, offs_tensor(128, 1429)),
}


def gradient(rows, cols, offs, dtype="bfloat16"):
    """Return numbers of very different sizes, so that the order of sums shows; NaN in the tail."""
    generator = seeded_generator(0)
    dy = torch.randn(rows, cols, generator=generator)
    dy *= torch.exp2(torch.randint(-8, 9, (rows, cols), generator=generator).float())
    dy[int(offs[-1]) :] = torch.nan
    return dy.to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", [*DTYPES])
@each_arch
def test_sums_of_ragged_groups(arch, dtype):
    for rows, cols, offs in CASES.values():
        dy = gradient(rows, cols, offs, dtype)
        check(arch, lambda dy=dy, offs=offs: dbias(dy, offs))


@each_arch
def test_sums_of_uniform_groups(arch):
    """Check sums of uniform groups, of strided gradients and of groups without rows."""
    dy = gradient(3 * 130, 72, offs_tensor(390)).view(3, 130, 72)
    check(arch, lambda: dbias(dy))
    check(arch, lambda: dbias(dy[:, ::2, 1:]))
    check(arch, lambda: dbias(dy[:, :0]))


@each_mode
@pytest.mark.parametrize("cols", [72, 9])
def test_any_order_of_warps(cols, mode):
    offs = offs_tensor(0, 700, 700, 701, 1990)
    dy = gradient(2000, cols, offs)
    check("sm_90a", lambda: dbias(dy, offs), num_sms=1, **mode)


@each_arch
def test_more_than_a_thousand_groups(arch):
    offs = offs_of_many_groups()
    dy = gradient(int(offs[-1]) + 5, 16, offs)
    check(arch, lambda: dbias(dy, offs))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_special_values(dtype):
    """Check sums with infinity, NaN, subnormal numbers and negative zeros."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, info.max, -info.max, info.tiny / 2, -info.tiny / 4]
    numbers += [torch.inf, -torch.inf, torch.nan]
    generator = seeded_generator(1)
    dy = torch.tensor(numbers)[torch.randint(0, 6, (300, 64), generator=generator)]
    dy[:, 40:] = torch.tensor(numbers)[torch.randint(0, 9, (300, 24), generator=generator)]
    dy[:, :8] = -0.0
    dy = dy.to(dtype)
    offs = offs_tensor(128, 129, 300)
    assert not dbias(dy, offs)[:, :8].view(I32).any()  # zeros of positive sign
    check("sm_100a", lambda: dbias(dy, offs))


def test_only_rows_of_groups_are_read():
    """Check that rows outside of the groups are not read."""
    rows, cols, offs = CASES["tail"]
    dy = gradient(rows, cols, offs)
    live = int(offs[-1])
    out = torch.full((len(offs), cols), -7.0)
    with backend("emulated:sm_90a"):
        check_touched(
            lambda: ops.grouped_dbias_out(dy, offs, dbias=out), [array_of(dy)[:live]], [offs, out]
        )
    assert_same_bytes(out, dbias(dy, offs), any_nan=True)


@unchecked_end_rows()
@pytest.mark.parametrize("num_sms", [1, 7])
def test_end_rows_outside_of_the_buffer_are_clamped(num_sms):
    dy = gradient(140, 64, offs_tensor(140))
    outside = offs_tensor(-5, 20, 1000, 2**31 - 1)
    check("sm_90a", lambda: dbias(dy, outside), num_sms=num_sms)


def test_views():
    dy = gradient(140, 64, offs_tensor(140))
    for view in (dy[:, 3:43], dy[1:, :].t(), dy.flatten()[3:8835].view(138, 64)):
        check("sm_90a", lambda view=view: dbias(view, offs_tensor(20, view.shape[0])))


@unchecked_end_rows()
def test_falling_end_rows_stay_in_the_buffer():
    """Check that falling end rows cause no access outside of the buffers."""
    dy = gradient(140, 64, offs_tensor(140))
    out = torch.zeros(2, 64)
    falling = offs_tensor(100, 20)
    with watching(dy, falling, out), backend("emulated:sm_90a"):
        ops.grouped_dbias_out(dy, falling, dbias=out)
    assert not out[1].any()


@pytest.mark.parametrize("config", [DbiasConfig("bfloat16"), DbiasConfig("float32")], ids=str)
def test_generated_code_is_exact_without_spills(config):
    check_code(config, "sm_90a")
