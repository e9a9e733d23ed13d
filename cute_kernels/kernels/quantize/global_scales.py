"""Second levels that a kernel writes for its caller."""

import cutlass
from cutlass import Int32, cute

from cute_kernels.device.codecs import Codec

#: What the second level of some format keeps besides amaxes, in the order of kernels' arguments.
GLOBAL_SCALE_BUFFERS = ("scale_inv", "scale")


class GlobalScaleWriter:
    """Writes the numbers that groups keep of their second level, those of empty groups too."""

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
        """Write them, (G,) fp32 each, if the format keeps any; which of ``num_threads`` this is
        says ``thread``.
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
        results = dict(zip(GLOBAL_SCALE_BUFFERS, (scale_inv, scale), strict=True))
        numbers = self.codec.global_scale_outputs(self.codec.global_scale(amax[group]))
        for name, number in zip(self.codec.global_scale_names, numbers, strict=True):
            results[name][group] = number
