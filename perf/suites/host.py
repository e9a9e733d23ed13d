"""Host time of one op call, and of a mixture's forward pass: what a GPU waits for between launches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_kernels import ops
from cute_kernels.formats import parse

from ..contender import Contender, Task, always, unchecked
from ..measure import Meter
from ..measure.host import HostMeter
from .base import Options, Suite
from .layer import PASSES
from .moe import MoEShape, MoEWork

_BY_ROW, _SQUARE = "nvfp4:row_scaled", "nvfp4:block=16x16"
_ENDS, _COLS, _WIDTH = (80, 128, 128, 256), 2048, 1024
_MOE, _TOKENS = MoEShape("small", 16, 512, 128, 8), 64


def _calls(device: torch.device) -> dict[tuple[str, str], list[Contender]]:
    """Ops at a size where a kernel takes little time, and their directions; who is called in which
    format.
    """
    x = torch.randn(_ENDS[-1], _COLS, device=device).bfloat16()
    offs = torch.tensor(_ENDS, dtype=torch.int32, device=device)
    weight = torch.randn(len(_ENDS), _WIDTH, _COLS, device=device).bfloat16()
    a = ops.grouped_quantize(x, _BY_ROW, offs, None, True, True)
    b = ops.grouped_quantize(weight, _SQUARE)
    fp8, fp8_square = "fp8_block", "fp8_block:block=128x128"
    a8, *s8 = ops.grouped_quantize(x, fp8, offs)
    b8, *t8 = ops.grouped_quantize(weight, fp8_square)
    rowwise = len(parse(_BY_ROW).buffer_names(False))
    flat: Any = torch.ops.cute_kernels
    quantize, bf16 = ops.grouped_quantize, torch.bfloat16
    # As modules do: lists and options are made for each call.
    options = (None, None, False, bf16)
    found: dict[tuple[str, str], list[Contender]] = {}

    # What is timed is the call; that results are right is checked where kernels are timed.
    def add(
        call: str, text: str, run: Callable[[], Any], directions: str = "", who: str = "ours"
    ) -> None:
        found.setdefault((call, directions), []).append(
            unchecked(who, text, run, quantity="host time")
        )

    add("quantize", _BY_ROW, lambda: quantize(x, _BY_ROW, offs), "row")
    add("quantize", "nvfp4", lambda: quantize(x, "nvfp4", offs), "row")
    add(
        "quantize",
        _BY_ROW,
        lambda: flat.grouped_quantize(x, _BY_ROW, offs),
        "row",
        "ours, dispatched",
    )
    add("quantize", _BY_ROW, lambda: quantize(x, _BY_ROW, offs, None, True, True), "row+column")
    add(
        "dequantize",
        _BY_ROW,
        lambda: ops.grouped_dequantize(a[0], a[1:rowwise], _BY_ROW, len(x), bf16, offs),
        "row",
    )
    product, fp8_pair = f"{_BY_ROW} x {_SQUARE}", f"{fp8} x {fp8_square}"
    m_grouped = ops.m_grouped_gemm
    add(
        "m_grouped_gemm",
        product,
        lambda: m_grouped(a[0], b[0], offs, *options, a[1:rowwise], b[1:], _BY_ROW, _SQUARE),
    )
    add("m_grouped_gemm", "bfloat16", lambda: m_grouped(x, weight, offs))
    add(
        "m_grouped_gemm",
        fp8_pair,
        lambda: m_grouped(a8, b8, offs, *options, s8, t8, fp8, fp8_square),
    )
    if device.type == "cuda":
        columns = weight.transpose(1, 2)
        add(
            "m_grouped_gemm",
            "bfloat16",
            functools.partial(torch._grouped_mm, x, columns, offs=offs),
            who="torch",
        )
    for fmt, square, codes, scales in ((_BY_ROW, _SQUARE, b[0], b[1:]), (fp8, fp8_square, b8, t8)):
        run = functools.partial(
            ops.m_grouped_quantize_gemm, x, codes, offs, scales, fmt, square, *options
        )
        add("m_grouped_quantize_gemm", f"{fmt} x {square}", run)
    k_grouped, way = ops.k_grouped_gemm, rowwise

    def gradient() -> Any:
        return k_grouped(
            a[way], a[way], offs, None, bf16, a[way + 1 :], a[way + 1 :], _BY_ROW, _BY_ROW
        )

    add("k_grouped_gemm", f"{_BY_ROW} x {_BY_ROW}", gradient)
    add("dbias", "bfloat16", lambda: ops.grouped_dbias(x, offs))
    add("compute_offsets", "int32", lambda: ops.compute_offsets(offs))
    return found


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    with meter.active():
        calls = _calls(meter.device)
    for (call, directions), found in calls.items():
        case = {"call": call, "directions": directions} if directions else {"call": call}
        yield Task("host", case, always(found))

    def mixtures(copy: int) -> list[Contender]:
        work = MoEWork("moe", _MOE, _TOKENS, "random", PASSES[0], meter.device, options.seed, copy)
        found = work.contenders(meter, options)
        timed: dict[str, Any] = {
            "quantity": "host time",
            "is_step": False,
            "bytes": None,
            "flops": None,
        }
        # Without a GPU a peer would compute.
        return [dataclasses.replace(c, **timed) for c in found if c.is_ours or meter.kind == "gpu"]

    yield Task("host", {"call": "MoE forward", "tokens": _TOKENS}, mixtures)


def _meters(options: Options) -> list[Meter]:
    return [HostMeter(options.backend, options.quick)]


SUITE = Suite(_tasks, _meters, True)
