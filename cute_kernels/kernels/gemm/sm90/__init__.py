"""Grouped GEMM for sm_90a: TMA and warpgroup MMA; FP4 operands in ``fp4``."""
