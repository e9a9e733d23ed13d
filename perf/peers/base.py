"""What a peer is."""

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

#: Relative errors of products and of values that are more than quantization, by format. Normal
#: numbers give 0.095 (NVFP4 values), 0.13 (their products), 0.027 and 0.038 (FP8); what is wrong
#: gives 1 and more.
NOISE = {"nvfp4": 0.2, "mxfp4": 0.25, "fp8": 0.08, "mxfp8": 0.08, "bfloat16": 4e-3}


class Peer:
    """A library that does what this package does.

    Its contenders take the same bf16 operands as ours, are checked against the same products before
    they are timed, and run on their library's public functions, by methods that are there if the
    library does such a thing: ``quantizers`` (of an ``Input``, as a ``Quantization`` asks),
    ``products`` (of bf16 ``Operands``, whose conversion is not timed), ``layers`` (of a
    ``LayerWork``), ``mixtures`` (of a ``MoEWork``) and ``experts`` (of an ``ExpertsWork``).

    Attributes:
        name: as ``Record.contender``.
        module: what is imported.
        distribution: its name on PyPI, if it is not the module's.
        kinds: of ``records.KINDS``, where it runs.
        capabilities: major compute capabilities of GPUs that it runs on; empty if all.
        sources: folder of a checkout that the emulator needs.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("gpu",)
    capabilities: ClassVar[tuple[int, ...]] = ()
    sources: ClassVar[str] = ""

    #: What measures; set before it is asked for contenders.
    meter: Meter

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.path = paths.get(self.name)

    def missing(self, meter: Meter) -> str:
        """Why it does not run here; empty if it does."""
        if meter.kind not in self.kinds:
            return f"it does not run on a {meter.kind}"
        if meter.kind == "emulator":
            return self._missing_checkout(meter)
        # Of a dotted name the parents are imported, which may fail in its own way.
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.module} is not installed"
        if meter.kind == "gpu" and self.capabilities:
            major, minor = torch.cuda.get_device_capability()
            if major not in self.capabilities:
                return f"it has no kernels for compute capability {major}.{minor}"
        return ""

    def _missing_checkout(self, meter: Meter) -> str:
        if meter.arch != "sm_100a":
            return "its CuTe DSL kernels are for sm_100a"
        if self.path is None:
            return f"--path {self.name}=FOLDER names no checkout"
        if not (self.path / self.sources).is_dir():
            return f"{self.path} is no checkout of {self.name}: it has no {self.sources}"
        return ""

    @property
    def versions(self) -> dict[str, str]:
        if self.path is not None:
            command = ["git", "-C", str(self.path), "rev-parse", "--short=12", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return {self.name: done.stdout.strip() or "unknown"}
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
        """One of its quantizers, to the format ``text``, of which it writes so many copies."""
        fmt = parse(text)
        moved = data.x.numel() * (2.0 + copies * element_bytes(fmt))
        return Contender(
            self.name, text, prepare, error, NOISE[fmt.name.partition("_")[0]], moved, note=note
        )

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
        """One of its products, of elements with so many bytes.

        ``text`` is the format, what stands last the coarsest; ``error`` is needed if the result is
        not laid out as ``work`` has it.
        """
        noise = next(name for name in ("nvfp4", "fp8", "bfloat16") if name in text)
        check, moved = error or work.error, work.least_bytes(a_bytes, b_bytes)
        done = (self.name, text, prepare, check, NOISE[noise], moved, work.flops)
        return Contender(*done, note=note)


class W4A16Peer(Peer, abc.ABC):
    """A library whose product is that of bf16 rows and NVFP4 weights, forward."""

    @abc.abstractmethod
    def prepare(self, work: Operands) -> Callable[[], Tensor]:
        """Quantize and arrange the weights; gives what multiplies."""

    def products(self, work: Operands) -> Iterator[Contender]:
        if work.product == "fprop":
            prepare = functools.partial(self.prepare, work)
            yield self.product(work, "bfloat16 x nvfp4", prepare, b_bytes=element_bytes(NVFP4()))


def padded_rows(x: Tensor, sizes: list[int], multiple: int) -> tuple[Tensor, Tensor]:
    """Rows with zeros up to whole ``multiple`` of each group; and the group of each, or -1."""
    room = [round_up(size, multiple) for size in sizes]
    padded = x.new_zeros(sum(room), x.shape[1])
    owner = torch.full((sum(room),), -1, dtype=torch.int32, device=x.device)
    start = 0
    for group, (part, rows) in enumerate(zip(x.split(sizes), room, strict=True)):
        padded[start : start + len(part)] = part
        owner[start : start + len(part)] = group
        start += rows
    return padded, owner


def unpadded_rows(x: Tensor, sizes: list[int], multiple: int) -> Tensor:
    room = [round_up(size, multiple) for size in sizes]
    return torch.cat([part[:n] for part, n in zip(x.split(room), sizes, strict=True)])


def row_scales(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """(rows, blocks) bytes of scales out of 128x4 tiles of one group."""
    return untile_scales(tiles.view(torch.uint8).view(1, -1, ceil_div(blocks, 4), 512), blocks)[
        0, :rows
    ]


def linear_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (G, N, K) quantized to NVFP4 as other libraries keep them.

    Returns:
        (G, N, K / 2) codes, (G, N, K / 16) E4M3 scales, and (G,) what both are multiplied by.
    """
    parts = grouped.quantize(weight, NVFP4()).to_parts(global_scale=True)
    return parts["codes"], parts["scales"], parts["global_scale"]
