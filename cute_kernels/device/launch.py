"""What kernels of all kinds are compiled with and launched by: stand-ins for arguments, and a grid."""

from typing import Any

from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

#: DSL types by the dtype names that configurations use.
DSL_TYPES = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}


def compact(dtype: Any, *shape: Any, align: int | None = None) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def env_stream() -> Any:
    """The stream that is current when the compiled function is called."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


class GridKernel:
    """A kernel whose CTAs take items by turns: called with its arguments, the number of SMs and a
    stream.
    """

    ctas_per_sm: int
    num_threads: int
    kernel: Any

    @cute.jit
    def __call__(self, *args: Any) -> None:
        *arguments, num_sms, stream = args
        self.kernel(*arguments).launch(
            grid=[num_sms * self.ctas_per_sm, 1, 1], block=[self.num_threads, 1, 1], stream=stream
        )
