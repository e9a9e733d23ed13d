"""The runner of ``adamw_quantize`` on CuTe DSL kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.quantize.choose import choose_tile_config
from ...kernels.quantize.config import AdamWTileConfig
from ...kernels.quantize.pass_config import AdamWConfig
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
    """Return the runner of ``adamw_quantize``."""
    quantization, fmt, gradient = op.quantize(op.master), op.record, dtype_name(op.grad.dtype)
    if not op.master.numel():
        empty = no_elements(quantization)
        return lambda op, outputs: empty(op.quantize(op.master), outputs[3:])
    names, run_quantize = tuple(quantization.specs()), None
    if fmt.global_scale is None or fmt.has_given_scale:
        config = choose_tile_config(
            fmt,
            quantized(quantization),
            launch.arch,
            AdamWTileConfig,
            rowwise=op.rowwise,
            columnwise=op.columnwise,
            gradient=gradient,
        )
        kernel = launch.kernel(config)
    else:
        kernel = launch.kernel(AdamWConfig(gradient, launch.arch, fmt.amaxes_keep_nan))
        run_quantize = quantize(
            op.quantize(op.master, op.master.new_empty(op.master.shape[0])), launch
        )

    def run(op: AdamWQuantize, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        state, out = outputs[:3], dict(zip(names, outputs[3:], strict=True))
        inputs = (
            *state,
            readable(op.grad),
            dense(op.numbers),
            op.beta1,
            op.beta2,
            op.eps,
            op.weight_decay,
        )
        amax = out.get("amax", out.get("amax_t"))
        if run_quantize is not None:
            kernel(*inputs, amax, launch.num_sms)
            run_quantize(op.quantize(state[0], amax), outputs[3:])
            return
        buffers = map(out.get, BUFFERS)
        kernel(
            *inputs,
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
