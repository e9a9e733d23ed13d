"""Modules over grouped tensors: grouped linear layers, experts and mixtures of them."""

from grouped.nn.delayed import DelayedScaling
from grouped.nn.linear import GroupedLinear
from grouped.nn.mlp import GroupedMLP
from grouped.nn.moe import MoE
from grouped.nn.router import MoELosses, Router

__all__ = ["DelayedScaling", "GroupedLinear", "GroupedMLP", "MoE", "MoELosses", "Router"]
