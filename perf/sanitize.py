"""Run every kernel family on small shapes under compute-sanitizer on a GPU.

Shapes have empty groups, boundaries inside tiles, a tail after the last group and widths that no
tile divides. Kernels are compiled first, without the tool. Each tensor gets a separate allocation,
so that memcheck sees an access past its end. The exit status is 1 if a tool reports anything, or if
memcheck misses a deliberate write past the end of a buffer.
"""

import argparse
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import cute_kernels
import grouped
from cute_kernels import ops
from cute_kernels.formats import NVFP4, Format, parse
from cute_kernels.kernels.gemm.common.operand_kinds import operand_of
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES, Sm90Tile
from cute_kernels.layout.shapes import round_up
from cute_kernels.ops.gemm.launcher import force_tile

from .cases import MOE_OPTIONS
from .suites.gemm import PAIRS
from .suites.quantize import DIRECTIONS, FORMATS, Quantization, amax_and_seed

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Exit status of a tool that reports an error.
_REPORTED = 9
_PROGRAM = (sys.executable, "-m", "perf", "sanitize")
_DEVICE = "cuda"
#: Name by which ``--format`` selects plain operands.
_PLAIN = "bfloat16"
_END_ROWS, _ROWS = (5, 5, 70, 199, 200), 230
_COLS, _WIDTH = 272, 208
#: Columns with more tiles than there are CTAs.
_WIDE = 16384
_gemm = grouped.grouped_gemm


@dataclasses.dataclass
class _Selection:
    """Formats and tiles that this process runs.

    Attributes:
        pattern: Regular expression that formats must match.
        share: Index of this process.
        shares: Number of processes; each runs every ``shares``-th tile or format.
    """

    pattern: str = ""
    share: int = 0
    shares: int = 1

    def accepts(self, *texts: str) -> bool:
        """Return True if one of the texts matches."""
        return any(re.search(self.pattern, text) for text in texts)

    @property
    def options(self) -> list[str]:
        """Arguments of a command with the same selection."""
        return ["--format", self.pattern, "--share", str(self.share), str(self.shares)]


_selection = _Selection()


def _offs() -> Tensor:
    return torch.tensor(_END_ROWS, dtype=torch.int32, device=_DEVICE)


def _sample(*shape: int) -> Tensor:
    return torch.randn(*shape, device=_DEVICE).bfloat16()


def _quantize(
    text: str, directions: str, x: Tensor, offs: Tensor | None, amax: Tensor | None
) -> None:
    """Quantize and decode, unless the format has no amaxes of groups to give."""
    fmt, request = parse(text), Quantization(directions, amax is not None)
    if request.is_valid_for(fmt):
        rowwise, columnwise = DIRECTIONS[directions]
        amax, _ = amax_and_seed(fmt, amax, request, x.device)
        q = grouped.quantize(x, fmt, offs=offs, rowwise=rowwise, columnwise=columnwise, amax=amax)
        for is_columnwise in request.copies:
            q.dequantize(x.dtype, "columnwise" if is_columnwise else "rowwise")


def quantize() -> None:
    """Run quantizers, decoding, AdamW, reductions and offsets."""
    offs = _offs()
    formats = [text for text in FORMATS if _selection.accepts(text)]
    for text in formats[_selection.share :: _selection.shares]:
        fmt = parse(text)
        cols = round_up(_COLS, fmt.k_multiple)
        x, weight = _sample(_ROWS, cols), _sample(len(_END_ROWS), _WIDTH, cols)
        inputs = (
            (x, offs, None),
            (weight, None, None),
            (x, offs, torch.ones(len(_END_ROWS), device=_DEVICE)),
        )
        try:
            for directions, data in itertools.product(DIRECTIONS, inputs):
                _quantize(text, directions, *data)
            if not fmt.is_transformed:
                scale = torch.ones(len(_END_ROWS), device=_DEVICE) if fmt.has_given_scale else None
                p = torch.nn.Parameter(grouped.quantize(weight, fmt, columnwise=True, scale=scale))
                p.grad = weight
                grouped.optim.AdamW([p]).step()
        except cute_kernels.UnsupportedError as reason:
            print(f"not here: {reason}")
    x = _sample(_ROWS, _COLS)
    ops.grouped_amax(x, offs)
    ops.grouped_dbias(x, offs)
    ops.compute_offsets(offs, 3)


def _in_all_tiles(*calls: Any) -> None:
    """Run calls in the tiles that ops choose, and in every tile of sm_90a."""
    if _selection.share == 0:
        for call in calls:
            call()
    _in_tiles(SM90_TILES, *calls)


