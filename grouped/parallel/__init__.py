"""Experts distributed over processes: expert parallelism and expert tensor parallelism."""

from .capacity import expert_capacity
from .clip_gradients import clip_grad_norm_
from .expert_parallel import ExpertParallel, ExpertTensorParallel

__all__ = ["ExpertParallel", "ExpertTensorParallel", "clip_grad_norm_", "expert_capacity"]
