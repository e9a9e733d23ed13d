"""The method of SGLang's experts: it creates, prepares and multiplies their weights."""

from typing import Any

import torch
from torch import Tensor, nn

from ...tensor.grouped_tensor import GroupedTensor
from ..serving import weights
from ..serving.activations import ExpertsActivation
from ..serving.device import check_device
from ..serving.experts import make_sizes, prepare_weights, wrap_operands
from ..serving.schemes import LoadedFormat
from .activations import find_activation
from .checkpoints import find_stored_experts
from .checks import check_options, load_stored_format, make_choice
from .runner import GroupedQuantInfo, GroupedRunnerCore
from .symbols import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    MoeRunner,
    MoeRunnerConfig,
    StandardCombineInput,
    resolve_moe_runner_backend,
    set_weight_attrs,
)
from .warmup import warm_up

#: SGLang's marks of parameters, by which its loader cuts the tensors of a checkpoint.
_MARKS = {
    weights.BLOCK: {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value},
    weights.TENSOR: {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value},
    weights.WEIGHT: {},
}


class GroupedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts of one layer on grouped kernels.

    Args:
        scheme_name: Value of ``--moe-runner-backend``.
    """

    def __init__(self, scheme_name: str) -> None:
        super().__init__()
        self.scheme_name = scheme_name
        self.formats: LoadedFormat
        self.activation: ExpertsActivation
        self._prefix: str
        self._sizes: tuple[weights.Sizes, weights.Sizes]
        #: Weights in the form of the kernels; their plain tensors are parameters of the layer.
        self._templates: tuple[GroupedTensor, GroupedTensor] | None = None
        self._operands: tuple[Tensor, Tensor] | None = None

    # ---- loading

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the parameters that SGLang's loader fills.

        Raises:
            ValueError: The layer, the checkpoint or an option of SGLang is not supported.
            cute_kernels.UnsupportedError: The GPU has no kernel.
        """
        self._prefix = layer.layer_name
        choice = make_choice(self.scheme_name)
        stored = find_stored_experts(layer, self._prefix, choice.option, choice.omit)
        self.formats = load_stored_format(self.scheme_name, stored.layout_name, stored.has_inputs)
        self.activation = find_activation(layer.moe_runner_config, self._prefix, choice.omit)
        check_options(layer, self.scheme_name, self.formats)
        self._sizes = make_sizes(
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            self.activation.activation.is_gated,
        )
        device = torch.get_default_device()
        check_device(device, self.formats, self._sizes, params_dtype, choice, self._prefix)
        marks = {"weight_loader": extra_weight_attrs["weight_loader"]}
        for sizes in self._sizes:
            for spec in weights.parameter_specs(
                sizes, self.formats.layout, params_dtype, stored.has_input_scale
            ):
                parameter = nn.Parameter(weights.allocate(spec, device), requires_grad=False)
                layer.register_parameter(spec.name, parameter)
                set_weight_attrs(parameter, {**marks, **_MARKS[spec.kind]})

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        """Create the runner of the layer."""
        self.runner = MoeRunner(resolve_moe_runner_backend(self.scheme_name), moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weights into the form that kernels multiply, and compile the kernels."""
        if self._templates is not None:
            return  # They are in this form already.
        self._templates = prepare_weights(layer, self._sizes, self.formats, self._prefix)
        for sizes, weight in zip(self._sizes, self._templates or (), strict=False):
            for attribute in weight._names:
                parameter = getattr(layer, weights.buffer_name(sizes.name, attribute))
                parameter.weight_loader = self._refuse_weights
        self._operands = None
        warm_up(self, layer)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Raise NotImplementedError if the weights are quantized: they cannot be loaded again."""
        if self._templates is not None:
            self._refuse_weights()

    def _refuse_weights(self, *_: Any, **__: Any) -> None:
        """Raise instead of writing plain weights into quantized ones."""
        raise NotImplementedError(
            f"weights of {self._prefix} cannot be updated in {self.scheme_name}, which has "
            "quantized them: start the server again, or use --moe-runner-backend grouped_bf16"
        )

    # ---- a call

    def operands(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return both weights around the parameters of the layer."""
        if self._operands is None:
            self._operands = wrap_operands(layer, self._sizes, self._templates)
        return self._operands

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Return the output of the routed experts; SGLang computes shared ones."""
        w1, w2 = self._operands or self.operands(layer)
        quant_info = GroupedQuantInfo(w1, w2, self.activation, self.formats.recipe)
        return self.runner.run(dispatch_output, quant_info)


def make_runner_core(config: MoeRunnerConfig) -> GroupedRunnerCore:
    """Return the runner core of a layer, for SGLang's ``MoeRunner``.

    Raises:
        NotImplementedError: Another method than the plug-in's asks for the runner.
    """
    method = getattr(config.layer, "quant_method", None)
    if not isinstance(method, GroupedExpertsMethod):
        raise NotImplementedError(
            f"SGLang's {type(method).__name__} asks for a runner of grouped-kernels, which cannot "
            "run its weights: omit --moe-runner-backend"
        )
    return GroupedRunnerCore(config, method.scheme_name)
