"""The runner of ``delayed_scaling_update`` on its CuTe DSL kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.quantize.pass_config import DelayedConfig
from ...runtime.launch import Launcher
from ..arguments import dense
from ..op import launched_by
from ..plan import Runner
from .op import DelayedScalingUpdate


@launched_by(DelayedScalingUpdate)
def delayed_scaling_update(op: DelayedScalingUpdate, launch: Launcher) -> Runner:
    """Return the runner of ``delayed_scaling_update``."""
    if not op.scale.numel():
        return lambda op, outputs: None
    kernel = launch.kernel(
        DelayedConfig(op.algorithm == "max", op.amax is not None, op.skip_nonfinite)
    )

    def run(op: DelayedScalingUpdate, outputs: Sequence[Tensor]) -> None:
        kernel(*outputs, dense(op.amax), op.largest)

    return run
