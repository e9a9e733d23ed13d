"""Load a checkpoint: see ``grouped.checkpoint``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels.formats.base import FP8_ELEMENTS
from grouped.checkpoint.files import Reader, progress
from grouped.checkpoint.layouts import LAYOUTS, Layout, stacked_suffix
from grouped.checkpoint.parts import joined_rows, reconciled, stacked
from grouped.checkpoint.weights import ExpertWeight, expert_weights, renamed, state_of
from grouped.tensor import GroupedTensor

if TYPE_CHECKING:
  from collections.abc import Iterator, Mapping
  from pathlib import Path

T = TypeVar("T")


@dataclasses.dataclass
class Report:
  """What ``load`` found.

  Attributes:
    layouts: the layout of each weight that was quantized, by its name in the state dict.
    reconciled: by an expert's weight, the signal-to-noise ratio in dB of what had to be quantized
      again: gate and up had different second levels, or share 128x128 blocks.
    input_scales: static scales of activations, by name in the checkpoint; nothing reads them.
    unexpected: names in the checkpoint that the module does not have.
  """

  layouts: dict[str, str] = dataclasses.field(default_factory=dict)
  reconciled: dict[str, float] = dataclasses.field(default_factory=dict)
  input_scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)
  unexpected: list[str] = dataclasses.field(default_factory=list)


@torch.no_grad()
def load(
  module: nn.Module, folder: str | Path, *, rename: Mapping[str, str] | None = None, strict: bool = True
) -> Report:
  """Load a checkpoint into ``module``.

  Experts' weights that the checkpoint has quantized replace the module's: GroupedTensors without
  a columnwise copy and without a gradient, of NVFP4 or FP8Block, as the files are. Their bytes are
  those of the files, except where ``Report.reconciled`` says so. An NVFP4 second level is kept as
  the amax that it was made of, so what it decodes by may differ in the last bit of fp32; ``save``
  gives the file's again. Plain weights are copied into what the module has, others that are
  quantized, as attention is in some checkpoints, are decoded into it.

  Args:
    module: a model of ``grouped.nn`` layers, or of transformers whose experts implementation is
      one of ``grouped.integrations.transformers``; on the device where it will run.
    folder: a folder of safetensors files, with an index or without.
    rename: regular expressions and what replaces them in the module's names, which gives those of
      the checkpoint: ``{"mlp": "block_sparse_moe"}``.
    strict: raise for tensors of the checkpoint that the module does not have.

  Raises:
    FileNotFoundError: the folder lacks files.
    KeyError: the module has what the checkpoint does not; or, if strict, the other way round.
      Nothing is loaded then.
    ValueError: a tensor of another shape, of FP8 without scales, or on the meta device; or MXFP4
      weights that are no exact NVFP4.
  """
  files, report = Reader(folder), Report()
  plans, used = [], set()
  missing: list[str] = []
  weights = list(expert_weights(module, rename))
  for weight in weights:
    plan = _plan(weight, files)
    if plan is None:
      missing.append(weight.names(0, files, ".weight")[0] + (".bias" if weight.is_bias else ".weight"))
      continue
    plans.append((weight, *plan))
    used |= {name for names in plan[1] for name in names}
  of_experts = {weight.key for weight in weights}
  state = state_of(module)
  for key, t in state.items():
    if t.is_meta:
      raise ValueError(f"{key} is on the meta device: give the module storage first, as by to_empty(device=...)")
  others = {renamed(key, rename): t for key, t in state.items() if key not in of_experts}
  sources = {name: _source(name, files) for name in others}
  missing += [name for name, (_, names) in sources.items() if names[0] not in files]
  used |= {name for _, names in sources.values() for name in names}
  report.unexpected = [name for name in files if name not in used]
  scales = tuple(layout.input_scale for layout in LAYOUTS.values() if layout.input_scale)
  for name in [n for n in report.unexpected if n.endswith(scales)]:
    report.unexpected.remove(name)
    report.input_scales[name] = files[name]
  if missing or (strict and report.unexpected):
    raise KeyError(f"{files.folder} lacks {_some(missing)} and has, beyond the module, {_some(report.unexpected)}")
  for name, t in others.items():
    found = _read(*sources[name], files)
    _check_shape(name, tuple(found.shape), tuple(t.shape))
    t.copy_(found)
  for weight, layout, names in progress(plans, "experts"):
    _load_weight(weight, layout, names, files, report)
  return report


def _source(name: str, files: Reader) -> tuple[Layout | None, list[str]]:
  """The layout of a tensor that is no expert's, None if plain, and the names that it consists of."""
  base = name.removesuffix(".weight")
  for layout in LAYOUTS.values() if base != name else ():
    names = [base + suffix for suffix in layout.suffixes]
    if all(n in files for n in names):
      return layout, names
  return None, [name]


