"""Empty groups are nearly free: emulated instructions on one SM with 64 and with 2048 groups."""

import contextlib

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels import backend
from cute_kernels.kernels.gemm.sm90.config import Sm90Tile
from cute_kernels.kernels.gemm.sm100.config import Sm100Tile
from cute_kernels.ops.gemm.launcher import force_tile
from tests.helpers import BF16, dequantize_arguments, each_arch, m_grouped_arguments, ops, sample

SIZES = (40, 1, 128, 30, 7, 200, 64, 10)
ROWS, K, N = sum(SIZES), 512, 64
#: Fixed tiles, so that they do not depend on the number of groups.
TILES = {
    "sm_90a": Sm90Tile(256, 32, swap_ab=True, consumers=4),
    "sm_100a": Sm100Tile(128, 32, swap_ab=True),
}
#: Tiles of FP8 GEMMs.
FP8_TILES = TILES | {"sm_90a": Sm90Tile(128, 128, swap_ab=True)}


def spread_over_groups(groups):
    sizes = torch.zeros(groups, dtype=torch.int64)
    sizes[:: groups // len(SIZES)] = torch.tensor(SIZES)
    return sizes.cumsum(0).int()


def quantize_by_reference(x, offs, columnwise=False, text="nvfp4"):
    with backend("reference"):
        return ops.grouped_quantize(x, text, offs, None, not columnwise, columnwise)


def weights(groups):
    return sample(1, N, K).repeat(groups, 1, 1)


def repeated_weights(groups, text="nvfp4"):
    return [
        t.repeat(groups, *[1] * (t.dim() - 1))
        for t in quantize_by_reference(sample(1, N, K), None, text=text)
    ]


def fp8_product(x, offs):
    a, b = quantize_by_reference(x, offs, text="fp8"), repeated_weights(len(offs), "fp8")
    return m_grouped_arguments(a[:2], b[:2], offs, a_format="fp8", b_format="fp8")


#: Op, its arguments for (x, offs), and the largest ratio of costs of 2048 and 64 groups.
READERS = {
    "amax": ("grouped_amax", lambda x, offs: (x, offs), 1.4),
    "rows": ("grouped_quantize", lambda x, offs: (x, "nvfp4:row_scaled", offs), 1.05),
    "tiles": (
        "grouped_quantize",
        lambda x, offs: (x, "nvfp4", offs, torch.ones(len(offs)), True, True),
        1.55,
    ),
    "dequantize": (
        "grouped_dequantize",
        lambda x, offs: dequantize_arguments(
            quantize_by_reference(x, offs), "nvfp4", ROWS, BF16, offs
        ),
        1.2,
    ),
    "dequantize columns": (
        "grouped_dequantize",
        lambda x, offs: dequantize_arguments(
            quantize_by_reference(x, offs, True), "nvfp4", ROWS, BF16, offs, True
        ),
        1.2,
    ),
    "nvfp4 gemm": (
        "m_grouped_gemm",
        lambda x, offs: m_grouped_arguments(
            quantize_by_reference(x, offs), repeated_weights(len(offs)), offs
        ),
        1.2,
    ),
    "fp8 gemm": ("m_grouped_gemm", fp8_product, 1.25),
    "bf16 gemm": ("m_grouped_gemm", lambda x, offs: (x, weights(len(offs)), offs), 1.15),
    "w4a16 gemm": (
        "m_grouped_gemm",
        lambda x, offs: m_grouped_arguments(x, repeated_weights(len(offs)), offs),
        1.05,
    ),
}


def count_instructions(tile, arch, op, arguments):
    forced = op.startswith("m_grouped")
    with (
        backend(f"emulated:{arch}", num_sms=1),
        force_tile(tile) if forced else contextlib.nullcontext(),
    ):
        emulator.reset_stats()
        getattr(ops, op)(*arguments)
        return emulator.stats()["warp_insns"]


@each_arch
@pytest.mark.parametrize("name", [*READERS])
def test_empty_groups_cost_little(name, arch):
    """Check that thousands of empty groups cost few instructions."""
    op, make, most = READERS[name]
    x = sample(ROWS, K)
    tile = (FP8_TILES if make is fp8_product else TILES)[arch]
    few, many = (
        count_instructions(tile, arch, op, make(x, spread_over_groups(groups)))
        for groups in (64, 2048)
    )
    assert few < many <= most * few
