"""GEMMs of the reference on NVFP4 variants: four over six, transforms, random rounding."""

import itertools

import pytest
import torch

import cute_kernels
from cute_kernels.formats import parse
from tests.helpers import (
    F32,
    assert_all_same,
    assert_same_bytes,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    ops,
    row_ranges,
    sample,
)
from tests.reference import fp8_oracle

from .test_gemm_fp8 import Product, Wgrad, accumulator_and_factor, scaled

SPLITS = (5, 0, 18)
OFFS = offs_from_splits(SPLITS)
N, K = 16, 48
BOUNDS = {256: "nvfp4:four_over_six", 448: "nvfp4:four_over_six,e4m3_max=448"}
SQUARES = "nvfp4:block=16x16,four_over_six"
STOCHASTIC = "nvfp4:stochastic_rounding"
TRANSFORMED = "nvfp4:hadamard"


def copy_of(text, *shape, columnwise=False):
    fmt, offs = parse(text), OFFS if len(shape) == 2 else None
    seed = torch.tensor([1, 2]) if fmt.is_stochastic else None
    return ops.grouped_quantize(
        sample(*shape), text, offs, None, not columnwise, columnwise, None, seed
    )


@pytest.mark.parametrize(("a_bound", "b_bound"), [*itertools.product((256, 448), (256, 448))])
@pytest.mark.parametrize("by_row", [False, True])
def test_each_operand_has_its_own_bound(a_bound, b_bound, by_row):
    """Check that each operand uses its own ``e4m3_max``."""
    a_text = BOUNDS[a_bound].replace("nvfp4:", "nvfp4:row_scaled,") if by_row else BOUNDS[a_bound]
    b_text = SQUARES if b_bound == 256 else SQUARES + ",e4m3_max=448"
    case = Product((a_text, b_text), SPLITS, N, K)
    want = torch.zeros(len(case.x), N)
    for _, rows, a, b in case.members():
        assert (a.bound, b.bound) == (a_bound, b_bound)
        want[rows] = scaled(*accumulator_and_factor(a, b))
    assert_same_bytes(case.run(), want)


def test_wgrad_reads_full_blocks_of_a_transformed_copy():
    """The transform mixes a group's last rows into slots behind them, so those count too."""
    case = Wgrad((TRANSFORMED, TRANSFORMED), SPLITS, N, K)
    got, (dy, x) = case.run(), case.tensors
    for g, (start, end) in enumerate(row_ranges(SPLITS)):
        padded_rows = 16 * -(-(end - start) // 16)
        a, b = (
            fp8_oracle.member(TRANSFORMED, copy, g, padded_rows, start, True)
            for copy in case.copies
        )
        assert_same_bytes(got[g], scaled(*accumulator_and_factor(a, b)))
        exact = dy[start:end].double().T @ x[start:end].double()
        assert (got[g] - exact).norm() <= 0.3 * exact.norm()


@pytest.mark.parametrize("text", [TRANSFORMED, STOCHASTIC])
@pytest.mark.parametrize("backend", ["reference", "reference:sm_90a", "reference:sm_100a"])
def test_variants_multiply_like_plain_nvfp4(text, backend):
    """A variant differs in how it computes codes; the same codes give the same product."""
    a, w = copy_of(text, sum(SPLITS), K), copy_of(text, 3, N, K)
    a_t, b_t = (copy_of(text, sum(SPLITS), cols, columnwise=True) for cols in (N, K))
    products = {}
    with cute_kernels.backend(backend):
        for name in (text, "nvfp4"):
            texts = {"a_format": name, "b_format": name}
            products[name] = (
                ops.m_grouped_gemm(*m_grouped_arguments(a, w, OFFS, **texts)),
                ops.k_grouped_gemm(*k_grouped_arguments(a_t, b_t, OFFS, **texts)),
            )
    assert_all_same(*products.values())


@pytest.mark.parametrize("text", [TRANSFORMED, STOCHASTIC, BOUNDS[256], BOUNDS[448], SQUARES])
def test_w4a16_with_variants(text):
    """Check W4A16 products of each variant of NVFP4."""
    x, w = sample(sum(SPLITS), K), copy_of(text, 3, N, K)
    values = ops.grouped_dequantize(w[0], w[1:], text, N, F32)
    got = ops.m_grouped_gemm(*m_grouped_arguments(x, w, OFFS, out_dtype=F32, b_format=text))
    want = torch.cat(
        [
            x[s:e].double() @ v.double().T
            for v, (s, e) in zip(values, row_ranges(SPLITS), strict=True)
        ]
    )
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
