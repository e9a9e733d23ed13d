"""The emulator against what an H200 answered, instruction by instruction."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.silicon import snippets as silicon


@pytest.fixture(scope="module")
def recorded(engine):
    emulator.load_ptx(silicon.ptx())
    return silicon.inputs(), silicon.answers()


def _emulate(index: int, x: np.ndarray) -> np.ndarray:
    out = np.full(len(x), 0xCDCDCDCDCDCDCDCD, np.uint64)
    emulator.launch(f"k{index}", (len(x) // 256,), (256,), (x, out))
    return out


@pytest.mark.parametrize(
    ("index", "name"),
    [pytest.param(i, n, id=n) for i, (n, s) in enumerate(silicon.snippets().items())
     if not s.approximate],
)  # fmt: skip
def test_equals_h200(recorded, index, name):
    x, answers = recorded
    got = _emulate(index, x)
    assert silicon.digest(name, got) == answers[name]


@pytest.mark.parametrize(
    ("index", "name"),
    [pytest.param(i, n, id=n) for i, (n, s) in enumerate(silicon.snippets().items())
     if s.approximate],
)  # fmt: skip
def test_is_close_to_h200(recorded, index, name):
    x, answers = recorded
    got = _emulate(index, x).astype(np.uint32).view(np.float32).astype(np.float64)
    want = answers[name].view(np.float32).astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(want) & (np.abs(want) > 1e-30)
    assert finite.sum() > 400
    np.testing.assert_allclose(got[finite], want[finite], rtol=2e-5)
    # The hardware's division flushes quotients of huge divisors to zero.
    same_class = (np.isnan(got) == np.isnan(want)) & (np.isinf(got) == np.isinf(want))
    assert (~same_class).sum() <= 1
