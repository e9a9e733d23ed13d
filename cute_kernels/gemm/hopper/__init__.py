"""Grouped GEMM for sm_90a: TMA, warpgroup MMA, and NVFP4 values made exact fp16 in registers."""
