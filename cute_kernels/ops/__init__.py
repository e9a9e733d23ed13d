"""The flat ops on plain tensors, registered as ``torch.ops.cute_kernels.*`` on import.

Each function here is the op of the same name. It takes the same arguments by position or by name,
and skips PyTorch's dispatcher if nothing observes the call. Signatures are in ``__init__.pyi``,
which ``python -m cute_kernels.ops.stub`` generates from the ``Op`` dataclasses.
"""

from ptx_emulator.host.suggestions import module_attributes as _module_attributes

# Each launcher registers how its ops run on kernels.
from .delayed_scaling import launcher as _delayed_scaling_launcher  # noqa: F401
from .delayed_scaling.op import DelayedScalingUpdate
from .dequantize import launcher as _dequantize_launcher  # noqa: F401
from .dequantize.op import GroupedDequantize
from .gemm import flops as _gemm_flops  # noqa: F401
from .gemm import launcher as _gemm_launcher  # noqa: F401
from .gemm.fused_op import (
    MGroupedGemmActivate,
    MGroupedQuantizeGemm,
    MGroupedQuantizeGemmActivate,
)
from .gemm.op import KGroupedGemm, MGroupedGemm
from .moe import launcher as _moe_launcher  # noqa: F401
from .moe.op import (
    ComputeRouting,
    MoeActivate,
    MoeActivateGradient,
    MoeCombine,
    MoeGather,
    MoeQuantizeGradient,
)
from .moe.router_op import MoeRoute, MoeRouteGradient
from .optimizer import launcher as _optimizer_launcher  # noqa: F401
from .optimizer.op import AdamWQuantize
from .quantize import launcher as _quantize_launcher  # noqa: F401
from .quantize.op import GroupedQuantize
from .reductions import launcher as _reductions_launcher  # noqa: F401
from .reductions.op import ComputeOffsets, GroupedAmax, GroupedDbias

__all__ = [
    "adamw_quantize",
    "compute_offsets",
    "compute_routing",
    "delayed_scaling_update",
    "grouped_amax",
    "grouped_dbias",
    "grouped_dequantize",
    "grouped_quantize",
    "k_grouped_gemm",
    "m_grouped_gemm",
    "m_grouped_gemm_activate",
    "m_grouped_quantize_gemm",
    "m_grouped_quantize_gemm_activate",
    "moe_activate",
    "moe_activate_gradient",
    "moe_combine",
    "moe_gather",
    "moe_quantize_gradient",
    "moe_route",
    "moe_route_gradient",
]

adamw_quantize = AdamWQuantize.fast_call
compute_offsets = ComputeOffsets.fast_call
compute_routing = ComputeRouting.fast_call
delayed_scaling_update = DelayedScalingUpdate.fast_call
grouped_amax = GroupedAmax.fast_call
grouped_dbias = GroupedDbias.fast_call
grouped_dequantize = GroupedDequantize.fast_call
grouped_quantize = GroupedQuantize.fast_call
k_grouped_gemm = KGroupedGemm.fast_call
m_grouped_gemm = MGroupedGemm.fast_call
m_grouped_gemm_activate = MGroupedGemmActivate.fast_call
m_grouped_quantize_gemm = MGroupedQuantizeGemm.fast_call
m_grouped_quantize_gemm_activate = MGroupedQuantizeGemmActivate.fast_call
moe_activate = MoeActivate.fast_call
moe_activate_gradient = MoeActivateGradient.fast_call
moe_combine = MoeCombine.fast_call
moe_gather = MoeGather.fast_call
moe_quantize_gradient = MoeQuantizeGradient.fast_call
moe_route = MoeRoute.fast_call
moe_route_gradient = MoeRouteGradient.fast_call

__getattr__ = _module_attributes(__name__)  # ``__init__.pyi`` declares the ops.


def __dir__() -> list[str]:
    return sorted(__all__)
