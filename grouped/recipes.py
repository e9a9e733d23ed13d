"""Training recipes: the format of each operand of a grouped linear layer.

A recipe maps roles to formats and nothing else. Formats are chosen by role, never by position. A
recipe knows no tile sizes. ``None`` means that the operand stays in bf16. Each product reads
these copies:

| role | fprop reads | dgrad reads | wgrad reads |
|---|---|---|---|
| input | rowwise | | columnwise |
| weight | rowwise | columnwise | |
| grad_output | | rowwise | columnwise |
"""

import abc
import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from cute_kernels import formats
from cute_kernels.capability import support
from cute_kernels.formats import E5M2, Format
from cute_kernels.ops.delayed_scaling.op import ALGORITHMS, check_margin
from cute_kernels.ops.format_pairs import check_pair, check_transforms
from cute_kernels.records import UnsupportedError, check_choice, suggest_arguments
from ptx_emulator.host.suggestions import closest, module_attributes

from .tensor.validation import check_format, check_size

__all__ = [
    "BF16",
    "FP8Block",
    "FP8Current",
    "FP8Delayed",
    "MXFP8",
    "NVFP4",
    "NVFP4RowScaled",
    "Recipe",
]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)


#: Names of the recipes that are ready to use.
NAMES = tuple(name for name in __all__ if name != "Recipe")

ROLES = ("input", "weight", "grad_output")
#: Choices of ``FP8Delayed.initial_scale``.
INITIAL_SCALES = ("current", "one")


