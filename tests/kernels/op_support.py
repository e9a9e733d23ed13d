"""Ops on emulated backends against the reference backend, to the bit."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import cute_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs the CuTe DSL", allow_module_level=True)

ARCHITECTURES = ("sm_90a", "sm_100a")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MODES = [{"mode": "chaos", "seed": seed} for seed in range(5)] + [{"races": True}]
MODE_IDS = [f"chaos {seed}" for seed in range(5)] + ["races"]


def ends(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def many_groups() -> Tensor:
    """End rows of 1500 groups: none to two rows each, a long run of empty ones, and a long one."""
    sizes = torch.randint(0, 3, (1500,), generator=torch.Generator().manual_seed(5))
    sizes[700:1400] = 0
    sizes[1450] = 130
    return sizes.cumsum(0).int()


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal bits, but one NaN is as good as another."""
    assert got.shape == want.shape and got.dtype == want.dtype
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    differs = got.view(integer) != want.view(integer)
    differs &= ~(got.isnan() & want.isnan())
    where = differs.nonzero()[:4].tolist()
    assert not where, (
        f"{int(differs.sum())} of {got.numel()} differ, first at {where}: got "
        f"{[got[tuple(i)].item() for i in where]}, expected "
        f"{[want[tuple(i)].item() for i in where]}"
    )


def check(arch: str, call: Callable[[], Tensor], **options: Any) -> None:
    """What ``call`` returns on an emulated architecture has the bits of the reference."""
    with cute_kernels.backend("reference"):
        want = call()
    with cute_kernels.backend(f"emulated:{arch}", **options):
        assert_same_bits(call(), want)
