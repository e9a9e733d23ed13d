"""Load a checkpoint: see ``grouped.checkpoint``.

Loading takes three passes, so that an error leaves the module unchanged. The first compares names,
shapes and dtypes in the headers with the module. The second reads the scales. The third reads the
tensors one by one and writes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.records import check_kind

from ..ownership import RULES, UNFILLABLE, Owner, Ownership, refill, retire
from ..preparation import SOURCES
from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor
from .allocate import Allocator
from .config import check_config
from .extras import find_harmless, find_result_changing
from .files import Reader, progress
from .layouts import LAYOUTS, stacked_suffix
from .plans import Plan, find_plain_tensor, find_weight
from .products import check_products
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
        layouts: Layout of each quantized weight, by its name in the state dict.
        reconciled: Signal-to-noise ratio in dB of weights that had to be quantized again, by
            expert. Gate and up had different global scales, or share 128x128 blocks. A sharded
            module reports the experts of this rank.
        input_scales: Static scales of activations, by name in the checkpoint. Nothing uses them.
        ignored: Names in the checkpoint that do not change results. These are scales of a quantized
            KV cache and of attention, tables of rotary embeddings, multi-token prediction layers,
            second copies of tied weights, and factors of 1.
        zero_scales: Names of weights that are zero. Their scale in the checkpoint is zero, as for
            experts without tokens in training.
        unexpected: Further names in the checkpoint that the module does not have.
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
    device: torch.device | str | int | None = None,
) -> Report:
    """Load a checkpoint into ``module``.

    Expert weights that are quantized in the checkpoint replace those of the module. They become
    GroupedTensors in NVFP4 or FP8Block, without a columnwise copy and without gradients. They hold
    the bytes of the files, except for those in ``Report.reconciled``. The global scale of NVFP4 is
    stored as the amax from which it was computed, so the decoded global scale may differ in the
    last bit of fp32. ``save`` writes the scale of the file again. Plain weights are copied into the
    module's parameters. Other quantized weights, such as those of attention in some checkpoints,
    are decoded into the parameters.

    Names, shapes, dtypes and scales are checked before anything is written. If there is an error,
    nothing is loaded.

    For parameters that FSDP2, ``ExpertParallel`` or ``distribute_tensor`` has sharded, each rank
    reads its own experts only, before or after the first call of the module. All ranks must call
    ``load``. If one rank has an error, all raise. Experts that are sharded along other dimensions
    (``ExpertTensorParallel``) can be loaded from plain weights. Create optimizers after loading: an
    optimizer with a replaced parameter, or with a master of old values, raises at its next step.

    A model that does not fit in memory as plain weights can be built on the meta device and loaded
    with ``device``: quantized experts are read as they are, and no plain copy of them is allocated.
    All tensors outside of the state dict, such as the tables of rotary embeddings, must have their
    values already.

    Args:
        module: A model of ``grouped.nn`` layers, or a transformers model with an experts
            implementation of ``grouped.integrations.transformers``. It must be on the device where
            it will run, or, with ``device``, on the meta device.
        folder: A folder of safetensors files. An index is optional.
        rename: Regular expressions and their replacements, which turn names of the module into
            names of the checkpoint: ``{"mlp": "block_sparse_moe"}``.
        strict: True raises for tensors of the checkpoint that the module does not have.
        device: Device on which tensors of the meta device are allocated. Tied ones stay tied. None
            raises for them.

    Returns:
        A report of layouts, ignored tensors and weights that were quantized again.

    Raises:
        FileNotFoundError: The folder lacks files.
        KeyError: The checkpoint lacks a tensor of the module. If strict, also the reverse.
        ValueError: A file is damaged, or a tensor has another shape or dtype than the module, or is
            FP8 or integer without scales. Scales are NaN, infinite, negative, or zero above nonzero
            codes. An additional tensor changes the results of a weight, such as AWQ's
            ``pre_quant_scale``. MXFP4 weights have no exact NVFP4 equivalent. A tensor is on the
            meta device without ``device``, or although no checkpoint has it. The owner of a
            parameter does not allow a replacement. A parameter is quantized and requires gradients
            while the checkpoint has a quantized weight. The recipe or the experts implementation
            of the module does not multiply the quantized weights.
        cute_kernels.UnsupportedError: The device has no kernel for the quantized weights.
    """
    check_kind(bool, strict=strict)
    check_kind(nn.Module, module=module)
    named_tensors = state_dict_with_aliases(module)
    tensors = [t for _, t in named_tensors]
    try:
        work = _prepare(module, named_tensors, Path(folder), rename, strict, device)
    except Exception:
        raise_on_all_ranks(tensors, has_error=True)  # Other ranks must not wait for this one.
        raise
    raise_on_all_ranks(tensors, has_error=False)
    return work.run()


class _PlainTensor(NamedTuple):
    """A tensor of the state dict outside of experts: its names and its source."""

    keys: list[str]
    target: Tensor
    stored: Stored


class _CheckedLoad(NamedTuple):
    """Everything that is loaded, after all checks."""

    plans: list[tuple[Plan, Owner | None]]
    plain_tensors: list[_PlainTensor]
    tied: list[tuple[ExpertWeight, ExpertWeight]]
    report: Report
    allocator: Allocator
    module: nn.Module

    def check_values(self) -> None:
        """Read all scales, and raise ValueError for invalid ones."""
        for stored, groups in self._sources():
            if stored.check_values(groups):
                self.report.zero_scales.append(stored.names[-1])

    def _sources(self) -> Iterator[tuple[Stored, range | None]]:
        """Yield all stored tensors and the groups that this rank reads of them."""
        for plan, _ in self.plans:
            groups = local_rows(plan.weight.parameter)
            yield from ((s, groups) for s in plan.select_groups(groups))
        for tensor in self.plain_tensors:
            yield tensor.stored, None

    def run(self) -> Report:
        """Read and write everything."""
        for tensor in self.plain_tensors:
            target = self.allocator.allocate(tensor.target)
            fill(target, tensor.stored.read_plain)
            refill([target], "checkpoint.load")
        for plan, owner in progress(self.plans, "experts"):
            if plan.layout is None:
                target = self.allocator.allocate(plan.weight.parameter)
                fill(target, plan.read_plain)
                refill([target], "checkpoint.load")
                continue
            retire([plan.weight.parameter], "checkpoint.load")
            device = self.allocator.device_of(local_part(plan.weight.parameter))
            _replace(plan, owner, device, self.report)
        for weight, original in self.tied:
            if original.key in self.report.layouts:
                weight.replace(original.parameter)
        if self.report.layouts:
            for source in SOURCES:
                source.finish(self.module)
        return self.report


def _prepare(
    module: nn.Module,
    named_tensors: list[tuple[list[str], Tensor]],
    folder: Path,
    rename: Mapping[str, str] | None,
    strict: bool,
    device: torch.device | str | int | None,
) -> _CheckedLoad:
    """Check everything: names, owners, headers, then scales."""
    weights = list(expert_weights(module, rename))
    originals = dict[int, ExpertWeight]()  # By parameter: the first weight of each.
    pairs = [(weight, originals.setdefault(id(weight.parameter), weight)) for weight in weights]
    ownership = Ownership(module)
    _check_can_fill(module, ownership, named_tensors, weights)
    allocator = Allocator(module, {id(t) for _, t in named_tensors}, device)
    files, missing, other_names, report = Reader(folder), list[str](), list[str](), Report()
    check_config(folder)
    plans = [
        plan
        for weight in originals.values()
        if (plan := find_weight(weight, files, missing, other_names)) is not None
    ]
    expert_keys = {weight.key for weight in weights}
    plain_tensors, copies = list[_PlainTensor](), list[tuple[str, str]]()
    for keys, t in named_tensors:
        if keys[0] not in expert_keys:
            names = [rename_path(key, rename) for key in keys]
            stored, aliases = find_plain_tensor(names, t, files, missing)
            plain_tensors.append(_PlainTensor(keys, t, stored))
            copies += [(stored.names[0], name) for name in aliases]
    sources = [*(s for plan in plans for s in plan.stored), *(t.stored for t in plain_tensors)]
    used = _used_names(sources) | {*other_names}
    report.ignored = [name for _, name in copies]
    sort_unexpected(module, files, used, report)
    if missing or (strict and report.unexpected):
        raise KeyError(_mismatch_message(files, missing, other_names, report.unexpected))
    for plan in plans:
        plan.check_headers()
    for tensor in plain_tensors:
        tensor.stored.check_headers(tensor.target.dtype)
    _check_copies(files, copies)
    check_transposed(plans)
    owners = _check_owners(ownership, plans, weights)
    check_products(plans, allocator.device_of)
    report.input_scales = {name: files[name] for name in report.input_scales}
    tied = [(weight, original) for weight, original in pairs if weight is not original]
    pairs_of_plans = list(zip(plans, owners, strict=True))
    work = _CheckedLoad(pairs_of_plans, plain_tensors, tied, report, allocator, module)
    work.check_values()
    return work


def _check_can_fill(
    module: nn.Module,
    ownership: Ownership,
    named_tensors: list[tuple[list[str], Tensor]],
    weights: list[ExpertWeight],
) -> None:
    """Raise ValueError for parameters whose values are stored elsewhere."""
    modules = {
        id(p): (m, name)
        for m in module.modules()
        for name, p in m._parameters.items()
        if p is not None
    }
    # Weights may also be computed, by a parametrization.
    targets = [(weight.key, (weight.owner, weight.attribute)) for weight in weights]
    targets += [(keys[0], modules[id(t)]) for keys, t in named_tensors if id(t) in modules]
    for key, target in targets:
        owner = ownership.owner(*target)
        if owner is not None and owner.kind in UNFILLABLE:
            raise ValueError(f"checkpoint.load cannot fill {key}: {owner.rule}. {owner.advice}")
    for keys, t in named_tensors:
        check_can_fill(keys[0], t)


def _check_owners(
    ownership: Ownership, plans: list[Plan], weights: list[ExpertWeight]
) -> list[Owner | None]:
    """Return the owner of each plan's weight.

    Raises:
        ValueError: An owner does not allow a quantized weight.
    """
    replaced = {id(plan.weight.parameter) for plan in plans if plan.layout is not None}
    targets = [(w.owner, w.attribute) for w in weights if id(w.parameter) in replaced]
    ownership.check_replaceable(targets, "checkpoint.load", allow=("fsdp", "dtensor", "meta"))
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
    """Raise ValueError for a quantized weight that requires gradients.

    The loaded weight would not require them.
    """
    p = weight.parameter
    if p.requires_grad and isinstance(local_part(p), GroupedTensor):
        raise ValueError(
            f"{weight.key} is quantized and requires gradients, but the checkpoint's weight would "
            "not: to train, load a plain checkpoint into a plain model, or the model's own state "
            "dict; to serve, call requires_grad_(False) first"
        )


def check_transposed(plans: list[Plan]) -> None:
    """Raise ValueError for transposed experts with both plain and quantized weights."""
    transposed_owners = {
        id(plan.weight.owner)
        for plan in plans
        if plan.layout is not None and plan.weight.transposed
    }
    for weight in (
        plan.weight for plan in plans if plan.layout is None and not plan.weight.is_bias
    ):
        if id(weight.owner) in transposed_owners:
            raise ValueError(
                f"{weight.key} is plain, other weights of these experts are quantized: all or none "
                "must be"
            )


def _used_names(stored: list[Stored]) -> set[str]:
    """Return all names that are loaded.

    Raises:
        ValueError: Two tensors of the module would be loaded from one name.
    """
    used, repeated = set[str](), list[str]()
    for name in (name for s in stored for name in s.names):
        (repeated if name in used else []).append(name)
        used.add(name)
    if repeated:
        raise ValueError(
            f"several tensors of the module would be {_abbreviate(repeated)}: choose a rename that "
            "keeps them apart"
        )
    return used


def sort_unexpected(module: nn.Module, files: Reader, used: set[str], report: Report) -> None:
    """Sort unused names into the report: harmless ones, scales of activations, unexpected ones.

    Raises:
        ValueError: An unused tensor would change results.
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
            f"{files.describe(change[0])} changes the results of its weight, and is not applied "
            f"here{f' ({len(change)} such tensors)' * (len(change) > 1)}: export the checkpoint "
            "without it, for instance with the factors of AWQ or SmoothQuant folded into the "
            "weights"
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