@suggest_arguments
@dataclass(frozen=True)
class Recipe:
    """Formats of all roles, or of none.

    Args:
        input: Activations that enter the layer.
        weight: The layer's weights.
        grad_output: Gradients of the layer's output.
        propagate_nonfinite: If True, an infinity or a NaN in an operand reaches the output and the
            gradients, so that ``torch.amp.GradScaler`` and similar checks find it. Operands are
            quantized with ``nan_scales`` (see ``cute_kernels.formats.Format``): an infinity makes
            the scale of its block NaN, or of its group under FP8 with one scale per group. Under
            NVFP4 an infinity or a NaN does that to the group, or to the row of a row-scaled
            operand. FP8 codes can store a NaN, which reaches the products of its row or column.
            Finite numbers keep their bits, and nothing is read twice. If False, E2M1 turns a NaN
            into a finite number and FP8 an infinity into its largest one. A run that diverges then
            looks healthy. Weights that are quantized already are used as they are. Rows after the
            last group are ignored.

    Raises:
        TypeError: A role is not a format record.
        ValueError: Only some roles have a format. A weight is row-scaled. An input or a weight has
            E5M2 codes. There is no product of two of the formats. Or a format needs given scales,
            which ``FP8Delayed`` has.
        cute_kernels.UnsupportedError: A format, or a flag of one, is not built.
    """

    input: Format | None = None
    weight: Format | None = None
    grad_output: Format | None = None
    propagate_nonfinite: bool = True

    def __post_init__(self) -> None:
        roles = {name: fmt for name in ROLES if (fmt := getattr(self, name)) is not None}
        if not isinstance(self.propagate_nonfinite, bool):
            named = ", ".join(f.name for f in fields(self) if f.kw_only)
            hint = f"; options have names: {named}" if named else ""
            raise TypeError(
                f"propagate_nonfinite must be a bool, got {self.propagate_nonfinite!r}{hint}"
            )
        for name, fmt in roles.items():
            check_format(name, fmt)
        missing = [name for name in ROLES if name not in roles]
        if roles and missing:
            raise ValueError(f"a recipe quantizes all roles or none; no format for {missing}")
        level = None if self.weight is None else self.weight.global_scale
        if level is not None and level.per == "row":
            raise ValueError(f"weight must have one global scale per group, got {self.weight}")
        for name, fmt in roles.items():
            if name != "grad_output" and fmt.element is E5M2:
                raise ValueError(
                    f"{name} must have E4M3 codes, got {fmt}: E5M2 has the range of gradients, and "
                    "two bits of fraction"
                )
        for name, fmt in roles.items():
            _require_built(name, fmt)
            if fmt.has_given_scale and not self._updates_scales:
                raise ValueError(f"{name} is {fmt}, whose scales have a history: use FP8Delayed")
        if self.input is not None and self.weight is not None and self.grad_output is not None:
            _check_products(self.input, self.weight, self.grad_output)
        # Store it: a compiler that traces a layer would otherwise trace how they are made.
        formats = roles
        if self.propagate_nonfinite:
            formats = {name: _with_nan_scales(name, fmt) for name, fmt in roles.items()}
        object.__setattr__(self, "formats", tuple(formats.get(name) for name in ROLES))
        object.__setattr__(
            self, "texts", tuple(roles[name].text if name in roles else None for name in ROLES)
        )

    def __str__(self) -> str:
        # Messages show the options that differ from the defaults.
        values = ((f, getattr(self, f.name)) for f in fields(self) if f.init)
        changed = [f"{f.name}={value}" for f, value in values if value != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    #: True if the scales of formats with given scales are updated.
    _updates_scales: ClassVar[bool] = False
    #: Format that the operand of each role is quantized to: with ``nan_scales`` if
    #: ``propagate_nonfinite``.
    formats: ClassVar[tuple[Format | None, ...]]
    #: Text of the format of each role, as the op ``grouped::linear`` takes it.
    texts: ClassVar[tuple[str | None, ...]]

    @property
    def multiple(self) -> int:
        """Required divisor of the sizes of a layer, since each of them is K of a product."""
        formats = (self.input, self.weight, self.grad_output)
        return math.lcm(*(fmt.k_multiple for fmt in formats if fmt is not None))

    @property
    def is_quantized(self) -> bool:
        """True if the operands are quantized."""
        return self.weight is not None

    @property
    def takes_scales(self) -> bool:
        """True if scales follow from earlier steps: calls need a ``DelayedScaling``."""
        return self.weight is not None and self.weight.has_given_scale


def _with_nan_scales(role: str, fmt: Format) -> Format:
    """Return the format that marks non-finite values by a NaN scale."""
    if not any(f.name == "nan_scales" for f in fields(fmt)):  # type: ignore[arg-type]
        raise ValueError(
            f"{role} is {fmt}, whose record has no nan_scales: pass propagate_nonfinite=False"
        )
    return replace(fmt, nan_scales=True)  # type: ignore[type-var]


def _require_built(role: str, fmt: Format) -> None:
    """Raise for a format that no backend runs; ops raise for formats that a device lacks."""
    for op in ("grouped_quantize", "grouped_gemm"):
        status = support(op, fmt, "reference")
        if not status:
            raise UnsupportedError(f"{role} cannot be {fmt}: {status.reason}")


def _check_products(x: Format, weight: Format, grad_output: Format) -> None:
    """Raise ValueError if there is no kernel for a product of the recipe."""
    _check_product("fprop multiplies input by weight", x, weight, weights=True)
    _check_product(
        "dgrad multiplies grad_output by weight", grad_output, weight, None, weight, weights=True
    )
    _check_product("wgrad multiplies grad_output by input", grad_output, x, grad_output, x)


def _check_product(
    name: str,
    a: Format,
    b: Format,
    rows_a: Format | None = None,
    rows_b: Format | None = None,
    weights: bool = False,
) -> None:
    """Raise ValueError if the product does not exist.

    Args:
        name: Description of the product, for the message.
        a: Format of the first operand.
        b: Format of the second operand.
        rows_a: Format of ``a`` if the product reads its columnwise copy.
        rows_b: Format of ``b`` if the product reads its columnwise copy.
        weights: True if ``b`` is a weight.
    """
    try:
        check_pair(a, b, weights=weights)
        check_transforms(rows_a, rows_b)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class _Named(Recipe):
    """Base of recipes whose options decide the roles; ``Recipe(...)`` takes any formats."""

    input: Format | None = field(default=None, init=False, repr=False)
    weight: Format | None = field(default=None, init=False, repr=False)
    grad_output: Format | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, fmt in zip(ROLES, self._roles(), strict=True):
            object.__setattr__(self, name, fmt)
        super().__post_init__()

    @abc.abstractmethod
    def _roles(self) -> tuple[Format | None, Format | None, Format | None]:
        """Return the formats of input, weight and gradient."""


def _option(default: Any) -> Any:
    return field(default=default, kw_only=True)


@suggest_arguments
@dataclass(frozen=True)
class BF16(_Named):
    """Plain operands in bf16.

    Args:
        propagate_nonfinite: See ``Recipe``. Products in bf16 propagate infinities and NaN anyway.
    """

    def _roles(self) -> tuple[None, None, None]:
        return None, None, None


@suggest_arguments
@dataclass(frozen=True)
class NVFP4(_Named):
    """NVFP4 operands: 1x16 blocks for activations and gradients, 16x16 for weights.

    Both options are on in NVIDIA's recipe for pretraining and off here, since they cost
    instructions.

    Args:
        propagate_nonfinite: See ``Recipe``.
        hadamard: Apply a random 16x16 Hadamard transform along the rows to the columnwise copies
            of activations and gradients, which wgrad multiplies. Inputs must be bf16.
        stochastic_rounding: Round gradients stochastically, with seeds from PyTorch's generator of
            their device.
    """

    hadamard: bool = _option(False)
    stochastic_rounding: bool = _option(False)

    def _roles(self) -> tuple[Format, Format, Format]:
        gradient = formats.NVFP4(
            hadamard=self.hadamard, stochastic_rounding=self.stochastic_rounding
        )
        x = formats.NVFP4(hadamard=self.hadamard)
        return x, formats.NVFP4(block=(16, 16)), gradient


@suggest_arguments
@dataclass(frozen=True)
class NVFP4RowScaled(_Named):
    """NVFP4 with one global scale per token for the rowwise copy of the input.

    Args:
        propagate_nonfinite: See ``Recipe``.
        stochastic_rounding: See ``NVFP4``.
    """

    stochastic_rounding: bool = _option(False)

    def _roles(self) -> tuple[Format, Format, Format]:
        gradient = formats.NVFP4(stochastic_rounding=self.stochastic_rounding)
        return formats.NVFP4(row_scaled=True), formats.NVFP4(block=(16, 16)), gradient


@suggest_arguments
@dataclass(frozen=True)
class MXFP8(_Named):
    """MXFP8 operands: E4M3 codes with a power-of-two scale per 32 elements.

    Args:
        propagate_nonfinite: See ``Recipe``.
        grad_dtype: Data type of the codes of gradients; ``torch.float8_e5m2`` is
            TransformerEngine's HYBRID.
        weight_block: (1, 32); or (32, 32), with which both directions of a weight have the same
            codes.
    """

    grad_dtype: torch.dtype = _option(torch.float8_e4m3fn)
    weight_block: tuple[int, int] = _option((1, 32))

    def _roles(self) -> tuple[Format, Format, Format]:
        return (
            formats.MXFP8(),
            formats.MXFP8(block=self.weight_block),
            formats.MXFP8(self.grad_dtype),
        )


@suggest_arguments
@dataclass(frozen=True)
class FP8Block(_Named):
    """FP8 with fp32 block scales: 1x128 for activations and gradients, 128x128 for weights.

    Args:
        propagate_nonfinite: See ``Recipe``.
        grad_dtype: Data type of the codes of gradients; ``torch.float8_e5m2`` is
            TransformerEngine's HYBRID.
        pow2_scales: True if scales are powers of two.
        amax_epsilon: Lower bound of a block's amax.
    """

    grad_dtype: torch.dtype = _option(torch.float8_e4m3fn)
    pow2_scales: bool = _option(True)
    amax_epsilon: float = _option(0.0)

    def _roles(self) -> tuple[Format, Format, Format]:
        x = formats.FP8Block(pow2_scales=self.pow2_scales, amax_epsilon=self.amax_epsilon)
        return x, replace(x, block=(128, 128)), replace(x, dtype=self.grad_dtype)


@suggest_arguments
@dataclass(frozen=True)
class FP8Current(_Named):
    """FP8 with one scale per group, from the amax of the tensor that it scales.

    Args:
        propagate_nonfinite: See ``Recipe``.
        grad_dtype: Data type of the codes of gradients; by default E5M2, TransformerEngine's
            HYBRID.
    """

    grad_dtype: torch.dtype = _option(torch.float8_e5m2)

    def _roles(self) -> tuple[Format, Format, Format]:
        return formats.FP8(), formats.FP8(), formats.FP8(self.grad_dtype)


@suggest_arguments
@dataclass(frozen=True)
class FP8Delayed(_Named):
    """FP8 with one scale per group, from the amaxes of earlier steps.

    An operand is quantized in one pass, since its scale is known before its values are. The scales,
    and the history that they follow from, are the state of a layer: see
    ``grouped.nn.DelayedScaling`` for the times of updates, ``grouped.delayed_scaling_update`` for
    the rule.

    Args:
        propagate_nonfinite: See ``Recipe``.
        grad_dtype: Data type of the codes of gradients. By default E5M2, TransformerEngine's
            HYBRID.
        history_length: Number of steps whose amaxes count. The default is TransformerEngine's
            ``amax_history_len``.
        margin: Scales are divided by two to this power.
        algorithm: ``"max"`` uses the largest amax of the history, ``"most_recent"`` the last one;
            TransformerEngine's ``amax_compute_algo``.
        initial_scale: Scale of a group whose history has no amax yet. ``"current"``: each operand
            is quantized with its own amax, with the bits of ``FP8Current``, until the first update
            with an amax of the group; ``margin`` is not applied. The device decides this for each
            group, so an expert without tokens in the first steps begins the same way later. It
            costs one more read of each operand until all groups have begun. ``"one"``: scales are
            1, as TransformerEngine begins, and products below the smallest code vanish in the
            first step.
        amax_group: Processes that share the scales. Their amaxes are reduced to the largest at each
            update, so all of them must take the same steps. A ``torch.distributed`` group or its
            name. The name is stored. ``DistributedDataParallel`` then needs
            ``broadcast_buffers=False``. None: each process has its own scales. A distributed
            checkpoint stores one set of them. With a group, first call ``update()`` of each
            ``scaling``, which reduces the amaxes of the last step.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """

    grad_dtype: torch.dtype = _option(torch.float8_e5m2)
    history_length: int = _option(1024)
    margin: int = _option(0)
    algorithm: str = _option("max")
    amax_group: ProcessGroup | str | None = _option(None)
    initial_scale: str = _option("current")
    _updates_scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("history_length", self.history_length)
        for fmt in self._roles():
            check_margin(self.margin, fmt)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_choice("initial_scale", self.initial_scale, INITIAL_SCALES)
        # The name is the same on all processes, and can be copied and saved.
        group: Any = self.amax_group
        group = getattr(group, "group_name", group)
        if not (group is None or isinstance(group, str)):
            raise TypeError(
                f"amax_group must be a torch.distributed group or its name, got {group!r}"
            )
        object.__setattr__(self, "amax_group", group)

    def _roles(self) -> tuple[Format, Format, Format]:
        x = formats.FP8(scaling="delayed")
        return x, x, formats.FP8(self.grad_dtype, "delayed")


@dataclass(frozen=True)
class CallRecipe(Recipe):
    """Formats of a call that has its scales as arguments, for ops."""

    _updates_scales: ClassVar[bool] = True


def check_recipe(recipe: object) -> None:
    """Raise ``TypeError`` unless ``recipe`` is a recipe, and not its class or a format."""
    if isinstance(recipe, Recipe):
        return
    hint = ""
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        hint = f": {recipe.__name__}(), not {recipe.__name__}"
    elif isinstance(recipe, Format):
        hint = ": a format, which a recipe has for each role, Recipe(input, weight, grad_output)"
    elif isinstance(recipe, str):
        match = closest(recipe, NAMES)
        hint = "" if match is None else f": did you mean grouped.recipes.{match}()?"
    raise TypeError(f"recipe must be a grouped.recipes.Recipe, got {recipe!r}{hint}")
