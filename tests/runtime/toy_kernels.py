"""A kernel small enough to compile in a tenth of a second, for tests of the machinery around it."""

import dataclasses

entries_traced = 0


@dataclasses.dataclass(frozen=True)
class Scale:
    """y = x * factor."""

    factor: float
    dtype: str = "Float32"

    def entry(self):
        import cutlass
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        global entries_traced
        entries_traced += 1
        extent = cute.sym_int()
        dtype = getattr(cutlass, self.dtype)
        x, y = (make_fake_compact_tensor(dtype, (extent,), assumed_align=16) for _ in range(2))
        return _scale_kernel(self), (x, y, make_fake_stream(use_tvm_ffi_env_stream=True))


def _scale_kernel(spec):
    from tests.runtime.toy_kernels_dsl import ScaleKernel

    return ScaleKernel(spec)
