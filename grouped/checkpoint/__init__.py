"""Checkpoints of quantized experts, as other systems write and read them.

  import grouped.checkpoint

  grouped.checkpoint.save(model, "out", layout="modelopt")  # or "compressed-tensors", "deepseek"
  report = grouped.checkpoint.load(model, "folder")

A folder of safetensors files with the experts of a model in one of the ``LAYOUTS``, one tensor an
expert and projection or all experts in one, and everything else as it is. Tensors are read and
written one after the other: there is never a second model in memory.
"""

from .layouts import LAYOUTS
from .load import Report, load
from .save import save

__all__ = ["LAYOUTS", "Report", "load", "save"]
