"""Load a checkpoint: see ``grouped.checkpoint``.

In three passes, so that nothing is changed if something is wrong: ``plan`` compares names, shapes
and dtypes of the headers with the module, ``check_values`` reads scales, and then tensors are read
one after the other and written.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.records import check_kind

from ..ownership import RULES, UNFILLABLE, Owner, Ownership, refill, retire
from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor
from .config import check_config
from .extras import find_harmless, find_result_changing
from .files import Reader, progress
from .layouts import LAYOUTS, stacked_suffix
from .plain_tensors import join_rows, reconcile, stack_experts
from .plans import Plan, find_plain_tensor, find_weight
from .shards import (
    check_can_fill,
    check_can_quantize,
    fill,
    local_rows,
    make_parameter,
    raise_on_all_ranks,
    update_owner,
)
from .stored import Stored
from .weights import ExpertWeight, expert_weights, rename_path, state_dict_with_aliases


@dataclass
class Report:
    """Result of ``load``.

    Attributes:
        layouts: the layout of each weight that was quantized, by its name in the state dict.
        reconciled: by an expert's weight, the signal-to-noise ratio in dB of what had to be
            quantized again: gate and up had different second levels, or share 128x128
            blocks. Of a module that is sharded, experts of this rank.
        input_scales: static scales of activations, by name in the checkpoint; nothing reads
            them.
        ignored: other names in the checkpoint that do not change results: scales of a quantized
            KV cache and of attention, tables of rotary embeddings, layers that predict
            further tokens (MTP), second copies of tied weights, and factors of 1.
        zero_scales: names in the checkpoint of weights that are zeros by a scale of zero: of
            experts that no token was routed to in training, say.
        unexpected: other names in the checkpoint that the module does not have.
    """

    layouts: dict[str, str] = field(default_factory=dict)
    reconciled: dict[str, float] = field(default_factory=dict)
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    zero_scales: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@torch.no_grad()
def load(
    module: nn.Module,
    folder: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
) -> Report:
    """Load a checkpoint into ``module``.

    Experts' weights that the checkpoint has quantized replace the module's: GroupedTensors without
    a columnwise copy and without a gradient, of NVFP4 or FP8Block, as the files are. Their bytes
    are those of the files, except where ``Report.reconciled`` says so. An NVFP4 second level is
    kept as the amax that it was made of, so what it decodes by may differ in the last bit of fp32;
    ``save`` gives the file's again. Plain weights are copied into what the module has, others that
    are quantized, as attention is in some checkpoints, are decoded into it.

    Names, shapes, dtypes and scales are checked before anything is written: if there is an error,
    nothing is loaded.

    Parameters that FSDP2, ``ExpertParallel`` or ``distribute_tensor`` has sharded are loaded by
    each rank: it reads its experts only, before the first call of the module or after it. All ranks
    must call; if one has an error, all raise. Experts that are cut along other dimensions
    (``ExpertTensorParallel``) are loaded from plain weights. Make optimizers afterwards: one that
    has a parameter which was replaced, or a master of old values, raises at its next step.

    Args:
        module: a model of ``grouped.nn`` layers, or of transformers whose experts
            implementation is one of ``grouped.integrations.transformers``; on the device
            where it will run.
        folder: a folder of safetensors files, with an index or without.
        rename: regular expressions and what replaces them in the module's names, which gives
            those of the checkpoint: ``{"mlp": "block_sparse_moe"}``.
        strict: raise for tensors of the checkpoint that the module does not have.

    Raises:
        FileNotFoundError: the folder lacks files.
        KeyError: the module has what the checkpoint does not; or, if strict, the other way
            round.
        ValueError: a tensor of another shape or dtype, or of FP8 or integers without scales;
            scales that are NaN, infinite, negative, or zero over codes that are not; files
            that are damaged; tensors beside a weight that change its results, as AWQ's
            ``pre_quant_scale``; MXFP4 weights that are no exact NVFP4; or a parameter on
            the meta device, or one that has an owner which cannot take another; or a
            quantized weight that takes gradients, where the checkpoint has a quantized one.
    """
    check_kind(bool, strict=strict)
    check_kind(nn.Module, module=module)
    named = state_dict_with_aliases(module)
    tensors = [t for _, t in named]
    try:
        work = _prepare(module, named, Path(folder), rename, strict)
    except Exception:
        raise_on_all_ranks(tensors, has_error=True)  # Other ranks must not wait for this one.
        raise
    raise_on_all_ranks(tensors, has_error=False)
    return work.run()


class _Other(NamedTuple):
    """A tensor of the state dict that is no expert's, its names, and what it is loaded from."""

    keys: list[str]
    target: Tensor
    stored: Stored


