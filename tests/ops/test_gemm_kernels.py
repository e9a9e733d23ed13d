"""GEMM ops on emulated kernels: the bits of the reference with the same tensor core."""

import pytest
import torch

from cute_kernels import UnsupportedError, backend
from cute_kernels.formats import parse
from cute_kernels.kernels.gemm.sm100.config import SM100_TILES
from cute_kernels.ops import op as op_module
from cute_kernels.ops.gemm.launcher import force_tile
from cute_kernels.runtime.launch import launcher
from cute_kernels.runtime.plan_cache import clear_plan_cache
from tests.helpers import (
    BF16,
    NVFP4_TEXTS,
    assert_all_same,
    assert_same_bytes,
    m_grouped_arguments,
    offs_from_splits,
    offs_tensor,
    ops,
    sample,
)

SPLITS, TAIL = (5, 0, 70), 60


def quantized_operands(text, weights="nvfp4"):
    offs = offs_from_splits(SPLITS)
    x, w = (
        ops.grouped_quantize(x, fmt, o)[: len(parse(fmt).operand_names(columnwise=False))]
        for x, fmt, o in (
            (sample(sum(SPLITS) + TAIL, 64), text, offs),
            (sample(len(SPLITS), 40, 64), weights, None),
        )
    )
    return m_grouped_arguments(x, w, offs, a_format=text, b_format=weights)


def plain_operands():
    x, w = sample(sum(SPLITS) + TAIL, 64), sample(len(SPLITS), 40, 64)
    return x.bfloat16(), w.bfloat16(), offs_from_splits(SPLITS)


PRODUCTS = {
    "nvfp4": lambda: quantized_operands("nvfp4"),
    "row-scaled": lambda: quantized_operands(NVFP4_TEXTS["row-scaled"]),
    "two bounds": lambda: quantized_operands("nvfp4:row_scaled,four_over_six"),
    "bf16": plain_operands,
    "mxfp8": lambda: quantized_operands("mxfp8", "mxfp8:dtype=e5m2"),
    "fp8": lambda: quantized_operands("fp8:dtype=e5m2", "fp8"),
}


@pytest.mark.emulated
@pytest.mark.parametrize("case", [*PRODUCTS])
def test_the_tail_of_a_new_output_is_zero(garbage, case):
    """Check that a new output has zeros in its tail."""
    arguments = PRODUCTS[case]()
    with backend("reference:sm_100a"):
        want = ops.m_grouped_gemm(*arguments)
    assert (want[sum(SPLITS) :] == 0).all() and want.isfinite().all()
    with backend("emulated:sm_100a"):
        got = ops.m_grouped_gemm(*arguments)
    assert_same_bytes(got, want)


@pytest.mark.emulated
@pytest.mark.parametrize("transpose_b", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("arch", "text"),
    [
        *(("sm_90a", text) for text in ("fp8", "fp8_block:block=128x128", "mxfp8")),
        *(("sm_100a", text) for text in ("nvfp4", "fp8_block:block=128x128", "mxfp8")),
    ],
)
def test_plain_activations_times_codes(garbage, arch, text, transpose_b):
    """Compare plain activations times quantized weights with the reference."""
    shape = (len(SPLITS), 64, 96) if transpose_b else (len(SPLITS), 96, 64)
    directions = {"rowwise": not transpose_b, "columnwise": transpose_b}
    b = ops.grouped_quantize(sample(*shape), text, **directions)[
        : len(parse(text).operand_names(transpose_b))
    ]
    x, bias = sample(sum(SPLITS) + TAIL, 64).bfloat16(), sample(len(SPLITS), 96).bfloat16()
    alpha = torch.tensor([0.3, 7.0, -1.1])
    arguments = m_grouped_arguments(
        x, b, offs_from_splits(SPLITS), bias, alpha, transpose_b, b_format=text
    )
    results = []
    for name in (f"reference:{arch}", f"emulated:{arch}"):
        with backend(name):
            results.append([ops.m_grouped_gemm(*arguments)])
            out = results[-1][0].clone()
            ops.m_grouped_gemm_out(*arguments, out=out, accumulate=True)
            results[-1].append(out)
    assert_all_same(*results)


def test_no_rows():
    """Check products without rows."""
    x, w = torch.ones(0, 64, dtype=BF16), torch.ones(3, 40, 64, dtype=BF16)
    offs = offs_tensor(0, 0, 0)
    with backend("emulated:sm_100a"):
        assert ops.m_grouped_gemm(x, w, offs).shape == (0, 40)
        dw = ops.k_grouped_gemm(torch.ones(0, 40, dtype=BF16), x, offs)
    assert dw.shape == (3, 40, 64) and (dw == 0).all()


def test_unsupported_operands_give_a_reason():
    x, w = torch.ones(4, 12), torch.ones(1, 8, 12)
    with backend("emulated:sm_100a"):
        with pytest.raises(UnsupportedError, match="float32"):
            ops.m_grouped_gemm(x, w, offs_from_splits((4,)))
        with pytest.raises(UnsupportedError, match="K must be a positive multiple"):
            ops.m_grouped_gemm(x.bfloat16(), w.bfloat16(), offs_from_splits((4,)))


@pytest.mark.emulated
def test_a_forced_tile_is_used_and_gives_the_same_bits(monkeypatch):
    """Check that a forced tile runs and gives the same bits."""
    used = []

    def recording_launcher(chosen, device):
        """Return the launcher, which records the tile of each kernel."""
        launch = launcher(chosen, device)
        kernel = launch.kernel
        monkeypatch.setattr(launch, "kernel", lambda spec: used.append(spec.tile) or kernel(spec))
        return launch

    launcher.cache_clear()
    monkeypatch.setattr(op_module, "launcher", recording_launcher)
    arguments, run = PRODUCTS["row-scaled"](), ops.m_grouped_gemm
    with backend("emulated:sm_100a"):
        clear_plan_cache()
        unforced = run(*arguments)
        chosen = set(used)
        tile = next(t for t in SM100_TILES if t not in chosen and t.num_ctas == 1)
        with force_tile(tile):
            forced = run(*arguments)
        assert used[-1] == tile
        run(*arguments)
        assert used[-1] in chosen
    launcher.cache_clear()
    assert_same_bytes(unforced, forced)


def test_an_unsupported_forced_tile_is_refused():
    swapped = next(tile for tile in SM100_TILES if tile.swap_ab)
    x = sample(sum(SPLITS), 32).bfloat16()
    with (
        backend("emulated:sm_100a"),
        force_tile(swapped),
        pytest.raises(UnsupportedError, match="swap_ab"),
    ):
        ops.k_grouped_gemm(x, x, offs_from_splits(SPLITS))
