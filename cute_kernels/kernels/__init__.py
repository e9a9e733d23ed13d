"""CuTe DSL kernels by family: quantization, grouped GEMM, and routing of mixtures of experts."""