class _Work(NamedTuple):
    """All that is loaded, checked."""

    plans: list[tuple[Plan, Owner | None]]
    others: list[_Other]
    tied: list[tuple[ExpertWeight, ExpertWeight]]
    report: Report

    def check_values(self) -> None:
        """Read scales, and raise ValueError for those that are wrong."""
        for stored, groups in self._parts():
            if stored.check_values(groups):
                self.report.zero_scales.append(stored.names[-1])

    def _parts(self) -> Iterator[tuple[Stored, range | None]]:
        for plan, _ in self.plans:
            groups = local_rows(plan.weight.parameter)
            yield from ((s, groups) for s in plan.select_groups(groups))
        for other in self.others:
            yield other.stored, None

    def run(self) -> Report:
        """Read and write everything."""
        for other in self.others:
            fill(other.target, other.stored.plain)
            refill([other.target], "checkpoint.load")
        for plan, owner in progress(self.plans, "experts"):
            if plan.layout is None:
                fill(plan.weight.parameter, functools.partial(_values, plan))
                refill([plan.weight.parameter], "checkpoint.load")
                continue
            retire([plan.weight.parameter], "checkpoint.load")
            _replace(plan, owner, self.report)
        for weight, first in self.tied:
            if first.key in self.report.layouts:
                weight.replace(first.parameter)
        return self.report


def _prepare(
    module: nn.Module,
    named: list[tuple[list[str], Tensor]],
    folder: Path,
    rename: Mapping[str, str] | None,
    strict: bool,
) -> _Work:
    """Check everything: names, owners, headers, then scales."""
    weights, first = list(expert_weights(module, rename)), dict[int, ExpertWeight]()
    pairs = [(weight, first.setdefault(id(weight.parameter), weight)) for weight in weights]
    ownership = Ownership(module)
    _check_can_fill(module, ownership, named, weights)
    files, missing, report = Reader(folder), list[str](), Report()
    check_config(folder)
    plans = [
        plan
        for weight in first.values()
        if (plan := find_weight(weight, files, missing)) is not None
    ]
    expert_keys = {weight.key for weight in weights}
    others, copies = list[_Other](), list[tuple[str, str]]()
    for keys, t in named:
        if keys[0] not in expert_keys:
            names = [rename_path(key, rename) for key in keys]
            stored, more = find_plain_tensor(names, t, files, missing)
            others.append(_Other(keys, t, stored))
            copies += [(stored.names[0], name) for name in more]
    used = _used([*(s for plan in plans for s in plan.stored), *(other.stored for other in others)])
    report.ignored = [name for _, name in copies]
    _sort_unexpected(module, files, used, report)
    if missing or (strict and report.unexpected):
        raise KeyError(_lacks(files, missing, report.unexpected))
    for plan in plans:
        plan.check_headers()
    for other in others:
        other.stored.check_headers(other.target.dtype)
    _check_copies(files, copies)
    _check_transposed(plans)
    owned = _check_owners(ownership, plans, weights)
    report.input_scales = {name: files[name] for name in report.input_scales}
    tied = [(weight, of) for weight, of in pairs if weight is not of]
    work = _Work(list(zip(plans, owned, strict=True)), others, tied, report)
    work.check_values()
    return work


