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
    """What ``call`` returns on an emulated architecture has the bits of the reference."""
    with backend("reference"):
        want = call()
    with backend(f"emulated:{arch}", **options):
        assert_same_bytes(call(), want, any_nan=True)


def array_of(x):
    return (x.view(torch.int16) if x.dtype == BF16 else x).numpy()


@contextlib.contextmanager
def watching(*memory):
    """Nothing but the tensors and arrays among ``memory`` may be touched."""
    try:
        emulator.watch(*(m for m in memory if isinstance(m, (torch.Tensor, np.ndarray))))
        yield
    finally:
        emulator.unwatch()


def check_code(config, arch, inexact=r"\.ftz|\.approx|\bfma\."):
    """No spills, and nothing ``inexact``; the PTX."""
    kernel = compile_for_emulator(config, arch)
    assert all(r.stack_bytes == 0 for r in read_resources(kernel.cubin).values())
    assert not re.findall(inexact, kernel.ptx)
    return kernel.ptx


def check_touched(run, needed, others=()):
    """``run`` stays in this memory and fails where the end of anything ``needed`` is missing."""
    with watching(*needed, *others):
        run()
    for i, array in enumerate(needed):
        with (
            watching(*needed[:i], array[:-1], *needed[i + 1 :], *others),
            pytest.raises(emulator.EmulatorError),
        ):
            run()
