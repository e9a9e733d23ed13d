"""Dot products of the reference: exact sums, order of scales, special values, tensor cores."""

import numpy as np
import pytest
import torch

from cute_kernels.formats import FP8, MXFP8, FP8Block
from cute_kernels.reference.dots import AccumulationModel, dot
from cute_kernels.reference.operands import Rows
from cute_kernels.reference.tensor_core import NAN_BITS
from tests.helpers import E4M3, E5M2, F32, U8, assert_same_bytes
from tests.reference import fp8_oracle

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
BACKENDS = {None: "none", "sm_90a": "sm_90a", "sm_100a": "sm_100a"}

each_a = pytest.mark.parametrize("a_dtype", DTYPES.values(), ids=DTYPES)
each_core = pytest.mark.parametrize("core", [*BACKENDS], ids=BACKENDS.values())


def codes(values, dtype=E4M3):
    x = torch.as_tensor(values, dtype=torch.float64)
    assert x.equal(x.to(dtype).double())
    return x.to(dtype)


def finite_codes(rows, depth, dtype):
    x = torch.randint(0, 256, (rows, depth), dtype=U8).view(dtype)
    return torch.where(x.float().isfinite(), x.float(), 0.0).to(dtype)


def exact_dot(a, b):
    ones = [np.ones((len(x), -(-x.shape[1] // 128))) for x in (a, b)]
    sides = [
        fp8_oracle.Member(x.double().numpy(), s, None, True, 128)
        for x, s in zip((a, b), ones, strict=True)
    ]
    return torch.from_numpy(fp8_oracle.dot_blocks(*sides))


def block_rows(x, scales=1.0, fmt=None):
    shape = len(x), -(-x.shape[1] // 128)
    return Rows(x, fmt or FP8Block(dtype=x.dtype), torch.as_tensor(scales).expand(shape).float())


@each_a
@pytest.mark.parametrize("b_dtype", DTYPES.values(), ids=DTYPES)
def test_partial_sums_of_all_codes_are_exact(a_dtype, b_dtype):
    a, b = finite_codes(24, 128, a_dtype), finite_codes(24, 128, b_dtype)
    assert_same_bytes(dot(block_rows(a), block_rows(b), AccumulationModel()), exact_dot(a, b))


def test_partial_sums_keep_bits_beyond_fp64():
    """Products from 2^31 to 2^-32 in one block: a tie in fp32, broken below the bits of fp64."""
    a = torch.zeros(3, 128, dtype=torch.float64)
    b = torch.zeros(1, 128, dtype=torch.float64)
    b[0, :3] = torch.tensor([2.0**15, 2.0**-8, 2.0**-16])
    a[:, 0], a[:, 1] = 2.0**15, 2.0**14  # 2^30 and half of its last place, 2^6
    a[1, 2], a[2, 2] = 2.0**-16, -(2.0**-16)
    a, b = codes(a, E5M2), codes(b, E5M2)
    got = dot(block_rows(a), block_rows(b), AccumulationModel())
    assert got.flatten().tolist() == [2.0**30, 2.0**30 + 2**7, 2.0**30]
    assert_same_bytes(got, exact_dot(a, b))


@each_core
@each_a
def test_inf_and_nan_stay_in_their_rows(core, a_dtype):
    """Check that infinity and NaN affect only their rows and columns."""
    a, b = finite_codes(4, 160, a_dtype), finite_codes(5, 160, E5M2)
    clean = dot(block_rows(a), block_rows(b), AccumulationModel(core))
    bad = b.clone()
    bad[1, 3], bad[2, 140] = torch.inf, torch.nan
    got = dot(block_rows(a), block_rows(bad), AccumulationModel(core))
    with_inf = a[:, 3].float() * torch.inf
    is_nan = with_inf.isnan()
    assert got[:, 1][~is_nan].equal(with_inf[~is_nan]) and got[:, 1][is_nan].isnan().all()
    assert got[:, 2].isnan().all()
    assert_same_bytes(got[:, [0, 3, 4]], clean[:, [0, 3, 4]])
    if core is not None:
        assert (got[:, 2].contiguous().view(torch.int32) == NAN_BITS[F32]).all()


@pytest.mark.parametrize("pow2", [True, False])
def test_scales_are_not_multiplied_with_each_other(pow2):
    """The partial sum is multiplied by the first scale, then by the second."""
    a, b = codes([[1.0] * 128]), codes([[1.0] * 128])
    fmt = FP8Block(pow2_scales=pow2)
    small, large = 2.0**-127, 2.0**126

    def run(a_scale, b_scale):
        return dot(
            block_rows(a, a_scale, fmt), block_rows(b, b_scale, fmt), AccumulationModel()
        ).item()

    assert run(small, large) == 2.0**6
    assert run(large, large) == torch.inf
    assert run(small, small) == 0.0
    # 2^-127 * 2^-20 is subnormal and exact; so is its product with 128.
    assert run(small, 2.0**-20) == 2.0**-140
    # 128 * 2^126 overflows before the other scale applies; a product of both scales would not.
    assert run(large, 2.0**-100) == torch.inf
    assert run(2.0**-100, large) == 2.0**33


def test_per_row_scales_come_first():
    """Check that scales per row are applied before scales of square blocks."""
    a, b = codes([[1.0] * 128]), codes([[1.0] * 128])
    rows, square = FP8Block(), FP8Block(block=(128, 128))
    large, small = 2.0**126, 2.0**-100
    for a_side, b_side, want in (
        ((rows, large), (square, small), torch.inf),
        ((square, large), (rows, small), 2.0**33),
        ((rows, small), (square, large), 2.0**33),
        ((square, small), (rows, large), torch.inf),
    ):
        sides = block_rows(a, *a_side[::-1]), block_rows(b, *b_side[::-1])
        assert dot(*sides, AccumulationModel()).item() == want
        # Kernels for sm_90a multiply both scales first.
        assert dot(*sides, AccumulationModel("sm_90a")).item() == 2.0**33


def mx_rows(x, exponents):
    shape = len(x), x.shape[1] // 32
    return Rows(x, MXFP8(dtype=x.dtype), torch.as_tensor(exponents, dtype=U8).expand(shape))


@each_core
def test_mxfp8_scales_beyond_fp32(core):
    """Values reach 57344 * 2^127, and products of scales 2^-254 to 2^254."""
    a, b = codes([[57344.0] + [0.0] * 63], E5M2), codes([[2.0**-16] + [0.0] * 63], E5M2)
    unit = 57344.0 * 2.0**-16
    for a_exponent, b_exponent, want in (
        (254, 0, unit),
        (0, 254, unit),
        (254, 254, torch.inf),
        (0, 200, unit * 2.0**-54),
        (0, 0, 0.0),
    ):
        assert (
            dot(mx_rows(a, a_exponent), mx_rows(b, b_exponent), AccumulationModel(core)).item()
            == want
        )


@each_core
def test_a_nan_scale_stays_in_its_row(core):
    """Check that a NaN scale affects only its row."""
    a, b = codes(torch.ones(2, 64)), codes(torch.ones(3, 64))
    scales = torch.full((2, 2), 127, dtype=U8)
    scales[1, 1] = 255
    got = dot(mx_rows(a, scales), mx_rows(b, 127), AccumulationModel(core))
    assert got[0].tolist() == [64.0] * 3 and got[1].isnan().all()


def test_mxfp8_blocks_on_hopper_have_separate_accumulators():
    """A block 2^20 below another one counts in full."""
    a, b = codes(torch.ones(1, 64)), codes(torch.ones(1, 64))
    assert (
        dot(mx_rows(a, [127, 107]), mx_rows(b, 127), AccumulationModel("sm_90a")).item()
        == 32 + 2.0**-15
    )
    # In one accumulator the products of the second block are below its 13 bits.
    values = codes([[1.0] * 32 + [2.0**-9] * 32])
    pair = Rows(values, FP8()), Rows(b, FP8())
    assert dot(*pair, AccumulationModel("sm_90a")).item() == 32
    assert dot(*pair, AccumulationModel("sm_100a")).item() == 32 + 2.0**-4


@each_core
@pytest.mark.parametrize("rows", [1, 255, 257, 600])
def test_results_do_not_depend_on_tiles(core, rows):
    """Check that results do not depend on the tiles of the reference."""
    a, b = finite_codes(rows, 272, E4M3), finite_codes(300, 272, E4M3)
    scales = [torch.rand(len(x), 3) + 0.5 for x in (a, b)]
    fmt = FP8Block(pow2_scales=False)
    whole = dot(
        block_rows(a, scales[0], fmt), block_rows(b, scales[1], fmt), AccumulationModel(core)
    )
    for i, j in ((0, 0), (rows - 1, 299), (rows // 2, 150)):
        operands = [
            block_rows(x[k : k + 1], s[k : k + 1], fmt)
            for x, s, k in zip((a, b), scales, (i, j), strict=True)
        ]
        assert_same_bytes(dot(*operands, AccumulationModel(core)), whole[i : i + 1, j : j + 1])
