"""Kernels of a mixture of experts between its products: configurations here, kernels beside."""

from .config import ActivateConfig, CombineConfig, GatherConfig, RouterConfig, RoutingConfig

__all__ = ["ActivateConfig", "CombineConfig", "GatherConfig", "RouterConfig", "RoutingConfig"]
