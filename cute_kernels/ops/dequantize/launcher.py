"""The runner of ``grouped_dequantize`` on its CuTe DSL kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.quantize.choose import choose_dequantize_config
from ...kernels.quantize.prologue import Grouping
from ...layout.buffers import code_pitch
from ...layout.shapes import PITCH_ALIGNMENT
from ...runtime.allocator import ALIGNMENT
from ...runtime.launch import Launcher
from ..arguments import dense, dtype_name, readable
from ..op import launched_by
from ..plan import Runner
from ..quantize.launcher import (
    each_member,
    flat_amax,
)
from .op import GroupedDequantize


@launched_by(GroupedDequantize)
def dequantize(op: GroupedDequantize, launch: Launcher) -> Runner:
    """Return the runner of ``grouped_dequantize``."""
    if op.shapes is not None:
        run_each = each_member(lambda member, _: dequantize(member, launch))

        def run_shapes(
            op: GroupedDequantize, outputs: Sequence[Tensor], fresh: bool = False
        ) -> None:
            if fresh:  # zeros past the last group
                outputs[0].zero_()
            run_each(op, outputs)

        return run_shapes
    if not op.rows:
        return lambda op, outputs, fresh=False: None
    fmt = op.record
    grouping: Grouping = "uniform" if op.offs is None else "ragged"
    kernel = launch.kernel(
        choose_dequantize_config(fmt, dtype_name(op.dtype), grouping, op.columnwise)
    )
    has_scales, has_global_scale = fmt.scale is not None, fmt.global_scale is not None

    def run(op: GroupedDequantize, outputs: Sequence[Tensor], fresh: bool = False) -> None:
        """Launch the kernel."""
        codes = readable(op.codes) if op.columnwise else _readable_rows(op.codes)
        scales = readable(op.scales[0]) if has_scales else None
        amax = flat_amax(dense(op.scales[-1])) if has_global_scale else None
        kernel(codes, scales, amax, dense(op.offs), outputs[0], int(fresh), launch.num_sms)

    return run


def _readable_rows(codes: Tensor) -> Tensor:
    """Return rowwise codes, copied if their rows do not have one pitch that kernels support."""
    pitch, aligned = codes.stride(-2), codes.data_ptr() % ALIGNMENT == 0
    even = codes.dim() == 2 or codes.stride(0) == codes.shape[1] * pitch
    if aligned and even and codes.stride(-1) == 1 and pitch % PITCH_ALIGNMENT == 0:
        return codes
    return codes.new_empty(*codes.shape[:-1], code_pitch(codes.shape[-1]))[
        ..., : codes.shape[-1]
    ].copy_(codes)
