"""The flat ops on plain tensors, registered as ``torch.ops.cute_kernels.*`` on import.

The functions here are those ops, with positional arguments, called without PyTorch's dispatcher
where nothing observes the call (``registry.Op.invoke``). Each op is documented where it is defined.
"""

from cute_kernels.ops import (
    delayed,
    dequantize,
    flops,  # noqa: F401 - it registers costs
    fused_gemm,
    gemm,
    moe,
    optimizer,
    quantize,
    reductions,
    router,
)

adamw_quantize = optimizer.AdamWQuantize.invoke
compute_offsets = reductions.ComputeOffsets.invoke
compute_routing = moe.ComputeRouting.invoke
delayed_scaling_update = delayed.DelayedScalingUpdate.invoke
grouped_amax = reductions.GroupedAmax.invoke
grouped_dbias = reductions.GroupedDbias.invoke
grouped_dequantize = dequantize.GroupedDequantize.invoke
grouped_quantize = quantize.GroupedQuantize.invoke
k_grouped_gemm = gemm.KGroupedGemm.invoke
m_grouped_gemm = gemm.MGroupedGemm.invoke
m_grouped_gemm_activate = fused_gemm.MGroupedGemmActivate.invoke
m_grouped_quantize_gemm = fused_gemm.MGroupedQuantizeGemm.invoke
m_grouped_quantize_gemm_activate = fused_gemm.MGroupedQuantizeGemmActivate.invoke
moe_activate = moe.MoeActivate.invoke
moe_activate_gradient = moe.MoeActivateGradient.invoke
moe_combine = moe.MoeCombine.invoke
moe_gather = moe.MoeGather.invoke
moe_quantize_gradient = moe.MoeQuantizeGradient.invoke
moe_route = router.MoeRoute.invoke
moe_route_gradient = router.MoeRouteGradient.invoke
