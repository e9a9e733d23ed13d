"""The flat ops on plain tensors, registered as ``torch.ops.cute_kernels.*`` on import.

The functions here are those ops, with positional arguments, called without PyTorch's dispatcher
where nothing observes the call (``registry.Op.invoke``). Each op is documented where it is defined.
"""

from cute_kernels.ops import fused, gemm, quantize

__all__ = [
    "compute_offsets",
    "fused",
    "gemm",
    "grouped_amax",
    "grouped_dbias",
    "grouped_dequantize_nvfp4",
    "grouped_quantize_nvfp4",
    "k_grouped_gemm",
    "k_grouped_gemm_nvfp4",
    "m_grouped_gemm",
    "m_grouped_gemm_nvfp4",
    "m_grouped_gemm_w4a16",
    "m_grouped_quantize_gemm_nvfp4",
    "quantize",
]

compute_offsets = quantize.ComputeOffsets.invoke
grouped_amax = quantize.GroupedAmax.invoke
grouped_dbias = quantize.GroupedDbias.invoke
grouped_dequantize_nvfp4 = quantize.GroupedDequantizeNVFP4.invoke
grouped_quantize_nvfp4 = quantize.GroupedQuantizeNVFP4.invoke
k_grouped_gemm = gemm.KGroupedGemm.invoke
k_grouped_gemm_nvfp4 = gemm.KGroupedGemmNVFP4.invoke
m_grouped_gemm = gemm.MGroupedGemm.invoke
m_grouped_gemm_nvfp4 = gemm.MGroupedGemmNVFP4.invoke
m_grouped_gemm_w4a16 = gemm.MGroupedGemmW4A16.invoke
m_grouped_quantize_gemm_nvfp4 = fused.MGroupedQuantizeGemmNVFP4.invoke
