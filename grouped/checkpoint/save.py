"""Save a checkpoint: see ``grouped.checkpoint``."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.formats import Format
from cute_kernels.records import check_kind

from ..tensor.grouped_tensor import GroupedTensor
from .config import (
    QuantizedWeight,
    check_model_config,
    check_plain,
    config_files,
    resolve_input_scales,
)
from .files import SHARD_BYTES, Writer, progress
from .layouts import Layout, get_writable_layout, stacked_suffix
from .plain_tensors import WeightTensors, check_finite, quantize_weight, split_rows, weight_tensors
from .weights import ExpertWeight, expert_weights, rename_path, untied_state_dict


@torch.no_grad()
def save(
    module: nn.Module,
    folder: str | Path,
    layout: str,
    *,
    rename: Mapping[str, str] | None = None,
    stacked: bool = False,
    shard_bytes: int = SHARD_BYTES,
    input_scales: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``module`` as a checkpoint.

    Expert weights that are GroupedTensors are written as they are. Plain ones are quantized, with
    one global scale for gate and up of an expert. All other tensors are written as they are.

    Args:
        module: As in ``load``.
        folder: The target. It must not have safetensors files, an index or a
            ``hf_quant_config.json``.
        layout: ``"modelopt"`` (NVFP4), ``"compressed-tensors"`` (NVFP4) or ``"deepseek"``
            (FP8Block of 128x128 with fp32 scales).
        rename: As in ``load``.
        stacked: True writes one tensor for all experts, ``experts.gate_up_proj``. False writes one
            per expert, ``experts.0.gate_proj.weight``.
        shard_bytes: Largest size of a file. As many bytes are held in memory.
        input_scales: Static scales of activations by name, such as ``Report.input_scales``. If
            every quantized weight has one, the config declares quantized activations. Otherwise it
            declares quantized weights alone. Scales of weights that are not quantized here are left
            out, with a warning.
        config: Content of ``config.json`` besides ``quantization_config``. By default the
            ``config`` of a transformers model.

    Raises:
        FileExistsError: The folder has files of a checkpoint, or another process writes to it.
        ValueError: The layout is unknown or does not hold the format of a weight. The 128x128
            blocks of a weight span gate and up. A global scale is beyond fp32. Two tensors have one
            name. A weight outside of experts is not plain. An input scale is unknown to the layout,
            or not finite and positive. ``config`` cannot be a JSON object, or ``shard_bytes`` is
            not a positive integer.
        OSError: A file cannot be written, for instance on a full disk.
        TypeError: A parameter is sharded: gather it first.
    """
    record = get_writable_layout(layout)
    check_kind(bool, stacked=stacked)
    weights = {weight.key: weight for weight in expert_weights(module, rename)}
    if not weights:
        raise ValueError(f"{type(module).__name__} has no experts, and only experts are quantized")
    state = untied_state_dict(module)
    for key, weight in weights.items():
        if not weight.is_bias:
            _check_can_hold(key, weight, record, stacked)
    for key, t in state.items():
        if hasattr(t, "_local_tensor"):
            raise TypeError(f"{key} is sharded (DTensor): save a module with whole parameters")
        if key not in weights:
            check_plain(key, str(t.dtype).removeprefix("torch."))
    if config is None:
        config = _transformers_config(module)
    check_model_config(config)
    quantized = [
        entry
        for key, weight in weights.items()
        if key in state
        for entry in _quantized_entries(weight, stacked)
    ]
    _warn_of_names(module, quantized)
    scales = resolve_input_scales(input_scales, record, quantized)
    plain = [
        rename_path(key, rename).removesuffix(".weight")
        for key in _plain_matrices(module)
        if key not in weights
    ]
    with Writer(folder, shard_bytes) as writer:
        for key, t in progress(state.items(), "saving"):
            if key in weights:
                for name, tensor in _stored_tensors(weights[key], record, stacked):
                    writer.add(name, tensor)
            else:
                writer.add(rename_path(key, rename), t)
        for name, scale in scales.items():
            writer.add(name, scale)
        writer.close(lambda: config_files(config, record, quantized, plain, writer.names))


def _transformers_config(module: Any) -> dict[str, Any]:
    """Return the configuration of a transformers model as ``save_pretrained`` writes it.

    Other modules have none, and return {}.
    """
    if not hasattr(getattr(module, "config", None), "to_dict"):
        return {}
    config: dict[str, Any] = module.config.to_dict()
    config["architectures"] = [type(module).__name__.removeprefix("FSDP")]
    if isinstance(getattr(module, "dtype", None), torch.dtype):
        config["dtype"] = str(module.dtype).removeprefix("torch.")
    return config


