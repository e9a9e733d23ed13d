"""Suites and their options."""

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
    """Options of a run. The fields ``backend`` to ``seed`` are options of ``perf run``.

    Attributes:
        peers: Libraries to measure next to this package.
        paths: Folders of peers that run from sources, by the name of the peer.
        emulation: Options of the emulator.
    """

    backend: str = ""
    protocol: str = "sustained"
    quick: bool = False
    full: bool = False
    seed: int = 0
    peers: "Sequence[Peer]" = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    emulation: Mapping[str, Any] = field(default_factory=dict)

    def competing(self, meter: Meter, method: str, *work: Any) -> Iterator[Contender]:
        """Yield the contenders of peers that have a method, such as ``"products"``.

        Args:
            meter: Measures the contenders.
            method: Name of the method.
            *work: Arguments of the method.
        """
        for peer in self.peers:
            if hasattr(peer, method) and meter.kind in peer.kinds and not peer.missing(meter):
                peer.meter = meter
                for contender in getattr(peer, method)(*work):
                    contender.versions = peer.versions
                    yield contender


@dataclass(frozen=True)
class Suite:
    """A set of tasks.

    Attributes:
        tasks: Yields the tasks that a meter measures.
        meters: Returns the meters, which measure one after the other.
        has_peers: True if peers compete in the suite.
    """

    tasks: Callable[[Meter, Options], Iterator[Task]]
    meters: Callable[[Options], list[Meter]]
    has_peers: bool = False


def default_meters(options: Options) -> list[Meter]:
    """Return the meter of the chosen backend."""
    return [meter_of(options.backend, options.protocol, options.quick, options.emulation)]


def element_bytes(fmt: Format | None, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the bytes per element of one copy of a tensor, block scales included.

    Global scales are left out: there is one per row or group.

    Args:
        fmt: Format of the tensor. None for a plain one.
        dtype: Data type of a plain tensor.
    """
    if fmt is None:
        return dtype.itemsize
    block = getattr(fmt, "block", (1, 1))
    scale = fmt.scale
    # The MN-major layout stores the scale of a square block once per row.
    rows = block[0] if scale is not None and scale.layout == "mn_major" else 1
    scales = scale.element.bits / 8 / scale.vec_size / rows if scale is not None else 0.0
    return fmt.element.bits / 8 + scales
