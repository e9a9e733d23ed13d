"""Experts distributed over ranks: expert parallelism, tensor parallelism, gradient clipping."""

from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

from .capacity import expert_capacity
from .clip_gradients import clip_grad_norm_
from .exchange import Exchange
from .expert_parallel import ExpertParallel, ExpertTensorParallel

__all__ = [
    "Exchange",
    "ExpertParallel",
    "ExpertTensorParallel",
    "clip_grad_norm_",
    "expert_capacity",
]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
