"""Plans of loading: the tensors of a checkpoint that make each parameter of a module."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from .files import Reader
from .layouts import LAYOUTS, Layout, stacked_suffix
from .stored import Stored
from .weights import ExpertWeight

T = TypeVar("T")


class Plan(NamedTuple):
    """A weight or bias of experts, and the tensors that it is loaded from.

    Attributes:
        weight: the parameter.
        layout: how it is quantized in the checkpoint; None if it is plain.
        stored: tensors of each projection of each expert, in order; or one item of all experts.
        is_stacked: whether ``stored`` is one item.
    """

    weight: ExpertWeight
    layout: Layout | None
    stored: list[Stored]
    is_stacked: bool

    def select_groups(self, groups: range | None) -> list[Stored]:
        """The tensors that have these experts; all for None."""
        if self.is_stacked or groups is None:
            return self.stored
        count = len(self.weight.projections)
        return self.stored[groups.start * count : groups.stop * count]

    def split_by_expert(self, items: list[T]) -> Iterator[list[T]]:
        """Cut a list with an item for each projection into those of each expert."""
        count = len(self.weight.projections)
        return (items[i : i + count] for i in range(0, len(items), count))

    def check_headers(self) -> None:
        """Check shapes and dtypes of all experts.

        Raises:
            ValueError: they are not those of the layout or of the module, or experts differ.
        """
        first, files = self.stored[0].names[0], self.stored[0].files
        like = files.header(first)
        for other in (s.names[0] for s in self.stored[1:]):
            header = files.header(other)
            if header.shape != like.shape or (
                self.layout is not None and header.dtype != like.dtype
            ):
                raise ValueError(
                    f"{other} is {header}, but {first} is {like} (in {files.path(other)})"
                )
        note = "" if self.is_stacked else self._whole(like.shape)
        for stored in self.stored:
            stored.check_headers(self.weight.parameter.dtype, note)

    def _whole(self, shape: tuple[int, ...]) -> str:
        """Say what the parameter's codes or values, which ``shape`` is a projection of, have to be."""
        groups, rows, *columns = self.weight.shape
        if self.layout is not None:
            columns = [self.layout.fmt.element.width(*columns)]
        whole = (groups, shape[0] * len(self.weight.projections), *shape[1:]) if shape else ()
        return f"; together {self.weight.key} must have the shape {(groups, rows, *columns)}, the checkpoint has {whole}"


def find_weight(weight: ExpertWeight, files: Reader, missing: list[str]) -> Plan | None:
    """The plan of a weight;

    None, and names added to ``missing``, if the checkpoint lacks tensors of it.
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
        each = [
            [n + s for s in suffixes]
            for g in range(groups)
            for n in weight.names(g, files, suffixes[0])
        ]
        if any(names[-1] in files for names in each):
            lost = [name for names in each for name in names if name not in files]
            missing += lost
            return (
                None
                if lost
                else Plan(
                    weight, layout, [Stored(files, layout, names, rows) for names in each], False
                )
            )
    missing.append(weight.names(0, files, plain[0])[0] + plain[0])
    return None


def find_plain_tensor(
    names: Sequence[str], target: Tensor, files: Reader, missing: list[str]
) -> tuple[Stored, list[str]]:
    """Find the tensors that one which is no expert's is loaded from, and further names of it that
    the checkpoint has.

    Args:
        names: its names, of which tied parameters have several.
        target: the tensor.
        files: the checkpoint.
        missing: where its name is added if the checkpoint has none.
    """
    shape = tuple(target.shape)
    for name in names:
        if (layout := _layout_of(name, target, files)) is not None or name in files:
            tensors = (
                [name]
                if layout is None
                else [name.removesuffix(".weight") + s for s in layout.suffixes]
            )
            copies = [other for other in names if other != name and other in files]
            return Stored(files, layout, tensors, shape), copies
    missing.append(names[0])
    return Stored(files, None, [names[0]], shape), []


def _layout_of(name: str, target: Tensor, files: Reader) -> Layout | None:
    """The layout in which a matrix is quantized in the checkpoint;

    None if it is plain there, or lacking.
    """
    base = name.removesuffix(".weight")
    if base == name or target.dim() != 2:
        return None
    single = [layout for layout in LAYOUTS.values() if layout.suffixes[0].startswith(".")]
    return next(
        (layout for layout in single if all(base + s in files for s in layout.suffixes)), None
    )
