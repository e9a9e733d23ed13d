"""The part of ``toy_kernels`` that needs the CuTe DSL."""

from cutlass import cute

THREADS = 64


class ScaleKernel:
    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
        self.kernel(x, y).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < cute.size(x):
            y[index] = x[index] * x.element_type(self.spec.factor)
