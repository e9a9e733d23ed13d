"""What the four warps of a team do together."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import store_shared
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TileGeometry


class CopyBuffers(NamedTuple):
    """The buffers of the copies that are written; None for tile there is not."""

    codes: cute.Tensor | None
    scales: cute.Tensor | None
    codes_t: cute.Tensor | None
    scales_t: cute.Tensor | None


class Team:
    """The team of a thread; ``team`` counts within the CTA."""

    def __init__(self, config: TileConfig, geometry: TileGeometry):
        self.geometry = geometry
        self.threads = config.warps_per_team * WARP_SIZE

    def thread(self, team: Int32) -> Int32:
        return cute.arch.thread_idx()[0] - team * self.threads

    @cute.jit
    def sync(self, team: Int32) -> None:
        cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.threads)

    @cute.jit
    def clear_rows(self, tile_at: Int32, count: Int32, team: Int32, multiple: int) -> None:
        """Zero a tile's rows from ``count`` to the next ``multiple``; for the whole team."""
        rows = (TILE_ROWS - count) % multiple
        chunks = rows * (BOX_BYTES // 16)
        for b in cutlass.range_constexpr(self.geometry.num_boxes):
            base = tile_at + (b * BOX_SIZE + count * BOX_BYTES)
            for i in cutlass.range(self.thread(team), chunks, self.threads, unroll=1):
                store_shared(base + i * 16, [Uint32(0)] * 4)
        # The next load of this stage is an asynchronous write after these.
        cute.arch.fence_view_async_shared()
        self.sync(team)
