"""Which warp does what, and how often each barrier is arrived at."""

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
#: Together no more than the CTA is launched with: a warp that asks for more waits forever.
_REGISTERS = {1: (128, 40), 2: (232, 40), 4: (104, 40)}
#: Likewise where a warpgroup of its own stores, and of that one.
_REGISTERS_APART, _STORE_REGISTERS = (216, 24), 56
#: Likewise where a warpgroup of its own gathers.
_REGISTERS_GATHERING = 216, 40
#: The barrier of all four consumer warpgroups.
CONSUMERS_BARRIER = 5
#: The first warpgroup's barriers where another one stores: its blocks are full, and free.
FIRST_FULL_BARRIER, FIRST_FREE_BARRIER = 7, 9


@dataclasses.dataclass(frozen=True)
class WarpSchedule:
    """Warp roles of a CTA: warpgroups that multiply, then one that loads and schedules.

    Attributes:
        consumers: warpgroups that multiply.
        stores_apart: another one stores, the last.
        gather_warps: warps that read rows of an operand by an index; four are a warpgroup of
            their own.
    """

    consumers: int
    stores_apart: bool = False
    gather_warps: int = 0

    store_registers = _STORE_REGISTERS

    @property
    def first_gather_warp(self) -> int:
        return self.num_threads // WARP_SIZE - self.gather_warps

    @property
    def stage_arrivals(self) -> int:
        """Arrivals that fill a stage: one for what TMA copies, and one of each lane that gathers."""
        return 1 + self.gather_warps * WARP_SIZE

    @property
    def load_warp_id(self) -> int:
        return self.num_consumer_warps

    @property
    def scheduler_warp_id(self) -> int:
        return self.num_consumer_warps + 1

    @property
    def num_consumer_warps(self) -> int:
        """Warps that multiply; one arrival of each frees a stage."""
        return self.consumers * WARPS

    @property
    def num_threads(self) -> int:
        """Threads of a CTA; two warps of the last warpgroup gather, or do nothing."""
        return (
            self.consumers + 1 + self.stores_apart + self.gather_warps // WARPS
        ) * WARPGROUP_SIZE

    @property
    def first_store_warp(self) -> int:
        return self.num_consumer_warps + WARPS

    @property
    def tile_consumer_arrivals(self) -> int:
        """Arrivals that free a tile record: one of each consumer and store warp and of those that
        load.
        """
        return self.num_consumer_warps + 1 + self.gather_warps + WARPS * self.stores_apart

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread: of consumers, and of the others."""
        if self.gather_warps == WARPS:
            return _REGISTERS_GATHERING
        return _REGISTERS_APART if self.stores_apart else _REGISTERS[self.consumers]
