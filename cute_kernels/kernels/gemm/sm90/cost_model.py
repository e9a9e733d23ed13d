"""A model of the time that a launch takes on sm_90a.

As for sm_100a it is a small model, here of an H200 with the memory bandwidth of the GPU. Group
sizes are on the device, so all groups are assumed to have the mean size. A stage of a tile costs
the larger of the time to decode and multiply, and the time to load.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from cute_kernels.layout.shapes import ceil_div

from ..common.problem import GemmProblem
from .config import Sm90GemmConfig

#: Bits of operand M times rows of operand N that one SM multiplies in a cycle.
_BITS_PER_CYCLE = 2048 * 16
#: Elements that one SM decodes in a cycle, as if it decoded before the products and not during
#: them: with instructions of up to 64 columns, and with wider ones, which hide half of it (H200).
_DECODED_PER_CYCLE = (40, 76)
_NARROW_N = 64
#: Partial sums that one SM promotes in a cycle, as if it promoted after the products and not during
#: those of another warpgroup: without scales, with scales of rows of operand M, and with scales of
#: columns. The last are read from shared memory, which is busy with operands (H200).
_PROMOTED_PER_CYCLE = (500, 160, 45)
#: Bytes that one SM loads in a cycle: from L2, and its share of memory. Data that the CTAs of a
#: cluster share is read from L2 once: 5% of the time of bf16 tiles of 128 x 256.
_LOAD_BYTES_PER_CYCLE = 46
_HBM_BYTES_PER_CYCLE = 19
#: Peak bytes per second of an H200's memory for each of its SMs, by its clock and bus.
_PEAK_PER_SM = 2 * 3.201e9 * 6144 / 8 / 132
#: Fraction of the time of all steps that is not hidden behind the slowest.
_LOST_OVERLAP = 0.1
#: Cycles before the first MMA of a tile's pipeline and after the last: TMA latency and epilogue.
_FILL_CYCLES = 3000
#: The same for promoted sums if TMA stores whole tiles.
_FILL_CYCLES_WHOLE = 2500
#: Extra cost of a tile that is not row-fitted and does not hold twice the mean rows. With group
#: sizes by Zipf's law and 16 rows on average 256 x 16 takes 1.6 times the time of equal groups
#: (H200).
_UNEVEN_GROUPS = 1.07
#: Factor of the products' time in balanced tiles, with 256 to 2048 rows per group (H200).
_BALANCED = 1.1
#: The same for FP8 if a group has more rows than two tiles: equal groups of 384 to 512 rows take 3
#: to 11% longer than in 128 x 256, groups of random sizes 7% longer to 5% less (H200).
_BALANCED_FP8 = 1.35
#: Number of random group sizes that are averaged.
_QUANTILES = 16
#: Rows of a group above which there is more than one tile, unless all groups have one size.
_LARGE_GROUP = 128
#: Time of FP8 tiles with dynamic scheduling relative to 128 x 256 tiles without it: for groups of
#: up to one tile on average, and for larger groups. Larger groups take 3 to 8% longer (H200).
_DYNAMIC = (0.95, 1.1)


def _balanced_tiles(mean: int, widths: tuple[int, ...], is_single: bool) -> tuple[float, float]:
    """Return the row tiles of a group, and the columns of a tile, on average.

    Args:
        mean: Mean rows of a group, whose sizes are random unless there is a single group.
        widths: Columns of the instructions.
        is_single: True if there is a single group.
    """
    distribution = statistics.NormalDist(mean, math.sqrt(mean))
    sizes = (
        [mean]
        if is_single
        else [
            max(1, round(distribution.inv_cdf((i + 0.5) / _QUANTILES))) for i in range(_QUANTILES)
        ]
    )
    counts = [ceil_div(size, widths[-1]) for size in sizes]
    columns = [
        next(w for w in widths if size <= w * n) * n for size, n in zip(sizes, counts, strict=True)
    ]
    return sum(counts) / len(sizes), sum(columns) / sum(counts)


def _bytes_from_memory(bandwidth: float | None, num_sms: int) -> int:
    """Return the bytes that an SM loads from memory in a cycle.

    They are rounded to whole bytes, so that every H200 has one choice of tiles.
    """
    return (
        _HBM_BYTES_PER_CYCLE
        if bandwidth is None
        else round(_HBM_BYTES_PER_CYCLE * bandwidth / num_sms / _PEAK_PER_SM)
    )


class _Work(NamedTuple):
    """The work of a product in tiles, with groups of the mean size.

    Attributes:
        mean: Mean rows of a group.
        row_tiles: Number of tiles along the rows of a group.
        columns: Columns of the instructions of a tile.
        depth: K of a tile.
        tiles: Number of tiles of all groups.
    """

    mean: int
    row_tiles: float
    columns: float
    depth: int
    tiles: float


def estimated_cycles(
    config: Sm90GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> float:
    """Return the estimated time of a launch in cycles; ``bandwidth`` as in ``choose_config``."""
    work = _work(config, problem)
    clusters = num_sms // config.tile.num_ctas
    # Whole waves while there are few of them; many even out.
    waves = (
        max(1.0, work.tiles / clusters) if work.tiles > 4 * clusters else -(-work.tiles // clusters)
    )
    multiply, load = _multiply_cycles(config, work), _load_cycles(config)
    memory = _memory_cycles(config, work, num_sms, bandwidth)
    # Overlap is not perfect. If memory bounds all tiles, the one with the least work is best.
    stage = max(multiply, load, memory) + _LOST_OVERLAP * (multiply + load)
    fill = _FILL_CYCLES_WHOLE if config.promotes and config.stores_whole_tiles else _FILL_CYCLES
    cycles = waves * (ceil_div(work.depth, config.stage_k) * stage + fill)
    return _with_uneven_groups(config, work.mean, cycles)


def _work(config: Sm90GemmConfig, problem: GemmProblem) -> _Work:
    """Return how many tiles there are and how large they are."""
    tile = config.tile
    live = min(problem.groups, problem.rows)
    mean = ceil_div(problem.rows, live)
    width = float(
        next((w for w in config.widths if mean <= w), tile.n) if tile.row_fitted else tile.n
    )
    if config.grouping == "m_grouped":
        # A group of more than a tile ends half-way through one on average. So do large ones that
        # have the rows of one tile on average: some have more, others less.
        row_tiles = (
            1.0 if mean <= min(tile.rows, _LARGE_GROUP) else max(1.0, mean / tile.rows + 0.5)
        )
        depth = problem.k
        if config.balances_row_tiles:
            row_tiles, width = _balanced_tiles(mean, config.widths, live == 1)
    else:
        row_tiles, depth = float(ceil_div(problem.m, tile.rows)), mean
    tiles = live * row_tiles * ceil_div(problem.n, tile.cols)
    return _Work(mean, row_tiles, width, depth, tiles)


def _multiply_cycles(config: Sm90GemmConfig, work: _Work) -> float:
    """Return the cycles in which a CTA decodes, multiplies and promotes one stage."""
    tile, width = config.tile, work.columns
    cycles = tile.m * width * config.stage_k * config.multiplied_bits / _BITS_PER_CYCLE
    if config.balances_row_tiles:
        is_large = config.kind.has_short_sums and work.mean > 2 * tile.n
        cycles *= _BALANCED_FP8 if is_large else _BALANCED
    if config.is_decoded:
        cycles += tile.m * config.stage_k / _DECODED_PER_CYCLE[width > _NARROW_N]
    if config.promotes:
        has_scales, has_columns = config.kind.has_row_scales, config.row_scales[1] > 0
        cycles += tile.m * tile.n / _PROMOTED_PER_CYCLE[has_scales + has_columns]
    return cycles


def _stage_bytes(config: Sm90GemmConfig) -> tuple[int, float]:
    """Return the bytes of a stage that a CTA loads alone, and its share of what a cluster loads."""
    return sum(config.m_stage_bytes), sum(config.n_stage_bytes) / config.tile.num_ctas


def _load_cycles(config: Sm90GemmConfig) -> float:
    """Return the cycles in which a CTA loads one stage from L2."""
    private, shared = _stage_bytes(config)
    return (private + shared) / _LOAD_BYTES_PER_CYCLE


def _memory_cycles(
    config: Sm90GemmConfig, work: _Work, num_sms: int, bandwidth: float | None
) -> float:
    """Return the cycles in which memory gives the weights of one stage."""
    private, shared = _stage_bytes(config)
    is_weight_n = config.grouping == "m_grouped" and not config.tile.swap_ab
    cycles = (
        (shared if is_weight_n else private)
        / work.row_tiles
        / _bytes_from_memory(bandwidth, num_sms)
    )
    if is_weight_n and work.mean <= config.tile.m:
        # CTAs of a cluster that have no rows load their share late: FP8Block, 128 rows, 428 us
        # instead of 375 (H100).
        cycles *= config.tile.num_ctas
    return cycles


def _with_uneven_groups(config: Sm90GemmConfig, mean: int, cycles: float) -> float:
    """Return ``cycles``, corrected for groups of different sizes."""
    tile = config.tile
    holds_more = tile.row_fitted or tile.rows >= 2 * mean
    if config.grouping == "m_grouped" and not holds_more:
        # Groups rarely have one size. Their sizes are not known here, but the possible cost is.
        cycles *= _UNEVEN_GROUPS
    is_even = config.promotes or config.balances_row_tiles
    if config.uses_dynamic_scheduling and not is_even and 2 * mean >= tile.rows:
        cycles *= _DYNAMIC[mean > tile.rows]
    return cycles
