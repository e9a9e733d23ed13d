"""Times of the NVFP4 quantizers on a GPU, beside a copy and compiled PyTorch, as a record.

    python -m perf.quantize [--rows 65536] [--cols 7168] [--groups 8] [--out perf/results/NAME.json]

Results are checked first, byte for byte, against ``cute_kernels.reference`` on the same GPU, for
``--check-rows`` rows. Then all candidates run in turn, ``--calls`` calls each, for ``--rounds``
rounds in one process; the median round counts, so clocks are those of sustained load. The input is
far larger than L2. ``floor`` is the time of a copy that moves the candidate's bytes, each input
read once and each output written once, at the rate of the fastest copy kernel of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.formats import NVFP4, Format, parse
from cute_kernels.layout.buffers import buffers
from cute_kernels.quantize import AmaxConfig, QuantizeProblem, RowsConfig, TileConfig
from cute_kernels.reference.groups import Groups
from cute_kernels.runtime.arch import device_architecture
from cute_kernels.runtime.compile import compile_kernel
from perf.measure import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable

_READ, _CODES = 2.0, 0.5625  # bytes of an element


@dataclasses.dataclass
class Candidate:
    """One thing to time.

    Attributes:
        run: launches it once.
        element_bytes: bytes that it must move for each element.
        check: raises if the last run's result is wrong.
    """

    run: Callable[[], object]
    element_bytes: float
    check: Callable[[], None] = lambda: None


class Workload:
    """A bf16 input of ragged groups, poisoned outputs, and the reference's results."""

    def __init__(self, rows: int, cols: int, groups: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
        self.x.normal_(generator=generator)
        self.x *= torch.exp2(torch.randn(rows, 1, device="cuda", generator=generator))
        cuts = torch.rand(groups, device="cuda", generator=generator) + 0.5
        self.offs = (cuts.cumsum(0) / cuts.sum() * rows).round().int()
        self.offs[-1] = rows
        specs = buffers(NVFP4(), (rows, cols), groups, columnwise=True)
        self.copies = {
            name: spec.allocate(self.x.device, zeroed=False)
            for name, spec in specs.items()
            if spec.dtype == torch.uint8
        }
        self.poison()
        self.row_amax = self.x.abs().amax(1).float()
        self.group_amax = torch.empty(groups, device="cuda")
        start = 0
        for g, end in enumerate(self.offs.tolist()):
            self.group_amax[g] = self.row_amax[start:end].amax()
            start = end

    def expected(self, fmt: Format, columnwise: bool) -> dict[str, Tensor]:
        """What the reference writes over poison."""
        specs = buffers(fmt, self.x.shape, len(self.offs), columnwise=columnwise)
        out = {name: spec.allocate(self.x.device, zeroed=False) for name, spec in specs.items()}
        names = [name for name in out if name in self.copies]
        for name in names:
            out[name].fill_(0xA5)
        groups = Groups.ragged(self.offs, len(self.x))
        reference.quantize(reference.Elements(self.x), groups, fmt, out)
        return {name: out[name] for name in names}

    def arguments(self, config: Any, num_sms: int) -> tuple[Any, ...]:
        """What the compiled function of ``config`` takes."""
        out = self.copies
        if isinstance(config, RowsConfig):
            amax = self.row_amax if config.computes_amax else self.group_amax
            return self.x, self.offs, amax, out["codes"], out["scales"], None, None, num_sms
        if isinstance(config, AmaxConfig):
            return self.x, self.offs, None, self.group_amax, num_sms
        amaxes = (
            self.row_amax if config.uses_row_amax else None,
            self.group_amax if config.uses_group_amax else None,
        )
        rowwise = (out["codes"], out["scales"]) if config.rowwise else (None, None)
        columnwise = (out["codes_t"], out["scales_t"]) if config.columnwise else (None, None)
        return (self.x, self.offs, *amaxes, *rowwise, *columnwise, None, None, num_sms)

    def candidate(self, config: Any) -> Candidate:
        """A kernel of ours."""
        device = torch.device("cuda", torch.cuda.current_device())
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernel = compile_kernel(config, device_architecture(device))
        run = functools.partial(kernel, *self.arguments(config, num_sms))
        if isinstance(config, AmaxConfig):
            return Candidate(run, _READ)
        by_rows = isinstance(config, RowsConfig)
        directions = 1 if by_rows else config.rowwise + config.columnwise
        return Candidate(run, _READ + directions * _CODES, functools.partial(self.check, config))

    def check(self, config: Any) -> None:
        """Compare what the last run wrote."""
        by_rows = isinstance(config, RowsConfig)
        want = self.expected(parse(config.format), not by_rows and config.columnwise)
        for name, value in want.items():
            if not by_rows and not config.rowwise and not name.endswith("_t"):
                continue
            wrong = (self.copies[name] != value).sum().item()
            if wrong:
                raise AssertionError(f"{config}: {wrong} bytes of {name} differ")

    def poison(self) -> None:
        """Overwrite all copies."""
        for copy in self.copies.values():
            copy.fill_(0xA5)


def _eager_nvfp4(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 codes and scales, not swizzled, as PyTorch users write it."""
    blocks = x.float().unflatten(-1, (-1, 16))
    level = (2688.0 / amax).view(-1, 1)
    scales = (blocks.abs().amax(-1) / 6.0 * level).clamp(max=448.0).to(torch.float8_e4m3fn)
    y = blocks * (level / scales.float()).unsqueeze(-1)
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8) + (magnitude >= 0.75) + (magnitude > 1.25)
    code = code + (magnitude >= 1.75) + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0)
    code = (code | (y < 0).to(torch.uint8) << 3).flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, scales


def _peers(work: Workload) -> dict[str, Candidate]:
    """Copies, and quantizers by ``torch.compile``."""
    target = torch.empty_like(work.x)
    given = work.group_amax.amax().view(1)
    by_scale = torch.compile(lambda x: _eager_nvfp4(x, given))
    by_row = torch.compile(lambda x: _eager_nvfp4(x, x.abs().amax(-1).float()))
    one = _READ + _CODES
    return {
        "copy (elementwise kernel)": Candidate(lambda: torch.neg(work.x, out=target), 2 * _READ),
        "copy (Tensor.copy_)": Candidate(lambda: target.copy_(work.x), 2 * _READ),
        "torch.compile, amax given": Candidate(lambda: by_scale(work.x), one),
        "torch.compile, row-scaled": Candidate(lambda: by_row(work.x), one),
    }


def _ours(cols: int, arch: str) -> dict[str, Any]:
    tiles = functools.partial(TileConfig, dtype="bfloat16", arch=arch)
    by_row, square = NVFP4(row_scaled=True), NVFP4(block=(16, 16))
    problem = QuantizeProblem("bfloat16", cols)
    return {
        "row-scaled": RowsConfig.choose(by_row, problem, arch),
        "rowwise by rows, amax given": RowsConfig.choose(NVFP4(), problem, arch),
        "amax of groups": AmaxConfig("bfloat16", arch=arch),
        "rowwise, amax given": tiles("nvfp4"),
        "rowwise, two phases": tiles("nvfp4", compute_amax=True),
        "columnwise, amax given": tiles("nvfp4", rowwise=False, columnwise=True),
        "row + column, amax given": tiles("nvfp4", columnwise=True),
        "row-scaled + column, two phases": tiles(by_row.text, columnwise=True, compute_amax=True),
        "16x16 row + column, amax given": tiles(square.text, columnwise=True),
    }


def measure(candidates: dict[str, Candidate], rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call, by candidate and round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate.run()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                candidate.run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / calls)
    return times


def main() -> None:
    """Check, measure, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--cols", type=int, default=7168)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--check-rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--no-peers", action="store_true", help="no torch.compile'd quantizers")
    parser.add_argument("--commit", help="the commit, where the package is not in a checkout")
    parser.add_argument("--out", type=Path, help="write the record here")
    options = parser.parse_args()
    arch = device_architecture(torch.cuda.current_device()).name
    configs = _ours(options.cols, arch)
    small = Workload(options.check_rows, options.cols, options.groups)
    for config in configs.values():
        small.poison()
        candidate = small.candidate(config)
        candidate.run()
        candidate.check()
    work = Workload(options.rows, options.cols, options.groups)
    candidates = {name: work.candidate(config) for name, config in configs.items()}
    peers = _peers(work)
    if options.no_peers:
        peers = {name: peer for name, peer in peers.items() if name.startswith("copy")}
    candidates |= peers
    times = measure(candidates, options.rounds, options.calls)
    facts = machine_facts()
    if options.commit:
        facts["commit"] = options.commit
    elements = options.rows * options.cols
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    rate = max(
        candidates[name].element_bytes * elements / medians[name]
        for name in candidates
        if name.startswith("copy")
    )
    results = {}
    for name, candidate in candidates.items():
        floor = candidate.element_bytes * elements / rate
        results[name] = {
            "us": round(medians[name], 1),
            "spread us": round(max(times[name]) - min(times[name]), 1),
            "floor us": round(floor, 1),
            "of copy rate": round(floor / medians[name], 3),
            "GB/s": round(candidate.element_bytes * elements / medians[name] / 1000),
        }
        print(f"{name:34}", *(f"{key} {value:<9}" for key, value in results[name].items()))
    print(f"copy {rate / 1e6:.3f} TB/s;", facts)
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        record = {"settings": settings, "environment": facts, "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
