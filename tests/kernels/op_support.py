"""Checks of ops and kernels on the emulator: bits, memory that is touched, and generated code."""

import contextlib
import re

import numpy as np
import pytest
import torch

import ptx_emulator as emulator
from cute_kernels import backend
from cute_kernels.testing.compiled import compile_for_emulator
from cute_kernels.testing.cubin import read_resources
from tests.helpers import BF16, assert_same_bytes

ARCHITECTURES = ("sm_90a", "sm_100a")
MODES = [{"mode": "chaos", "seed": seed} for seed in range(5)] + [{"races": True}]
each_mode = pytest.mark.parametrize(
    "mode", MODES, ids=lambda mode: f"chaos {mode['seed']}" if "seed" in mode else "races"
)


def check(arch, call, **options):
    """Check that ``call`` returns the bits of the reference on an emulated architecture."""
    with backend("reference"):
        want = call()
    with backend(f"emulated:{arch}", **options):
        assert_same_bytes(call(), want, any_nan=True)


def array_of(x):
    """Return a NumPy view of the tensor; bf16 as int16."""
    return (x.view(torch.int16) if x.dtype == BF16 else x).numpy()


@contextlib.contextmanager
def watching(*memory):
    """Let kernels touch the tensors and arrays among ``memory`` only."""
    try:
        emulator.watch(*(m for m in memory if isinstance(m, (torch.Tensor, np.ndarray))))
        yield
    finally:
        emulator.unwatch()


def check_code(config, arch, inexact=r"\.ftz|\.approx|\bfma\."):
    """Check that a kernel has no spills and no ``inexact`` instructions and return its PTX."""
    kernel = compile_for_emulator(config, arch)
    assert all(r.stack_bytes == 0 for r in read_resources(kernel.cubin).values())
    assert not re.findall(inexact, kernel.ptx)
    return kernel.ptx


def check_touched(run, needed, readable=()):
    """Check that ``run`` touches these arrays only, and the last element of each ``needed`` one."""
    with watching(*needed, *readable):
        run()
    for i, array in enumerate(needed):
        with (
            watching(*needed[:i], array[:-1], *needed[i + 1 :], *readable),
            pytest.raises(emulator.EmulatorError),
        ):
            run()
