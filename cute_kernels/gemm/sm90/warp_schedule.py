"""Which warp does what, and how often each barrier is arrived at."""

from __future__ import annotations

import dataclasses

from cute_kernels.device.constants import WARP_SIZE

#: Warps of a warpgroup.
_WARPS = 4
WARPGROUP_SIZE = _WARPS * WARP_SIZE
#: The first warpgroup's hardware barrier in the epilogue; 0 is the one of ``sync_threads``.
FIRST_EPILOGUE_BARRIER = 1
#: The first of the two barriers that let a warpgroup begin its epilogue.
FIRST_PING_PONG_BARRIER = 5
#: Registers of an SM, of which a thread has whole eights, and of a thread that does not multiply.
_REGISTERS, _EIGHT, _FEW = 65536, 8, 40


@dataclasses.dataclass(frozen=True)
class WarpSchedule:
  """Warp roles of a CTA: warpgroups that multiply, then one that loads and schedules.

  Attributes:
    consumers: warpgroups that multiply.
    gathers: rows of an operand are read by an index.
  """

  consumers: int
  gathers: bool = False

  @property
  def load_warp_id(self) -> int:
    return self.num_consumer_warps

  @property
  def scheduler_warp_id(self) -> int:
    return self.num_consumer_warps + 1

  @property
  def first_gather_warp_id(self) -> int:
    """The first of the warps that gather, the last of the CTA."""
    return self.num_threads // WARP_SIZE - self.num_gather_warps

  @property
  def num_gather_warps(self) -> int:
    """How many there are; each of their lanes arrives at a stage."""
    return 2 if self.gathers else 0

  @property
  def stage_arrivals(self) -> int:
    """Arrivals that fill a stage."""
    return 1 + self.num_gather_warps * WARP_SIZE

  @property
  def num_consumer_warps(self) -> int:
    """Warps that multiply; one arrival of each frees a stage."""
    return self.consumers * _WARPS

  @property
  def num_threads(self) -> int:
    """Threads of a CTA; what a warpgroup has left over does nothing."""
    return (self.consumers + 1 + self.num_gather_warps // _WARPS) * WARPGROUP_SIZE

  @property
  def tile_consumer_arrivals(self) -> int:
    """Arrivals that free a tile record: one of each consumer warp and of those that load."""
    return self.num_consumer_warps + 1 + self.num_gather_warps

  @property
  def registers(self) -> tuple[int, int]:
    """Registers of a thread: of consumers, and of the others.

    Together no more than the CTA is launched with: a warp that asks for more waits forever.
    """
    launched = _REGISTERS // self.num_threads // _EIGHT * _EIGHT * self.num_threads // WARPGROUP_SIZE
    others = self.num_threads // WARPGROUP_SIZE - self.consumers
    return (launched - others * _FEW) // self.consumers // _EIGHT * _EIGHT, _FEW
