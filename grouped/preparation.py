"""``prepare``: quantize the expert weights of a model once, in place."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels import active_backend, support
from cute_kernels.capability import require
from cute_kernels.formats import Format
from cute_kernels.ops.format_pairs import is_w4a8
from cute_kernels.records import check_kind

from .functional.linear_autograd import linear
from .functional.quantization import quantize
from .nn.delayed_scaling import DelayedScaling
from .nn.linear import GroupedLinear
from .nn.mlp import GroupedMLP
from .ownership import Ownership, retire
from .recipes import FP8Delayed, Recipe
from .tensor.grouped_tensor import GroupedTensor
from .tensor.validation import check_format


class Weight(NamedTuple):
    """A parameter that is a weight of experts.

    Attributes:
        module: Module that has it.
        name: Its name there.
        recipe: Recipe of its products.
        transposed: True if the parameter is (G, K, N).
    """

    module: nn.Module
    name: str
    recipe: Recipe
    transposed: bool = False

    @property
    def is_foreign(self) -> bool:
        """True if experts of another library have it."""
        return not isinstance(self.module, GroupedLinear)

    @property
    def parameter(self) -> Any:
        """Present parameter of the module."""
        return self.module._parameters[self.name]

    @property
    def linear(self) -> Tensor:
        """Parameter as (G, N, K), detached."""
        weight: Tensor = self.parameter.detach()
        return weight.transpose(1, 2) if self.transposed else weight


class Source(NamedTuple):
    """Experts of another library, which its integration adds to ``SOURCES``.

    Attributes:
        find_weights: Returns the weights of a module that is experts of the library, else None.
        finish: Called with a model in which such weights were quantized.
        recipes: Recipes by the names by which users of the library choose them.
    """

    find_weights: Callable[[nn.Module], list[Weight] | None]
    finish: Callable[[nn.Module], None]
    recipes: Mapping[str, Recipe]


#: Libraries whose experts ``prepare`` quantizes.
SOURCES: list[Source] = []


@torch.no_grad()
def prepare(
    model: nn.Module,
    fmt: Format | None = None,
    *,
    trainable: bool = False,
    columnwise: bool | None = None,
    masters: MutableMapping[Tensor, Tensor] | None = None,
) -> int:
    """Quantize the expert weights of a model once, in place.

    Each weight of ``MoE``, ``GroupedMLP`` and ``GroupedLinear``, and of transformers' experts under
    an implementation of ``grouped.integrations.transformers``, becomes a GroupedTensor (G, N, K).
    Calls then use it as it is: they quantize no weight, also when a CUDA graph replays them. The
    memory of a plain weight is freed when nothing else refers to it.

    By default the weights are for inference: they require no gradient, and have the layout that the
    GPU multiplies fastest. Weights that are quantized already, as by a checkpoint, get that
    layout. A second call changes nothing. Errors are raised before the first layer is changed, or
    leave complete layers.

    Train quantized weights without a copy in bf16:

        masters = {}
        grouped.prepare(moe, grouped.FP8Block(block=(128, 128)), trainable=True, masters=masters)
        optimizer = grouped.optim.AdamW(moe.parameters(), masters=masters)

    Train adapters of other layers while the experts are frozen (QLoRA):

        grouped.prepare(model, grouped.NVFP4(), columnwise=True)

    Args:
        model: A model, or experts alone, on the device where it will run. Call this function
            before ``fully_shard``, ``DistributedDataParallel``, ``parallelize_module``, an adapter
            of the experts, and the optimizer.
        fmt: Format of the weights. None for the format of each layer's recipe. Layers with ``BF16``
            then stay plain. Quantized weights under ``BF16`` run with bf16 or fp16 activations
            (W4A16, W8A16). If the recipe has delayed scaling, None uses the scales of the weight as
            it is now.
        trainable: Let the weights require gradients. They then have the columnwise copy, which the
            gradient of the input reads.
        columnwise: Make the columnwise copy also for weights that require no gradient. By default
            ``trainable``.
        masters: Receives, by new parameter, the plain weight (G, N, K) that it was quantized from,
            for ``grouped.optim.AdamW``. It keeps them in memory. ``fully_shard`` makes other
            parameters: then use names as keys.

    Returns:
        The number of expert layers with quantized weights: each ``GroupedMLP``, each
        ``GroupedLinear`` outside of one, and the transformers experts of each layer.

    Raises:
        TypeError: ``fmt`` is not a format, or an option has another type.
        ValueError: ``model`` has no experts, or ``fmt`` is None and no recipe quantizes weights. A
            recipe does not multiply by ``fmt``. A weight is quantized in another format, or
            without a requested copy. A weight has an owner (``grouped.ownership``): FSDP2, a
            DTensor, PEFT, accelerate's offload, a parametrization or another module. A weight is
            on the meta device. Or a layer was made with ``single_parameter=False``.
        cute_kernels.UnsupportedError: The device does not run the format.
    """
    check_kind(
        bool, trainable=trainable, columnwise=trainable if columnwise is None else columnwise
    )
    if fmt is not None:
        check_format("fmt", fmt)
    if masters is not None and not trainable:
        raise ValueError("masters is for weights that an optimizer updates: pass trainable=True")
    if trainable and columnwise is False:
        raise ValueError(
            "columnwise=False, but trainable=True: the gradient of the input reads the columnwise "
            "copy"
        )
    layers = list(expert_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no experts: neither layers of grouped.nn, nor, once it is "
            "imported, of grouped.integrations.transformers"
        )
    targets = [_weights_and_formats(layer, fmt) for layer in layers]
    targets = [layer for layer in targets if layer]
    if not targets:
        raise ValueError(
            f"{layers[0][0].recipe} does not quantize weights: pass fmt, such as grouped.NVFP4()"
        )
    plan = _Plan(model, trainable, trainable if columnwise is None else columnwise)
    plan.check([pair for layer in targets for pair in layer])
    for layer in targets:
        plan.replace(layer, masters)
    if any(weight.is_foreign for layer in targets for weight, _ in layer):
        for source in SOURCES:
            source.finish(model)
    return len(targets)


def _weights_and_formats(layer: list[Weight], fmt: Format | None) -> list[tuple[Weight, Format]]:
    """Return the weights of a layer that are to be quantized, and their formats."""
    formats = ((weight, _target_format(weight, fmt)) for weight in layer)
    return [(weight, target) for weight, target in formats if target is not None]


def is_foreign_experts(module: nn.Module) -> bool:
    """Return True for an experts module of transformers, and False for wrappers of one."""
    marks = ("has_gate", "is_transposed")
    has_marks = all(mark in vars(module) or hasattr(type(module), mark) for mark in marks)
    return has_marks and hasattr(module, "down_proj")


def expert_layers(model: nn.Module) -> Iterator[list[Weight]]:
    """Yield the weights of each expert layer under ``model``."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GroupedMLP):
            inside |= {module.gate_up, module.down}
            yield [_layer_weight(module.gate_up), _layer_weight(module.down)]
        elif isinstance(module, GroupedLinear) and module not in inside:
            yield [_layer_weight(module)]
        else:
            yield from (
                weights
                for source in SOURCES
                if (weights := source.find_weights(module)) is not None
            )


