"""Two forms of a layer's parameters in state dicts: one for all groups, or one per group."""

from typing import Any

import torch
from torch import Tensor

from ..tensor.grouped_tensor import GroupedTensor


def convert(state_dict: dict[str, Any], key: str, num_groups: int, stacked: bool) -> None:
    """Convert a parameter in a state dict to the form that a layer has, in place.

    A partial set of per-group keys stays as it is, and is reported as missing keys.

    Args:
        state_dict: The state dict.
        key: Name of the parameter, with its prefix.
        num_groups: G. The number of groups.
        stacked: True if the layer has one parameter for all groups, False if one per group.
    """
    keys = [f"{key}{group}" for group in range(num_groups)]
    has_groups = all(k in state_dict for k in keys)
    if stacked:
        if key not in state_dict and has_groups:
            state_dict[key] = torch.stack([_plain(state_dict[k]) for k in keys])
        if key in state_dict:
            for k in keys:
                state_dict.pop(k, None)
            if key.endswith("bias") and state_dict[key].dim() == 3:
                state_dict[key] = state_dict[key].squeeze(1)
    elif key in state_dict:
        stacked_parameter = _plain(state_dict.pop(key))
        if not has_groups and len(stacked_parameter) == num_groups:
            for k, member in zip(keys, stacked_parameter, strict=True):
                state_dict[k] = member.reshape(-1) if key.endswith("bias") else member


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, GroupedTensor) else x
