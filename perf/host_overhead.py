"""Host time of one op call: what a GPU waits for between launches.

    python -m perf.host_overhead [--device cuda] [--json results.jsonl]

Calls are timed back to back without synchronization, few enough that the queue of launches never
fills; the smallest median of the rounds is reported. ``launches`` is the share of the kernels'
compiled host code, called again with the same arguments. Without a GPU the kernels are left out:
what remains is the Python above a launch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
import unittest.mock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cute_kernels
from cute_kernels import ops
from cute_kernels.formats import NVFP4
from cute_kernels.ops import registry
from cute_kernels.runtime.launch import launcher
from perf.measure import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROUNDS, _CALLS = 25, 100


class _Recorder:
    """A launcher that notes the launches of a call.

    Args:
        arch: the architecture.
        num_sms: its SMs.
        launch: what runs kernels; None to leave them out.
    """

    def __init__(self, arch: str, num_sms: int, launch: Any = None) -> None:
        self.arch, self.num_sms, self._launch = arch, num_sms, launch
        self.launches: list[Callable[[], object]] | None = None

    def kernel(self, spec: Any) -> Callable[..., object]:
        """What launches the kernel of ``spec``, noting it if launches are being noted."""
        kernel = self._launch.kernel(spec) if self._launch else lambda *arguments: None
        launches = self.launches
        if launches is None:
            return kernel

        def run(*arguments: Any) -> None:
            launches.append(functools.partial(kernel, *arguments))
            kernel(*arguments)

        return run


def _microseconds(call: Callable[[], object]) -> float:
    """The smallest median over the rounds."""
    medians = []
    for _ in range(_ROUNDS):
        times = []
        for _ in range(_CALLS):
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
    by_row, square = NVFP4(row_scaled=True).text, NVFP4(block=(16, 16)).text
    a = ops.grouped_quantize(x, by_row, offs, None, True, True)
    b = ops.grouped_quantize(weight, square)
    flat: Any = torch.ops.cute_kernels
    quantize = ops.grouped_quantize
    bf16 = torch.bfloat16
    # As modules do: lists and options are made for each call.
    options = (None, None, False, bf16)
    calls: dict[str, Callable[[], object]] = {
        "quantize, row-scaled": lambda: quantize(x, by_row, offs),
        "quantize, rowwise": lambda: quantize(x, "nvfp4", offs),
        "quantize, row-scaled + columnwise": lambda: quantize(x, by_row, offs, None, True, True),
        "quantize, row-scaled, dispatched": lambda: flat.grouped_quantize(x, by_row, offs),
        "dequantize": lambda: ops.grouped_dequantize(a[0], a[1:3], by_row, 256, bf16, offs),
        "m_grouped_gemm nvfp4": lambda: ops.m_grouped_gemm(
            a[0], b[0], offs, *options, a[1:3], b[1:], by_row, square
        ),
        "k_grouped_gemm nvfp4": lambda: ops.k_grouped_gemm(
            a[3], a[3], offs, None, bf16, a[4:], a[4:], by_row, by_row
        ),
        "m_grouped_gemm bf16": lambda: ops.m_grouped_gemm(x, weight, offs),
        "grouped_dbias": lambda: ops.grouped_dbias(x, offs),
        "compute_offsets": lambda: ops.compute_offsets(offs),
    }
    if device != "cpu":
        columns = weight.transpose(1, 2)
        calls["torch._grouped_mm bf16"] = lambda: torch._grouped_mm(x, columns, offs=offs)
    return calls


@contextlib.contextmanager
def _launching(recorder: _Recorder) -> Iterator[None]:
    """Ops launch their kernels by ``recorder`` inside the block."""
    with unittest.mock.patch.object(registry, "launcher", lambda backend, device: recorder):
        registry.forget_plans()
        yield
    registry.forget_plans()


def _launches(call: Callable[[], object], recorder: _Recorder) -> list[Callable[[], object]]:
    """The launches of one call, ready to be done again."""
    launches = recorder.launches = []
    with _launching(recorder):
        call()
    recorder.launches = None
    return launches


def _call_all(functions: list[Callable[[], object]]) -> None:
    for function in functions:
        function()


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    options = parser.parse_args()
    backend = "cuda"
    recorder = _Recorder("sm_90a", 132)
    stub: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.device == "cpu":
        backend, stub = "emulated:sm_90a", _launching(recorder)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        launch = launcher(cute_kernels.active_backend(device), device)
        recorder = _Recorder(launch.arch, launch.num_sms, launch)
    results = {}
    with cute_kernels.backend(backend), stub:
        for name, call in cases(options.device).items():
            launches = _launches(call, recorder)
            call()
            times = {"us": _microseconds(call)}
            if options.device != "cpu" and launches:
                times["launches us"] = _microseconds(functools.partial(_call_all, launches))
            results[name] = {key: round(value, 1) for key, value in times.items()}
            results[name]["launches"] = len(launches)
            print(f"{name:36}", *(f"{key} {value:<6}" for key, value in results[name].items()))
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"results": results} | machine_facts()) + "\n")


if __name__ == "__main__":
    main()
