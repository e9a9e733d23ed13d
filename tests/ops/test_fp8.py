"""FP8 with current scaling: given amaxes, empty groups, and one scale for both copies."""

import pytest
import torch

import grouped
from cute_kernels import backend
from tests.helpers import sample


def test_given_amaxes_set_the_scales():
    """Check that given amaxes set the scales of FP8 tensors."""
    fmt = grouped.FP8()
    q = grouped.quantize(torch.ones(4, 32), fmt, offs=[4, 4], amax=torch.tensor([-2.0, 7.0]))
    assert q.amax.tolist() == [2.0, 7.0]
    assert q.rowwise.scale.tolist() == [224.0, 64.0]
    assert q.rowwise.scale_inv.equal(q.rowwise.scale.reciprocal())
    assert q.member(0).codes.float().eq(224.0).all()


@pytest.mark.parametrize("name", ["reference", "emulated:sm_100a"])
def test_groups_without_rows_have_scale_one(name):
    with backend(name):
        empty = grouped.quantize(torch.ones(0, 32), grouped.FP8(), offs=[0, 0])
    assert empty.amax.tolist() == [0.0, 0.0] and empty.rowwise.scale.tolist() == [1.0, 1.0]


def test_both_copies_must_share_one_scale():
    small, large = (
        grouped.quantize(w, grouped.FP8(), columnwise=True)
        for w in (sample(3, 48, 64), 1000 * sample(3, 48, 64))
    )
    with pytest.raises(ValueError, match="share scale_inv"):
        grouped.GroupedTensor(
            small.shape, small.dtype, small.format, None, small.rowwise, large.columnwise
        )
    with pytest.raises(ValueError, match="share scale_inv"):
        grouped.GroupedTensor(
            small.shape,
            small.dtype,
            small.format,
            None,
            small.rowwise,
            small.columnwise._replace(scale_inv=large.rowwise.scale_inv),
        )
