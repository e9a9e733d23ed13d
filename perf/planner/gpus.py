"""Rates and tiles of GPUs, as data: measured on Hopper, published for Blackwell."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cute_kernels.arch import get_arch
from cute_kernels.formats import Format

from ..roofs import published


@dataclass(frozen=True)
class Range:
    """A rate with its lower and upper bound, which are equal if it was measured."""

    low: float
    high: float

    def interpolate(self, position: float) -> float:
        """Return ``low`` at -1, ``high`` at 1, and their geometric mean at 0."""
        return math.sqrt(self.low * self.high) * math.pow(self.high / self.low, position / 2)


@dataclass(frozen=True)
class Tiles:
    """Tiles of grouped products.

    Attributes:
        rows: Smallest and largest number of rows of a tile. A tile has the power of two that holds
            the mean rows of the groups.
        step: Multiple to which the rows of a group's last tile are rounded up. 0 means the rows of
            the tile.
        cols: Columns of a tile of one SM.
        wgrad_rows: Rows of a tile of a gradient of weights.
        depth: Multiple to which the rows of a group are rounded up when they are contracted.
    """

    rows: tuple[int, int]
    step: int
    cols: int
    wgrad_rows: int
    depth: int


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Part of the name that its driver reports.
        arch: Architecture of its kernels.
        sms: Number of SMs.
        clock: Clock rate under load, in GHz.
        copy: Rate of a copy kernel in TB/s. Bytes read and bytes written both count.
        dense: Sustained TFLOP/s of large dense products, by the type of the operands.
        peak: The same rates at the clock of the data sheet.
        memory: Size of the GPU's memory in GB.
        tiles: Tiles of its products.
        source: Source of the rates, for people.
        doubt: Median relative error of predictions that were not measured.
    """

    name: str
    arch: str
    sms: int
    clock: float
    copy: Range
    dense: Mapping[str, Range]
    peak: Mapping[str, float]
    memory: float
    tiles: Tiles
    source: str
    doubt: float = 0.0

    @property
    def issue(self) -> float:
        """Thread instructions per second: four warps of 32 per SM and cycle."""
        return self.sms * 4 * 32 * self.clock * 1e9

    def mma_operand(self, fmt: Format | None) -> tuple[str, bool]:
        """Return the type that tensor cores multiply, and if operands are decoded to it.

        The tensor cores of sm_90a multiply FP8 without block scales. Sums of blocks of 128 are
        scaled in registers. Operands with finer blocks are decoded to a type that holds the product
        of code and scale.
        """
        if fmt is None:
            return "bfloat16", False
        if get_arch(self.arch).has_block_scaled_mma:
            return f"fp{fmt.element.bits}", False
        if fmt.element.bits < 8:
            return "float16", True
        is_fine = fmt.scale is not None and fmt.scale.vec_size < 128
        return ("bfloat16", True) if is_fine else ("fp8", False)


def _peak(name: str) -> dict[str, float]:
    """Return the TFLOP/s of a data sheet by type."""
    sheet = published(name)
    return {kind: rate for kind, rate in sheet.items() if kind != "copy"} | {
        "float16": sheet["bfloat16"]
    }


#: An H100 has the SMs, clocks and power limit of an H200, and less bandwidth.
_H200 = Gpu(
    name="H200",
    arch="sm_90a",
    sms=132,
    clock=1.7,
    copy=Range(4.25, 4.25),
    dense={
        "bfloat16": Range(682.0, 682.0),
        "float16": Range(688.0, 688.0),
        "fp8": Range(1270.0, 1270.0),
    },
    peak=_peak("H200"),
    memory=141.0,
    tiles=Tiles((8, 128), 0, 256, 128, 64),
    source="measured on an H200 at 700 W, sustained",
)
_H100 = replace(
    _H200,
    name="H100",
    copy=Range(2.99, 2.99),
    memory=80.0,
    source="rates of an H200, measured copy",
)
# Quantizers of other libraries reach 6.4 to 7.2 of 8 TB/s (TransformerEngine #2412 on a B300,
# FlashInfer #2838). Dense products: NVFP4 5239 (cuBLAS) to 5702 (DeepGEMM #348), FP8 2330 at 4096^3
# (helion #2756) to the 3500 that torchao takes as achievable, bf16 1360 (vLLM #20646) to 1540
# (ThunderKittens). Half of the published times of other libraries' kernels are within ``doubt``.
_B200 = Gpu(
    name="B200",
    arch="sm_100a",
    sms=148,
    clock=1.85,
    copy=Range(6.4, 7.2),
    dense={
        "bfloat16": Range(1360.0, 1540.0),
        "fp8": Range(2330.0, 3500.0),
        "fp4": Range(5239.0, 5702.0),
    },
    peak=_peak("B200"),
    memory=180.0,
    tiles=Tiles((256, 256), 16, 128, 256, 256),
    source="published rates, counts of the emulator",
    doubt=0.2,
)
#: GPUs by name.
GPUS = {gpu.name: gpu for gpu in (_H200, _H100, _B200)}


def gpu_of(name: str) -> Gpu:
    """Return a GPU by its name, or by the name that its driver reports.

    Raises:
        ValueError: It is not one of ``GPUS``.
    """
    gpu = next((gpu for key, gpu in GPUS.items() if key in name.upper()), None)
    if gpu is None:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return gpu
