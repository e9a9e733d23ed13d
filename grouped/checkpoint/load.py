"""Load a checkpoint: see ``grouped.checkpoint``."""

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels.records import check_kind

from ..tensor import GroupedTensor
from .config import check_config
from .files import Reader, progress
from .layouts import LAYOUTS, Layout, stacked_suffix
from .parts import joined_rows, reconciled, stacked
from .weights import ExpertWeight, expert_weights, renamed, state_of

T = TypeVar("T")


@dataclass
class Report:
	"""What ``load`` found.

	Attributes:
		layouts: the layout of each weight that was quantized, by its name in the state dict.
		reconciled: by an expert's weight, the signal-to-noise ratio in dB of what had to be quantized
			again: gate and up had different second levels, or share 128x128 blocks.
		input_scales: static scales of activations, by name in the checkpoint; nothing reads them.
		unexpected: names in the checkpoint that the module does not have.
	"""

	layouts: dict[str, str] = field(default_factory=dict)
	reconciled: dict[str, float] = field(default_factory=dict)
	input_scales: dict[str, Tensor] = field(default_factory=dict)
	unexpected: list[str] = field(default_factory=list)


@torch.no_grad()
def load(
	module: nn.Module, folder: str | Path, *, rename: Mapping[str, str] | None = None, strict: bool = True
) -> Report:
	"""Load a checkpoint into ``module``.

	Experts' weights that the checkpoint has quantized replace the module's: GroupedTensors without a columnwise copy and
	without a gradient, of NVFP4 or FP8Block, as the files are. Their bytes are those of the files, except where
	``Report.reconciled`` says so. An NVFP4 second level is kept as the amax that it was made of, so what it decodes by
	may differ in the last bit of fp32; ``save`` gives the file's again. Plain weights are copied into what the module
	has, others that are quantized, as attention is in some checkpoints, are decoded into it.

	Args:
		module: a model of ``grouped.nn`` layers, or of transformers whose experts implementation is
			one of ``grouped.integrations.transformers``; on the device where it will run.
		folder: a folder of safetensors files, with an index or without.
		rename: regular expressions and what replaces them in the module's names, which gives those of
			the checkpoint: ``{"mlp": "block_sparse_moe"}``.
		strict: raise for tensors of the checkpoint that the module does not have.

	Raises:
		FileNotFoundError: the folder lacks files.
		KeyError: the module has what the checkpoint does not; or, if strict, the other way round. Nothing is loaded then.
		ValueError: a tensor of another shape, of FP8 or integers without scales, or on the meta
			device; files that are damaged; or MXFP4 weights that are no exact NVFP4.
	"""
	check_kind(bool, strict=strict)
	files, report = Reader(folder), Report()
	check_config(folder)
	missing = list[str]()
	weights, first = list(expert_weights(module, rename)), dict[int, ExpertWeight]()
	tied = [(weight, first.setdefault(id(weight.parameter), weight)) for weight in weights]
	plans = [plan for weight in first.values() if (plan := _plan(weight, files, missing))]
	of_experts = {weight.key for weight in weights}
	state = state_of(module)
	for key, t in state.items():
		if t.is_meta:
			raise ValueError(f"{key} is on the meta device: give the module storage first, as by to_empty(device=...)")
	others = [(renamed(key, rename), t) for key, t in state.items() if key not in of_experts]
	sources = [_source(name, files) for name, _ in others]
	missing += [names[0] for _, names in sources if names[0] not in files]
	used = collections.Counter(
		[name for plan in plans for names in plan.names for name in names]
		+ [name for _, names in sources for name in names]
	)
	twice = [name for name, count in used.items() if count > 1]
	if twice:
		raise ValueError(f"several tensors of the module would be {_some(twice)}: rename them apart")
	report.unexpected = [name for name in files if name not in used]
	scales = tuple(layout.input_scale for layout in LAYOUTS.values() if layout.input_scale)
	for name in [n for n in report.unexpected if n.endswith(scales)]:
		report.unexpected.remove(name)
		report.input_scales[name] = files[name]
	if missing or (strict and report.unexpected):
		raise KeyError(
			f"{files.folder} lacks {_some(missing)} and has, beyond the module, {_some(report.unexpected)}: where modules "
			"have other names there, say rename={'mlp': 'block_sparse_moe'}"
		)
	turned = {id(plan.weight.owner) for plan in plans if plan.layout is not None and plan.weight.transposed}
	for weight in (plan.weight for plan in plans if plan.layout is None and not plan.weight.is_bias):
		if id(weight.owner) in turned:
			raise ValueError(f"{weight.key} is plain, other weights of these experts are quantized: all or none must be")
	for (name, t), source in zip(others, sources, strict=True):
		found = _read(*source, files, t)
		_check_shape(name, tuple(found.shape), tuple(t.shape))
		t.copy_(found)
	for plan in progress(plans, "experts"):
		_load_weight(plan, files, report)
	for weight, of in tied:
		if weight is not of and of.key in report.layouts:
			weight.replace(of.parameter)
	return report


