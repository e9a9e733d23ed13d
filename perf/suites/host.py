"""Host time of op calls and of a mixture's forward pass, for which a GPU waits between launches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_kernels import ops
from cute_kernels.formats import parse

from ..contender import Contender, Task, same_for_all_copies, unchecked
from ..measure import Meter
from ..measure.host import HostMeter
from .base import Options, Suite
from .layer import PASSES
from .moe import MoEShape, MoEWork

_ROW_SCALED, _SQUARE = "nvfp4:row_scaled", "nvfp4:block=16x16"
_FP8, _FP8_SQUARE = "fp8_block", "fp8_block:block=128x128"
_END_ROWS, _COLS, _WIDTH = (80, 128, 128, 256), 2048, 1024
_MOE, _TOKENS = MoEShape("small", 16, 512, 128, 8), 64


def _calls(device: torch.device) -> dict[tuple[str, str], list[Contender]]:
    """Return the contenders of each op and its directions.

    Shapes are small, so that kernels take little time. Results are not checked here: the suites
    that time kernels do that.
    """
    x = torch.randn(_END_ROWS[-1], _COLS, device=device).bfloat16()
    offs = torch.tensor(_END_ROWS, dtype=torch.int32, device=device)
    weight = torch.randn(len(_END_ROWS), _WIDTH, _COLS, device=device).bfloat16()
    a = ops.grouped_quantize(x, _ROW_SCALED, offs, None, True, True)
    b = ops.grouped_quantize(weight, _SQUARE)
    a8, *s8 = ops.grouped_quantize(x, _FP8, offs)
    b8, *t8 = ops.grouped_quantize(weight, _FP8_SQUARE)
    num_rowwise = len(parse(_ROW_SCALED).buffer_names(False))
    flat: Any = torch.ops.cute_kernels
    quantize, bf16 = ops.grouped_quantize, torch.bfloat16
    # Lists and options are made in each call, as modules do.
    options = (None, None, False, bf16)
    contenders: dict[tuple[str, str], list[Contender]] = {}

    def add(
        call: str, text: str, run: Callable[[], Any], directions: str = "", name: str = "ours"
    ) -> None:
        contender = unchecked(name, text, run, quantity="host time")
        contenders.setdefault((call, directions), []).append(contender)

    add("quantize", _ROW_SCALED, lambda: quantize(x, _ROW_SCALED, offs), "row")
    add("quantize", "nvfp4", lambda: quantize(x, "nvfp4", offs), "row")
    add(
        "quantize",
        _ROW_SCALED,
        lambda: flat.grouped_quantize(x, _ROW_SCALED, offs),
        "row",
        "ours, dispatched",
    )
    add(
        "quantize",
        _ROW_SCALED,
        lambda: quantize(x, _ROW_SCALED, offs, None, True, True),
        "row+column",
    )
    add(
        "dequantize",
        _ROW_SCALED,
        lambda: ops.grouped_dequantize(a[0], a[1:num_rowwise], _ROW_SCALED, len(x), bf16, offs),
        "row",
    )
    m_grouped = ops.m_grouped_gemm
    add(
        "m_grouped_gemm",
        f"{_ROW_SCALED} x {_SQUARE}",
        lambda: m_grouped(
            a[0], b[0], offs, *options, a[1:num_rowwise], b[1:], _ROW_SCALED, _SQUARE
        ),
    )
    add("m_grouped_gemm", "bfloat16", lambda: m_grouped(x, weight, offs))
    add(
        "m_grouped_gemm",
        f"{_FP8} x {_FP8_SQUARE}",
        lambda: m_grouped(a8, b8, offs, *options, s8, t8, _FP8, _FP8_SQUARE),
    )
    if device.type == "cuda":
        add(
            "m_grouped_gemm",
            "bfloat16",
            functools.partial(torch._grouped_mm, x, weight.transpose(1, 2), offs=offs),
            name="torch",
        )
    for fmt, square, codes, scales in (
        (_ROW_SCALED, _SQUARE, b[0], b[1:]),
        (_FP8, _FP8_SQUARE, b8, t8),
    ):
        run = functools.partial(
            ops.m_grouped_quantize_gemm, x, codes, offs, scales, fmt, square, *options
        )
        add("m_grouped_quantize_gemm", f"{fmt} x {square}", run)

    def wgrad() -> Any:
        codes = a[num_rowwise]
        return ops.k_grouped_gemm(
            codes,
            codes,
            offs,
            None,
            bf16,
            a[num_rowwise + 1 :],
            a[num_rowwise + 1 :],
            _ROW_SCALED,
            _ROW_SCALED,
        )

    add("k_grouped_gemm", f"{_ROW_SCALED} x {_ROW_SCALED}", wgrad)
    add("dbias", "bfloat16", lambda: ops.grouped_dbias(x, offs))
    add("compute_offsets", "int32", lambda: ops.compute_offsets(offs))
    return contenders


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    """Yield a task per op, and the forward pass of a mixture."""
    with meter.active():
        calls = _calls(meter.device)
    for (call, directions), contenders in calls.items():
        case = {"call": call, "directions": directions} if directions else {"call": call}
        yield Task("host", case, same_for_all_copies(contenders))

    def mixtures(copy: int) -> list[Contender]:
        work = MoEWork("moe", _MOE, _TOKENS, "random", PASSES[0], meter.device, options.seed, copy)
        return [
            dataclasses.replace(c, quantity="host time", is_step=False, bytes=None, flops=None)
            for c in work.contenders(meter, options)
            # Without a GPU the kernels of a peer would run on the host.
            if c.is_ours or meter.kind == "gpu"
        ]

    yield Task("host", {"call": "MoE forward", "tokens": _TOKENS}, mixtures)


def _meters(options: Options) -> list[Meter]:
    return [HostMeter(options.backend, options.quick)]


SUITE = Suite(_tasks, _meters, has_peers=True)