def _mismatch_message(
    files: Reader, missing: list[str], other_names: list[str], unexpected: list[str]
) -> str:
    """Return a message with missing and unexpected names, and a remedy."""
    clauses = [f"lacks {_abbreviate(missing)}"] if missing else []
    clauses += [f"has, beyond the module, {_abbreviate(unexpected)}"] if unexpected else []
    remedy = _remedy(files, missing, other_names, unexpected)
    return f"{files.folder} {' and '.join(clauses)}: {remedy}"


def _remedy(
    files: Reader, missing: list[str], other_names: list[str], unexpected: list[str]
) -> str:
    """Return a remedy that fits the names."""
    incomplete = "the checkpoint is incomplete, or of a module with fewer layers or experts"
    if not missing:
        return "if the module should not have them, strict=False ignores the tensors"
    if other_names and not unexpected:
        return f"it has other tensors of these weights, so {incomplete}"
    if any(".lora_" in name for name in missing):
        return "the module has adapters of PEFT: load the checkpoint before get_peft_model"
    tails = {_last_parts(name) for name in unexpected}
    if any(_last_parts(name) in tails for name in missing):
        return "if modules have other names there, pass rename={'mlp': 'block_sparse_moe'}"
    if files.config().get("tie_word_embeddings") and any("lm_head" in name for name in missing):
        return (
            "config.json has tie_word_embeddings, so tie the head of the module to its embedding "
            "first"
        )
    base = missing[0].rpartition(".")[0]
    neighbors = [name for name in files if base and name.startswith(f"{base}.")]
    if neighbors:
        return f"it has {_abbreviate(neighbors)}, which is not a layout of {', '.join(LAYOUTS)}"
    return incomplete


