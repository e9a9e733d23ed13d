"""The toy kernel of ``toy_kernels.Scale`` in the CuTe DSL."""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 64


class ScaleKernel:
    """y = factor * x, one element per thread."""

    def __init__(self, spec):
        self.spec = spec
        type(spec).traced += 1

    @staticmethod
    def fake_args(spec):
        """Return fake x and y of one dynamic extent, and a fake stream."""
        extent = cute.sym_int()
        dtype = getattr(cutlass, spec.dtype)
        x, y = (make_fake_compact_tensor(dtype, (extent,), assumed_align=16) for _ in range(2))
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
        self.kernel(x, y).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        """Scale one element."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < cute.size(x):
            y[index] = x[index] * x.element_type(self.spec.factor)
