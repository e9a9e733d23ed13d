"""The measurement of a training step's memory."""

import pytest

from grouped import recipes
from perf.measure.memory import Sizes, bytes_of_step, measure


@pytest.mark.parametrize(
    ("name", "activations", "weights"),
    [
        ("BF16", 2 * 256 * (256 + 256 + 128), 0),
        ("NVFP4", 0.5625 * 512 * (256 + 128) + 2 * 256 * 256 + 16, 0.5625 * 2 * 256 * 384 + 16),
    ],
)
def test_bytes_by_hand(name, activations, weights):
    """256 rows of two experts in slots for 512, widths 256 and 128; 4 bytes an amax or an end."""
    saved, _ = measure(getattr(recipes, name)(), Sizes(2, 256, 128, 128))
    assert sum(t.nbytes for t in saved) == activations + weights + 2 * 4


def test_sums_of_a_step():
    """BF16 saves no weight; the peak includes the gradients of parameters and of x."""
    sizes = Sizes(experts=2, hidden=256, intermediate=128, tokens=128)
    totals = bytes_of_step(recipes.BF16(), sizes)
    assert totals["saved of activations"] == 2 * 256 * (256 + 256 + 128) + 2 * 4
    assert totals["saved of weights"] == 0
    assert totals["peak"] >= 2 * (3 * 2 * 256 * 128 + 256 * 256)
