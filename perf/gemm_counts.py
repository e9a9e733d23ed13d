"""What ``count_gemm`` counts, and the products that it counts it on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from cute_kernels.formats import NVFP4
from cute_kernels.layout.buffers import BufferSpec, buffers
from cute_kernels.layout.slots import slot_tile
from cute_kernels.reference.scales import untile_scales
from cute_kernels.reference.tensor_core import tensor_core_gemm

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ARCH", "CASES", "NUM_SMS", "Counts", "Operands"]

ARCH = "sm_100a"
NUM_SMS = 8
_SAMPLE = 16
#: Rows of each group. The last two are routings that NVIDIA's example drew.
CASES = {
    "balanced": [256] * 8,
    "ragged": [37, 150, 299, 1, 80, 212, 5, 266],
    "routed": [432, 80, 160, 32, 176, 128, 560, 480],
    "skewed": [16, 16, 240, 192, 416, 1040, 16, 112],
}


@dataclasses.dataclass
class Counts:
    """Counts of one launch, see ``count_gemm``.

    Attributes:
        work: MMA work over useful work.
        load: megabytes by TMA.
        store: megabytes by TMA.
        direct: megabytes by ordinary stores.
        warp: thousands of warp instructions.
        waves: thousands of shared-memory wavefronts.
    """

    work: float
    load: float
    store: float
    direct: float
    warp: float
    waves: float

    @classmethod
    def of(cls, stats: Mapping[str, int], operands: Operands) -> Counts:
        """The counts in what the emulator says of a launch."""
        return cls(
            work=stats["mma_flops"] / operands.useful_flops,
            load=stats["tma_load_bytes"] / 1e6,
            store=stats["tma_store_bytes"] / 1e6,
            direct=stats["st_global_bytes"] / 1e6,
            warp=stats["warp_insns"] / 1e3,
            waves=stats["smem_wavefronts"] / 1e3,
        )

    def cells(self) -> str:
        """Columns of a table."""
        megabytes = (self.load, self.store, self.direct)
        return (
            f"{self.work:8.2f}"
            + "".join(f"{x:8.1f}" for x in megabytes)
            + f"{self.warp:8.0f}{self.waves:8.0f}"
        )


@dataclasses.dataclass
class Operands:
    """Random codes and scales of an m_grouped product, all amaxes 2688 so that factors are 1."""

    a: torch.Tensor
    a_scales: torch.Tensor
    b: torch.Tensor
    b_scales: torch.Tensor
    offs: torch.Tensor

    @classmethod
    def random(cls, sizes: list[int], n: int, k: int) -> Operands:
        """Operands of groups of ``sizes`` rows."""
        generator = torch.Generator().manual_seed(0)
        groups = len(sizes)
        tokens = buffers(NVFP4(row_scaled=True), (sum(sizes), k), groups)
        weights = buffers(NVFP4(), (groups, n, k), None)

        def bytes_of(spec: BufferSpec, low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, spec.shape, dtype=spec.dtype, generator=generator)

        # In this order, for the sake of the same numbers; scales are E4M3 from 1/8 to 16.
        a, a_scales = bytes_of(tokens["codes"], 0, 256), bytes_of(tokens["scales"], 0x20, 0x58)
        b, b_scales = bytes_of(weights["codes"], 0, 256), bytes_of(weights["scales"], 0x20, 0x58)
        return cls(a, a_scales, b, b_scales, torch.tensor(sizes).cumsum(0).int())

    @property
    def useful_flops(self) -> float:
        """Work of the products themselves."""
        rows, packed_k = self.a.shape
        return 2.0 * rows * self.b.shape[1] * 2 * packed_k

    def check(self, out: torch.Tensor) -> None:
        """Compare the corner of each group's product."""
        start = 0
        blocks = self.a.shape[1] * 2 // 16
        for group, end in enumerate(self.offs.tolist()):
            rows = min(_SAMPLE, end - start)
            if rows > 0:
                slot = slot_tile(start, group)
                operands = (self.a[start : start + rows], self.b[group, :_SAMPLE])
                tiles = (self.a_scales[slot], self.b_scales[group, 0])
                a_sf, b_sf = (
                    untile_scales(t[None], blocks).view(torch.float8_e4m3fn) for t in tiles
                )
                want = tensor_core_gemm(
                    ARCH, *operands, a_scales=a_sf[:rows], b_scales=b_sf[:_SAMPLE]
                )
                factor = torch.tensor(2688.0) * torch.tensor(1 / 2688)
                want = (want * (factor * factor)).to(out.dtype)
                torch.testing.assert_close(
                    out[start : start + rows, :_SAMPLE], want, rtol=0, atol=0
                )
            start = end