def _layer_weight(layer: GroupedLinear) -> Weight:
    """Return the weight of a layer. Raise ValueError if it has one parameter per group."""
    if not layer.single_parameter:
        raise ValueError(
            "a layer was made with single_parameter=False: its groups are apart; load its state "
            "dict into a layer with single_parameter=True and prepare that"
        )
    return Weight(layer, "weight", layer.recipe)


def _target_format(weight: Weight, fmt: Format | None) -> Format | None:
    """Return the format of the quantized weight, or None to leave it plain."""
    default, parameter = weight.recipe.weight, weight.module._parameters.get(weight.name)
    if fmt is None and isinstance(parameter, GroupedTensor):
        return parameter.format
    if fmt is not None or default is None or not default.has_given_scale:
        return fmt or default
    # A history of scales makes sense for a weight that changes in each step.
    return dataclasses.replace(default, scaling="current")  # type: ignore[call-arg, type-var]


class _Plan:
    """Replacement of a model's weights. All checks precede the first change."""

    def __init__(self, model: nn.Module, trainable: bool, columnwise: bool) -> None:
        self._trainable, self._columnwise = trainable, columnwise
        self._ownership = Ownership(model)
        #: Old and new parameters of weights that several modules share, by the id of the old one.
        #: The old one is stored so that no other tensor gets its id.
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    def check(self, weights: list[tuple[Weight, Format]]) -> None:
        """Raise unless all weights can be replaced, quantized and multiplied."""
        plain = []
        for weight, fmt in weights:
            parameter = weight.module._parameters.get(weight.name)
            if isinstance(parameter, GroupedTensor):
                self._check_quantized(weight, fmt, parameter)
            else:
                plain.append((weight, fmt))
        self._ownership.check_replaceable(
            [(weight.module, weight.name) for weight, _ in plain], "prepare()"
        )
        uses: dict[int, tuple[Any, ...]] = {}
        rehearsed: set[tuple[Any, ...]] = set()
        for weight, fmt in plain:
            p = weight.parameter
            use = (weight.recipe, fmt, weight.transposed)
            if uses.setdefault(id(p), use) != use:
                raise ValueError(
                    f"prepare() cannot replace {self._path(weight)}: layers with other recipes "
                    "share it. Give each its own"
                )
            key = (*use, p.shape, p.dtype, p.device)
            if key not in rehearsed:
                rehearsed.add(key)
                self._rehearse(weight, fmt)

    def _path(self, weight: Weight) -> str:
        return self._ownership.path(weight.module, weight.name)

    def _check_quantized(self, weight: Weight, fmt: Format, quantized: GroupedTensor) -> None:
        """Raise unless a weight that is quantized already has the format and the copies."""
        path = self._path(weight)
        if fmt != quantized.format:
            raise ValueError(f"{path} is already {quantized.format}, but fmt is {fmt}")
        if self._columnwise and quantized.columnwise is None:
            raise ValueError(
                f"{path} is quantized already, without the columnwise copy that gradients of the "
                "input read: prepare plain weights with columnwise=True or trainable=True"
            )
        try:
            check_product(quantized, weight.recipe, quantized.device, needs_dx=self._columnwise)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{path} is {fmt}, which {weight.recipe} does not multiply: {error}"
            ) from None

    def _rehearse(self, weight: Weight, fmt: Format) -> None:
        """Raise unless the device can quantize and multiply the weight."""
        recipe, w = weight.recipe, weight.linear
        require("grouped_quantize", fmt, active_backend(w.device).arch, columnwise=self._columnwise)
        try:
            quantized = quantize(
                torch.empty_like(w, device="meta"), fmt, columnwise=self._columnwise
            )
            check_product(quantized, recipe, w.device, needs_dx=self._columnwise)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"prepare() cannot quantize {self._path(weight)} to {fmt} under {recipe}: "
                f"{weight.name} of {type(weight.module).__name__}: {error}"
            ) from None

    def replace(
        self, weights: list[tuple[Weight, Format]], masters: MutableMapping[Tensor, Tensor] | None
    ) -> None:
        """Quantize the weights of a layer, then set them in its modules."""
        new = [self._prepared(*pair) for pair in weights]
        for (weight, _), parameter in zip(weights, new, strict=True):
            module, old = weight.module, weight.parameter
            if parameter is not old:
                if masters is not None:
                    masters[parameter] = weight.linear
                retire([old], "prepare()")
                setattr(module, weight.name, parameter)
                if isinstance(module, GroupedLinear):
                    module._cached_weight = None
            parameter.requires_grad_(self._trainable)
            reorder(weight)
        for weight, _ in weights:
            if weight.transposed:
                weight.module.is_transposed = False  # type: ignore[assignment]

    def _prepared(self, weight: Weight, fmt: Format) -> Tensor:
        """Return the new parameter, or the present one if it is quantized."""
        old: Tensor = weight.parameter
        if isinstance(old, GroupedTensor):
            return old
        if id(old) in self._shared:
            return self._shared[id(old)][1]
        quantized = quantize(weight.linear.contiguous(), fmt, columnwise=self._columnwise)
        new = nn.Parameter(quantized, requires_grad=self._trainable)
        for name, value in vars(old).items():
            setattr(new, name, value)  # Frameworks mark parameters with attributes.
        if self._ownership.is_shared(old):
            self._shared[id(old)] = (old, new)
        return new


