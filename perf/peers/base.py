"""Base class of peers, and conversions that several of them need."""

import abc
import functools
import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import grouped
from cute_kernels.formats import NVFP4, parse
from cute_kernels.layout.shapes import ceil_div, round_up
from cute_kernels.reference.scales import untile_scales

from ..contender import Contender, Prepare
from ..environment import package_version
from ..measure import Meter
from ..operands import Operands
from ..suites.base import element_bytes
from ..suites.quantize import Input

#: Relative errors of products and values by format; larger ones are not due to quantization. Normal
#: numbers give 0.095 (NVFP4 values), 0.13 (their products), 0.027 and 0.038 (FP8). A wrong result
#: gives 1 or more.
NOISE = {"nvfp4": 0.2, "mxfp4": 0.25, "fp8": 0.08, "mxfp8": 0.08, "bfloat16": 4e-3}


class Peer:
    """A library with the same functions as this package.

    Its contenders get the same bf16 operands as those of this package, and are checked against the
    same products. They call public functions of the library. A peer has those of the following
    methods that its library supports.

    - ``quantizers(input, quantization)`` yields quantizers of an ``Input``.
    - ``products(operands)`` yields products of bf16 ``Operands``. Conversions are not timed.
    - ``layers(work)`` yields linear layers and MLPs of a ``LayerWork``.
    - ``mixtures(work)`` yields the mixture of experts of a ``MoEWork``.
    - ``experts(work)`` yields the experts alone, of an ``ExpertsWork``.

    Attributes:
        name: Name in ``Record.contender``.
        module: Name of the Python module.
        distribution: Name on PyPI, if it differs from that of the module.
        kinds: Those of ``records.KINDS`` on which it runs.
        capabilities: Major compute capabilities of GPUs on which it runs. Empty for all.
        sources: Folder of a checkout that the emulator needs.
        meter: Meter of the run, set before contenders are made.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("gpu",)
    capabilities: ClassVar[tuple[int, ...]] = ()
    sources: ClassVar[str] = ""

    meter: Meter

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.path = paths.get(self.name)

    def missing(self, meter: Meter) -> str:
        """Return why the peer does not run on a meter's device, or '' if it does."""
        if meter.kind not in self.kinds:
            return f"it does not run on a {meter.kind}"
        if meter.kind == "emulator":
            return self._missing_checkout(meter)
        # find_spec of a dotted name would import the parents, which may fail.
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.module} is not installed"
        if meter.kind == "gpu" and self.capabilities:
            major, minor = torch.cuda.get_device_capability()
            if major not in self.capabilities:
                return f"it has no kernels for compute capability {major}.{minor}"
        return ""

    def _missing_checkout(self, meter: Meter) -> str:
        """Return why the peer does not run on the emulator, or '' if it does."""
        if meter.arch != "sm_100a":
            return "its CuTe DSL kernels are for sm_100a"
        if self.path is None:
            return f"pass --path {self.name}=FOLDER with a checkout"
        if not (self.path / self.sources).is_dir():
            return f"{self.path} is not a checkout of {self.name}: it has no {self.sources}"
        return ""

    @property
    def versions(self) -> dict[str, str]:
        """Version of the library, or the commit of its checkout."""
        if self.path is not None:
            command = ["git", "-C", str(self.path), "rev-parse", "--short=12", "HEAD"]
            git = subprocess.run(command, capture_output=True, text=True, check=False)
            return {self.name: git.stdout.strip() or "unknown"}
        return {self.name: package_version(self.distribution or self.module) or "unknown"}

    def quantizer(
        self,
        data: Input,
        text: str,
        prepare: Prepare,
        error: Callable[[Any], float],
        *,
        copies: int = 1,
        note: str = "",
    ) -> Contender:
        """Return a contender of a quantizer.

        Args:
            data: Input.
            text: Text of the format.
            prepare: See ``Contender``.
            error: See ``Contender``.
            copies: Number of copies that are written.
            note: Remark in the record.
        """
        fmt = parse(text)
        moved = data.x.numel() * (2.0 + copies * element_bytes(fmt))
        bound = NOISE[fmt.name.partition("_")[0]]
        return Contender(self.name, text, prepare, error, bound, bytes=moved, note=note)

    def product(
        self,
        work: Operands,
        text: str,
        prepare: Callable[[], Callable[[], Tensor]],
        a_bytes: float = 2.0,
        b_bytes: float = 2.0,
        *,
        error: Callable[[Tensor], float] | None = None,
        note: str = "",
    ) -> Contender:
        """Return a contender of a product.

        Args:
            work: Operands.
            text: Format of the record.
            prepare: Makes the call.
            a_bytes: Bytes per element of operand A.
            b_bytes: Bytes per element of operand B.
            error: Check of results that have another layout than ``work`` expects.
            note: Remark in the record.
        """
        noise = next(name for name in ("nvfp4", "fp8", "bfloat16") if name in text)
        return Contender(
            name=self.name,
            format=text,
            prepare=prepare,
            error=error or work.error,
            bound=NOISE[noise],
            bytes=work.least_bytes(a_bytes, b_bytes),
            flops=work.flops,
            note=note,
        )


class W4A16Peer(Peer, abc.ABC):
    """A library with forward products of bf16 rows and NVFP4 weights."""

    @abc.abstractmethod
    def prepare(self, work: Operands) -> Callable[[], Tensor]:
        """Quantize and arrange the weights, and return the call of the product."""

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield the forward product."""
        if work.product == "fprop":
            prepare = functools.partial(self.prepare, work)
            yield self.product(work, "bfloat16 x nvfp4", prepare, b_bytes=element_bytes(NVFP4()))


def padded_rows(x: Tensor, sizes: list[int], multiple: int) -> tuple[Tensor, Tensor]:
    """Pad each group with zeros to a multiple of rows.

    Returns:
        The padded rows, and the group of each row, or -1 for padding.
    """
    padded_sizes = [round_up(size, multiple) for size in sizes]
    padded = x.new_zeros(sum(padded_sizes), x.shape[1])
    owner = torch.full((sum(padded_sizes),), -1, dtype=torch.int32, device=x.device)
    start = 0
    for group, (rows, padded_size) in enumerate(zip(x.split(sizes), padded_sizes, strict=True)):
        padded[start : start + len(rows)] = rows
        owner[start : start + len(rows)] = group
        start += padded_size
    return padded, owner


def unpadded_rows(x: Tensor, sizes: list[int], multiple: int) -> Tensor:
    """Return the rows of ``padded_rows`` without the padding."""
    groups = x.split([round_up(size, multiple) for size in sizes])
    return torch.cat([group[:size] for group, size in zip(groups, sizes, strict=True)])


def row_scales(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the scales (rows, blocks) of one group as bytes, from tiles of 128 x 4."""
    return untile_scales(tiles.view(torch.uint8).view(1, -1, ceil_div(blocks, 4), 512), blocks)[
        0, :rows
    ]


def linear_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize weights (G, N, K) to NVFP4, in the row-major form of other libraries.

    Returns:
        Codes (G, N, K / 2), E4M3 scales (G, N, K / 16), and global scales (G,).
    """
    tensors = grouped.quantize(weight, NVFP4()).to_parts(global_scale=True)
    return tensors["codes"], tensors["scales"], tensors["global_scale"]