def _check_can_fill(
    module: nn.Module,
    ownership: Ownership,
    named: list[tuple[list[str], Tensor]],
    weights: list[ExpertWeight],
) -> None:
    """Raise ValueError for parameters whose values are elsewhere."""
    holders = {
        id(p): (m, name)
        for m in module.modules()
        for name, p in m._parameters.items()
        if p is not None
    }
    targets = [
        (weight.key, (weight.owner, weight.attribute)) for weight in weights
    ]  # Also those that are computed.
    targets += [(keys[0], holders[id(t)]) for keys, t in named if id(t) in holders]
    for key, target in targets:
        owner = ownership.owner(*target)
        if owner is not None and owner.kind in UNFILLABLE:
            raise ValueError(f"checkpoint.load cannot fill {key}: {owner.rule}. {owner.advice}")
    for keys, t in named:
        if t.is_meta:
            raise ValueError(
                f"{keys[0]} is on the meta device: give the module storage first, as by to_empty(device=...)"
            )
        check_can_fill(keys[0], t)


def _check_owners(
    ownership: Ownership, plans: list[Plan], weights: list[ExpertWeight]
) -> list[Owner | None]:
    """Raise ValueError for owners that cannot take a quantized weight; returns the owner of each
    plan's weight.
    """
    replaced = {id(plan.weight.parameter) for plan in plans if plan.layout is not None}
    targets = [(w.owner, w.attribute) for w in weights if id(w.parameter) in replaced]
    ownership.check_replaceable(targets, "checkpoint.load", allow=("fsdp", "dtensor"))
    owners = [ownership.owner(plan.weight.owner, plan.weight.attribute, targets) for plan in plans]
    for plan, owner in zip(plans, owners, strict=True):
        if plan.layout is not None:
            _check_is_not_trained(plan.weight)
            if (owner is not None and owner.kind == "dtensor") and ownership.has_other_holder(
                plan.weight.owner, plan.weight.attribute, targets
            ):
                rule, advice = RULES["tied"]
                raise ValueError(
                    f"checkpoint.load cannot replace {plan.weight.key}: {rule}. {advice}"
                )
            check_can_quantize(plan.weight.key, plan.weight.parameter, plan.weight.shape, owner)
    return owners


def _check_is_not_trained(weight: ExpertWeight) -> None:
    """Raise ValueError for a quantized weight that is trained: what is loaded would take no
    gradient.
    """
    p = weight.parameter
    if p.requires_grad and isinstance(local_part(p), GroupedTensor):
        raise ValueError(
            f"{weight.key} is quantized and takes gradients, the checkpoint's weight would not: to train, load a plain "
            "checkpoint into a plain model, or the model's own state dict; to serve, call requires_grad_(False) first"
        )


def _check_transposed(plans: list[Plan]) -> None:
    """Raise ValueError for experts of which some weights only would be turned."""
    turned = {
        id(plan.weight.owner)
        for plan in plans
        if plan.layout is not None and plan.weight.transposed
    }
    for weight in (
        plan.weight for plan in plans if plan.layout is None and not plan.weight.is_bias
    ):
        if id(weight.owner) in turned:
            raise ValueError(
                f"{weight.key} is plain, other weights of these experts are quantized: all or none must be"
            )


def _used(stored: list[Stored]) -> set[str]:
    """Names that are loaded; raises ValueError if two tensors of the module would be the same one."""
    used, twice = set[str](), list[str]()
    for name in (name for s in stored for name in s.names):
        (twice if name in used else []).append(name)
        used.add(name)
    if twice:
        raise ValueError(
            f"several tensors of the module would be {_some(twice)}: rename them apart"
        )
    return used


def _sort_unexpected(module: nn.Module, files: Reader, used: set[str], report: Report) -> None:
    """Sort names that nothing takes: harmless ones, scales of activations, others; raise if one
    changes results.
    """
    names = [name for name in files if name not in used and name not in report.ignored]
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    ignored = set(
        find_harmless(names, used, patterns if isinstance(patterns, list | tuple | set) else ())
    )
    names = [name for name in names if name not in ignored]
    change, neutral = find_result_changing(names, used, files.__getitem__)
    if change:
        raise ValueError(
            f"{files.where(change[0])} changes the results of the weight beside it, and is not applied here"
            f"{f' ({len(change)} such tensors)' * (len(change) > 1)}: export the checkpoint without it, as with the "
            "factors of AWQ or SmoothQuant folded into the weights"
        )
    report.ignored += [*(name for name in files if name in ignored), *neutral]
    suffixes = [layout.input_scale for layout in LAYOUTS.values() if layout.input_scale] + [
        ".activation_scale"
    ]
    scales = tuple(suffixes + [stacked_suffix(suffix) for suffix in suffixes])
    harmless_factors = set(neutral)
    for name in names:
        if name.endswith(scales):
            report.input_scales[name] = torch.empty(0)
        elif name not in harmless_factors:
            report.unexpected.append(name)


