"""Read and write the checkpoints of other systems.

Example::

    import grouped.checkpoint

    grouped.checkpoint.save(model, "out", layout="modelopt")
    report = grouped.checkpoint.load(model, "folder")

A checkpoint is a folder of safetensors files. Its experts have one of the ``LAYOUTS``, with one
tensor per expert and projection or one for all experts. All other tensors stay as they are. Tensors
are read and written one by one, so there is never a second model in memory.
"""

from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

from .layouts import LAYOUTS
from .load import Report, load
from .save import save

__all__ = ["LAYOUTS", "Report", "load", "save"]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
