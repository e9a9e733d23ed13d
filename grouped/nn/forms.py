"""The two forms of a layer's parameters in state dicts: one for all groups, or one for each."""

from typing import Any

import torch
from torch import Tensor

from ..tensor.grouped_tensor import GroupedTensor


def convert(state_dict: dict[str, Any], key: str, num_groups: int, stacked: bool) -> None:
    """Turn the other form of a parameter, all groups ``stacked`` or one a group, into a layer's, in
    place.

    A partial set of per-group keys is left alone, and reported as missing keys.
    """
    keys = [f"{key}{group}" for group in range(num_groups)]
    discrete = all(k in state_dict for k in keys)
    if stacked:
        if key not in state_dict and discrete:
            state_dict[key] = torch.stack([_plain(state_dict[k]) for k in keys])
        if key in state_dict:
            for k in keys:
                state_dict.pop(k, None)
            if key.endswith("bias") and state_dict[key].dim() == 3:
                state_dict[key] = state_dict[key].squeeze(1)
    elif key in state_dict:
        whole = _plain(state_dict.pop(key))
        if not discrete and len(whole) == num_groups:
            for k, member in zip(keys, whole, strict=True):
                state_dict[k] = member.reshape(-1) if key.endswith("bias") else member


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, GroupedTensor) else x
