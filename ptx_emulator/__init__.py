"""Runs CuTe DSL kernels compiled for sm_90a, sm_100a or sm_103a on the CPU, and looks for faults.

  from cute_kernels import emulator

  emulator.install("sm_100a", num_sms=4)
  compiled = cute.compile(host_function, *args)  # unchanged; --enable-tvm-ffi works too
  compiled(*args)                                # CPU tensors stand for device memory
  with emulator.options(mode="chaos", seed=7):   # late, reordered asynchronous work; random warps
    compiled(*args)
  with emulator.options(races=True):             # every access ordered by barriers?
    compiled(*args)
  emulator.stats()                               # instructions, bytes, bank conflicts, MMA flops

``cute.compile`` needs no GPU. The engine interprets the PTX that it made; a CUDA runtime whose
device is the engine takes the place of NVIDIA's under the compiled host code. The engine is C++,
compiled once for each source version and machine (``build``). PTX text can be run without the DSL,
too (``load_ptx``, ``launch``). Needs g++ 12 or later and NumPy; torch and CuTe DSL only where they
are used.

**What it models.** Warps of 32 lanes with divergence, clusters, distributed shared memory, named
and cluster barriers, mbarriers with transaction counts, fences, ``cp.async``, ``cp.async.bulk``,
TMA tiles (all ranks, swizzles, multicast, ``cta_group::2``, ``gather4``), tensor maps in their 128-byte format,
``wgmma`` (f16, bf16, tf32, e4m3, e5m2; A from registers or shared memory), ``tcgen05`` (alloc, cp,
ld, st, commit, and mma of the kinds f16, tf32, f8f6f4, mxf8f6f4, mxf4, mxf4nvf4 with one or two
CTAs), the integer and floating-point instructions that the DSL's compiler emits,
e4m3/e5m2/e2m1/ue8m0 conversions. Tensor cores add to the bit as ``reference.tensor_core`` says, which
is written apart from the engine.

**What it finds.** Each is an ``EmulatorError`` that names the kernel, CTA, warp and PTX line:

- global (``watch``), shared, tensor-memory and local accesses out of bounds; misalignment; invalid
  TMA boxes and tensor maps, also a misaligned address of one that the kernel makes;
- deadlock, with every warp's position and what it waits for, and polling for what does not come;
- an mbarrier that is used before ``mbarrier.init`` or gets more arrivals than it was made for, and
  named barriers with differing thread counts;
- shared memory that is written by ordinary stores and read by TMA or a tensor core, or overwritten
  by TMA, with no ``fence.proxy.async`` between, by the writer or the issuer;
- tensor memory that is not freed, a CTA that exits under a pending bulk store, a cluster that
  exits before its loads, copies, MMAs or commits have completed;
- in chaos mode, by wrong results: missing waits. Copies, MMAs and tensor-memory stores take effect
  late and out of order. Run several seeds;
- with ``races=True``: data races on shared and tensor memory, by happens-before (vector clocks
  over warps, TMA loads, bulk stores, wgmmas and the tensor core). Order comes from barriers,
  mbarriers and completed operations, so no lucky schedule is needed, and both sides are named.

**What it does not.**

- Time. The counts of ``stats`` compare designs; they do not predict microseconds.
- Not modelled, and an error when a warp reaches it (``unsupported`` lists them by kernel): im2col
  and scatter TMA, TMA reductions, bulk copies between CTAs, ``tensormap.replace``, cluster launch
  control, unpacked 4- and 6-bit operands, ``mma.sync``, sparse and ``.ws`` MMA, M = 128 with two
  CTAs, negated operands, 16x64b and 16x32bx2 tensor-memory shapes, 8-bit ``ldmatrix``,
  ``st.async``, doubles, 128-bit registers, carries, atomics of 16-bit floats or vectors, calls of
  device functions. Device ``printf`` prints nothing.
- ``cvt.rs`` (stochastic rounding) uses its random bits in an order of its own, since the PTX ISA
  gives the hardware's only as a figure.
- Races between lanes of one warp and on global memory are not looked for. A missing
  ``wgmma.fence``, ``tcgen05.wait::ld``, ``fence.proxy.tensormap`` or memory fence may go unseen.
  Several warps that write the same value to the same place are reported; shared flags that are
  polled by ordinary loads are, too.
- Where a kernel makes a tensor map by ordinary instructions, strides that are no multiple of 16
  bytes are cut before the emulator can see them; addresses are checked.
- A spin on ordinary loads or ``mbarrier.test_wait`` is found after ``max_idle_insns``.

**How far it is checked.** ``tests/emulator`` compares 203 integer, floating-point, conversion,
packed-half and warp-exchange instructions with the answers of an H200 (1024 inputs each: random
bits, special values, ties, denormals): all agree bit for bit. Approximate ones are correctly
rounded, from which an H200 was at most 2e-5 away (but for quotients of huge divisors, which it
flushes to zero).
Every instruction class is tested against NumPy, and every checker by a kernel with its fault and a
corrected twin. The rule by which Hopper adds gave an H200's fp32 results of whole GEMMs bit for
bit, too (bf16, fp16, e4m3; K 512 to 4096); no B200 was at hand. NVIDIA's examples pass their own
checks, eager, in chaos mode and without a data race: persistent GEMMs with one and two CTAs and the
grouped block-scaled GEMM for MoE on sm_100a; the persistent and FP8 GEMMs on sm_90a.

**Limits of ``install``** beside those that it names itself: while the emulator is
installed, the DSL's ``from_dlpack`` takes CPU tensors only. Kernels are recognised by their cubin:
an object file from a disk cache runs only if ``load_ptx`` got its PTX and cubin in this process
(``call`` then runs it). Threads may use the emulator together: launches wait for each other,
``options`` are a thread's own, and watched memory and counts are those of all threads.
"""

from .compilation import build
from .cutlass_hooks import call, install, installed, uninstall
from .engine import (
    launch,
    load_ptx,
    options,
    reset_stats,
    stats,
    tensor_map,
    unsupported,
    unwatch,
    watch,
)
from .errors import BuildError, EmulatorError
from .lexer import PtxError

__all__ = [
    "BuildError",
    "EmulatorError",
    "PtxError",
    "build",
    "call",
    "install",
    "installed",
    "launch",
    "load_ptx",
    "options",
    "reset_stats",
    "stats",
    "tensor_map",
    "uninstall",
    "unsupported",
    "unwatch",
    "watch",
]