def _source(name: str, files: Reader) -> tuple[Layout | None, list[str]]:
	"""The layout of a tensor that is no expert's, None if plain, and the names that it consists of."""
	base = name.removesuffix(".weight")
	for layout in LAYOUTS.values() if base != name else ():
		names = [base + suffix for suffix in layout.suffixes]
		if all(n in files for n in names):
			return layout, names
	return None, [name]


def _read(layout: Layout | None, names: list[str], files: Reader, target: Tensor) -> Tensor:
	tensors = [files[name] for name in names]
	if layout is not None:
		return layout.parts(*tensors).decoded(layout.fmt)
	(found,) = tensors
	if found.is_floating_point() != target.is_floating_point() or (found.is_floating_point() and found.itemsize == 1):
		raise ValueError(
			f"{names[0]} is {found.dtype} without the scales of a layout ({', '.join(LAYOUTS)}), for {target.dtype}"
		)
	return found


def _some(names: list[str]) -> str:
	return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4) or "nothing"


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
	if found != wanted:
		raise ValueError(f"{name} must have the shape {wanted}, the checkpoint has {found}")


class _Plan(NamedTuple):
	"""A weight, its layout, None if plain, and the names of its tensors.

	Those of each projection of each expert; if ``stacked``, of all at once.
	"""

	weight: ExpertWeight
	layout: Layout | None
	names: list[list[str]]
	stacked: bool = False


def _plan(weight: ExpertWeight, files: Reader, missing: list[str]) -> _Plan | None:
	groups = weight.shape[0]
	plain = (".bias",) if weight.is_bias else (".weight",)
	quantized = [] if weight.is_bias else [(layout, layout.suffixes) for layout in LAYOUTS.values()]
	for layout, suffixes in [*quantized, (None, plain)]:
		stacked = [weight.path + weight.stacked + stacked_suffix(s) for s in suffixes]
		if all(name in files for name in stacked):
			return _Plan(weight, layout, [stacked], True)
		names = [[n + s for s in suffixes] for g in range(groups) for n in weight.names(g, files, suffixes[0])]
		if any(name in files for of_one in names for name in of_one[-1:]):
			lost = [name for of_one in names for name in of_one if name not in files]
			missing += lost
			return None if lost else _checked(_Plan(weight, layout, names), files)
	missing.append(weight.names(0, files, plain[0])[0] + plain[0])
	return None


def _checked(plan: _Plan, files: Reader) -> _Plan:
	"""``plan``, unless experts differ: joined, what is wrong of one would go unnoticed."""
	first, *others = plan.names
	for name, like in ((name, like) for of_one in others for name, like in zip(of_one[:2], first, strict=False)):
		found, wanted = files.facts(name), files.facts(like)
		if found[0] != wanted[0] or (plan.layout is not None and found[1] != wanted[1]):
			raise ValueError(f"{name} is {found[1]} of shape {found[0]}, but {like} is {wanted[1]} of shape {wanted[0]}")
	return plan


def _load_weight(plan: _Plan, files: Reader, report: Report) -> None:
	weight, layout, names, is_stacked = plan
	count = len(weight.projections)
	if layout is None:
		if is_stacked:
			_check_shape(names[0][0], files.shape(names[0][0]), tuple(weight.parameter.shape))
			weight.parameter.copy_(_read(None, names[0], files, weight.parameter))
			return
		found = [_read(None, of_one, files, weight.parameter) for of_one in names]
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
	made = GroupedTensor.from_parts(fmt, *whole, dtype=weight.parameter.dtype)
	weight.replace(nn.Parameter(made, requires_grad=False))
	report.layouts[weight.key] = layout.name


def _by_expert(items: list[T], count: int) -> Iterator[list[T]]:
	return (items[i : i + count] for i in range(0, len(items), count))
