"""What GPUs can do, as data: measured on Hopper, published for Blackwell."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cute_kernels.arch import get_arch
from cute_kernels.formats import Format

from ..roofs import published


@dataclass(frozen=True)
class Range:
    """A rate and between what it lies: one number if it was measured."""

    low: float
    high: float

    def at(self, where: float) -> float:
        """``low`` at -1, ``high`` at 1, their geometric mean at 0."""
        return math.sqrt(self.low * self.high) * math.pow(self.high / self.low, where / 2)


@dataclass(frozen=True)
class Tiles:
    """How products are cut.

    Attributes:
        rows: the least and the most rows of a tile, which is the power of two that holds the
            mean.
        step: what the rows of a group's last tile are rounded up to; 0: to the tile's.
        cols: columns of a tile of one SM.
        wgrad_rows: rows of one of a gradient of weights.
        depth: what the rows of a group are rounded up to where they are contracted.
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
        name: part of what its driver calls it.
        clock: GHz under load.
        copy: TB/s of a copy kernel, read and written.
        dense: sustained TFLOP/s of large dense products, by what is multiplied.
        peak: the same at the clock of the data sheet.
        memory: GB.
        doubt: median relative error of predictions where they were not measured.
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
        """Thread instructions a second: four warps of 32 an SM and cycle."""
        return self.sms * 4 * 32 * self.clock * 1e9

    def multiplied(self, fmt: Format | None) -> tuple[str, bool]:
        """What tensor cores multiply of operands in a format, and whether they decode to that.

        Those of sm_90a know FP8 but no block scales. Blocks of 128 are added in registers; what is
        finer is decoded to a type that holds the product of code and scale.
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
    """TFLOP/s of a data sheet."""
    sheet = published(name)
    return {kind: rate for kind, rate in sheet.items() if kind != "copy"} | {
        "float16": sheet["bfloat16"]
    }


#: An H100 has the SMs, clocks and power limit of an H200, and less bandwidth.
_H200 = Gpu(
    *("H200", "sm_90a", 132, 1.7, Range(4.25, 4.25)),
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
    _H200, name="H100", copy=Range(2.99, 2.99), memory=80.0, source="an H200's; measured copy"
)
# Quantizers of others reach 6.4 to 7.2 TB/s of 8 (TransformerEngine #2412 on a B300, FlashInfer
# #2838). Dense products: NVFP4 5239 (cuBLAS) to 5702 (DeepGEMM #348), FP8 2330 at 4096^3 (helion
# #2756) to the 3500 that torchao takes as achievable, bf16 1360 (vLLM #20646) to 1540
# (ThunderKittens). Half of the published times of others' kernels are within ``doubt``.
_B200 = Gpu(
    *("B200", "sm_100a", 148, 1.85, Range(6.4, 7.2)),
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
#: By name.
GPUS = {gpu.name: gpu for gpu in (_H200, _H100, _B200)}


def gpu_of(name: str) -> Gpu:
    """A GPU by its name, or by what its driver calls it.

    Raises:
        ValueError: it is not one of ``GPUS``.
    """
    found = next((gpu for key, gpu in GPUS.items() if key in name.upper()), None)
    if found is None:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return found
