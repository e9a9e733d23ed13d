"""m_grouped GEMMs that several kernels share, each with a tile of its own (sm_90a)."""

import dataclasses

import pytest

import ptx_emulator as emulator
from cute_kernels.kernels.gemm.choose import choose_config, split_launches
from cute_kernels.kernels.gemm.common.problem import GemmProblem, RowRange
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES, Sm90GemmConfig, Sm90Tile
from cute_kernels.kernels.gemm.sm90.split_launches import all_split_launches
from tests.helpers import assert_same_bytes

from .gemm_support import m_grouped
from .op_support import each_mode

NUM_SMS = 132
KINDS = {
    "nvfp4": {"operand": "nvfp4", "row_scaled": True},
    "prepacked": {"operand": "nvfp4", "prepacked": True, "zero_tail": True, "has_alpha": True},
    "w4a16": {
        "operand": "nvfp4",
        "activations": "bfloat16",
        "out_dtype": "float32",
        "bias_dtype": "float32",
        "accumulate": True,
    },
}
#: Row counts of groups with all kinds of tiles: full ones, and remainders around each bound.
SKEWED = [300, 0, 1, 128, 64, 33, 129, 32, 97, 65, 17, 0, 0, 256]


def launches_of(kind, mean=64, **options):
    base = Sm90GemmConfig(tile=Sm90Tile(128, 128, swap_ab=True), **(KINDS[kind] | options))
    problem = GemmProblem(base.operand, "m_grouped", base.out_dtype, 128, 128 * mean, 5760, k=2880)
    return split_launches(choose_config(base, problem, NUM_SMS), problem, NUM_SMS)


def run(product, launches, num_sms, device):
    out = product.before.to(device, copy=True)
    for config in launches:
        dataclasses.replace(product, config=config).run_into(out, num_sms)
    return out.cpu()


@pytest.mark.parametrize("mean", [16, 64, 80, 128, 512])
@pytest.mark.parametrize("kind", [*KINDS])
def test_launches_handle_every_row_once(kind, mean):
    """Check that the launches that share a product cover every row once."""
    launches = launches_of(kind, mean)
    row_ranges = [row_range.handled_rows for row_range in launches]
    assert len({row_range.chunk_rows for row_range in row_ranges}) == 1
    ranges = sorted((row_range.min_rows, row_range.max_rows) for row_range in row_ranges)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == row_ranges[0].chunk_rows
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    for config, row_range in zip(launches, row_ranges, strict=True):
        assert config.tile.rows >= row_range.max_rows
        # Full chunks are exactly one tile.
        assert row_range.max_rows < row_range.chunk_rows or config.tile.rows == row_range.chunk_rows
    assert [row_range.is_later for row_range in row_ranges] == [
        i > 0 for i in range(len(row_ranges))
    ]
    # The launch that handles groups of mean size comes first.
    assert row_ranges[0].min_rows < min(mean, row_ranges[0].chunk_rows) <= row_ranges[0].max_rows
    assert set(launches) <= set(all_split_launches(launches[0]))


def test_small_products_and_single_groups_have_one_launch():
    for operand, grouping, groups, rows, n, depth in (
        ("nvfp4", "m_grouped", 128, 1024, 256, {"k": 2048}),
        ("nvfp4", "m_grouped", 1, 8192, 8192, {"k": 2048}),
        ("bfloat16", "m_grouped", 128, 8192, 5760, {"k": 2880}),
        ("nvfp4", "k_grouped", 8, 8192, 4096, {"m": 7168}),
    ):
        base = Sm90GemmConfig(
            operand, grouping, tile=Sm90Tile(128, 128, swap_ab=grouping == "m_grouped")
        )
        problem = GemmProblem(operand, grouping, "bfloat16", groups, rows, n, **depth)
        config = choose_config(base, problem, NUM_SMS)
        assert split_launches(config, problem, NUM_SMS) == (config,)


def test_a_tile_must_hold_its_row_range():
    narrow = next(tile for tile in SM90_TILES if tile.swap_ab and tile.n == 64)
    for row_range in (RowRange(128, 64, 128), RowRange(128, 32, 65), RowRange(32, 0, 32)):
        with pytest.raises(ValueError, match="cannot hold"):
            Sm90GemmConfig("nvfp4", tile=narrow, row_range=row_range)
    with pytest.raises(ValueError, match="only an m_grouped product"):
        Sm90GemmConfig(
            "nvfp4", "k_grouped", tile=Sm90Tile(128, 128), row_range=RowRange(128, 0, 128)
        )


@pytest.mark.parametrize("kind", [*KINDS])
def test_bits_equal_those_of_one_kernel(kind, device):
    """Compare a product of several launches with the bits of the reference."""
    launches = launches_of(kind)
    assert len(launches) > 1
    # The tail has NaN activations, and its output rows must stay unchanged.
    product = m_grouped(launches[0], SKEWED, 136, 288, tail=150)
    want = product.expected()
    if launches[0].zero_tail:
        want[sum(SKEWED) :] = 0.0
    assert_same_bytes(run(product, launches, 4, device), want)


@pytest.mark.parametrize(
    "sizes",
    [[0, 0, 700, 0], [0] * 40, [1] * 1030 + [70] + [0] * 9],
    ids=["all in one", "all empty", "many groups"],
)
def test_skewed_routings(sizes, device):
    launches = launches_of("nvfp4")
    product = m_grouped(launches[0], sizes, 24, 64, tail=3)
    assert_same_bytes(run(product, launches, 4, device), product.expected())


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    """Check that several launches give the same bits in every order of events."""
    launches = launches_of("nvfp4")
    product = m_grouped(launches[0], [140, 0, 9, 60, 1, 70], 136, 416, tail=2)
    want = product.expected()
    with emulator.options(**mode):
        assert_same_bytes(run(product, launches, 2, "cpu"), want)


def relative_flops(product, launches):
    """Return the FLOPs of the emulated tensor cores relative to the useful ones."""
    emulator.reset_stats()
    run(product, launches, 4, "cpu")
    useful = 2 * int(product.offs[-1]) * product.before.shape[1] * product.a.codes.shape[1] * 2
    return int(emulator.stats()["mma_flops"]) / useful


def test_tensor_cores_do_little_unneeded_work():
    """Check that split launches multiply little padding."""
    launches = launches_of("nvfp4")
    product = m_grouped(launches[0], [260, 3, 7, 66, 12, 0, 20, 90, 5, 33], 512, 128)
    assert relative_flops(product, launches) < 1.25
    # One kernel, as chosen for the mean, would have tiles of 64 or 128 rows for every group.
    for tile in (Sm90Tile(256, 64, swap_ab=True, consumers=4), Sm90Tile(128, 128, swap_ab=True)):
        assert (
            relative_flops(product, (dataclasses.replace(launches[0], row_range=None, tile=tile),))
            > 1.6
        )
