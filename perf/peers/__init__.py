"""Other libraries behind one interface (``peers.base.Peer``)."""

import importlib
from collections.abc import Mapping
from pathlib import Path

from .base import Peer

#: Modules of this package. Each has a class ``PEER``.
PEERS = (
    "pytorch",
    "transformer_engine",
    "torchao",
    "flashinfer",
    "deep_gemm",
    "quack",
    "marlin",
    "humming",
    "cutlass",
    "transformers",
)


def all_peers(paths: Mapping[str, Path]) -> list[Peer]:
    """Return all peers. ``paths`` maps names of peers that run from sources to their folders."""
    modules = (importlib.import_module(f"perf.peers.{name}") for name in PEERS)
    return [module.PEER(paths) for module in modules]
