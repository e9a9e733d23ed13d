"""The method of vLLM's experts: it creates, prepares and multiplies their weights."""

from typing import Any

import torch
from torch import Tensor, nn

from ...functional.moe import moe as grouped_moe
from ...tensor.grouped_tensor import GroupedTensor
from ..serving import weights
from ..serving.device import check_device
from ..serving.experts import make_sizes, prepare_weights, wrap_operands
from ..serving.schemes import LoadedFormat
from .activations import find_activation
from .checks import check_options, make_choice
from .symbols import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    get_current_vllm_config,
    init_logger,
    initialize_online_processing,
    set_weight_attrs,
)
from .warmup import token_counts, warm_up

logger = init_logger(f"vllm.{__name__}")

#: vLLM's marks of parameters, by which its loader cuts the tensors of a checkpoint.
_MARKS = {
    weights.BLOCK: {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value},
    weights.TENSOR: {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value},
    weights.WEIGHT: {},
}


class GroupedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts of one layer on grouped kernels.

    Args:
        layer: vLLM's ``RoutedExperts``.
        prefix: Name of the layer.
        scheme_name: Value of ``--quantization``.
        formats: Formats of the experts.
        has_input_scale: True if the checkpoint has static scales of activations. They are read
            and not used: the recipe computes the scales of each call.

    Raises:
        ValueError: The layer, the model or an option of vLLM is not supported.
        cute_kernels.UnsupportedError: The GPU has no kernel.
    """

    def __init__(
        self,
        layer: Any,
        prefix: str,
        scheme_name: str,
        formats: LoadedFormat,
        has_input_scale: bool = False,
    ) -> None:
        super().__init__(layer.moe_config)
        config = get_current_vllm_config()
        check_options(self.moe, config, scheme_name, formats)
        self.formats = formats
        self._prefix, self._scheme_name = prefix, scheme_name
        self._has_input_scale = has_input_scale
        self._activation = find_activation(layer, prefix)
        self._token_counts = token_counts(config, self.moe)
        if formats.layout is not None and formats.layout.shapes is not None:
            #: vLLM's model of gpt-oss asks for it.
            self.weight_dtype = "gpt_oss_mxfp4"
        #: Plain weights are quantized layer by layer while vLLM loads them, so that the plain
        #: weights of all layers are never in memory. The loader of gpt-oss, whose rows are
        #: interleaved, does not tell when a layer is complete.
        self.uses_meta_device = (
            formats.layout is None
            and formats.weight is not None
            and not self._activation.interleaved
        )
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
        """Create the parameters that vLLM's loader fills."""
        self._sizes = make_sizes(
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            self._activation.activation.is_gated,
        )
        device = torch.get_default_device()
        choice = make_choice(self._scheme_name)
        check_device(device, self.formats, self._sizes, params_dtype, choice, self._prefix)
        target = torch.device("meta") if self.uses_meta_device else device
        for sizes in self._sizes:
            for spec in weights.parameter_specs(
                sizes, self.formats.layout, params_dtype, self._has_input_scale
            ):
                parameter = nn.Parameter(weights.allocate(spec, target), requires_grad=False)
                layer.register_parameter(spec.name, parameter)
                set_weight_attrs(parameter, {**extra_weight_attrs, **_MARKS[spec.kind]})
            if self.moe.has_bias:
                name, shape = f"{sizes.name}_bias", (num_experts, sizes.rows)
                bias = torch.zeros(shape, dtype=params_dtype, device=target)
                layer.register_parameter(name, nn.Parameter(bias, requires_grad=False))
                set_weight_attrs(getattr(layer, name), extra_weight_attrs)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weights into the form that kernels multiply, and compile the kernels."""
        # vLLM calls this again for layers that it processed while loading.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer._already_called_process_weights_after_loading = True
        self._templates = prepare_weights(layer, self._sizes, self.formats, self._prefix)
        self._operands = None
        warm_up(self, layer, self._token_counts)
        # A reload copies new weights into the old parameters and brings those back.
        self._operands = None

    # ---- vLLM's questions

    @property
    def supports_eplb(self) -> bool:
        """True: each parameter has the experts in its first dimension."""
        return True

    def maybe_make_prepare_finalize(self, *arguments: Any, **named: Any) -> None:
        """Return None: vLLM 0.24 then gathers tokens of data-parallel ranks itself."""

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return the description of inputs: vLLM hands over tokens as they are."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    # ---- a call

    def operands(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return both weights around the present parameters of the layer."""
        if self._operands is None:
            self._operands = wrap_operands(layer, self._sizes, self._templates)
        return self._operands

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the routed experts; vLLM computes shared ones."""
        w1, w2 = self._operands or self.operands(layer)
        has_bias = self.moe.has_bias
        return grouped_moe(
            x,
            topk_ids,
            topk_weights,
            w1,
            w2,
            b1=layer.w13_bias if has_bias else None,
            b2=layer.w2_bias if has_bias else None,
            activation=self._activation.activation,
            interleaved=self._activation.interleaved,
            recipe=self.formats.recipe,
            num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
