"""The experts' weights of a module, and how checkpoints call them."""

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

import grouped.nn
from cute_kernels.records import check_kind

from ..preparation import is_foreign_experts

#: What checkpoints call the projections of an expert: Mixtral's names.
ALIASES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class ExpertWeight(NamedTuple):
    """A parameter (G, N, K), or (G, N) of a bias, and the projections that its rows are.

    Attributes:
        owner: the module that has it.
        attribute: its name there.
        key: its name in the state dict.
        path: what experts are called, such as ``model.layers.0.mlp.experts``.
        projections: the names of what its rows consist of; ("",) if experts are all there is.
        interleaved: rows of two projections alternate.
        transposed: the parameter is (G, K, N).
        stacked: what follows ``path`` where all experts are one tensor.
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
        """Whether it is one."""
        return self.attribute.endswith("bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """(G, N, K), or (G, N)."""
        groups, *rest = self.parameter.shape
        return (groups, *(reversed(rest) if self.transposed and len(rest) > 1 else rest))

    @property
    def linear(self) -> Tensor:
        """The parameter as (G, N, K): a view."""
        return self.parameter.mT if self.transposed and not self.is_bias else self.parameter

    def names(self, expert: int, known: Container[str], suffix: str) -> list[str]:
        """What the projections of an expert are called, without ``suffix``; as ``known`` has them."""
        found = []
        for projection in self.projections:
            alias = ALIASES.get(projection, projection)
            first, second = (
                ".".join(filter(None, (self.path, str(expert), p))) for p in (projection, alias)
            )
            found.append(
                second if first + suffix not in known and second + suffix in known else first
            )
        return found

    def replace(self, weight: Tensor) -> None:
        """Have the module hold ``weight``, a parameter (G, N, K)."""
        setattr(self.owner, self.attribute, weight)
        if self.transposed:
            self.owner.is_transposed = False  # type: ignore[assignment]


def rename_path(name: str, rename: Mapping[str, str] | None) -> str:
    """A name of a module as the checkpoint has it.

    Raises:
        TypeError: ``rename`` is no mapping of texts.
        ValueError: one of its expressions, or what replaces it, is no regular expression.
    """
    if rename is not None:
        check_kind(Mapping, rename=rename)
    for pattern, by in (rename or {}).items():
        check_kind(str, rename=pattern)
        check_kind(str, rename=by)
        try:
            name = re.sub(pattern, by, name)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename has {pattern!r}: {by!r}, which is no regular expression: {error}"
            ) from None
    return name


def expert_weights(
    module: nn.Module, rename: Mapping[str, str] | None = None
) -> Iterator[ExpertWeight]:
    """All weights and biases of experts: of ``grouped.nn``, and of transformers' experts.

    Args:
        module: a model, a layer or experts.
        rename: regular expressions and what replaces them in the paths of modules.

    Raises:
        ValueError: a layer was made with ``single_parameter=False``.
    """
    inside: set[nn.Module] = set()
    for name, m in module.named_modules():
        if isinstance(m, grouped.nn.GroupedMLP):
            first = ("gate_proj", "up_proj") if m.activation.is_gated else ("up_proj",)
            inside |= {m.gate_up, m.down}
            for layer, key, rows, stacked in (
                (m.gate_up, "gate_up", first, "gate_up_proj" if len(first) > 1 else "up_proj"),
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
        elif isinstance(m, grouped.nn.GroupedLinear) and m not in inside:
            yield from _linear(m, name, rename_path(name, rename), ("",), False, "")
        elif is_foreign_experts(m):
            yield from _of_transformers(m, name, rename_path(name, rename))


def _linear(
    layer: grouped.nn.GroupedLinear,
    key: str,
    path: str,
    rows: tuple[str, ...],
    interleaved: bool,
    stacked: str,
) -> Iterator[ExpertWeight]:
    if not layer.single_parameter:
        raise ValueError(
            f"{key.lstrip('.')} was made with single_parameter=False: load its state dict into one with True"
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


def _of_transformers(experts: Any, name: str, path: str) -> Iterator[ExpertWeight]:
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    for attribute in (first, "down_proj"):
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
    """Its state dict without second names of tied parameters, which files do not have."""
    return {keys[0]: t for keys, t in state_dict_with_aliases(module)}


def state_dict_with_aliases(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The tensors of its state dict, each with all of its names: tied parameters have several."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for key, t in module.state_dict(keep_vars=True).items():
        if hasattr(t, "dtype"):
            names.setdefault(id(t), ([], t))[0].append(key)
    return list(names.values())
