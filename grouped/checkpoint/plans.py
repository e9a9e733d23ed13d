"""Plans of loading: the tensors of a checkpoint for each parameter of a module."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..tensor.grouped_tensor import GroupedTensor
from .files import Reader
from .layouts import LAYOUTS, Layout, stacked_suffix
from .plain_tensors import join_rows, reconcile, stack_experts
from .stored import Stored
from .weights import ExpertWeight

T = TypeVar("T")


class Plan(NamedTuple):
    """A weight or bias of experts, and the tensors from which it is loaded.

    Attributes:
        weight: The parameter.
        layout: The layout in the checkpoint. None for a plain weight.
        stored: Tensors of each projection of each expert, in order, or one item for all experts.
        is_stacked: True if ``stored`` is one item for all experts.
    """

    weight: ExpertWeight
    layout: Layout | None
    stored: list[Stored]
    is_stacked: bool

    def select_groups(self, groups: range | None) -> list[Stored]:
        """Return the tensors of these experts, or all for None."""
        if self.is_stacked or groups is None:
            return self.stored
        count = len(self.weight.projections)
        return self.stored[groups.start * count : groups.stop * count]

    def split_by_expert(self, items: list[T]) -> Iterator[list[T]]:
        """Split a list with an item per projection into the items of each expert."""
        count = len(self.weight.projections)
        return (items[i : i + count] for i in range(0, len(items), count))

    def check_headers(self) -> None:
        """Check shapes and dtypes of all experts.

        Raises:
            ValueError: They do not match the layout or the module, or experts differ.
        """
        reference_name, files = self.stored[0].names[0], self.stored[0].files
        reference = files.header(reference_name)
        for name in (s.names[0] for s in self.stored[1:]):
            header = files.header(name)
            if header.shape != reference.shape or (
                self.layout is not None and header.dtype != reference.dtype
            ):
                raise ValueError(
                    f"{name} is {header}, but {reference_name} is {reference} "
                    f"(in {files.path(name)})"
                )
        note = "" if self.is_stacked else self._joined_shape_note(reference.shape)
        for stored in self.stored:
            stored.check_headers(self.weight.parameter.dtype, note)

    def read_plain(self, groups: range | None = None) -> Tensor:
        """Read the plain values of these experts, or of all, in the layout of the parameter."""
        if self.is_stacked:
            return self.stored[0].read_plain(groups)
        weight = self.weight
        matrices = [stored.read_plain() for stored in self.select_groups(groups)]
        dense = torch.stack(
            [join_rows(rows, weight.interleaved) for rows in self.split_by_expert(matrices)]
        )
        return dense.mT if weight.transposed and not weight.is_bias else dense

    def read_quantized(
        self, groups: range, device: torch.device, dtype: torch.dtype
    ) -> tuple[GroupedTensor, dict[str, float]]:
        """Read a quantized weight.

        Args:
            groups: Experts to read.
            device: Device of the result.
            dtype: Dtype of the result.

        Returns:
            The weight (G, N, K), and the signal-to-noise ratio in dB of the experts that had to be
            quantized again, by name.
        """
        weight, layout = self.weight, self.layout
        assert layout is not None
        if self.is_stacked:
            whole = self.stored[0].read_quantized(groups, device)
            return GroupedTensor.from_parts(layout.fmt, *whole, dtype=dtype), {}
        experts, noises = [], {}
        tensors = [stored.read_quantized(None, device) for stored in self.select_groups(groups)]
        for expert, projections in zip(groups, self.split_by_expert(tensors), strict=True):
            joined, noise = reconcile(projections, layout.fmt, weight.interleaved)
            experts.append(joined)
            if noise is not None:
                noises[f"{weight.path}.{expert}".lstrip(".")] = noise
        whole = stack_experts(experts)
        return GroupedTensor.from_parts(layout.fmt, *whole, dtype=dtype), noises

    def _joined_shape_note(self, shape: tuple[int, ...]) -> str:
        """Return a note on the shape of the parameter, if one projection has ``shape``."""
        groups, rows, *columns = self.weight.shape
        if self.layout is not None:
            columns = [self.layout.fmt.element.width(*columns)]
        whole = (groups, shape[0] * len(self.weight.projections), *shape[1:]) if shape else ()
        return (
            f"; together {self.weight.key} must have the shape {(groups, rows, *columns)}, "
            f"the checkpoint has {whole}"
        )


def find_weight(
    weight: ExpertWeight, files: Reader, missing: list[str], other_names: list[str]
) -> Plan | None:
    """Return the plan of a weight.

    If the checkpoint lacks some of its tensors, return None, add their names to ``missing``, and
    those of its other tensors to ``other_names``.
    """
    groups, *matrix = weight.shape
    rows = (matrix[0] // len(weight.projections), *matrix[1:])
    plain = (".bias",) if weight.is_bias else (".weight",)
    quantized = [] if weight.is_bias else [(layout, layout.suffixes) for layout in LAYOUTS.values()]
    for layout, suffixes in [*quantized, (None, plain)]:
        names = [weight.path + weight.stacked + stacked_suffix(s) for s in suffixes]
        if all(name in files for name in names):
            shape = tuple(weight.parameter.shape) if layout is None else weight.shape
            return Plan(weight, layout, [Stored(files, layout, names, shape)], True)
        candidates = [
            [n + s for s in suffixes]
            for g in range(groups)
            for n in weight.names(g, files, suffixes[0])
        ]
        if any(names[-1] in files for names in candidates):
            lacking = [name for names in candidates for name in names if name not in files]
            if lacking:
                missing += lacking
                other_names += [name for names in candidates for name in names if name in files]
                return None
            stored = [Stored(files, layout, names, rows) for names in candidates]
            return Plan(weight, layout, stored, False)
    missing.append(weight.names(0, files, plain[0])[0] + plain[0])
    return None


def find_plain_tensor(
    names: Sequence[str], target: Tensor, files: Reader, missing: list[str]
) -> tuple[Stored, list[str]]:
    """Find the tensors for a parameter that belongs to no expert, and its further names.

    Args:
        names: Names of the parameter. A tied one has several.
        target: The parameter.
        files: The checkpoint.
        missing: If the checkpoint has none of the names, one is added to this list.

    Returns:
        The stored tensors, and further names of the parameter in the checkpoint.
    """
    shape = tuple(target.shape)
    for name in names:
        if (layout := _layout_of(name, target, files)) is not None or name in files:
            tensors = (
                [name]
                if layout is None
                else [name.removesuffix(".weight") + s for s in layout.suffixes]
            )
            copies = [n for n in names if n != name and n in files]
            return Stored(files, layout, tensors, shape), copies
    missing.append(names[0])
    return Stored(files, None, [names[0]], shape), []


def _layout_of(name: str, target: Tensor, files: Reader) -> Layout | None:
    """Return the layout of a quantized matrix in the checkpoint, or None if it is not quantized."""
    base = name.removesuffix(".weight")
    if base == name or target.dim() != 2:
        return None
    single = [layout for layout in LAYOUTS.values() if layout.suffixes[0].startswith(".")]
    return next(
        (layout for layout in single if all(base + s in files for s in layout.suffixes)), None
    )