def _read(layout: Layout | None, names: list[str], files: Reader) -> Tensor:
  tensors = [files[name] for name in names]
  if layout is not None:
    return layout.parts(*tensors).decoded(layout.fmt)
  if tensors[0].dtype in FP8_ELEMENTS:
    raise ValueError(f"{names[0]} is {tensors[0].dtype} without the scales of a layout: {', '.join(LAYOUTS)}")
  return tensors[0]


def _some(names: list[str]) -> str:
  return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4) or "nothing"  # noqa: PLR2004


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
  if found != wanted:
    raise ValueError(f"{name} must have the shape {wanted}, the checkpoint has {found}")


def _plan(weight: ExpertWeight, files: Reader) -> tuple[Layout | None, list[list[str]]] | None:
  """The layout of a weight, None if plain, and the names of its tensors: of each projection of each expert.

  Or of all experts at once, if those are one tensor.
  """
  groups = weight.shape[0]
  plain = (".bias",) if weight.is_bias else (".weight",)
  quantized = [] if weight.is_bias else [(layout, layout.suffixes) for layout in LAYOUTS.values()]
  for layout, suffixes in [*quantized, (None, plain)]:
    stacked = [weight.path + weight.stacked + stacked_suffix(s) for s in suffixes]
    if all(name in files for name in stacked):
      return layout, [stacked]
    names = [[n + s for s in suffixes] for g in range(groups) for n in weight.names(g, files, suffixes[0])]
    if all(name in files for name in names[0]):
      missing = [name for of_one in names for name in of_one if name not in files]
      return None if missing else (layout, names)
  return None


def _load_weight(
  weight: ExpertWeight, layout: Layout | None, names: list[list[str]], files: Reader, report: Report
) -> None:
  count = len(weight.projections)
  is_stacked = len(names) == 1 and count * weight.shape[0] > 1
  if layout is None:
    if is_stacked:
      _check_shape(names[0][0], files.shape(names[0][0]), tuple(weight.parameter.shape))
      weight.parameter.copy_(files[names[0][0]])
      return
    found = [files[name] for (name,) in names]
    dense = torch.stack([joined_rows(of_one, weight.interleaved) for of_one in _by_expert(found, count)])
    _check_shape(names[0][0], tuple(dense.shape), weight.shape)
    weight.linear.copy_(dense)
    return
  device, fmt = weight.parameter.device, layout.fmt
  parts = [layout.parts(*(files[name].to(device) for name in of_one)) for of_one in names]
  whole = parts[0]
  if not is_stacked:
    experts = []
    for expert, of_one in enumerate(_by_expert(parts, count)):
      joined, noise = reconciled(of_one, fmt, weight.interleaved)
      experts.append(joined)
      if noise is not None:
        report.reconciled[f"{weight.path}.{expert}".lstrip(".")] = noise
    whole = stacked(experts)
  *rows, columns = weight.shape
  _check_shape(names[0][0], tuple(whole.codes.shape), (*rows, fmt.element.width(columns)))
  weight.replace(GroupedTensor.from_parts(fmt, *whole, dtype=weight.parameter.dtype))
  report.layouts[weight.key] = layout.name


def _by_expert(items: list[T], count: int) -> Iterator[list[T]]:
  return (items[i : i + count] for i in range(0, len(items), count))
