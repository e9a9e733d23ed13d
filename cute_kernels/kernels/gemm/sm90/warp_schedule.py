"""Roles of the warps, and the number of arrivals at each barrier."""

import dataclasses

from cute_kernels.device.constants import WARP_SIZE

#: Warps of a warpgroup.
WARPS = 4
WARPGROUP_SIZE = WARPS * WARP_SIZE
#: The first warpgroup's hardware barrier in the epilogue; 0 is the one of ``sync_threads``.
FIRST_EPILOGUE_BARRIER = 1
#: The first of the two barriers that let a warpgroup begin its epilogue.
FIRST_PING_PONG_BARRIER = 5
#: Registers of a thread by the number of consumer warpgroups: of consumers, and of the others.
#: Together they may not exceed the registers with which the CTA is launched: a warp that asks for
#: more waits forever.
_REGISTERS = {1: (128, 40), 2: (232, 40), 4: (104, 40)}
#: The same with a store warpgroup, and registers of a thread of that one.
_REGISTERS_STORING, _STORE_REGISTERS = (216, 24), 56
#: The same with a gather warpgroup.
_REGISTERS_GATHERING = 216, 40
#: The barrier of all four consumer warpgroups.
CONSUMERS_BARRIER = 5
#: The first warpgroup's barriers with a store warpgroup: its blocks are full, and free.
FIRST_FULL_BARRIER, FIRST_FREE_BARRIER = 7, 9


@dataclasses.dataclass(frozen=True)
class WarpSchedule:
    """Warp roles of a CTA: warpgroups that multiply, then one that loads and schedules.

    Attributes:
        consumers: Warpgroups that multiply.
        has_store_warpgroup: True if another warpgroup stores, the last one.
        gather_warps: Warps that read rows of an operand by an index; four are a warpgroup of their
            own.
    """

    consumers: int
    has_store_warpgroup: bool = False
    gather_warps: int = 0

    store_registers = _STORE_REGISTERS

    @property
    def first_gather_warp(self) -> int:
        """Number of the first gather warp."""
        return self.num_threads // WARP_SIZE - self.gather_warps

    @property
    def stage_arrivals(self) -> int:
        """Arrivals that fill a stage: one for the copies of TMA, and one per lane that gathers."""
        return 1 + self.gather_warps * WARP_SIZE

    @property
    def load_warp_id(self) -> int:
        """Number of the load warp."""
        return self.num_consumer_warps

    @property
    def scheduler_warp_id(self) -> int:
        """Number of the scheduler warp."""
        return self.num_consumer_warps + 1

    @property
    def num_consumer_warps(self) -> int:
        """Number of warps that multiply; one arrival of each frees a stage."""
        return self.consumers * WARPS

    @property
    def num_threads(self) -> int:
        """Threads of a CTA; two warps of the last warpgroup gather, or are idle."""
        return (
            self.consumers + 1 + self.has_store_warpgroup + self.gather_warps // WARPS
        ) * WARPGROUP_SIZE

    @property
    def first_store_warp(self) -> int:
        """Number of the first warp of the store warpgroup."""
        return self.num_consumer_warps + WARPS

    @property
    def tile_consumer_arrivals(self) -> int:
        """Arrivals that free a tile record: one per consumer, store, load and gather warp."""
        return self.num_consumer_warps + 1 + self.gather_warps + WARPS * self.has_store_warpgroup

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread: of consumers, and of the others."""
        if self.gather_warps == WARPS:
            return _REGISTERS_GATHERING
        return _REGISTERS_STORING if self.has_store_warpgroup else _REGISTERS[self.consumers]
