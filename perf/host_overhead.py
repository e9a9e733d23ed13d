"""Host time of one op call: what a GPU waits for between launches.

    python -m perf.host_overhead [--device cuda] [--calls 2000]

Without a GPU the kernels are left out (``stub``): what remains is the Python above a launch. Calls
are timed back to back without synchronization; the smallest median of five rounds is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

import cute_kernels
from cute_kernels import ops
from cute_kernels.ops import registry

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 5


class _Stub:
    """A launcher whose kernels do nothing."""

    num_sms = 132
    arch = "sm_90a"

    def kernel(self, spec: object) -> Callable[..., None]:
        return lambda *arguments: None


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """The smallest median over the rounds."""
    medians = []
    for _ in range(_ROUNDS):
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        medians.append(statistics.median(times))
    return min(medians) * 1e6


def cases(device: str) -> dict[str, Callable[[], object]]:
    """Ops at a size where a kernel takes little time."""
    x = torch.randn(256, 2048, device=device).bfloat16()
    offs = torch.tensor([80, 128, 128, 256], dtype=torch.int32, device=device)
    weight = torch.randn(4, 1024, 2048, device=device).bfloat16()
    a = ops.grouped_quantize_nvfp4(x, offs, None, True)
    b = ops.grouped_quantize_nvfp4(weight, None, None, False, True)
    flat: Any = torch.ops.cute_kernels
    return {
        "grouped_quantize_nvfp4, row-scaled": lambda: ops.grouped_quantize_nvfp4(
            x, offs, None, True
        ),
        "grouped_quantize_nvfp4, both copies": lambda: ops.grouped_quantize_nvfp4(
            x, offs, None, False, False, True, True
        ),
        "m_grouped_gemm_nvfp4": lambda: ops.m_grouped_gemm_nvfp4(
            *a[:3], *b[:3], offs, None, None, True
        ),
        "the first, through the dispatcher": lambda: flat.grouped_quantize_nvfp4(
            x, offs, None, True
        ),
    }


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    backend = "cuda"
    if args.device == "cpu":
        backend = "emulated:sm_90a"
        registry.launcher = lambda backend, device: _Stub()  # type: ignore
    with cute_kernels.backend(backend):
        for name, call in cases(args.device).items():
            call()
            print(f"{name:40} {_microseconds(call, args.calls):6.1f} us")


if __name__ == "__main__":
    main()
