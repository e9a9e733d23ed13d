"""The grouped GEMM ops, their launchers and the preparation of their operands."""
