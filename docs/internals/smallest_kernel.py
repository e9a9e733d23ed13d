"""Divide each row of a matrix by its largest magnitude, with two warps per row."""

import sys

import torch

from cutlass import Float32, cute, memory
from cutlass.cute.runtime import from_dlpack

import ptx_emulator as emulator

WARPS, THREADS = 2, 64


class NormalizeRows:
    """y[r, c] = x[r, c] / max |x[r, :]|, with one CTA per row and one thread per column."""

    def __init__(self, has_barrier: bool):
        self.has_barrier = has_barrier

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        """Launch one CTA for each row. This part runs on the host."""
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        """Normalize one element. This part runs on the device, once per thread."""
        row, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        # Shared memory of the CTA: one number per warp.
        partial = memory.SmemAllocator().allocate_array(Float32, WARPS)

        value = x[row, thread]
        # The 32 lanes of a warp exchange values, and all of them get the largest.
        largest = cute.arch.warp_reduction_max(cute.arch.fmax(value, -value))
        if thread % 32 == 0:
            partial[thread // 32] = largest
        # The other warp's number is there once all threads have arrived here.
        if self.has_barrier:
            cute.arch.sync_threads()
        y[row, thread] = value / cute.arch.fmax(partial[0], partial[1])


def run(has_barrier: bool) -> None:
    """Run the kernel for sm_100a on the emulator with the race check; compare with torch."""
    emulator.install("sm_100a")
    torch.manual_seed(0)
    x = torch.randn(4, THREADS)
    y = torch.zeros_like(x)
    views = from_dlpack(x), from_dlpack(y)
    kernel = cute.compile(NormalizeRows(has_barrier), *views)
    with emulator.options(races=True):
        kernel(*views)
    assert torch.equal(y, x / x.abs().amax(1, keepdim=True))
    print("equal to torch,", emulator.stats()["warp_insns"], "instructions of warps")


if __name__ == "__main__":
    run(has_barrier="--broken" not in sys.argv)
