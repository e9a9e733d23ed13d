"""The choice of a tile, and of the kernels that share a product.

The choice starts from the tiles that the configuration can have (``GemmConfig.why_unsupported``)
and that the architecture prefers (``prefers`` in ``sm90.choose`` and ``sm100.choose``). Among the
tiles that can compute the problem (``can_implement``) it takes the one with the shortest time in
the architecture's ``cost_model``. The choice is deterministic: the same sizes give the same tile,
and every tile gives the same bits.
"""

import dataclasses
import functools
from typing import Any, TypeVar

from cute_kernels.capability import Support

from .common.config import GemmConfig
from .common.problem import GemmProblem, TileShape
from .sm90 import choose as sm90_choose
from .sm90 import cost_model as sm90_cost_model
from .sm90 import split_launches as sm90_split_launches
from .sm100 import choose as sm100_choose
from .sm100 import cost_model as sm100_cost_model

ConfigT = TypeVar("ConfigT", bound=GemmConfig)

#: The modules of an architecture that have ``prefers`` and ``prefers_activation``,
#: ``estimated_cycles``, and ``split_launches``; None if no product of it is shared.
_PREFERENCES: dict[str, Any] = {"sm_90a": sm90_choose, "sm_100a": sm100_choose}
_COST_MODELS: dict[str, Any] = {"sm_90a": sm90_cost_model, "sm_100a": sm100_cost_model}
_SPLIT_LAUNCHES: dict[str, Any] = {"sm_90a": sm90_split_launches, "sm_100a": None}


def prefers(config: GemmConfig, tile: TileShape) -> Support:
    """Return whether ``choose_config`` considers ``tile`` for ``config``, and if not, why."""
    support: Support = _PREFERENCES[config.arch].prefers(config, tile)
    return support


def prefers_activation(config: GemmConfig, num_rows: int, before_quantizer: bool) -> bool:
    """Return True if the epilogue of a product should apply the activation.

    Args:
        config: Configuration of the product with the activation, with any tile.
        num_rows: Rows of the product.
        before_quantizer: True if a quantizer follows that could apply the activation as well.
    """
    preferences = _PREFERENCES[config.arch]
    is_preferred: bool = preferences.prefers_activation(config, num_rows, before_quantizer)
    return is_preferred


@functools.lru_cache(maxsize=256)
def preferred_tiles(config: GemmConfig) -> tuple[TileShape, ...]:
    """Return the tiles that ``choose_config`` considers for ``config``.

    They keep the rules of fields and tiles. ``can_implement`` may still refuse a problem.
    """
    return tuple(tile for tile in config.tile_shapes if prefers(config, tile))


def estimated_cycles(
    config: GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> float:
    """Return the estimated time of a launch in cycles; ``bandwidth`` as in ``choose_config``."""
    cost_model = _COST_MODELS[config.arch]
    cycles: float = cost_model.estimated_cycles(config, problem, num_sms, bandwidth)
    return cycles


def split_launches(
    config: GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> tuple[GemmConfig, ...]:
    """Return the kernels that share a product, in the order in which they run.

    A product that is not shared has one: ``config``.
    """
    module = _SPLIT_LAUNCHES[config.arch]
    if module is None:
        return (config,)
    configs: tuple[GemmConfig, ...] = module.split_launches(config, problem, num_sms, bandwidth)
    return configs


def choose_config(
    base: ConfigT,
    problem: GemmProblem,
    num_sms: int,
    tile: TileShape | None = None,
    bandwidth: float | None = None,
) -> ConfigT:
    """Return ``base`` with the tile that is estimated to be fastest, or with a given tile.

    Args:
        base: Configuration with any tile.
        problem: Sizes of the product.
        num_sms: Number of SMs of the GPU.
        tile: A legal tile to use whatever its estimated time is.
        bandwidth: Peak bytes per second of the GPU's memory. None for that of the GPU that the
            model of time describes.

    Raises:
        ValueError: No tile, or not the given tile, can compute the problem. The message says why.
    """
    candidates = []
    reason = ""
    for shape in preferred_tiles(base) if tile is None else (tile,):
        if shape.num_ctas > num_sms:
            reason = f"{shape.num_ctas} CTAs need as many SMs, there are {num_sms}"
            continue
        config = dataclasses.replace(base, tile=shape)
        support = config.can_implement(problem)
        if support:
            candidates.append(config)
        reason = support.reason or reason
    if not candidates:
        raise ValueError(f"no grouped GEMM kernel computes {problem}: {reason}")
    return min(candidates, key=lambda config: estimated_cycles(config, problem, num_sms, bandwidth))
