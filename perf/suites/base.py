"""What a suite is, and what is asked of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.formats import Format

from ..contender import Contender, Task
from ..measure import Meter, meter_of

if TYPE_CHECKING:
    from ..peers.base import Peer


@dataclass(frozen=True)
class Options:
    """What is asked of a run: options of ``perf run``, the peers beside this package, and the
    emulator's options.
    """

    backend: str = ""
    protocol: str = "sustained"
    quick: bool = False
    full: bool = False
    seed: int = 0
    peers: "Sequence[Peer]" = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    emulation: Mapping[str, Any] = field(default_factory=dict)

    def competing(self, meter: Meter, what: str, *work: Any) -> Iterator[Contender]:
        """What the method ``what`` of each peer that has one offers."""
        for peer in self.peers:
            if hasattr(peer, what) and meter.kind in peer.kinds and not peer.missing(meter):
                peer.meter = meter
                for contender in getattr(peer, what)(*work):
                    contender.versions = peer.versions
                    yield contender


@dataclass(frozen=True)
class Suite:
    """A set of tasks, and the meters that measure them, one after the other."""

    tasks: Callable[[Meter, Options], Iterator[Task]]
    meters: Callable[[Options], list[Meter]]
    has_peers: bool = False


def default_meters(options: Options) -> list[Meter]:
    return [meter_of(options.backend, options.protocol, options.quick, options.emulation)]


def element_bytes(fmt: Format | None, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes of an element of one copy of a tensor, its block scales included.

    The second level is not: it is a number a row, or a group.
    """
    if fmt is None:
        return dtype.itemsize
    block = getattr(fmt, "block", (1, 1))
    scale = fmt.scale
    # A square block's scale is kept once for each of its rows, where the layout asks for that.
    rows = block[0] if scale is not None and scale.layout == "mn_major" else 1
    scales = scale.element.bits / 8 / scale.vec_size / rows if scale is not None else 0.0
    return fmt.element.bits / 8 + scales
