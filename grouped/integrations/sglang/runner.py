"""SGLang's runner of experts, on grouped kernels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...functional.moe import moe as grouped_moe
from ...recipes import Recipe
from ..serving.activations import ExpertsActivation
from .symbols import (
    DispatchMoeRunnerCore,
    MoeQuantInfo,
    MoeRunnerConfig,
    StandardCombineInput,
    resolve_moe_runner_backend,
)


@dataclass
class GroupedQuantInfo(MoeQuantInfo):  # type: ignore[misc]
    """Weights of a layer and what to do with them.

    Attributes:
        w1: (E, 2 I, H) or (E, I, H). Weight of the first product, plain or quantized.
        w2: (E, H, I). Weight of the second product.
        activation: Activation between the products.
        recipe: Recipe of the products.
    """

    w1: Tensor
    w2: Tensor
    activation: ExpertsActivation
    recipe: Recipe


class GroupedRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """Runner core of the schemes.

    Args:
        config: SGLang's configuration of the layer.
        scheme_name: Value of ``--moe-runner-backend``.
    """

    def __init__(self, config: MoeRunnerConfig, scheme_name: str) -> None:
        super().__init__(config)
        self._backend = resolve_moe_runner_backend(scheme_name)

    @property
    def runner_backend(self) -> Any:
        """The runner's backend."""
        return self._backend

    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: GroupedQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """Return the output of the experts on this rank.

        Expert ids are local ones, and -1 for experts of other ranks, which get no row.

        Raises:
            NotImplementedError: Tokens are quantized, or adapters are in use.
        """
        if hooks is not None or dispatch_output.hidden_states_scale is not None:
            raise NotImplementedError(
                "experts of grouped-kernels take no adapters and no quantized tokens"
            )
        routing = dispatch_output.topk_output
        weights, factor = routing.topk_weights, runner_config.routed_scaling_factor
        on_input = runner_config.apply_router_weight_on_input
        is_scaled = factor is not None and factor != 1.0
        y = grouped_moe(
            dispatch_output.hidden_states,
            routing.topk_ids,
            weights * factor if is_scaled and not on_input else weights,
            quant_info.w1,
            quant_info.w2,
            activation=quant_info.activation.activation,
            interleaved=quant_info.activation.interleaved,
            recipe=quant_info.recipe,
            apply_router_weight_on_input=on_input,
        )
        return StandardCombineInput(hidden_states=y.mul_(factor) if is_scaled and on_input else y)