def _in_tiles(tiles: Sequence[Sm90Tile], *calls: Any) -> None:
    """Run calls in this process's share of the tiles; skip tiles that do not support a call."""
    for tile, call in itertools.product(tiles[_selection.share :: _selection.shares], calls):
        with force_tile(tile):
            try:
                call()
            except cute_kernels.UnsupportedError:
                continue


def _in_all_formats(product: str, run: Callable[[Format, Format, int, int], None]) -> None:
    """Call ``run(a_format, b_format, width, cols)`` for the formats of a product."""
    for a, b in dict.fromkeys(pair.formats for pair in PAIRS if pair.is_valid_for(product)):
        if a is None or b is None or not _selection.accepts(a.text, b.text):
            continue
        b_format = a if product == "wgrad" else b
        multiple = math.lcm(a.k_multiple, b_format.k_multiple)
        try:
            run(a, b_format, round_up(_WIDTH, multiple), round_up(_COLS, multiple))
        except cute_kernels.UnsupportedError as reason:
            print(f"not here: {reason}")


def m_grouped() -> None:
    """Run forward products and gradients of the rows."""
    x, weight, offs = _sample(_ROWS, _COLS), _sample(len(_END_ROWS), _WIDTH, _COLS), _offs()
    bias, transposed = _sample(len(_END_ROWS), _WIDTH), weight.transpose(1, 2).contiguous()
    if _selection.accepts(_PLAIN):
        _in_all_tiles(
            lambda: _gemm(x, weight, offs=offs, bias=bias),
            lambda: _gemm(x, transposed, offs=offs, transpose_b=True),
        )
    _in_all_formats("fprop", _m_grouped)
    _in_all_formats("fprop", _dynamically_scheduled)


