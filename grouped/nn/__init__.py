"""Modules over grouped tensors: grouped linear layers and mixture-of-experts MLPs."""

from grouped.nn.delayed import DelayedScaling
from grouped.nn.linear import GroupedLinear
from grouped.nn.mlp import GroupedMLP

__all__ = ["DelayedScaling", "GroupedLinear", "GroupedMLP"]
