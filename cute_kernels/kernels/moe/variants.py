"""Kernels of mixtures of experts that are worth compiling ahead of time."""

import itertools
from collections.abc import Iterator

from cute_kernels.capability import support

from .config import (
    ActivateConfig,
    CombineConfig,
    GatherConfig,
    RouterConfig,
    RouterGradientConfig,
    RoutingConfig,
    ScatterConfig,
)

Config = (
    ActivateConfig
    | CombineConfig
    | GatherConfig
    | RouterConfig
    | RouterGradientConfig
    | RoutingConfig
)


def kernel_specs(arch: str) -> Iterator[Config]:
    """Yield the configurations to compile for the architecture ``arch``."""
    if support("compute_routing", None, arch):
        for ids, mapped in itertools.product(("int32", "int64"), (False, True)):
            for ctas in (1, RoutingConfig.ctas):
                yield RoutingConfig(ids, ctas, mapped=mapped)
    if support("moe_route", None, arch):
        for score, grouped in (("softmax", False), ("sigmoid", True)):
            yield RouterConfig(score, per_lane=8 if grouped else 4, biased=grouped, grouped=grouped)
            yield RouterGradientConfig(score, per_lane=8 if grouped else 4)
    if support("moe_gather", None, arch):
        yield from (GatherConfig(), ScatterConfig())
    if support("moe_activate", None, arch):
        yield ActivateConfig("swiglu", arch)
        yield ActivateConfig("swiglu", arch, gradient=True)
        yield ActivateConfig("swiglu", arch, gradient=True, weighted=True)
    if support("moe_combine", None, arch):
        yield from (CombineConfig(weighted=weighted) for weighted in (True, False))
