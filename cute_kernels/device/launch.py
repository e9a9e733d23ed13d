"""Stand-ins for kernel arguments at compile time, and the launch of kernels with a simple grid."""

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
    """Return a fake contiguous tensor.

    Args:
        dtype: DSL type of the elements.
        shape: Extents or symbols.
        align: Assumed alignment in bytes, or None for that of an element.
    """
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def env_stream() -> Any:
    """Return the stream that is current when the compiled function is called."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


class GridKernel:
    """Base class of kernels whose CTAs loop over items.

    The compiled function takes the arguments of ``kernel``, the number of SMs and a stream.

    Attributes:
        ctas_per_sm: CTAs to launch per SM.
        num_threads: Threads of a CTA.
    """

    ctas_per_sm: int
    num_threads: int
    kernel: Any

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch ``ctas_per_sm`` CTAs per SM."""
        *arguments, num_sms, stream = args
        self.kernel(*arguments).launch(
            grid=[num_sms * self.ctas_per_sm, 1, 1], block=[self.num_threads, 1, 1], stream=stream
        )