def _lacks(files: Reader, missing: list[str], unexpected: list[str]) -> str:
    """Say what does not fit, and a way out that does."""
    text = f"{files.folder} lacks {_some(missing)} and has, beyond the module, {_some(unexpected)}"
    return f"{text}: {_hint(files, missing, unexpected)}"


def _hint(files: Reader, missing: list[str], unexpected: list[str]) -> str:
    """A way out that fits the names."""
    if not missing:
        return "strict=False leaves these out"
    if any(".lora_" in name for name in missing):
        return "the module has adapters of PEFT: load the checkpoint before get_peft_model"
    tails = {_tail(name) for name in unexpected}
    if any(_tail(name) in tails for name in missing):
        return "where modules have other names there, say rename={'mlp': 'block_sparse_moe'}"
    if files.config().get("tie_word_embeddings") and any("lm_head" in name for name in missing):
        return "config.json has tie_word_embeddings, so tie the head of the module to its embedding first"
    base = missing[0].rpartition(".")[0]
    neighbors = [name for name in files if base and name.startswith(f"{base}.")]
    if neighbors:
        return f"it has {_some(neighbors)}, which is none of the layouts {', '.join(LAYOUTS)}"
    return "the checkpoint is incomplete, or of a module with fewer layers or experts"


def _tail(name: str) -> str:
    """The end of a name that modules with other names have, too."""
    return ".".join(name.split(".")[-2:])


def _some(names: list[str]) -> str:
    """The first names of a list, for messages."""
    return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4) or "nothing"


def _check_copies(files: Reader, copies: list[tuple[str, str]]) -> None:
    """Raise ValueError unless tensors that the module ties are equal in the checkpoint."""
    for first, second in copies:
        same = files.header(first) == files.header(second)
        rows = files.shape(first)[0] if same and files.shape(first) else 0
        chunks = [slice(i, i + 4096) for i in range(0, rows, 4096)]
        if not same or not all(
            torch.equal(files.rows(first, c), files.rows(second, c)) for c in chunks
        ):
            raise ValueError(
                f"the module ties {first} and {second}, but they differ in {files.folder}: untie them in the module first"
            )


def _values(plan: Plan, groups: range | None) -> Tensor:
    """Plain values of these experts, as the parameter has them."""
    if plan.is_stacked:
        return plan.stored[0].plain(groups)
    weight = plan.weight
    matrices = [stored.plain() for stored in plan.select_groups(groups)]
    dense = torch.stack(
        [join_rows(of_one, weight.interleaved) for of_one in plan.split_by_expert(matrices)]
    )
    return dense.mT if weight.transposed and not weight.is_bias else dense


def _replace(plan: Plan, owner: Owner | None, report: Report) -> None:
    """Have the module hold the quantized weight of the checkpoint, of this rank's experts."""
    weight, layout = plan.weight, plan.layout
    assert layout is not None
    old, groups = weight.parameter, local_rows(weight.parameter)
    assert groups is not None
    device, fmt = local_part(old).device, layout.fmt
    # A rank without experts has none of the first one.
    read = groups or range(1)
    if plan.is_stacked:
        whole = plan.stored[0].parts(read, device)
    else:
        experts = []
        parts = [stored.parts(None, device) for stored in plan.select_groups(read)]
        for expert, of_one in zip(read, plan.split_by_expert(parts), strict=True):
            joined, noise = reconcile(of_one, fmt, weight.interleaved)
            experts.append(joined)
            if noise is not None and groups:
                report.reconciled[f"{weight.path}.{expert}".lstrip(".")] = noise
        whole = stack_experts(experts)
    quantized = GroupedTensor.from_parts(fmt, *whole, dtype=old.dtype)
    weight.replace(make_parameter(old, quantized if groups else quantized[:0], weight.shape))
    update_owner(owner)
    report.layouts[weight.key] = layout.name
