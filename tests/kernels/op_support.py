"""Ops on emulated backends against the reference backend, to the bit."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

import cute_kernels
from tests.helpers import assert_same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs the CuTe DSL", allow_module_level=True)

ARCHITECTURES = ("sm_90a", "sm_100a")
MODES = [{"mode": "chaos", "seed": seed} for seed in range(5)] + [{"races": True}]
MODE_IDS = [f"chaos {seed}" for seed in range(5)] + ["races"]


def check(arch: str, call: Callable[[], Tensor], **options: Any) -> None:
    """What ``call`` returns on an emulated architecture has the bits of the reference."""
    with cute_kernels.backend("reference"):
        want = call()
    with cute_kernels.backend(f"emulated:{arch}", **options):
        assert_same_bytes(call(), want, any_nan=True)
