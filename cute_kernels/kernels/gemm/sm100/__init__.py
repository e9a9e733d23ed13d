"""Grouped GEMM for sm_100a: TMA, tcgen05 MMA with block scales, accumulators in tensor memory."""
