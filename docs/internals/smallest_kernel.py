"""The smallest kernel: divide each row of a matrix by its largest magnitude.

Two warps share a row. Each finds the largest magnitude of its half, and the two numbers meet in
shared memory. Run it with ``python docs/internals/smallest_kernel.py``; it needs no GPU.
"""

import sys

import torch
from cutlass import Float32, cute, memory
from cutlass.cute.runtime import from_dlpack

import ptx_emulator as emulator

WARPS = 2
THREADS = 32 * WARPS


class NormalizeRows:
    """y[r, c] = x[r, c] / max |x[r, :]|, with one CTA per row and one column per thread."""

    def __init__(self, has_barrier: bool):
        self.has_barrier = has_barrier

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        # Runs on the host, and launches one CTA for each row.
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        # Runs on the device, once per thread.
        row, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        # One number per warp, in the shared memory of the CTA.
        partial = memory.SmemAllocator().allocate_array(Float32, WARPS)

        value = x[row, thread]
        # Five exchanges between the 32 lanes of a warp; every lane gets the maximum.
        largest = cute.arch.warp_reduction_max(cute.arch.fmax(value, -value))
        if thread % 32 == 0:
            partial[thread // 32] = largest
        # Without this line a warp may read what the other has not written yet.
        if self.has_barrier:
            cute.arch.sync_threads()
        y[row, thread] = value / cute.arch.fmax(partial[0], partial[1])


def run(has_barrier: bool) -> None:
    """Compile for sm_100a, run on the emulator with the race check, and compare with torch."""
    emulator.install("sm_100a")
    x = torch.randn(4, THREADS)
    y = torch.zeros_like(x)
    views = from_dlpack(x), from_dlpack(y)
    kernel = cute.compile(NormalizeRows(has_barrier), *views)
    with emulator.options(races=True):
        kernel(*views)
    torch.testing.assert_close(y, x / x.abs().amax(1, keepdim=True), rtol=0, atol=0)
    print("equal to torch,", emulator.stats()["warp_insns"], "instructions of warps")


if __name__ == "__main__":
    run(has_barrier="--broken" not in sys.argv)
