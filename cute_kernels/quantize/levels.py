"""Second levels that a kernel writes for its caller."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cute_kernels.device.codecs import Codec

__all__ = ["LEVEL_RESULTS", "write_levels"]

#: What the second level of some format keeps besides amaxes, in the order of kernels' arguments.
LEVEL_RESULTS = ("scale_inv", "scale")


@cute.jit
def write_levels(
    codec: Codec,
    amax: cute.Tensor,
    results: tuple[cute.Tensor | None, ...],
    thread: Int32,
    num_threads: Int32,
) -> None:
    """Write the numbers that groups keep of their second level, those of empty groups too.

    Args:
        codec: says which, and what they are.
        amax: (G,) fp32.
        results: a buffer (G,) fp32 for each of ``LEVEL_RESULTS``, None where not kept.
        thread: which of the threads that write this is.
        num_threads: how many write.
    """
    if cutlass.const_expr(len(codec.level_names) > 0):
        for group in cutlass.range(thread, amax.shape[0], num_threads, unroll=1):
            numbers = codec.level_results(codec.second_level(amax[group]))
            for name, number in zip(codec.level_names, numbers, strict=True):
                results[LEVEL_RESULTS.index(name)][group] = number
