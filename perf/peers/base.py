"""What a peer is."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

import torch

from perf.environment import package_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from perf.contender import Contender
    from perf.measure import Meter
    from perf.operands import Operands
    from perf.suites.layer import LayerWork
    from perf.suites.quantize import Input, Quantization

__all__ = ["NOISE", "Peer"]

#: Relative errors of products and of values that are more than quantization, by format. Normal
#: numbers give 0.095 (NVFP4 values), 0.13 (their products), 0.027 and 0.038 (FP8); what is wrong
#: gives 1 and more.
NOISE = {"nvfp4": 0.2, "mxfp4": 0.25, "fp8": 0.08, "mxfp8": 0.08, "bfloat16": 4e-3}


class Peer:
    """A library that does what this package does.

    Its contenders take the same bf16 operands as ours, are checked against the same products before
    they are timed, and run on their library's public functions. What a library does not do it does
    not offer.

    Attributes:
        name: as ``Record.contender``.
        module: what is imported.
        distribution: its name on PyPI, for its version.
        kinds: of ``records.KINDS``, where it runs.
        capabilities: major compute capabilities of GPUs that it runs on; empty if all.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("gpu",)
    capabilities: ClassVar[tuple[int, ...]] = ()

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.path = paths.get(self.name)

    def missing(self, meter: Meter) -> str:
        """Why it does not run here; empty if it does."""
        if meter.kind not in self.kinds:
            return f"it does not run on a {meter.kind}"
        # Of a dotted name the parents are imported, which may fail in its own way.
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.module} is not installed"
        if meter.kind == "gpu" and self.capabilities:
            major, minor = torch.cuda.get_device_capability()
            if major not in self.capabilities:
                return f"it has no kernels for compute capability {major}.{minor}"
        return ""

    @property
    def versions(self) -> dict[str, str]:
        """As ``Contender.versions``."""
        return {self.name: package_version(self.distribution) or "unknown"}

    def quantizers(self, data: Input, asked: Quantization) -> Iterator[Contender]:
        """Its quantizers for an input."""
        del data, asked
        yield from ()

    def products(self, work: Operands) -> Iterator[Contender]:
        """Its grouped products of bf16 operands, whose conversion is not timed."""
        del work
        yield from ()

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """Its layers, bf16 in and bf16 out."""
        del work
        yield from ()
