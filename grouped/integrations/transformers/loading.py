"""Reads of quantized weights while ``from_pretrained`` loads a folder.

transformers maps each name in the files to a parameter, and asks a converter for its value. The
converter here reads the tensors of a quantized weight by ``grouped.checkpoint``, and ignores those
that transformers would read for it. Everything else is loaded by transformers.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import core_model_loading as hf

from cute_kernels.formats import Format

from ...checkpoint.config import check_config
from ...checkpoint.files import PLAIN_DTYPES, Reader
from ...checkpoint.layouts import LAYOUTS
from ...checkpoint.load import Report, check_transposed, sort_unexpected
from ...checkpoint.plans import Plan, find_weight
from ...checkpoint.stored import Stored
from ...checkpoint.weights import ALIASES, ExpertWeight, expert_weights
from ...functional.quantization import quantize
from ...tensor.grouped_tensor import GroupedTensor

#: Patterns of the converter: the tensor whose device and dtype it takes, and the others.
_PROBE, _REST = "grouped quantized weight", "grouped further tensor"
#: Name under which transformers sees tensors that do not change results.
IGNORED = "grouped ignored tensor"

_PROJECTIONS = "|".join(["gate_up_proj", *ALIASES, *ALIASES.values()])
#: Names of tensors of experts in a file, with one tensor per expert or one for all.
_EXPERTS = re.compile(rf"(?P<path>.+?)\.(?:\d+\.)?(?:{_PROJECTIONS})(?:[._]\w+)?")
#: Names under a path that transformers knows if the path is that of experts.
_SAMPLES = (".gate_up_proj", ".up_proj", ".down_proj", ".0.gate_proj.weight", ".0.w1.weight")


class Read(NamedTuple):
    """A parameter that the converter reads.

    Attributes:
        key: Its name in the model.
        names: Names of its tensors in the files. The first is the probe, which transformers reads
            too.
        value: Returns the parameter. Its argument is the probe on the device and in the dtype of
            the parameter.
    """

    key: str
    names: list[str]
    value: Callable[[Tensor], Tensor]


class Work(NamedTuple):
    """Everything that is read from a folder by ``grouped.checkpoint``.

    Attributes:
        reads: The parameters.
        formats: Formats of the quantized weights of experts, by key.
        joined: Plain weights of experts that transformers joins of tensors with other names, by
            key. They are quantized afterwards, a layer at a time.
        ignored: Names in the files that do not change results.
        report: Report of ``grouped.checkpoint.load``; reading completes it.
    """

    reads: list[Read]
    formats: dict[str, Format]
    joined: dict[str, ExpertWeight]
    ignored: list[str]
    report: Report


class Names:
    """The names of a folder as transformers maps them to parameters of a model.

    Args:
        model: The model, on the meta device.
        conversions: Its conversions in transformers. They are copied, since a use marks them.
    """

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        conversions = copy.deepcopy(conversions)
        self._renamings = [c for c in conversions if isinstance(c, hf.WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, hf.WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, model.state_dict()

    def key(self, name: str) -> tuple[str, bool]:
        """Return the key of a name, and True if transformers converts the tensor for it."""
        key, pattern = hf.rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if key not in self._state and name in self._state:
            return name, False
        return key, pattern is not None

    def renamed(self, name: str) -> str:
        """Return a name as a converter sees it."""
        return str(hf.rename_source_key(name, self._renamings, [])[0])

    def parameter(self, key: str) -> Tensor | None:
        """Return the parameter or buffer of a key, or None if there is none."""
        return self._state.get(key)


def find_work(
    model: nn.Module, folder: Path, names: Names, fmt: Format | None, only_plain: bool
) -> Work:
    """Check a folder, and find all weights that transformers does not read right.

    Args:
        model: The model, on the meta device.
        folder: The folder.
        names: Its names.
        fmt: Format for plain weights of experts. None keeps them plain.
        only_plain: True refuses weights of experts that are quantized in the folder.

    Raises:
        ValueError: As ``grouped.checkpoint.load``. Or ``only_plain`` refuses a weight.
        KeyError: The folder lacks tensors of experts.
    """
    check_config(folder)
    files = Reader(folder)
    joined = dict[str, ExpertWeight]()
    plans = list(_plans(model, files, names, joined))
    if fmt is None:
        check_transposed(plans)
    quantized = next((p for p in plans if p.layout is not None), None)
    if only_plain and quantized is not None:
        raise ValueError(
            f"{quantized.weight.key} is quantized already in {folder}, so GroupedConfig(weight=...)"
            " cannot choose its format: pass GroupedConfig()"
        )
    report = Report()
    reads = [_read_of(plan, fmt, report) for plan in plans]
    used = {name for read in reads for name in read.names}
    reads += _matrices(files, names, used, {plan.weight.key for plan in plans})
    used = {name for read in reads for name in read.names}
    used |= {name for name in files if name not in used and _is_plain(files, names, name)}
    sort_unexpected(model, files, used, report)
    for plan in plans:
        plan.check_headers()
        _check_values(plan.stored, report)
    formats = {
        plan.weight.key: plan.layout.fmt if plan.layout is not None else fmt
        for plan in plans
        if not plan.weight.is_bias
    }
    formats |= dict.fromkeys(joined, fmt)
    return Work(
        reads,
        {key: target for key, target in formats.items() if target is not None},
        joined,
        [*report.ignored, *report.input_scales],
        report,
    )


def _plans(
    model: nn.Module, files: Reader, names: Names, joined: dict[str, ExpertWeight]
) -> Iterator[Plan]:
    """Yield the plan of each weight and bias of experts, or add the weight to ``joined``.

    Raises:
        KeyError: The folder lacks tensors of one.
    """
    weights = list(expert_weights(model))
    paths = _paths(weights, files, names)
    reached = None
    for weight in weights:
        lacking: list[str] = []
        named = weight._replace(path=paths.get(weight.path, weight.path))
        plan = find_weight(named, files, lacking, [])
        if plan is not None:
            yield plan
            continue
        reached = {names.key(name)[0] for name in files} if reached is None else reached
        is_incomplete = weight.path in paths and not weight.is_bias
        if is_incomplete or weight.key not in reached:
            raise KeyError(
                f"{files.folder} lacks {lacking[0]}, for {weight.key} ({len(lacking)} such tensors)"
            )
        if not weight.is_bias:
            joined[weight.key] = weight


def _paths(weights: list[ExpertWeight], files: Reader, names: Names) -> dict[str, str]:
    """Return the path of experts in the files by their path in the model."""
    keys, paths = {weight.key: weight.path for weight in weights}, dict[str, str]()
    matches = (_EXPERTS.fullmatch(name) for name in files)
    for path in dict.fromkeys(match["path"] for match in matches if match):
        key = next((key for s in _SAMPLES if (key := names.key(path + s)[0]) in keys), None)
        if key is not None:
            paths.setdefault(keys[key], path)
    return paths


def _read_of(plan: Plan, fmt: Format | None, report: Report) -> Read:
    """Return the read of a weight or bias of experts."""
    weight, every = plan.weight, [name for stored in plan.stored for name in stored.names]
    probe = plan.stored[0].names[-1]  # The scale, or the one tensor of a plain weight.

    def quantized(probe: Tensor) -> Tensor:
        """Read a weight that is quantized in the files."""
        assert plan.layout is not None
        groups = range(weight.shape[0])
        value, noise = plan.read_quantized(groups, probe.device, probe.dtype)
        report.layouts[weight.key] = plan.layout.name
        report.reconciled.update(noise)
        return _make_parameter(weight, value)

    def plain(probe: Tensor) -> Tensor:
        """Read a plain weight or bias. transformers has read it already if it is one tensor."""
        return probe if plan.is_stacked else plan.read_plain().to(probe.device, probe.dtype)

    def encoded(probe: Tensor) -> Tensor:
        """Quantize a plain weight, expert by expert."""
        assert fmt is not None
        if plan.is_stacked:
            return quantize_experts(weight, probe.split(1), fmt)
        experts = (plan.read_plain(range(g, g + 1)) for g in range(weight.shape[0]))
        return quantize_experts(weight, (e.to(probe.device, probe.dtype) for e in experts), fmt)

    if plan.layout is not None:
        value = quantized
    else:
        value = plain if weight.is_bias or fmt is None else encoded
    return Read(weight.key, [probe, *(name for name in every if name != probe)], value)


def quantize_experts(weight: ExpertWeight, experts: Iterable[Tensor], fmt: Format) -> nn.Parameter:
    """Return the quantized parameter of a weight.

    Args:
        weight: The weight.
        experts: (1, N, K) of each expert, or (1, K, N) if the weight is transposed.
        fmt: Format of the parameter.
    """
    rows = (expert.mT if weight.transposed else expert for expert in experts)
    return _make_parameter(weight, torch.cat([quantize(w.contiguous(), fmt) for w in rows]))  # type: ignore[arg-type, misc]


def _make_parameter(weight: ExpertWeight, value: GroupedTensor) -> nn.Parameter:
    """Return the parameter for a quantized weight (G, N, K), and tell the experts its order."""
    if weight.transposed:
        weight.owner.is_transposed = False  # type: ignore[assignment]
    return nn.Parameter(value, requires_grad=False)


def _matrices(files: Reader, names: Names, used: set[str], expert_keys: set[str]) -> Iterator[Read]:
    """Yield the reads of quantized matrices outside of the experts, which are decoded.

    Raises:
        ValueError: One has no parameter of its own, or its tensors are not as in the layout.
    """
    single = [layout for layout in LAYOUTS.values() if layout.suffixes[0].startswith(".")]
    matrix_names = set[str]()
    for name in (n for n in files if n not in used):
        for layout in single:
            base = name.removesuffix(layout.suffixes[0])
            tensors = [base + suffix for suffix in layout.suffixes]
            is_complete = base != name and all(t in files for t in tensors)
            if not is_complete or name in matrix_names:
                continue
            key, is_converted = names.key(f"{base}.weight")
            target = names.parameter(key)
            if target is None:
                continue  # transformers reports it, as any tensor that the model does not have.
            if is_converted or key in expert_keys:
                raise ValueError(
                    f"{name} is quantized (layout {layout.name}), and transformers joins it with "
                    f"other tensors to {key}: GroupedConfig does not read this"
                )
            stored = Stored(files, layout, tensors, tuple(target.shape))
            stored.check_headers(target.dtype)
            stored.check_values()
            matrix_names |= set(tensors)
            yield Read(key, tensors[::-1], _decoding(stored))


def _decoding(stored: Stored) -> Callable[[Tensor], Tensor]:
    """Return the function that reads and decodes a matrix."""

    def value(probe: Tensor) -> Tensor:
        assert stored.layout is not None
        tensors = stored.read_quantized(None, probe.device)
        return tensors.decoded(stored.layout.fmt).to(probe.dtype)

    return value


def _is_plain(files: Reader, names: Names, name: str) -> bool:
    """Return True if transformers reads a tensor for a parameter.

    Raises:
        ValueError: It is FP8 or integer, without the scales of a layout, for a floating parameter.
    """
    key, is_converted = names.key(name)
    target = names.parameter(key)
    if target is None:
        return is_converted
    dtype = files.header(name).dtype
    if target.is_floating_point() and dtype not in PLAIN_DTYPES:
        raise ValueError(
            f"{files.describe(name)} is {dtype} without the scales of a layout "
            f"({', '.join(LAYOUTS)}), for {key} of {target.dtype}"
        )
    return True


def _check_values(every: list[Stored], report: Report) -> None:
    """Check all scales of a weight."""
    for stored in every:
        if stored.check_values():
            report.zero_scales.append(stored.names[-1])


class QuantizedReads(hf.WeightConverter):  # type: ignore[misc]
    """Converter that reads the parameters of ``Work`` when transformers comes to them.

    Args:
        reads: Reads by key.
        targets: Key and pattern of each tensor that belongs to a read, by its name after
            transformers' renamings.
        ignored: Names of tensors that are ignored, after these renamings.
    """

    def __init__(
        self, reads: dict[str, Read], targets: dict[str, tuple[str, str]], ignored: set[str]
    ) -> None:
        super().__init__([_PROBE, _REST], [_PROBE], [_Unused()])
        self._reads, self._targets, self._ignored = reads, targets, ignored

    @classmethod
    def from_work(cls, work: Work, names: Names) -> "QuantizedReads":
        """Return the converter of a folder."""
        targets = {
            names.renamed(name): (read.key, _REST if i else _PROBE)
            for read in work.reads
            for i, name in enumerate(read.names)
        }
        ignored = {names.renamed(name) for name in work.ignored}
        return cls({read.key: read for read in work.reads}, targets, ignored)

    def __deepcopy__(self, memo: Any) -> "QuantizedReads":
        # transformers copies a converter for each tensor.
        return type(self)(self._reads, self._targets, self._ignored)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the key of a name and its pattern, as transformers asks for them."""
        unused = (IGNORED if source_key in self._ignored else source_key, None)
        return self._targets.get(source_key, unused)

    def convert(self, layer_name: str, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """Return the parameter of a key by the key. Only the probe is read by transformers."""
        (pending,) = self.collected_tensors[_PROBE]
        self.collected_tensors.clear()
        probe = pending() if callable(pending) else pending.result()
        return {layer_name: self._reads[layer_name].value(probe)}


class QuantizeJoined(hf.ConversionOps):  # type: ignore[misc]
    """Operation after those of transformers: quantize the weights ``Work.joined``."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def convert(self, input_dict: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """Return the parameters of the plain weights."""
        return {key: self._quantize(key, value) for key, value in input_dict.items()}

    def _quantize(self, key: str, value: Any) -> nn.Parameter:
        """Return the parameter of one weight."""
        weight = self._work.joined[key]
        plain = value[0] if isinstance(value, list) else value
        dtype = weight.parameter.dtype
        return quantize_experts(weight, plain.to(dtype).split(1), self._work.formats[key])


class _Unused(hf.ConversionOps):  # type: ignore[misc]
    """Operation of a converter that needs one, but overrides ``convert``."""

    def convert(self, input_dict: Any, *arguments: Any, **options: Any) -> Any:
        """Return the tensors."""
        return input_dict