def check_product(
    weight: GroupedTensor, recipe: Recipe, device: torch.device, *, needs_dx: bool
) -> None:
    """Raise unless ``device`` runs the products of ``recipe`` with a quantized weight.

    The bytes of the weight are not read. A prepacked weight is checked as ``reorder`` would leave
    it.
    """
    groups, _, depth = weight.shape
    # A call on the meta device raises the same errors as one with data.
    x = torch.empty(1, depth, dtype=weight.dtype, device="meta", requires_grad=needs_dx)
    offs = torch.ones(groups, dtype=torch.int32, device="meta")
    scaling = DelayedScaling(recipe, groups, "meta") if isinstance(recipe, FP8Delayed) else None
    with torch.enable_grad():
        y = linear(x, _on_meta(weight), None, offs, recipe, scaling=scaling)
    if needs_dx:
        y.backward(torch.empty_like(y))
    arch = active_backend(device).listed
    if recipe.input is None:
        require("grouped_gemm_w4a16", weight.format, arch)
    elif is_w4a8(recipe.input, weight.format):
        require("grouped_gemm_w4a8", recipe.input, arch)
    else:
        require("grouped_gemm", weight.format, arch)


def _on_meta(weight: GroupedTensor) -> Tensor:
    moved: Any = weight.data.to("meta")
    return moved.unpack()


def prepacks(recipe: Recipe, fmt: Format, device: torch.device) -> bool:
    """Return True if ``device`` multiplies weights of ``fmt`` faster when they are prepacked."""
    level, arch = fmt.global_scale, active_backend(device).arch
    can_prepack = fmt.element.per_byte > 1 and (level is None or level.per != "row")
    if not (can_prepack and recipe.is_quantized and arch != "reference"):
        return False
    return bool(support("grouped_gemm", fmt, arch, prepacked=True))


def reorder(weight: Weight) -> None:
    """Prepack or unpack a quantized weight that requires no gradient, as its recipe reads it."""
    parameter = weight.parameter
    if isinstance(parameter, GroupedTensor) and not (parameter.requires_grad or parameter.is_meta):
        is_faster = prepacks(weight.recipe, parameter.format, parameter.device)
        if is_faster != parameter.prepacked:
            parameter.data = parameter.data.prepack() if is_faster else parameter.data.unpack()