def _last_parts(name: str) -> str:
    """Return the last two parts of a name, which other names of the module share."""
    return ".".join(name.split(".")[-2:])


def _abbreviate(names: list[str]) -> str:
    """Return the first names of a list, for messages."""
    return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4)


def _check_copies(files: Reader, copies: list[tuple[str, str]]) -> None:
    """Raise ValueError unless tensors that the module ties are equal in the checkpoint."""
    for name, alias in copies:
        same = files.header(name) == files.header(alias)
        rows = files.shape(name)[0] if same and files.shape(name) else 0
        chunks = [slice(i, i + 4096) for i in range(0, rows, 4096)]
        if not same or not all(
            torch.equal(files.rows(name, c), files.rows(alias, c)) for c in chunks
        ):
            raise ValueError(
                f"the module ties {name} and {alias}, but they differ in {files.folder}: untie "
                "them in the module first"
            )


def _replace(plan: Plan, owner: Owner | None, device: torch.device, report: Report) -> None:
    """Replace a parameter by the quantized weight of the checkpoint, for this rank's experts."""
    weight, layout = plan.weight, plan.layout
    assert layout is not None
    old, groups = weight.parameter, local_rows(weight.parameter)
    assert groups is not None
    # A rank without experts reads the first one, and takes zero groups of it.
    quantized, noise = plan.read_quantized(groups or range(1), device, old.dtype)
    if groups:
        report.reconciled |= noise
    weight.replace(make_parameter(old, quantized if groups else quantized[:0], weight.shape))
    update_owner(owner)
    report.layouts[weight.key] = layout.name
