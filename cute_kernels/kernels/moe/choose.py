"""Preferred configurations of the kernels of a mixture of experts."""

from typing import TypeVar

from .config import GatherConfig, RoutingConfig

#: Pairs of a token and an expert up to which one CTA sorts them faster than a cluster of CTAs.
_MAX_PAIRS_OF_ONE_CTA = 4096

GatherConfigT = TypeVar("GatherConfigT", bound=GatherConfig)


def choose_routing_config(ids: str, pairs: int, *, mapped: bool = False) -> RoutingConfig:
    """Return the configuration that sorts pairs of a token and an expert.

    Args:
        ids: Data type of the expert ids.
        pairs: Number of pairs.
        mapped: True if a map gives the expert of each id.
    """
    ctas = 1 if pairs <= _MAX_PAIRS_OF_ONE_CTA else RoutingConfig.ctas
    return RoutingConfig(ids, ctas, mapped=mapped)


def choose_gather_config(row_bytes: int, config_class: type[GatherConfigT]) -> GatherConfigT:
    """Return the configuration with the widest loads that divide rows of ``row_bytes`` bytes."""
    return config_class(next(width for width in (16, 4, 2) if row_bytes % width == 0))
