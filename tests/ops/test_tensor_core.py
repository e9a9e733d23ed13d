"""Ops on ``reference:sm_90a`` and ``reference:sm_100a``; numerics are tested in reference/."""

import pytest
import torch

import grouped
from cute_kernels import UnsupportedError, active_backend, backend
from tests.helpers import (
    F32,
    assert_all_same,
    assert_same_bytes,
    offs_from_splits,
    ops,
    poisoned,
    sample,
)
from tests.reference.oracle import RCP_2688
from tests.reference.test_gemm_fp8 import FP8_KINDS, Product, scaled

every_core = pytest.mark.parametrize("core", ("sm_90a", "sm_100a"))


@every_core
def test_fp32_operands_raise(core):
    """Check that references of tensor cores refuse fp32 operands."""
    a, b = torch.ones(4, 16), torch.ones(1, 8, 16)
    out = poisoned(torch.empty(4, 8))
    before = out.clone()
    with backend(f"reference:{core}"):
        for name, operands in (
            ("m_grouped_gemm", (a, b, offs_from_splits((4,)), None, None, False, F32)),
            ("k_grouped_gemm", (a, a, offs_from_splits((4,)), None, F32)),
        ):
            with pytest.raises(
                UnsupportedError, match=f"on reference:{core}: a tensor core truncates"
            ):
                getattr(ops, name)(*operands)
        with pytest.raises(UnsupportedError, match="truncates float32"):
            ops.m_grouped_gemm_out(a, b, offs_from_splits((4,)), out=out)
    assert_same_bytes(out, before)


@every_core
def test_the_backend_names_its_tensor_core(core):
    """Check that the backend names its tensor core, and that other ops do not depend on it."""
    device = torch.device("cpu")
    assert active_backend(device).tensor_core is None
    with backend(f"reference:{core}"):
        chosen = active_backend(device)
        assert (chosen.arch, chosen.tensor_core) == ("reference", core)
        # All ops but GEMMs equal those of the plain reference.
        x = sample(20, 32)
        got = ops.grouped_quantize(x, "nvfp4", offs_from_splits((20,)), columnwise=True)
    assert_all_same(got, ops.grouped_quantize(x, "nvfp4", offs_from_splits((20,)), columnwise=True))


@every_core
def test_quantizing_on_the_fly_takes_the_accumulation(core):
    for transpose_b in (False, True):
        case = Product(FP8_KINDS["fp8"], (3, 0, 5), 32, 288, transpose_b=transpose_b)
        for accumulation in (None, "fast", "split"):
            with backend(f"reference:{core}"):
                want = ops.m_grouped_gemm(*case.arguments(), accumulation=accumulation)
                got = ops.m_grouped_quantize_gemm(
                    case.x,
                    case.b[0],
                    case.offs,
                    case.b[1:],
                    *case.pair,
                    None,
                    None,
                    transpose_b,
                    F32,
                    accumulation=accumulation,
                )
            assert_same_bytes(got, want)


@every_core
def test_grouped_gemm_takes_the_accumulation(core):
    """Check the default and the explicit accumulation of each product."""
    fmt = grouped.FP8()
    x = grouped.quantize(torch.randn(40, 256), fmt, offs=[10, 40], columnwise=True)
    w = grouped.quantize(torch.randn(2, 48, 256), fmt, columnwise=True)
    dy = grouped.quantize(torch.randn(40, 48), fmt, offs=[10, 40], columnwise=True)
    products = ((x, w, {}), (dy, w, {"transpose_b": True}), (dy, x, {}))
    defaults = ("fast", "split", "split")
    with backend(f"reference:{core}"):
        for (a, b, gemm_options), default in zip(products, defaults, strict=True):
            results = {}
            for accumulation in (None, "fast", "split"):
                options = {"out_dtype": F32, "accumulation": accumulation, **gemm_options}
                results[accumulation] = grouped.grouped_gemm(a, b, **options)
                out = torch.empty_like(results[accumulation])
                options = {"accumulation": accumulation, **gemm_options}
                grouped.grouped_gemm(a, b, out=out, **options)
                assert_same_bytes(out, results[accumulation])
            assert_same_bytes(results[None], results[default])


@pytest.mark.parametrize("transpose_b", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize(
    "text", ["fp8:dtype=e5m2", "fp8_block", "fp8_block:block=128x128,pow2_scales=false", "mxfp8"]
)
def test_w4a8_is_exact_without_a_tensor_core(text, transpose_b):
    """Check that W4A8 products are exact without a tensor core."""
    case = Product((text, "nvfp4"), (3, 0, 5), 32, 288, transpose_b=transpose_b)
    exact = case.run()
    for _, rows, a, b in case.members():
        levels = [torch.tensor(x.level) for x in (a, b) if x.level is not None]
        levels[-1] *= torch.tensor(RCP_2688)
        factor = levels[0] * levels[1] if len(levels) > 1 else levels[0]
        acc = torch.from_numpy(a.values() @ b.values().T).float()
        assert_same_bytes(exact[rows], scaled(acc, factor))
    with (
        backend("reference:sm_90a"),
        pytest.raises(UnsupportedError, match="no sm_90a kernel of grouped_gemm_w4a8"),
    ):
        case.run()
