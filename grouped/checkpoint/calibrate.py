"""Measurement of the inputs of a model's experts, for static scales of activations.

``grouped.convert`` writes the scales.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..preparation import is_foreign_experts
from .token_ids import read_ids

#: Maximal number of tokens of a forward pass. Longer sequences are split.
SEQUENCE_LENGTH = 2048
#: Name of the experts implementation that measures, in transformers.
_NAME = "grouped_calibration"


@torch.no_grad()
def input_amaxes(
    source: str | Path,
    data: str | Path,
    layers: Sequence[tuple[str, int]],
    device: torch.device | str = "cpu",
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the amaxes of each expert's inputs while the model runs over a file.

    Args:
        source: The folder of the model.
        data: The file of token ids or text. See ``grouped.checkpoint.token_ids.read_ids``.
        layers: Name and number of experts of each layer of experts in the folder.
        device: Device that runs the model.

    Returns:
        For each name of a layer, two fp32 tensors (E,) on the CPU. They are the amaxes of the
        tokens, which are the input of gate and up, and of the activations, which are the input of
        down. An expert that gets no token, or zeros only, has the largest amax of the layer.

    Raises:
        ValueError: The file has no valid ids, the model has other experts than ``layers``, no
            expert of a layer gets a token, or an input is not finite.
        FileNotFoundError: There is no such file.
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.integrations import moe as hf
    except ImportError as error:
        raise ImportError(
            "calibration needs transformers: pip install 'grouped-kernels[transformers]'"
        ) from error
    sequences = read_ids(data, source)
    hf.ALL_EXPERTS_FUNCTIONS.register(_NAME, _measuring_forward)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", experts_implementation=_NAME
    )
    model.to(device).eval()
    matched = _match_layers(model, layers, source)
    size = model.get_input_embeddings().num_embeddings
    for ids in sequences:
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"{data} must hold token ids from 0 to {size - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}"
            )
    for module in matched.values():
        module.calibration_amaxes = torch.zeros(2, module.num_experts, device=device)
    for ids in sequences:
        for sequence in ids.split(SEQUENCE_LENGTH):
            model(sequence[None].to(device), use_cache=False)
    return {
        name: _fill_unused(name, module.calibration_amaxes.cpu(), data)
        for name, module in matched.items()
    }


def _match_layers(
    model: nn.Module, layers: Sequence[tuple[str, int]], source: str | Path
) -> dict[str, Any]:
    """Return the module of each layer: it has the same name, or the same numbers in its name.

    Files and transformers have different names for the parents of experts, such as
    ``block_sparse_moe`` for ``mlp``.

    Raises:
        ValueError: A layer has no such module, or the number of experts differs.
    """
    modules = {name: m for name, m in model.named_modules() if is_foreign_experts(m)}
    names_of_numbers: dict[tuple[str, ...], list[str]] = {}
    for name in modules:
        names_of_numbers.setdefault(tuple(re.findall(r"\d+", name)), []).append(name)
    matched = {}
    for layer, count in layers:
        same = (
            [layer]
            if layer in modules
            else names_of_numbers.get(tuple(re.findall(r"\d+", layer)), [])
        )
        if len(same) != 1 or modules[same[0]].num_experts != count:
            raise ValueError(
                f"{source} has {count} experts in {layer}, which transformers' "
                f"{type(model).__name__} does not run ({', '.join(same) or 'no such layer'}): "
                "their inputs cannot be measured. Convert without calibration"
            )
        matched[layer] = modules[same[0]]
    return matched


def _measuring_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts one by one and record the amaxes of their inputs.

    This is an experts implementation of transformers.

    Args:
        self: The module of the experts.
        hidden_states: (T, H). The tokens.
        top_k_index: (T, k) integers. Experts of each token.
        top_k_weights: (T, k). Routing weights.

    Returns:
        (T, H) in the dtype of ``hidden_states``.
    """
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    input_layer = "gate_up_proj" if self.has_gate else "up_proj"
    for expert in top_k_index.unique().tolist():
        if expert >= self.num_experts:
            continue  # A sentinel of expert parallelism.
        token, choice = torch.where(top_k_index == expert)
        x = hidden_states[token]
        hidden = _product(self, input_layer, expert, x)
        activations = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        for i, t in enumerate((x, activations)):
            amaxes = self.calibration_amaxes[i]
            amaxes[expert] = torch.maximum(amaxes[expert], t.abs().amax().float())
        y = _product(self, "down_proj", expert, activations)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        out.index_add_(0, token, y.float() * top_k_weights[token, choice, None].float())
    return out.to(hidden_states.dtype)


def _product(experts: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """Apply one projection of one expert to ``x`` (T, K)."""
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return linear(x, weight.mT if experts.is_transposed else weight, bias)


def _fill_unused(layer: str, amaxes: Tensor, data: str | Path) -> tuple[Tensor, Tensor]:
    """Check the amaxes (2, E) of a layer, and replace zeros by the largest amax of the layer."""
    if not bool(amaxes.isfinite().all()):
        raise ValueError(
            f"the inputs of {layer} overflow while the model runs over {data}: no scale fits them"
        )
    largest = amaxes.amax(1, keepdim=True)
    if not bool((largest > 0).all()):
        raise ValueError(
            f"no expert of {layer} gets a token of {data} that is not zero: calibrate with more "
            "data"
        )
    tokens, activations = torch.where(amaxes > 0, amaxes, largest)
    return tokens, activations
