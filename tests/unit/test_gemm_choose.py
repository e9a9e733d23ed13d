"""Legality and preference of GEMM tiles: rules with reasons, and preferences among legal tiles."""

from dataclasses import replace

import pytest

from cute_kernels.kernels.gemm.choose import choose_config, preferred_tiles, prefers
from cute_kernels.kernels.gemm.common.problem import GemmProblem
from cute_kernels.kernels.gemm.common.rules import Rule, check_rules
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES, Sm90GemmConfig, Sm90Tile
from cute_kernels.kernels.gemm.sm100.config import SM100_TILES, Sm100GemmConfig, Sm100Tile

SWAPPED = Sm90Tile(128, 128, swap_ab=True)
CONFIGS = [
    Sm90GemmConfig("nvfp4", tile=SWAPPED),
    Sm90GemmConfig("bfloat16", tile=SWAPPED, activation="swiglu"),
    Sm90GemmConfig("fp8", tile=SWAPPED, activation="swiglu"),
    Sm90GemmConfig("bfloat16", tile=SWAPPED, gathered=True),
    Sm90GemmConfig("fp8", "k_grouped"),
    Sm100GemmConfig("nvfp4"),
    Sm100GemmConfig("fp8_block"),
    Sm100GemmConfig("bfloat16", "k_grouped"),
]


def test_a_reason_names_the_rule_the_argument_and_its_value():
    rule = Rule(False, "N", 12, "N must be a positive multiple of 8")
    assert check_rules([rule]).reason == "N must be a positive multiple of 8, got N=12"


def test_rules_after_the_first_broken_one_are_not_evaluated():
    def rules():
        yield Rule(True, "a", 1, "a must be 1")
        yield Rule(False, "b", 2, "b must be 1")
        raise AssertionError("evaluated")

    assert check_rules(rules()).reason == "b must be 1, got b=2"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_preferred_tiles_are_legal(config):
    preferred = preferred_tiles(config)
    assert preferred
    assert not any(config.why_unsupported(tile) for tile in preferred)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tiles_that_are_not_preferred_have_a_reason(config):
    for tile in set(config.tile_shapes) - set(preferred_tiles(config)):
        support = prefers(config, tile)
        assert not support
        assert ", got " in support.reason


@pytest.mark.parametrize(
    ("config", "tile", "sizes"),
    [
        (
            Sm90GemmConfig("nvfp4", tile=SWAPPED),
            Sm90Tile(128, 256, num_ctas=2, swap_ab=True),
            {"groups": 8, "rows": 4096, "n": 4096, "k": 2048},
        ),
        (
            Sm100GemmConfig("nvfp4"),
            Sm100Tile(128, 128),
            {"groups": 8, "rows": 4096, "n": 4096, "k": 2048},
        ),
    ],
    ids=["sm_90a", "sm_100a"],
)
def test_a_legal_tile_that_is_not_preferred_can_be_forced_but_is_never_chosen(config, tile, sizes):
    """Check that a legal tile that is not preferred can be forced, but is not chosen."""
    assert not config.why_unsupported(tile)
    assert not prefers(config, tile)
    problem = GemmProblem("nvfp4", "m_grouped", "bfloat16", **sizes)
    assert choose_config(config, problem, 132, tile) == replace(config, tile=tile)
    assert choose_config(config, problem, 132).tile != tile


def test_every_tile_is_preferred_by_some_product():
    sm90 = [
        *CONFIGS[:5],
        Sm90GemmConfig("bfloat16", tile=SWAPPED),
        Sm90GemmConfig("fp8", tile=SWAPPED),
        Sm90GemmConfig("bfloat16", "k_grouped", gathered=True),
    ]
    for tiles, configs in ((SM90_TILES, sm90), (SM100_TILES, CONFIGS[5:])):
        assert set(tiles) == {tile for config in configs for tile in preferred_tiles(config)}
