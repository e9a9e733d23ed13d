"""Counts on the emulator: both architectures for CI, with ``--full`` Blackwell for the tables.

Counts do not vary between runs. Any difference is a change of a kernel, or of the launches of an
op.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from cute_kernels.kernels.gemm.common.problem import TileShape
from cute_kernels.kernels.gemm.sm100.config import Sm100Tile
from cute_kernels.ops.gemm.launcher import force_tile
from perf.suites import fused, gemm

from ..cases import GroupedShape
from ..contender import Contender, Task
from ..measure import Meter
from ..measure.emulator import EmulatorMeter
from .base import Options, Suite
from .gemm import Pair
from .layer import PASSES
from .moe import MoEShape, MoEWork
from .quantize import Quantization, Tasks

#: SMs of the emulated GPU.
NUM_SMS = 8
_ARCHES = ("sm_90a", "sm_100a")

#: Rows, columns and groups of quantizers, in CI and for docs/performance.md.
_INPUT, _FULL_INPUT = (256, 4096, 2), (2048, 4096, 4)
_NVFP4, _ROW_SCALED = "nvfp4", "nvfp4:row_scaled"
#: Formats by quantization.
_QUANTIZERS = {
    Quantization("row", True): (_NVFP4, "fp8"),
    Quantization("row", False): (_ROW_SCALED, "fp8_block", "mxfp8"),
    Quantization("column", True): (_NVFP4,),
    Quantization("row+column", True): (
        _NVFP4,
        *(f"nvfp4:{option}" for option in ("block=16x16", "stochastic_rounding", "hadamard")),
    ),
    Quantization("row+column", False): (
        _ROW_SCALED,
        "fp8",
        "fp8_block",
        "fp8_block:block=128x128",
        "mxfp8",
    ),
    Quantization("row+column", False, True): ("mxfp8",),
    Quantization("row", False, True): (_ROW_SCALED,),
}
#: Rows of each group, by the name of the routing. NVIDIA's example drew the last two.
ROUTINGS = {
    "balanced": "256 256 256 256 256 256 256 256",
    "ragged": "37 150 299 1 80 212 5 266",
    "routed": "432 80 160 32 176 128 560 480",
    "skewed": "16 16 240 192 416 1040 16 112",
}
_MIXTURE = MoEShape("counted", 4, 256, 256, 2)
_FULL_SHAPE = GroupedShape("counted", "up", 8, 2048, 2048)
_SHAPE = GroupedShape("counted", "up", 4, 512, 512)
_RAGGED = "37 150 1 68"
_PAIRS = (
    Pair(_ROW_SCALED, _NVFP4),
    Pair(_ROW_SCALED, _NVFP4, prepacked=True),
    Pair(_NVFP4, "nvfp4:block=16x16"),
    Pair(None, _NVFP4),
    Pair("mxfp8", "mxfp8"),
    Pair(None, None),
)
#: Pairs that NVIDIA's example has, too.
_FULL_PAIRS = (_PAIRS[0], Pair("mxfp8", "mxfp8"))
#: Tiles that are compared with NVIDIA's example; the ops choose 256x256.
_TILES = {"256x128": Sm100Tile(256, 128, 2), "128x128": Sm100Tile(128, 128, swap_partial=True)}


def _quantizers(meter: Meter, options: Options) -> Iterator[Task]:
    tasks = Tasks(meter, options, _FULL_INPUT if options.full else _INPUT, "counts")
    for request, texts in _QUANTIZERS.items():
        yield _restrict(texts, tasks.quantize(request))
    for task in tasks:
        if task.case["op"] == "dequantize":
            yield _restrict((_NVFP4, _ROW_SCALED, "fp8"), task)
        elif not task.case["op"].endswith("quantize"):
            yield task


def _restrict(texts: Sequence[str], task: Task) -> Task:
    """Return a task with some formats of this package and all peers."""

    def contenders(copy: int) -> list[Contender]:
        return [c for c in task.contenders(copy) if c.name != "ours" or c.format in texts]

    return dataclasses.replace(task, contenders=contenders)


def _with_tile(contender: Contender, name: str, tile: TileShape) -> Contender:
    """Return a product in another tile than the op chooses."""
    full_name = f"{contender.name}, tile {name}"
    return dataclasses.replace(
        contender, name=full_name, prepare=lambda: force_tile(tile)(contender.prepare())
    )


def _product(meter: Meter, options: Options, shape: GroupedShape, product: str, sizes: str) -> Task:
    """Return the task of a product, with ``--full`` also in other tiles."""
    rows, pairs = sum(map(int, sizes.split())), _FULL_PAIRS if options.full else _PAIRS
    task = gemm.task(meter, options, shape, rows, product, sizes, "counts", pairs)
    if not options.full:
        return task

    def contenders(copy: int) -> list[Contender]:
        chosen = task.contenders(copy)
        tiles = itertools.product([c for c in chosen if c.is_ours], _TILES.items())
        return [*chosen, *(_with_tile(c, name, tile) for c, (name, tile) in tiles)]

    return dataclasses.replace(task, contenders=contenders)


def _step(meter: Meter, options: Options) -> Task:
    """Return the task of a training step of a mixture of experts."""
    case = {"layer": "moe", **dataclasses.asdict(_MIXTURE), "tokens": _INPUT[0], "pass": PASSES[1]}

    def contenders(copy: int) -> list[Contender]:
        work = MoEWork("moe", _MIXTURE, _INPUT[0], "random", PASSES[1], meter.device, options.seed)
        return list(work.contenders(meter, options))

    return Task("counts", case, contenders)


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    yield from _quantizers(meter, options)
    if not options.full:
        for product in ("fprop", "dgrad", "wgrad"):
            yield _product(meter, options, _SHAPE, product, _RAGGED)
        yield _step(meter, options)
        if meter.arch != _ARCHES[0]:  # on Hopper fused ops are timed instead
            yield from fused.tasks(meter, options)
    else:
        for sizes in ROUTINGS.values():
            yield _product(meter, options, _FULL_SHAPE, "fprop", sizes)


def _meters(options: Options) -> list[Meter]:
    """Return a meter per architecture, or the one of ``--backend``."""
    emulation = {"num_sms": NUM_SMS, **options.emulation}
    chosen = options.backend.removeprefix("emulated:")
    arches = _ARCHES[1:] if options.full else _ARCHES
    return [EmulatorMeter(f"emulated:{a}", **emulation) for a in arches if chosen in ("", a)]


SUITE = Suite(_tasks, _meters, has_peers=True)
