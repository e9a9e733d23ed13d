"""Global scales that a kernel writes for its caller."""

import cutlass
from cutlass import Int32, cute

from cute_kernels.device.codecs import Codec

#: Buffers of global scales besides amaxes, in the order of kernel arguments.
GLOBAL_SCALE_BUFFERS = ("scale_inv", "scale")


class GlobalScaleWriter:
    """Writer of the global-scale buffers of groups, including empty groups."""

    def __init__(self, codec: Codec):
        self.codec = codec

    @cute.jit
    def write(
        self,
        amax: cute.Tensor | None,
        scale_inv: cute.Tensor | None,
        scale: cute.Tensor | None,
        thread: Int32,
        num_threads: Int32,
    ) -> None:
        """Write the buffers, if the format stores any, by all threads of the grid.

        Args:
            amax: (G,) fp32 input.
            scale_inv: (G,) fp32 output, or None.
            scale: (G,) fp32 output, or None.
            thread: Index of the calling thread.
            num_threads: Threads that share the work.
        """
        if cutlass.const_expr(len(self.codec.global_scale_names) > 0):
            for group in cutlass.range(thread, amax.shape[0], num_threads, unroll=1):
                self.write_group(amax, scale_inv, scale, group)

    def write_group(
        self,
        amax: cute.Tensor,
        scale_inv: cute.Tensor | None,
        scale: cute.Tensor | None,
        group: Int32,
    ) -> None:
        """Write the numbers of one group."""
        buffers = dict(zip(GLOBAL_SCALE_BUFFERS, (scale_inv, scale), strict=True))
        numbers = self.codec.global_scale_outputs(self.codec.global_scale(amax[group]))
        for name, number in zip(self.codec.global_scale_names, numbers, strict=True):
            buffers[name][group] = number
