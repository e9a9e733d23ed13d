"""Measure the inputs of a model's experts: for static scales of activations, see
``grouped.convert``.
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

#: Longer sequences are cut into pieces of at most so many tokens.
SEQUENCE_LENGTH = 2048
#: The name of the experts implementation that measures.
_NAME = "grouped_calibration"


@torch.no_grad()
def input_amaxes(
    source: str | Path,
    data: str | Path,
    layers: Sequence[tuple[str, int]],
    device: torch.device | str = "cpu",
) -> dict[str, tuple[Tensor, Tensor]]:
    """The largest absolute value of each expert's inputs while the model runs over a file.

    Args:
        source: the folder of the model.
        data: the file of token ids or text, see ``grouped.checkpoint.token_ids.read_ids``.
        layers: the layers of experts in the folder's files: name and number of experts.
        device: where to run the model.

    Returns:
        By the name of the layer, two fp32 tensors (E,) on the CPU: of the tokens, which gate
        and up take, and of the activations between, which down takes. An expert that saw no
        token, or zeros alone, has the largest value of the layer's other experts.

    Raises:
        ValueError: the file has no ids that the model knows, the model has other experts than
            ``layers``, no expert of a layer saw a token, or an input is not finite.
        FileNotFoundError: there is no such file.
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
    hf.ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", experts_implementation=_NAME
    )
    model.to(device).eval()
    matched = _matched(model, layers, source)
    size = model.get_input_embeddings().num_embeddings
    for ids in sequences:
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"{data} must hold token ids from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
    for module in matched.values():
        module.calibration_amaxes = torch.zeros(2, module.num_experts, device=device)
    for ids in sequences:
        for piece in ids.split(SEQUENCE_LENGTH):
            model(piece[None].to(device), use_cache=False)
    return {
        name: _filled(name, module.calibration_amaxes.cpu(), data)
        for name, module in matched.items()
    }


def _matched(
    model: nn.Module, layers: Sequence[tuple[str, int]], source: str | Path
) -> dict[str, Any]:
    """The module of each layer of the files: the one of its name, or of the same numbers in its
    name.

    Files call the parents of experts by other names than transformers (``block_sparse_moe`` for
    ``mlp``).
    """
    modules = {name: m for name, m in model.named_modules() if is_foreign_experts(m)}
    by_numbers: dict[tuple[str, ...], list[str]] = {}
    for name in modules:
        by_numbers.setdefault(tuple(re.findall(r"\d+", name)), []).append(name)
    matched = {}
    for layer, count in layers:
        same = [layer] if layer in modules else by_numbers.get(tuple(re.findall(r"\d+", layer)), [])
        if len(same) != 1 or modules[same[0]].num_experts != count:
            raise ValueError(
                f"{source} has {count} experts in {layer}, which transformers' {type(model).__name__} does not run "
                f"({', '.join(same) or 'no such layer'}): their inputs cannot be measured. Convert without calibration"
            )
        matched[layer] = modules[same[0]]
    return matched


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts implementation of transformers that computes expert by expert and records the
    amaxes of inputs.
    """
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    for expert in top_k_index.unique().tolist():
        if expert >= self.num_experts:
            continue  # A sentinel of expert parallelism.
        token, choice = torch.where(top_k_index == expert)
        x = hidden_states[token]
        hidden = _product(self, first, expert, x)
        between = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        for i, t in enumerate((x, between)):
            amaxes = self.calibration_amaxes[i]
            amaxes[expert] = torch.maximum(amaxes[expert], t.abs().amax().float())
        y = _product(self, "down_proj", expert, between)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        out.index_add_(0, token, y.float() * top_k_weights[token, choice, None].float())
    return out.to(hidden_states.dtype)


def _product(experts: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return linear(x, weight.mT if experts.is_transposed else weight, bias)


def _filled(layer: str, amaxes: Tensor, data: str | Path) -> tuple[Tensor, Tensor]:
    """Check the amaxes (2, E) of a layer and give experts without one the largest of the others."""
    if not bool(amaxes.isfinite().all()):
        raise ValueError(
            f"the inputs of {layer} overflow while the model runs over {data}: no scale holds them"
        )
    largest = amaxes.amax(1, keepdim=True)
    if not bool((largest > 0).all()):
        raise ValueError(
            f"no expert of {layer} sees a token of {data} that is not zero: calibrate with more data"
        )
    tokens, between = torch.where(amaxes > 0, amaxes, largest)
    return tokens, between
