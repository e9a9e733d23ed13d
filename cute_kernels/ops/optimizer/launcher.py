"""The runner of ``adamw_quantize`` on CuTe DSL kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.quantize.choose import choose_tile_config
from ...kernels.quantize.config import (
    AdamWConfig,
    AdamWTileConfig,
)
from ...runtime.launch import Launcher
from ..arguments import dense, dtype_name, readable
from ..op import launched_by
from ..plan import Runner
from ..quantize.launcher import (
    BUFFERS,
    no_elements,
    quantize,
    quantized,
)
from .op import AdamWQuantize


@launched_by(AdamWQuantize)
def adamw_quantize(op: AdamWQuantize, launch: Launcher) -> Runner:
    like, fmt, gradient = op.quantize(op.master), op.record, dtype_name(op.grad.dtype)
    if not op.master.numel():
        empty = no_elements(like)
        return lambda op, outputs: empty(op.quantize(op.master), outputs[3:])
    names, after = tuple(like.specs()), None
    if fmt.global_scale is None or fmt.has_given_scale:
        config = choose_tile_config(
            fmt,
            quantized(like),
            launch.arch,
            AdamWTileConfig,
            rowwise=op.rowwise,
            columnwise=op.columnwise,
            gradient=gradient,
        )
        kernel = launch.kernel(config)
    else:
        kernel = launch.kernel(AdamWConfig(gradient, launch.arch, fmt.amaxes_keep_nan))
        after = quantize(op.quantize(op.master, op.master.new_empty(op.master.shape[0])), launch)

    def run(op: AdamWQuantize, outputs: Sequence[Tensor]) -> None:
        held, out = outputs[:3], dict(zip(names, outputs[3:], strict=True))
        by = (
            *held,
            readable(op.grad),
            dense(op.numbers),
            op.beta1,
            op.beta2,
            op.eps,
            op.weight_decay,
        )
        amax = out.get("amax", out.get("amax_t"))
        if after is not None:
            kernel(*by, amax, launch.num_sms)
            after(op.quantize(held[0], amax), outputs[3:])
            return
        buffers = map(out.get, BUFFERS)
        kernel(
            *by,
            None,
            None,
            dense(op.scale),
            *buffers,
            amax,
            None,
            dense(op.seed),
            None,
            None,
            launch.num_sms,
        )

    return run
