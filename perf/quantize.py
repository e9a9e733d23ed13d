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

from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import ceil_div, code_pitch, num_slot_tiles, scale_tiles
from cute_kernels.quantize import AmaxConfig, QuantizeProblem, RowScaledConfig, TileConfig
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.nvfp4 import quantize_nvfp4
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
        tiles = num_slot_tiles(rows, groups)
        byte = functools.partial(torch.full, fill_value=0xA5, dtype=torch.uint8, device="cuda")
        self.codes = byte((rows, code_pitch(cols // 2)))[:, : cols // 2]
        self.scales = byte((tiles, scale_tiles(cols, 16), 512))
        self.codes_t = byte((cols, 64 * tiles))
        self.scales_t = byte((ceil_div(cols, 128), 2 * tiles, 512))
        self.row_amax = self.x.abs().amax(1).float()
        self.group_amax = torch.empty(groups, device="cuda")
        start = 0
        for g, end in enumerate(self.offs.tolist()):
            self.group_amax[g] = self.row_amax[start:end].amax()
            start = end

    def expected(self, fmt: NVFP4, columnwise: bool) -> dict[str, Tensor]:
        """What the reference writes over poison."""
        names = ["codes", "scales", *(["codes_t", "scales_t"] if columnwise else [])]
        out = {name: torch.full_like(getattr(self, name), 0xA5) for name in names}
        amaxes = {"amax": self.row_amax.clone() if fmt.row_scaled else self.group_amax.clone()}
        if columnwise:
            amaxes["amax_t"] = self.group_amax.clone()
        full: dict[str, Any] = dict.fromkeys(("codes_t", "scales_t", "amax_t")) | out | amaxes
        groups = Groups.ragged(self.offs, len(self.x))
        quantize_nvfp4(self.x, groups, fmt, given_amax=None, **full)
        return {name: full[name] for name in names}

    def arguments(self, config: Any, num_sms: int) -> tuple[Any, ...]:
        """What the compiled function of ``config`` takes."""
        if isinstance(config, RowScaledConfig):
            amax = self.group_amax if config.group_amax else self.row_amax
            return self.x, self.offs, amax, self.codes, self.scales, num_sms
        if isinstance(config, AmaxConfig):
            return self.x, self.offs, None, self.group_amax, num_sms
        amaxes = (
            self.row_amax if config.row_scaled else None,
            self.group_amax if config.uses_group_amax else None,
        )
        rowwise = (self.codes, self.scales) if config.rowwise else (None, None)
        columnwise = (self.codes_t, self.scales_t) if config.columnwise else (None, None)
        return (self.x, self.offs, *amaxes, *rowwise, *columnwise, num_sms)

    def candidate(self, config: Any) -> Candidate:
        """A kernel of ours."""
        device = torch.device("cuda", torch.cuda.current_device())
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernel = compile_kernel(config, device_architecture(device))
        run = functools.partial(kernel, *self.arguments(config, num_sms))
        if isinstance(config, AmaxConfig):
            return Candidate(run, _READ)
        row = isinstance(config, RowScaledConfig)
        directions = 1 if row else config.rowwise + config.columnwise
        return Candidate(run, _READ + directions * _CODES, functools.partial(self.check, config))

    def check(self, config: Any) -> None:
        """Compare what the last run wrote."""
        row = isinstance(config, RowScaledConfig)
        square = not row and config.square_blocks
        row_scaled = not config.group_amax if row else config.row_scaled
        fmt = NVFP4(row_scaled, (16, 16) if square else (1, 16))
        columnwise = not row and config.columnwise
        want = self.expected(fmt, columnwise)
        for name, value in want.items():
            if not row and not config.rowwise and not name.endswith("_t"):
                continue
            if not torch.equal(getattr(self, name), value):
                wrong = (getattr(self, name) != value).sum().item()
                raise AssertionError(f"{config}: {wrong} bytes of {name} differ")

    def poison(self) -> None:
        """Overwrite all outputs."""
        for name in ("codes", "scales", "codes_t", "scales_t"):
            getattr(self, name).fill_(0xA5)


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
    tiles = functools.partial(TileConfig, "bfloat16", arch=arch)
    problem = QuantizeProblem("bfloat16", cols)
    return {
        "row-scaled": RowScaledConfig.choose(problem, arch),
        "rowwise by rows, amax given": RowScaledConfig.choose(problem, arch, group_amax=True),
        "amax of groups": AmaxConfig("bfloat16", arch=arch),
        "rowwise, amax given": tiles(),
        "rowwise, two phases": tiles(compute_amax=True),
        "columnwise, amax given": tiles(rowwise=False, columnwise=True),
        "row + column, amax given": tiles(columnwise=True),
        "row-scaled + column, two phases": tiles(
            columnwise=True, row_scaled=True, compute_amax=True
        ),
        "16x16 row + column, amax given": tiles(columnwise=True, square_blocks=True),
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
