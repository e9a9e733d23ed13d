"""The expert weights of a module, and their names in checkpoints."""

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

import grouped.nn
from cute_kernels.records import check_kind

from ..preparation import is_foreign_experts

#: Mixtral's names of the projections of an expert.
ALIASES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class ExpertWeight(NamedTuple):
    """A weight (G, N, K) or bias (G, N) of experts, and the projections in its rows.

    Attributes:
        owner: The module that has the parameter.
        attribute: The name of the parameter in ``owner``.
        key: The name in the state dict.
        path: The name of the experts, such as ``model.layers.0.mlp.experts``.
        projections: Names of the projections in the rows. They are ("",) for a single layer.
        interleaved: True if the rows of two projections alternate.
        transposed: True if the parameter is (G, K, N).
        stacked: The suffix after ``path`` if all experts are one tensor.
    """

    owner: nn.Module
    attribute: str
    key: str
    path: str
    projections: tuple[str, ...]
    interleaved: bool
    transposed: bool
    stacked: str

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        return getattr(self.owner, self.attribute)

    @property
    def is_bias(self) -> bool:
        """True for a bias."""
        return self.attribute.endswith("bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """(G, N, K), or (G, N)."""
        groups, *dims = self.parameter.shape
        return (groups, *(reversed(dims) if self.transposed and len(dims) > 1 else dims))

    @property
    def linear(self) -> Tensor:
        """A view of the parameter as (G, N, K)."""
        return self.parameter.mT if self.transposed and not self.is_bias else self.parameter

    def names(self, expert: int, known: Container[str], suffix: str) -> list[str]:
        """Return the names of an expert's projections without ``suffix``.

        Args:
            expert: Index of the expert.
            known: Names in the checkpoint. They decide between a projection's name and its alias.
            suffix: Suffix of the names in ``known``.
        """
        names = []
        for projection in self.projections:
            prefix = ".".join(filter(None, (self.path, str(expert))))
            name = ".".join(filter(None, (prefix, projection)))
            alias = ".".join(filter(None, (prefix, ALIASES.get(projection, projection))))
            is_alias = name + suffix not in known and alias + suffix in known
            names.append(alias if is_alias else name)
        return names

    def replace(self, weight: Tensor) -> None:
        """Set the parameter of the module to ``weight`` (G, N, K)."""
        setattr(self.owner, self.attribute, weight)
        if self.transposed:
            self.owner.is_transposed = False  # type: ignore[assignment]


def rename_path(name: str, rename: Mapping[str, str] | None) -> str:
    """Return the name in the checkpoint of a name in the module.

    Args:
        name: A name in the module.
        rename: Regular expressions and their replacements, applied in order.

    Raises:
        TypeError: ``rename`` is not a mapping of strings.
        ValueError: An expression or its replacement is invalid.
    """
    if rename is not None:
        check_kind(Mapping, rename=rename)
    for pattern, replacement in (rename or {}).items():
        check_kind(str, rename=pattern)
        check_kind(str, rename=replacement)
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename has {pattern!r}: {replacement!r}, not a regular expression: {error}"
            ) from None
    return name


def expert_weights(
    module: nn.Module, rename: Mapping[str, str] | None = None
) -> Iterator[ExpertWeight]:
    """Yield all weights and biases of experts, of ``grouped.nn`` and of transformers.

    Args:
        module: A model, a layer or experts.
        rename: Regular expressions and their replacements for the paths of modules.

    Raises:
        ValueError: A layer was created with ``single_parameter=False``.
    """
    layers_of_mlps: set[nn.Module] = set()
    for name, m in module.named_modules():
        if isinstance(m, grouped.nn.GroupedMLP):
            is_gated = m.activation.is_gated
            gate_up_rows = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
            layers_of_mlps |= {m.gate_up, m.down}
            for layer, key, rows, stacked in (
                (m.gate_up, "gate_up", gate_up_rows, "gate_up_proj" if is_gated else "up_proj"),
                (m.down, "down", ("down_proj",), "down_proj"),
            ):
                yield from _linear(
                    layer,
                    f"{name}.{key}",
                    rename_path(name, rename),
                    rows,
                    m.interleaved and len(rows) > 1,
                    f".{stacked}",
                )
        elif isinstance(m, grouped.nn.GroupedLinear) and m not in layers_of_mlps:
            yield from _linear(m, name, rename_path(name, rename), ("",), False, "")
        elif is_foreign_experts(m):
            yield from _foreign_weights(m, name, rename_path(name, rename))


def _linear(
    layer: grouped.nn.GroupedLinear,
    key: str,
    path: str,
    rows: tuple[str, ...],
    interleaved: bool,
    stacked: str,
) -> Iterator[ExpertWeight]:
    """Yield the weight and the bias of one layer."""
    if not layer.single_parameter:
        raise ValueError(
            f"{key.lstrip('.')} was created with single_parameter=False: load its state dict into "
            "a layer with single_parameter=True"
        )
    for attribute in ("weight", "bias") if layer.has_bias else ("weight",):
        yield ExpertWeight(
            layer,
            attribute,
            f"{key}.{attribute}".lstrip("."),
            path,
            rows,
            interleaved,
            False,
            stacked,
        )


def _foreign_weights(experts: Any, name: str, path: str) -> Iterator[ExpertWeight]:
    """Yield the weights and biases of transformers experts."""
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    for attribute in (up_name, "down_proj"):
        rows = ("gate_proj", "up_proj") if attribute == "gate_up_proj" else (attribute,)
        interleaved = len(rows) > 1 and not getattr(experts, "is_concatenated", True)
        for full in (attribute, f"{attribute}_bias"):
            if getattr(experts, full, None) is not None:
                key = ".".join(filter(None, (name, full)))
                yield ExpertWeight(
                    experts,
                    full,
                    key,
                    path,
                    rows,
                    interleaved,
                    experts.is_transposed,
                    f".{attribute}",
                )


def untied_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with one name per tied parameter, as files have it."""
    return {keys[0]: t for keys, t in state_dict_with_aliases(module)}


def state_dict_with_aliases(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors of the state dict, each with all its names (several if it is tied)."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for key, t in module.state_dict(keep_vars=True).items():
        if hasattr(t, "dtype"):
            names.setdefault(id(t), ([], t))[0].append(key)
    return list(names.values())
