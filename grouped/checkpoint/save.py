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
from .config import Quantized, check_model_config, check_plain, checked_scales, config_files
from .files import SHARD_BYTES, Writer, progress
from .layouts import Layout, stacked_suffix, writable
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

    Experts' weights that are GroupedTensors are written as they are; plain ones are quantized,
    gate and up of an expert with one second level. Everything else is written as it is.

    Args:
        module: as in ``load``.
        folder: where to; it must not have safetensors files, their index or a
            ``hf_quant_config.json``.
        layout: ``"modelopt"`` (NVFP4), ``"compressed-tensors"`` (NVFP4) or ``"deepseek"``
            (FP8Block of 128x128 with fp32 scales).
        rename: as in ``load``.
        stacked: one tensor of all experts, ``experts.gate_up_proj``, instead of one each,
            ``experts.0.gate_proj.weight``.
        shard_bytes: the most bytes of a file; so much is held until it is written.
        input_scales: static scales of activations by name, such as ``Report.input_scales``. If
            each quantized weight has one, the config says that activations are quantized,
            else that weights alone are. Those of weights that are not quantized here are
            left out, with a warning.
        config: what ``config.json`` holds besides ``quantization_config``; the ``config`` of a
            transformers model by default.

    Raises:
        FileExistsError: the folder has files of a checkpoint, or another process writes to it.
        ValueError: another layout, a weight whose format it does not hold, or one whose 128x128
            blocks span gate and up; a second level beyond fp32; two tensors of one name; a
            weight besides experts that is not plain; an input scale that the layout does
            not have, or that is not finite and positive; a ``config`` that is no JSON
            object; or ``shard_bytes`` that is no positive integer.
        OSError: a file cannot be written, as on a full disk.
        TypeError: a parameter is sharded: gather it first.
    """
    record = writable(layout)
    check_kind(bool, stacked=stacked)
    weights = {weight.key: weight for weight in expert_weights(module, rename)}
    if not weights:
        raise ValueError(f"{type(module).__name__} has no experts, which alone are quantized")
    state = untied_state_dict(module)
    for key, weight in weights.items():
        if not weight.is_bias:
            _check_holds(key, weight, record, stacked)
    for key, t in state.items():
        if hasattr(t, "_local_tensor"):
            raise TypeError(f"{key} is sharded (DTensor): save a module with whole parameters")
        if key not in weights:
            check_plain(key, str(t.dtype).removeprefix("torch."))
    if config is None:
        config = _config_of(module)
    check_model_config(config)
    quantized = [
        one for key, weight in weights.items() if key in state for one in _names(weight, stacked)
    ]
    _warn_of_names(module, quantized)
    scales = checked_scales(input_scales, record, quantized)
    plain = [
        rename_path(key, rename).removesuffix(".weight")
        for key in _plain_matrices(module)
        if key not in weights
    ]
    with Writer(folder, shard_bytes) as writer:
        for key, t in progress(state.items(), "saving"):
            if key in weights:
                for name, part in _stored(weights[key], record, stacked):
                    writer.add(name, part)
            else:
                writer.add(rename_path(key, rename), t)
        for name, scale in scales.items():
            writer.add(name, scale)
        writer.close(lambda: config_files(config, record, quantized, plain, writer.names))


def _config_of(module: Any) -> dict[str, Any]:
    """The configuration of a transformers model, with the class and dtype that ``save_pretrained``
    adds; else {}.
    """
    if not hasattr(getattr(module, "config", None), "to_dict"):
        return {}
    config: dict[str, Any] = module.config.to_dict()
    config["architectures"] = [type(module).__name__.removeprefix("FSDP")]
    if isinstance(getattr(module, "dtype", None), torch.dtype):
        config["dtype"] = str(module.dtype).removeprefix("torch.")
    return config


def _warn_of_names(module: Any, weights: list[Quantized]) -> None:
    """Warn if transformers reads the experts of its model under other names than those that are
    written.
    """
    config: Any = getattr(module, "config", None)
    mapping = sys.modules.get("transformers.conversion_mapping")
    if mapping is None or not hasattr(config, "model_type"):
        return
    rules = mapping.get_checkpoint_conversion_mapping(config.model_type) or ()
    patterns = [
        pattern for rule in rules for pattern in rule.source_patterns if "experts" in pattern
    ]
    # The names of the module itself are read as well.
    read = [
        *(re.escape(p).replace(r"\*", r"\d+") for p in patterns),
        *map(re.escape, module.state_dict()),
    ]
    unread = [w for w in weights if not any(re.search(p, w.tensor(".weight")) for p in read)]
    if unread:
        warnings.warn(
            f"transformers reads experts of {config.model_type} as {' and '.join(patterns) or 'one tensor for all'}, not as "
            f"{unread[0].tensor('.weight')}: its from_pretrained would leave them at random values, without an error. "
            "Convert a folder of save_pretrained instead (python -m grouped.convert), which keeps the names; "
            "grouped.checkpoint.load reads both",
            stacklevel=3,
        )


def _names(weight: ExpertWeight, is_stacked: bool) -> list[Quantized]:
    """The weights of a file that the parameter is written as."""
    if weight.is_bias:
        return []
    if is_stacked:
        return [Quantized(weight.path + weight.stacked, True)]
    return [
        Quantized(name, False)
        for g in range(weight.shape[0])
        for name in weight.names(g, (), ".weight")
    ]


def _plain_matrices(module: nn.Module) -> Iterator[str]:
    """Names of weights with two dimensions or more, second names of tied ones included.

    Files lack a tied ``lm_head``, but readers make the module and ask whether it is quantized.
    """
    return (
        key
        for key, t in module.state_dict(keep_vars=True).items()
        if key.endswith(".weight") and t.dim() > 1
    )


def _check_holds(key: str, weight: ExpertWeight, layout: Layout, stacked: bool) -> None:
    fmt, held = layout.fmt, weight.parameter
    if not isinstance(held, GroupedTensor):
        return
    if held.grouping != "uniform":
        raise ValueError(f"{key} must be uniform (G, N, K), got {held!r}")
    ours, theirs = ((f.element, f.scale, f.global_scale) for f in (held.format, fmt))
    # Such scales are stored for every row, also where a square block has one.
    per_row = held.format.has_scale_tiles
    if ours != theirs or (not per_row and held.format.is_2d != fmt.is_2d):
        raise ValueError(
            f"{key} is {held.format}, {layout.name} holds {fmt}: quantize it again, or choose another layout"
        )
    if held.rowwise is None:
        raise ValueError(f"{key} has no rowwise copy, which checkpoints hold")
    rows = weight.shape[1] // len(weight.projections)
    is_cut = not per_row and len(weight.projections) > 1 and not stacked
    if is_cut and (weight.interleaved or rows % fmt.scale.vec_size):  # type: ignore[union-attr]
        raise ValueError(
            f"the blocks of {key} span gate and up: save with stacked=True, or from plain weights"
        )


def _stored(weight: ExpertWeight, layout: Layout, stacked: bool) -> Iterator[tuple[str, Tensor]]:
    count, held = len(weight.projections), weight.linear
    name = weight.path + weight.stacked
    if weight.is_bias:
        if stacked:
            yield f"{name}_bias", held
            return
        for g, row in enumerate(held):
            for of, part in zip(
                weight.names(g, (), ".bias"),
                split_rows(row, count, weight.interleaved),
                strict=True,
            ):
                yield f"{of}.bias", part
        return
    if not isinstance(held, GroupedTensor):
        check_finite(weight.key, held)
    if stacked:
        whole = (
            weight_tensors(held)
            if isinstance(held, GroupedTensor)
            else quantize_weight(held, layout.fmt)
        )
        for suffix, t in layout.stored(whole).items():
            yield name + stacked_suffix(suffix), t
        return
    for g, parts in enumerate(_split(held, weight, layout.fmt)):
        for of, one in zip(weight.names(g, (), ".weight"), parts, strict=True):
            for suffix, t in layout.stored(one).items():
                yield of + suffix, t


def _split(held: Tensor, weight: ExpertWeight, fmt: Format) -> Iterator[list[WeightTensors]]:
    count = len(weight.projections)
    if isinstance(held, GroupedTensor):
        whole = weight_tensors(held)
        for g in range(weight.shape[0]):
            one = whole.expert(g)
            codes, scales = (
                split_rows(t, count, weight.interleaved) for t in (one.codes, one.scales)
            )
            yield [WeightTensors(c, s, one.amax) for c, s in zip(codes, scales, strict=True)]
        return
    for expert in held:
        amax = expert.abs().amax().float()[None] if fmt.global_scale is not None else None
        yield [
            quantize_weight(rows[None], fmt, amax).expert(0)
            for rows in split_rows(expert, count, weight.interleaved)
        ]
