"""Modules over grouped tensors: grouped linear layers, experts and mixtures of them."""

from .delayed_scaling import DelayedScaling
from .linear import GroupedLinear
from .mlp import GroupedMLP
from .moe import MoE
from .router import MoELosses, Router

__all__ = ["DelayedScaling", "GroupedLinear", "GroupedMLP", "MoE", "MoELosses", "Router"]


def __dir__() -> list[str]:
    return sorted(__all__)
