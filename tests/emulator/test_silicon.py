"""Instructions against the recorded answers of an H200, bit for bit."""

import numpy as np
import pytest

import ptx_emulator as emulator

from .silicon import snippets as silicon


@pytest.fixture(scope="module")
def recorded(engine):
    emulator.load_ptx(silicon.ptx())
    return silicon.inputs(), silicon.answers()


@pytest.mark.parametrize(("index", "snippet"), list(enumerate(silicon.SNIPPETS)))
def test_an_instruction_gives_the_bits_of_an_h200(recorded, index, snippet):
    """Compare the digest of an instruction's results with the recorded digest of an H200."""
    x, answers = recorded
    out = np.full(len(x), 0xCDCDCDCDCDCDCDCD, np.uint64)
    emulator.launch(f"k{index}", (len(x) // 256,), (256,), (x, out))
    assert silicon.digest(snippet, out) == answers[index]
