"""Modules over grouped tensors: grouped linear layers, experts and mixtures of them."""

from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

from .delayed_scaling import DelayedScaling
from .linear import GroupedLinear
from .mlp import GroupedMLP
from .moe import MoE
from .router import MoELosses, Router

__all__ = ["DelayedScaling", "GroupedLinear", "GroupedMLP", "MoE", "MoELosses", "Router"]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
