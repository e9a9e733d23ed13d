"""A model of the time that a launch takes on sm_100a, from the sizes that the host knows.

Group sizes are on the device, so all groups are assumed to have the mean size. A tile costs the
larger of its MMA time and its load time, and CTAs work in waves. The two rates below come from
NVIDIA's figures for a B200 (dense FP4 peak, and half of it for each doubling of the element), not
from measurements. They decide ties between tiles, never correctness.
"""

import math

from cute_kernels.layout.shapes import ceil_div

from ..common.problem import GemmProblem
from .config import Sm100GemmConfig

#: Multiply-adds of FP4 that one SM does in a cycle: 9 PFLOP/s over 148 SMs at 1.85 GHz.
_FP4_MACS_PER_CYCLE = 16384
#: Bytes that one SM loads from L2 in a cycle.
_LOAD_BYTES_PER_CYCLE = 64
#: Elements that one SM decodes in a cycle: 128 threads' instructions, three per element.
_DECODED_PER_CYCLE = 43
#: Cycles before the first MMA of a tile's pipeline and after the last: TMA latency and epilogue.
_FILL_CYCLES = 2000


def estimated_cycles(
    config: Sm100GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> float:
    """Return the estimated time of a launch in cycles.

    ``bandwidth`` is not used: tiles are loaded from L2 here.
    """
    tile, kind = config.tile, config.mma_kind
    tile_m, tile_n, tile_k = config.mma_tiler_mnk
    live = min(problem.groups, problem.rows)
    mean = ceil_div(problem.rows, live)
    if config.grouping == "m_grouped":
        # A group of more than a tile ends half-way through one on average.
        row_tiles = 1.0 if mean <= tile.rows else mean / tile.rows + 0.5
        depth = problem.k
        if tile.may_swap:
            tile_n = min(tile_n, config.instruction_n(math.ceil(mean / row_tiles)))
    else:
        row_tiles, depth = float(ceil_div(problem.m, tile.m)), mean
    clusters = num_sms // tile.num_ctas
    tiles = live * row_tiles * ceil_div(problem.n, tile.cols)
    # Whole waves while there are few of them; many even out.
    waves = max(1.0, tiles / clusters) if tiles > 4 * clusters else -(-tiles // clusters)
    macs = tile_m // tile.num_ctas * tile_n * tile_k
    loaded = config.loaded_bytes + config.codes_stage_bytes // 2
    decoded = sum(codes.rows for codes in config.codes) * tile_k
    stage = max(
        macs * kind.bits / 4 / _FP4_MACS_PER_CYCLE,
        loaded / _LOAD_BYTES_PER_CYCLE,
        decoded / _DECODED_PER_CYCLE,
    )
    return waves * ceil_div(depth, tile_k) * stage + _FILL_CYCLES
