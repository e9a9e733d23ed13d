"""Operations of the four warps of a team together."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import store_shared
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TileGeometry


class CopyBuffers(NamedTuple):
    """Buffers of the copies that a kernel writes, or None for each one that it does not write.

    Attributes:
        codes: Rowwise codes, (T, K) or (G, N, K).
        scales: Rowwise block scales.
        codes_t: Columnwise codes, (K, P), or (P, K) if the format does not transpose.
        scales_t: Columnwise block scales.
    """

    codes: cute.Tensor | None
    scales: cute.Tensor | None
    codes_t: cute.Tensor | None
    scales_t: cute.Tensor | None


class Team:
    """Four warps that convert one tile; ``team`` arguments count teams in the CTA."""

    def __init__(self, config: TileConfig, geometry: TileGeometry):
        self.geometry = geometry
        self.threads = config.warps_per_team * WARP_SIZE

    def thread(self, team: Int32) -> Int32:
        """Return the index of the calling thread in its team."""
        return cute.arch.thread_idx()[0] - team * self.threads

    @cute.jit
    def sync(self, team: Int32) -> None:
        """Synchronize the threads of a team."""
        cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.threads)

    @cute.jit
    def clear_rows(self, tile_address: Int32, count: Int32, team: Int32, multiple: int) -> None:
        """Zero a tile's rows from ``count`` to the next ``multiple``, by the whole team."""
        rows = (TILE_ROWS - count) % multiple
        chunks = rows * (BOX_BYTES // 16)
        for b in cutlass.range_constexpr(self.geometry.num_boxes):
            base = tile_address + (b * BOX_SIZE + count * BOX_BYTES)
            for i in cutlass.range(self.thread(team), chunks, self.threads, unroll=1):
                store_shared(base + i * 16, [Uint32(0)] * 4)
        # The next load of this stage is an asynchronous write after these.
        cute.arch.fence_view_async_shared()
        self.sync(team)
