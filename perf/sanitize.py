"""Run every kernel family on small shapes under compute-sanitizer on a GPU.

Shapes have empty groups, boundaries inside tiles, a tail that belongs to no group and widths that
no tile divides. Kernels are compiled first, without the tool. Each tensor gets an allocation of its
own, so that memcheck sees an access past its end. The exit status is 1 if a tool reports anything,
or if memcheck misses a deliberate write past the end of a buffer.
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

from .cases import OWN
from .suites.gemm import PAIRS
from .suites.quantize import DIRECTIONS, FORMATS, Quantization, given

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Exit status of a tool that reports something.
_REPORTED = 9
_PROGRAM = (sys.executable, "-m", "perf", "sanitize")
_DEVICE = "cuda"
#: What plain operands are called where formats are chosen.
_PLAIN = "bfloat16"
_ENDS, _ROWS = (5, 5, 70, 199, 200), 230
_COLS, _WIDTH = 272, 208
#: Columns of more tiles than there are CTAs.
_WIDE = 16384
_gemm = grouped.grouped_gemm


@dataclasses.dataclass
class _Choice:
    """What of each part is run: formats that match, and every ``shares``-th tile or format."""

    pattern: str = ""
    share: int = 0
    shares: int = 1

    def fits(self, *texts: str) -> bool:
        return any(re.search(self.pattern, text) for text in texts)

    @property
    def options(self) -> list[str]:
        return ["--format", self.pattern, "--share", str(self.share), str(self.shares)]


_choice = _Choice()


def _offs() -> Tensor:
    return torch.tensor(_ENDS, dtype=torch.int32, device=_DEVICE)


def _sample(*shape: int) -> Tensor:
    return torch.randn(*shape, device=_DEVICE).bfloat16()


def _quantize(
    text: str, directions: str, x: Tensor, offs: Tensor | None, amax: Tensor | None
) -> None:
    fmt, asked = parse(text), Quantization(directions, amax is not None)
    if asked.fits(fmt):
        rowwise, columnwise = DIRECTIONS[directions]
        amax, _ = given(fmt, amax, asked, x.device)
        q = grouped.quantize(x, fmt, offs=offs, rowwise=rowwise, columnwise=columnwise, amax=amax)
        for way in asked.ways:
            q.dequantize(x.dtype, "columnwise" if way else "rowwise")


def quantize() -> None:
    offs = _offs()
    for text in [text for text in FORMATS if _choice.fits(text)][_choice.share :: _choice.shares]:
        fmt = parse(text)
        cols = round_up(_COLS, fmt.k_multiple)
        x, weight = _sample(_ROWS, cols), _sample(len(_ENDS), _WIDTH, cols)
        inputs = (
            (x, offs, None),
            (weight, None, None),
            (x, offs, torch.ones(len(_ENDS), device=_DEVICE)),
        )
        try:
            for directions, data in itertools.product(DIRECTIONS, inputs):
                _quantize(text, directions, *data)
            if not fmt.is_transformed:
                scale = torch.ones(len(_ENDS), device=_DEVICE) if fmt.has_given_scale else None
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
    if _choice.share == 0:
        for call in calls:
            call()
    _in_tiles(SM90_TILES, *calls)


def _in_tiles(tiles: Sequence[Sm90Tile], *calls: Any) -> None:
    for tile, call in itertools.product(tiles[_choice.share :: _choice.shares], calls):
        with force_tile(tile):
            try:
                call()
            except cute_kernels.UnsupportedError:
                continue


def _in_all_formats(product: str, run: Callable[[Format, Format, int, int], None]) -> None:
    for a, b in dict.fromkeys(pair.formats for pair in PAIRS if pair.fits(product)):
        if a is None or b is None or not _choice.fits(a.text, b.text):
            continue
        second = a if product == "wgrad" else b
        multiple = math.lcm(a.k_multiple, second.k_multiple)
        try:
            run(a, second, round_up(_WIDTH, multiple), round_up(_COLS, multiple))
        except cute_kernels.UnsupportedError as reason:
            print(f"not here: {reason}")


def m_grouped() -> None:
    x, weight, offs = _sample(_ROWS, _COLS), _sample(len(_ENDS), _WIDTH, _COLS), _offs()
    bias, turned = _sample(len(_ENDS), _WIDTH), weight.transpose(1, 2).contiguous()
    if _choice.fits(_PLAIN):
        _in_all_tiles(
            lambda: _gemm(x, weight, offs=offs, bias=bias),
            lambda: _gemm(x, turned, offs=offs, transpose_b=True),
        )
    _in_all_formats("fprop", _m_grouped)
    _in_all_formats("fprop", _counted)


def _m_grouped(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    groups = len(_ENDS)
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


def _counted(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    """Products whose CTAs take tiles from a counter, and that quantize what they activate."""
    if not operand_of(a_fmt).has_short_sums:
        return
    a = grouped.quantize(_sample(_ROWS, cols), a_fmt, offs=_offs())
    b = grouped.quantize(_sample(len(_ENDS), _WIDE, cols), b_fmt)
    (codes, scales), (b_codes, b_scales) = (
        x.rowwise.operand for x in (a, b) if x.rowwise is not None
    )
    texts, bf16 = (a_fmt.text, b_fmt.text), torch.bfloat16
    operands = (
        codes,
        b_codes,
        a.offs,
        None,
        None,
        False,
        bf16,
        scales,
        b_scales,
        *texts,
        False,
        *[None] * 3,
    )
    amax = None if a_fmt.global_scale is None else torch.ones(len(_ENDS), device=_DEVICE)
    _in_tiles(
        [tile for tile in SM90_TILES if tile.rows == 128],
        lambda: _gemm(a, b),
        lambda: ops.m_grouped_gemm_activate(*operands, "swiglu", False, False, a_fmt.text, amax),
    )


def k_grouped() -> None:
    x, dy, offs = _sample(_ROWS, _COLS), _sample(_ROWS, _WIDTH), _offs()
    if _choice.fits(_PLAIN):
        _in_all_tiles(lambda: _gemm(dy, x, offs=offs))
    _in_all_formats("wgrad", _k_grouped)


def _k_grouped(a_fmt: Format, b_fmt: Format, width: int, cols: int) -> None:
    options: dict[str, Any] = {"offs": _offs(), "rowwise": False, "columnwise": True}
    a, b = (
        grouped.quantize(_sample(_ROWS, n), fmt, **options)
        for n, fmt in ((width, a_fmt), (cols, b_fmt))
    )
    out = torch.zeros(len(_ENDS), width, cols, device=_DEVICE)
    _in_all_tiles(lambda: _gemm(a, b), lambda: _gemm(a, b, out=out, accumulate=True))


def mixture() -> None:
    """Training steps of a mixture and of its optimizer: routing, gathered rows, fused activations,
    gradients, sums.
    """
    names = [name for name in grouped.recipes.NAMES if _choice.fits(name)][
        _choice.share :: _choice.shares
    ]
    for name, own in itertools.product(names, ({}, *OWN.values())):
        _step(name, own)


def _step(name: str, own: dict[str, Any]) -> None:
    hidden, intermediate = (round_up(size, 32) for size in (_COLS, _WIDTH))
    x = _sample(_ROWS, hidden).requires_grad_()
    # Some recipes are refused by the layer, some only by its first product.
    try:
        recipe = getattr(grouped.recipes, name)()
        moe = grouped.nn.MoE(
            hidden, intermediate, 16, 3, recipe=recipe, device=_DEVICE, dtype=x.dtype, **own
        )
        optimizer = grouped.optim.AdamW(moe.parameters())
        moe(x).sum().backward()
        optimizer.step()
    except cute_kernels.UnsupportedError as reason:
        print(f"not here: {reason}")


def canary() -> None:
    """Write past the end of an output whose memory was taken away."""
    q = grouped.quantize(_sample(_ROWS, _COLS), NVFP4(), offs=_offs())
    out = torch.empty(_ROWS, _COLS, device=_DEVICE, dtype=torch.bfloat16)
    out.untyped_storage().resize_(256)
    assert q.rowwise is not None
    codes, scales = q.rowwise.operand
    torch.ops.cute_kernels.grouped_dequantize_out(
        codes, scales, NVFP4().text, _ROWS, out.dtype, q.offs, out=out
    )


PARTS = {part.__name__: part for part in (quantize, m_grouped, k_grouped, mixture)}


def _run_under(tool: str, part: str) -> tuple[int, list[str]]:
    # A symbol that an older driver lacks is no error of ours; our kernels have "Config" in their
    # names.
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
        *_choice.options,
        "--tool",
        "--part",
        part,
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", nargs="*", default=["memcheck", "racecheck"], choices=TOOLS)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=[*PARTS, "canary"])
    parser.add_argument("--format", default="", help="formats that match this regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), help=argparse.SUPPRESS)


def _in_jobs(arguments: argparse.Namespace) -> int:
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
    """Run what was asked for; 1 if a tool reports something."""
    if not torch.cuda.is_available():
        raise ValueError("sanitize needs a GPU, and torch sees none")
    if arguments.jobs > 1:
        return _in_jobs(arguments)
    _choice.pattern, (_choice.share, _choice.shares) = arguments.format, arguments.share
    torch.manual_seed(0)
    for part in arguments.part:
        PARTS.get(part, canary)()
    torch.cuda.synchronize()
    failed = False
    for tool, part in itertools.product(arguments.tool, arguments.part):
        status, lines = _run_under(tool, part)
        print(f"{tool} {part}: exit status {status}; {lines[-1] if lines else ''}", flush=True)
        if status:
            failed = True
            print("\n".join(lines[:60]))
    if (
        "memcheck" in arguments.tool
        and _choice.share == 0
        and _run_under("memcheck", "canary")[0] != _REPORTED
    ):
        failed = True
        print("memcheck misses a write past the end of a buffer: it sees no kernel of this package")
    return int(failed)
