"""Delayed scaling: update scales from the amaxes of earlier steps."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cute_kernels import ops
from cute_kernels.formats import FP8, Format
from cute_kernels.ops.delayed_scaling.op import DelayedScalingUpdate, check_margin

from ..tensor.validation import check_format


def delayed_scaling_update(
    amax_history: Tensor,
    scale: Tensor,
    fmt: Format | torch.dtype,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    algorithm: str = "max",
    group: ProcessGroup | str | None = None,
    skip_nonfinite: bool = False,
) -> None:
    """Roll a history of amaxes and compute the next scales from it, in place, once per step.

    A slot is a column of the history, one group of a tensor. Its scale is FP8_MAX * 2^-margin over
    the largest of the last L amaxes, by TransformerEngine's rule; the docstring of
    ``torch.ops.cute_kernels.delayed_scaling_update`` defines the bits. A slot whose amax is 0
    changes nothing. An infinite or NaN amax enters the history, unless ``skip_nonfinite``. The
    scale does not change while that amax is the one that counts.

    With ``group`` each slot takes the largest amax among the processes before the roll, in
    one all-reduce of all slots, so that histories and scales stay equal on all of them. There a
    NaN counts as 0, since the maximum of a number and NaN depends on the backend of
    ``torch.distributed``. A slot that is 0 or NaN in every process changes nothing.

    Args:
        amax_history: (L, n) fp32, contiguous. Row 0 takes the largest amaxes of the present step.
            Row 1 is the oldest, and row L - 1 the newest.
        scale: (n,) fp32, contiguous: the argument ``scale`` of ``quantize``.
        fmt: Format of the quantized tensor: ``FP8(dtype, scaling="delayed")``, or its dtype.
        amax: (n,) fp32 of this step, instead of row 0. Its sign is ignored.
        margin: Integer. FP8_MAX is divided by two to this power.
        algorithm: ``"max"`` or ``"most_recent"``.
        group: Processes that share the scales, or the name of such a ``torch.distributed``
            group.
        skip_nonfinite: Count an infinite or NaN amax of this step as 0, with ``group`` in all
            processes: ``torch.amp.GradScaler`` skips such a step.

    Raises:
        TypeError: ``fmt`` is neither a format record nor the dtype of one, or a dtype is not fp32.
        ValueError: A shape, a device, the margin or the algorithm is invalid.
        RuntimeError: An argument requires a gradient and gradients are enabled.
        cute_kernels.UnsupportedError: The backend does not run the op.
    """
    if isinstance(fmt, torch.dtype):
        fmt = FP8(fmt, "delayed")
    check_format("fmt", fmt)
    # Check here, too: the dispatcher converts True to 1.
    check_margin(margin, fmt)
    if group is not None:
        # Check before anything is reduced or written.
        DelayedScalingUpdate(amax_history, scale, fmt.text, amax, margin, algorithm).check()
        step_amax = amax_history[0]
        if amax is not None:
            step_amax = torch.where(amax == 0, step_amax, amax.abs())
        # Write the result to row 0, so that every process rolls a slot if one of them has an amax
        # for it.
        amax_history[0] = reduce_amaxes(step_amax, group)
        amax = None
    ops.delayed_scaling_update(
        amax_history, scale, fmt.text, amax, margin, algorithm, skip_nonfinite
    )


def reduce_amaxes(amaxes: Tensor, group: ProcessGroup | str) -> Tensor:
    """Return the largest of each amax among the processes of ``group``; NaN counts as 0.

    Args:
        amaxes: (n,) fp32.
        group: A process group, or its name.
    """
    finite_or_inf = amaxes.nan_to_num(nan=0.0, posinf=torch.inf)
    name = group if isinstance(group, str) else group.group_name
    # The functional form, which compiled graphs can contain, too.
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(finite_or_inf, "max", name))