def _m_grouped(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    """Run the products of a pair of formats."""
    groups = len(_END_ROWS)
    a = grouped.quantize(_sample(_ROWS, cols), a_fmt, offs=_offs())
    b = grouped.quantize(_sample(groups, width, cols), b_fmt)
    b_t = grouped.quantize(_sample(groups, cols, width), b_fmt, rowwise=False, columnwise=True)
    bias, alpha = _sample(groups, width), torch.ones(groups, device=_DEVICE)
    out = torch.zeros(_ROWS, width, device=_DEVICE)
    _in_all_tiles(
        lambda: _gemm(a, b, bias=bias, alpha=alpha),
        lambda: _gemm(a, b, out=out, accumulate=True),
        lambda: _gemm(a, b_t, transpose_b=True),
    )


def _dynamically_scheduled(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    """Run products with dynamic scheduling, one of which activates and quantizes its results."""
    if not operand_of(a_fmt).has_short_sums:
        return
    offs = _offs()
    a = grouped.quantize(_sample(_ROWS, cols), a_fmt, offs=offs)
    b = grouped.quantize(_sample(len(_END_ROWS), _WIDE, cols), b_fmt)
    (codes, scales), (b_codes, b_scales) = (
        x.rowwise.operand for x in (a, b) if x.rowwise is not None
    )
    amax = None if a_fmt.global_scale is None else torch.ones(len(_END_ROWS), device=_DEVICE)

    def activate_and_quantize() -> None:
        ops.m_grouped_gemm_activate(
            codes,
            b_codes,
            offs,
            out_dtype=torch.bfloat16,
            a_scales=scales,
            b_scales=b_scales,
            a_format=a_fmt.text,
            b_format=b_fmt.text,
            epilogue="swiglu",
            quantize_to=a_fmt.text,
            amax=amax,
        )

    tiles = [tile for tile in SM90_TILES if tile.rows == 128]
    _in_tiles(tiles, lambda: _gemm(a, b), activate_and_quantize)


def k_grouped() -> None:
    """Run gradients of the weights."""
    x, dy, offs = _sample(_ROWS, _COLS), _sample(_ROWS, _WIDTH), _offs()
    if _selection.accepts(_PLAIN):
        _in_all_tiles(lambda: _gemm(dy, x, offs=offs))
    _in_all_formats("wgrad", _k_grouped)


def _k_grouped(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    """Run the gradients of the weights of a pair of formats."""
    options: dict[str, Any] = {"offs": _offs(), "rowwise": False, "columnwise": True}
    a, b = (
        grouped.quantize(_sample(_ROWS, n), fmt, **options)
        for n, fmt in ((width, a_fmt), (cols, b_fmt))
    )
    out = torch.zeros(len(_END_ROWS), width, cols, device=_DEVICE)
    _in_all_tiles(lambda: _gemm(a, b), lambda: _gemm(a, b, out=out, accumulate=True))


def mixture() -> None:
    """Run training steps of mixtures of experts and of their optimizer.

    They cover routing, gathered rows, fused activations, gradients and sums.
    """
    names = [name for name in grouped.recipes.NAMES if _selection.accepts(name)]
    names = names[_selection.share :: _selection.shares]
    for name, options in itertools.product(names, ({}, *MOE_OPTIONS.values())):
        _step(name, options)


def _step(name: str, options: dict[str, Any]) -> None:
    """Run a training step in a recipe, with options of ``grouped.nn.MoE``."""
    hidden, intermediate = (round_up(size, 32) for size in (_COLS, _WIDTH))
    x = _sample(_ROWS, hidden).requires_grad_()
    # The layer refuses some recipes, its first product others.
    try:
        recipe = getattr(grouped.recipes, name)()
        moe = grouped.nn.MoE(
            hidden, intermediate, 16, 3, recipe=recipe, device=_DEVICE, dtype=x.dtype, **options
        )
        optimizer = grouped.optim.AdamW(moe.parameters())
        moe(x).sum().backward()
        optimizer.step()
    except cute_kernels.UnsupportedError as reason:
        print(f"not here: {reason}")


def canary() -> None:
    """Write past the end of an output whose memory was shrunk."""
    q = grouped.quantize(_sample(_ROWS, _COLS), NVFP4(), offs=_offs())
    out = torch.empty(_ROWS, _COLS, device=_DEVICE, dtype=torch.bfloat16)
    out.untyped_storage().resize_(256)
    assert q.rowwise is not None
    codes, scales = q.rowwise.operand
    torch.ops.cute_kernels.grouped_dequantize_out(
        codes, scales, NVFP4().text, _ROWS, out.dtype, q.offs, out=out
    )


#: Kernel families by the name in ``--part``.
FAMILIES = {function.__name__: function for function in (quantize, m_grouped, k_grouped, mixture)}


def _run_under(tool: str, family: str) -> tuple[int, list[str]]:
    """Run a kernel family under a tool and return the exit status and the lines of its output."""
    # API errors are left out: the driver's bindings ask for symbols that older drivers lack. The
    # kernels of this package have "Config" in their names.
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        str(_REPORTED),
        "--report-api-errors",
        "no",
    ]
    command += [
        "--kernel-name",
        "kernel_substring=Config",
        *_PROGRAM,
        *_selection.options,
        "--tool",
        "--part",
        family,
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return run.returncode, (run.stdout + run.stderr).splitlines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``perf sanitize``."""
    parser.add_argument("--tool", nargs="*", default=["memcheck", "racecheck"], choices=TOOLS)
    parser.add_argument("--part", nargs="+", default=list(FAMILIES), choices=[*FAMILIES, "canary"])
    parser.add_argument("--format", default="", help="formats that match this regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), help=argparse.SUPPRESS)


def _in_jobs(arguments: argparse.Namespace) -> int:
    """Run in several processes, each with its share and return the largest exit status."""
    command = [
        *_PROGRAM,
        "--format",
        arguments.format,
        "--tool",
        *arguments.tool,
        "--part",
        *arguments.part,
    ]
    jobs = [
        subprocess.Popen([*command, "--share", str(i), str(arguments.jobs)])
        for i in range(arguments.jobs)
    ]
    return max(job.wait() for job in jobs)


def main(arguments: argparse.Namespace) -> int:
    """Run kernel families under tools and return 1 if a tool reports an error."""
    if not torch.cuda.is_available():
        raise ValueError("sanitize needs a GPU, and torch sees none")
    if arguments.jobs > 1:
        return _in_jobs(arguments)
    _selection.pattern, (_selection.share, _selection.shares) = arguments.format, arguments.share
    torch.manual_seed(0)
    for family in arguments.part:
        FAMILIES.get(family, canary)()
    torch.cuda.synchronize()
    failed = False
    for tool, family in itertools.product(arguments.tool, arguments.part):
        status, lines = _run_under(tool, family)
        print(f"{tool} {family}: exit status {status}; {lines[-1] if lines else ''}", flush=True)
        if status:
            failed = True
            print("\n".join(lines[:60]))
    if (
        "memcheck" in arguments.tool
        and _selection.share == 0
        and _run_under("memcheck", "canary")[0] != _REPORTED
    ):
        failed = True
        print("memcheck misses a write past the end of a buffer: it sees no kernel of this package")
    return int(failed)
