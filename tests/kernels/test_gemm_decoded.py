"""GEMMs of plain A and codes of B, which warps of sm_100a decode, bit for bit."""

from dataclasses import replace

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.kernels.gemm.sm100.config import Sm100GemmConfig, Sm100Tile
from tests.helpers import DTYPES, U8, seeded_generator

from .gemm_support import SHAPES, check_modes, m_grouped, quantize
from .op_support import each_mode

BF16, FP16 = (Sm100GemmConfig(dtype, b_operand="nvfp4") for dtype in ("bfloat16", "float16"))
PAIR, NARROW_PAIR = Sm100Tile(256, 256, 2), Sm100Tile(256, 128, 2)
SWAPPED, FEW_ROWS = Sm100Tile(128, 64, swap_ab=True), Sm100Tile(128, 32, swap_ab=True)
#: Options and tiles, varied over the formats of B.
CONFIGS = {
    "nvfp4": replace(FP16, out_dtype="float32", bias_dtype="bfloat16"),
    "nvfp4 256x256": replace(BF16, tile=PAIR),
    "nvfp4 256x128": replace(
        BF16, tile=NARROW_PAIR, bias_dtype="float32", has_alpha=True, accumulate=True
    ),
    "nvfp4 partial": replace(BF16, tile=Sm100Tile(256, 256, 2, swap_partial=True)),
    "nvfp4 few rows": replace(BF16, tile=FEW_ROWS),
    "fp8": replace(FP16, b_operand="fp8", tile=Sm100Tile(128, 64)),
    "fp8 e5m2": replace(BF16, b_operand="fp8:dtype=e5m2", tile=SWAPPED, has_alpha=True),
    "fp8_block rows": replace(BF16, b_operand="fp8_block", tile=NARROW_PAIR),
    "fp8_block squares": replace(
        FP16, b_operand="fp8_block:block=128x128", out_dtype="float16", tile=PAIR
    ),
    "fp8_block squares few rows": replace(
        BF16, b_operand="fp8_block:block=128x128", tile=FEW_ROWS, out_dtype="float32"
    ),
    "mxfp8": replace(
        BF16, b_operand="mxfp8", out_dtype="float32", tile=Sm100Tile(128, 128, swap_partial=True)
    ),
    "fp8 x nvfp4": Sm100GemmConfig("fp8", b_operand="nvfp4", tile=PAIR),
    "fp8_block x nvfp4": Sm100GemmConfig(
        "fp8_block:dtype=e5m2",
        b_operand="nvfp4",
        tile=FEW_ROWS,
        out_dtype="float32",
        has_alpha=True,
    ),
    "squares x nvfp4": Sm100GemmConfig(
        "fp8_block:block=128x128", b_operand="nvfp4", bias_dtype="bfloat16", accumulate=True
    ),
    "mxfp8 x nvfp4": Sm100GemmConfig(
        "mxfp8", b_operand="nvfp4", tile=Sm100Tile(128, 128, swap_partial=True)
    ),
    "mxfp8 e5m2": replace(FP16, b_operand="mxfp8:dtype=e5m2", tile=NARROW_PAIR),
}
each_config = pytest.mark.parametrize("name", [*CONFIGS])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 256x128", "nvfp4 few rows", "nvfp4 partial"])
def test_all_shapes(name, shape):
    m_grouped(CONFIGS[name], *shape).check()


@each_config
def test_every_format_and_tile(name):
    # One cluster, so that every pipeline wraps around.
    config = CONFIGS[name]
    m_grouped(config, [3, 0, 130], 392, 1056, 5).check(config.tile.num_ctas)


@pytest.mark.parametrize("name", [n for n in CONFIGS if "mxfp8" not in n])
def test_dgrad_with_a_columnwise_copy(name):
    m_grouped(CONFIGS[name], [5, 130], 136, 144, 3, columnwise_b=True).check()


@each_config
def test_every_code_and_scale(name):
    """Rows of A select elements of B one by one, so that sums hide nothing, not even NaN."""
    config = replace(CONFIGS[name], bias_dtype=None, accumulate=False)
    config = replace(config, has_alpha=False, out_dtype="float32")
    product = m_grouped(config, [128], 264, 128)
    assert config.b_kind.fmt is not None
    generator = seeded_generator(3)
    if product.a.fmt is None:
        product.a.codes = torch.eye(128).to(DTYPES[config.operand])
    else:
        product.a = quantize(torch.eye(128), product.offs, product.a.fmt)
    b = product.b
    if b.amax is not None:
        b.amax.fill_(1 / config.b_kind.global_scale_factor)
    for tensor in (b.codes, b.scales):
        if tensor is not None:
            stored = tensor.view(U8)
            stored.copy_(torch.randint(0, 256, stored.shape, generator=generator))
    if config.b_kind.has_row_scales:
        # Scales of all sizes, so that values overflow and underflow the dtypes.
        exponents = torch.randint(-149, 128, b.scales.shape, generator=generator).double()
        b.scales.copy_((torch.rand(b.scales.shape, generator=generator) + 1) * 2.0**exponents)
    product.check(config.tile.num_ctas, any_nan=True)


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    names = ("nvfp4 256x256", "nvfp4 partial", "nvfp4 few rows", "mxfp8", "fp8 x nvfp4")
    products = [m_grouped(CONFIGS[name], [3, 0, 70], 392, 560, 1) for name in names]
    check_modes(mode, [(product, product.config.tile.num_ctas) for product in products])


@pytest.mark.parametrize("name", ["nvfp4 256x256", "nvfp4 few rows", "fp8_block squares", "mxfp8"])
def test_shared_memory_has_few_bank_conflicts(name):
    """Codes and values have none; scale words of 32 rows are read at once and lie on 8 banks."""
    config = CONFIGS[name]
    counts = []
    for k in (512, 1024):
        emulator.reset_stats()
        m_grouped(config, [16], 256, k).run(config.tile.num_ctas)
        stats = emulator.stats()
        counts.append((stats["smem_wavefronts"], stats["smem_accesses"]))
    wavefronts, accesses = (after - before for before, after in zip(*counts, strict=True))
    assert wavefronts <= 1.1 * accesses