def _warn_of_names(module: Any, weights: list[QuantizedWeight]) -> None:
    """Warn if transformers reads experts under other names than the written ones."""
    config: Any = getattr(module, "config", None)
    mapping = sys.modules.get("transformers.conversion_mapping")
    if mapping is None or not hasattr(config, "model_type"):
        return
    rules = mapping.get_checkpoint_conversion_mapping(config.model_type) or ()
    patterns = [
        pattern for rule in rules for pattern in rule.source_patterns if "experts" in pattern
    ]
    # transformers also reads the names of the module itself.
    read = [
        *(re.escape(p).replace(r"\*", r"\d+") for p in patterns),
        *map(re.escape, module.state_dict()),
    ]
    unread = [w for w in weights if not any(re.search(p, w.tensor(".weight")) for p in read)]
    if unread:
        warnings.warn(
            f"transformers reads experts of {config.model_type} as "
            f"{' and '.join(patterns) or 'one tensor for all'}, not as "
            f"{unread[0].tensor('.weight')}: its from_pretrained would leave them at random "
            "values, without an error. Convert a folder of save_pretrained instead "
            "(python -m grouped.convert), which keeps the names; "
            "grouped.checkpoint.load reads both",
            stacklevel=3,
        )


def _quantized_entries(weight: ExpertWeight, is_stacked: bool) -> list[QuantizedWeight]:
    """Return the quantized weights of a file that the parameter becomes."""
    if weight.is_bias:
        return []
    if is_stacked:
        return [QuantizedWeight(weight.path + weight.stacked, True)]
    return [
        QuantizedWeight(name, False)
        for g in range(weight.shape[0])
        for name in weight.names(g, (), ".weight")
    ]


def _plain_matrices(module: nn.Module) -> Iterator[str]:
    """Yield the names of weights with at least two dimensions, including aliases of tied weights.

    Files lack a tied ``lm_head``, but readers create the module and look up its quantization.
    """
    return (
        key
        for key, t in module.state_dict(keep_vars=True).items()
        if key.endswith(".weight") and t.dim() > 1
    )


def _check_can_hold(key: str, weight: ExpertWeight, layout: Layout, stacked: bool) -> None:
    """Raise ValueError if the layout cannot hold a quantized parameter."""
    fmt, parameter = layout.fmt, weight.parameter
    if not isinstance(parameter, GroupedTensor):
        return
    if parameter.grouping != "uniform":
        raise ValueError(f"{key} must be uniform (G, N, K), got {parameter!r}")
    ours, theirs = ((f.element, f.scale, f.global_scale) for f in (parameter.format, fmt))
    # Scale tiles store a scale per row, also for square blocks.
    per_row = parameter.format.has_scale_tiles
    if ours != theirs or (not per_row and parameter.format.is_2d != fmt.is_2d):
        raise ValueError(
            f"{key} is {parameter.format}, {layout.name} holds {fmt}: quantize it again, or choose "
            "another layout"
        )
    if parameter.rowwise is None:
        raise ValueError(f"{key} has no rowwise copy, and checkpoints store rowwise copies")
    rows = weight.shape[1] // len(weight.projections)
    is_cut = not per_row and len(weight.projections) > 1 and not stacked
    if is_cut and (weight.interleaved or rows % fmt.scale.vec_size):  # type: ignore[union-attr]
        raise ValueError(
            f"the blocks of {key} span gate and up: save with stacked=True, or from plain weights"
        )


def _stored_tensors(
    weight: ExpertWeight, layout: Layout, stacked: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a file for a weight or bias of experts."""
    count, parameter = len(weight.projections), weight.linear
    name = weight.path + weight.stacked
    if weight.is_bias:
        if stacked:
            yield f"{name}_bias", parameter
            return
        for g, row in enumerate(parameter):
            for projection, bias in zip(
                weight.names(g, (), ".bias"),
                split_rows(row, count, weight.interleaved),
                strict=True,
            ):
                yield f"{projection}.bias", bias
        return
    if not isinstance(parameter, GroupedTensor):
        check_finite(weight.key, parameter)
    if stacked:
        whole = (
            weight_tensors(parameter)
            if isinstance(parameter, GroupedTensor)
            else quantize_weight(parameter, layout.fmt)
        )
        for suffix, t in layout.stored(whole).items():
            yield name + stacked_suffix(suffix), t
        return
    for g, tensors in enumerate(_quantize_projections(parameter, weight, layout.fmt)):
        for name, quantized in zip(weight.names(g, (), ".weight"), tensors, strict=True):
            for suffix, t in layout.stored(quantized).items():
                yield name + suffix, t


def _quantize_projections(
    parameter: Tensor, weight: ExpertWeight, fmt: Format
) -> Iterator[list[WeightTensors]]:
    """Yield the quantized projections of each expert, with one global scale per expert."""
    count = len(weight.projections)
    if isinstance(parameter, GroupedTensor):
        tensors = weight_tensors(parameter)
        for g in range(weight.shape[0]):
            expert = tensors.expert(g)
            codes = split_rows(expert.codes, count, weight.interleaved)
            scales = split_rows(expert.scales, count, weight.interleaved)
            yield [WeightTensors(c, s, expert.amax) for c, s in zip(codes, scales, strict=True)]
        return
    for matrix in parameter:
        amax = matrix.abs().amax().float()[None] if fmt.global_scale is not None else None
        yield [
            quantize_weight(rows[None], fmt, amax).expert(0)
            for rows in split_rows(matrix, count, weight.interleaved)
        ]
