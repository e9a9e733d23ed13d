"""The choice of a tile: the one that an architecture's model of time says is fastest."""

import dataclasses
from typing import TypeVar

from .common.problem import GemmConfig, GemmProblem, TileShape

ConfigT = TypeVar("ConfigT", bound="GemmConfig")


def choose_config(
    base: ConfigT,
    problem: GemmProblem,
    num_sms: int,
    tile: TileShape | None = None,
    bandwidth: float | None = None,
) -> ConfigT:
    """``base`` with the tile that suits a problem best, or with the one that is given.

    Deterministic: the same sizes give the same tile, and every tile gives the same bits.
    ``bandwidth`` is the peak bytes a second of the GPU's memory; None for that of the GPU which the
    model is of.

    Raises:
        ValueError: no tile takes the problem, or not the one asked for; says why.
    """
    candidates = []
    reason = ""
    for shape in base.tile_shapes if tile is None else (tile,):
        if tile is None and not base.may_choose(shape):
            continue
        if shape.num_ctas > num_sms:
            reason = f"{shape.num_ctas} CTAs need as many SMs, there are {num_sms}"
            continue
        config = dataclasses.replace(base, tile=shape)
        support = config.can_implement(problem)
        if support:
            candidates.append(config)
        reason = support.reason or reason
    if not candidates:
        raise ValueError(f"no grouped GEMM kernel takes {problem}: {reason}")
    return min(candidates, key=lambda config: config.estimated_cycles(problem, num_sms, bandwidth))
