"""The kernels of mixtures of experts that are worth compiling ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.capability import support
from cute_kernels.moe.config import ActivateConfig, CombineConfig, GatherConfig, RoutingConfig

if TYPE_CHECKING:
  from collections.abc import Iterator

Config = ActivateConfig | CombineConfig | GatherConfig | RoutingConfig


def kernel_specs(arch: str) -> Iterator[Config]:
  if support("compute_routing", None, arch):
    for ids in ("int32", "int64"):
      yield from (RoutingConfig(ids, ctas) for ctas in (1, RoutingConfig.ctas))
  if support("moe_gather", None, arch):
    yield GatherConfig()
  if support("moe_activate", None, arch):
    yield ActivateConfig("swiglu", arch)
    yield ActivateConfig("swiglu", arch, gradient=True)
    yield ActivateConfig("swiglu", arch, gradient=True, weighted=True)
  if support("moe_combine", None, arch):
    yield from (CombineConfig(weighted=weighted) for weighted in (True, False))
