"""Where rows of a product are gathered into memory first, because no kernel reads them by an index."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cute_kernels.ops.moe import MoeGather
from cute_kernels.ops.registry import Allocator

if TYPE_CHECKING:
  from collections.abc import Callable, Sequence

  from torch import Tensor

  from cute_kernels.ops.gemm import GroupedGemm
  from cute_kernels.ops.registry import Runner
  from cute_kernels.runtime.launch import Launcher

__all__ = ["gathers_first", "multiply_gathered"]


#: Bytes of a matrix, from one row to the next, that kernels address.
_MOST_BYTES = 2**35


def gathers_first(op: GroupedGemm, side: str, arch: str) -> bool:
  """Whether those of a plain operand ``side`` are: unless both are plain, on sm_90a."""
  if op.index is None or op.a_record is not None:
    return False
  x: Tensor = getattr(op, side)
  return arch != "sm_90a" or op.b_record is not None or len(x) * x.stride(0) * x.itemsize > _MOST_BYTES


def multiply_gathered(op: Any, side: str, launch: Launcher, multiply: Callable[[Any, Launcher], Runner]) -> Runner:
  """How that runs, with ``multiply`` for the rows of operand ``side`` one after the other."""

  def gathering(op: Any) -> MoeGather:
    return MoeGather(getattr(op, side), op.index)

  def product(op: Any, rows: Tensor) -> Any:
    return dataclasses.replace(op, rows=None, **{side: rows})

  gather = gathering(op).kernels(launch)
  buffer = Allocator(gathering(op).outputs(), op.device)
  run_plain = multiply(product(op, buffer.make()[0]), launch)

  def run(op: Any, outputs: Sequence[Tensor], **options: bool) -> None:
    made = buffer.make()
    gather(gathering(op), made)
    run_plain(product(op, made[0]), outputs, **options)

  return run
