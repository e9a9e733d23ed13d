"""Roles of the warps, and the number of arrivals at each barrier."""

import dataclasses
import enum

from cute_kernels.device.constants import WARP_SIZE


class NamedBarrierId(enum.IntEnum):
    """Hardware barriers.

    0 is the one of ``sync_threads``. Warps that share blocks have one each from ``FIRST_SHARED``
    on.
    """

    TMEM = 1
    EPILOGUE = 2
    FIRST_SHARED = 3


@dataclasses.dataclass(frozen=True)
class WarpSchedule:
    """Warp roles of a CTA.

    The epilogue warps come first because a warp reaches only the quarter of tensor memory that its
    number modulo 4 names.

    Attributes:
        num_ctas: CTAs that share a tile's MMA.
        decodes: True if an operand is decoded: then there are a warp that loads codes and warps
            that decode them.
    """

    num_ctas: int = 1
    decodes: bool = False

    epilogue_warp_ids = (0, 1, 2, 3)
    mma_warp_id = 4
    load_warp_id = 5
    scheduler_warp_id = 6
    codes_load_warp_id = 7
    first_decode_warp_id = 8
    #: Warps of each of two teams, which decode every second stage.
    team_warps = 4

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        warps = self.scheduler_warp_id + 1
        if self.decodes:
            warps = self.first_decode_warp_id + self.num_decode_warps
        return WARP_SIZE * warps

    @property
    def num_decode_warps(self) -> int:
        """Number of warps that decode."""
        return 2 * self.team_warps if self.decodes else 0

    @property
    def stage_arrivals(self) -> int:
        """Arrivals that fill a stage: one of the load warp, and those of a team of each CTA."""
        return 1 + (self.team_warps * self.num_ctas if self.decodes else 0)

    @property
    def num_epilogue_threads(self) -> int:
        """Threads of the epilogue: one per row of tensor memory."""
        return WARP_SIZE * len(self.epilogue_warp_ids)

    @property
    def num_tmem_threads(self) -> int:
        """Threads that use tensor memory: the epilogue, which allocates it, and the MMA warp."""
        return self.num_epilogue_threads + WARP_SIZE

    @property
    def tile_consumer_arrivals(self) -> int:
        """Arrivals that free a tile record: one per warp except the scheduler."""
        return self.num_threads // WARP_SIZE - 1

    @property
    def acc_consumer_arrivals(self) -> int:
        """Arrivals that free an accumulator: one per epilogue warp of every CTA."""
        return len(self.epilogue_warp_ids) * self.num_ctas
