"""compute_offsets, grouped_amax and grouped_dbias of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    DTYPES,
    I32,
    SPLITS,
    assert_same_bytes,
    end_rows,
    offs_from_splits,
    ops,
    poisoned,
    row_ranges,
    sample,
    special_values,
)
from tests.reference import oracle


@given(
    st.lists(st.integers(0, 1 << 20), max_size=50),
    st.integers(1, 8),
    st.sampled_from([I32, torch.int64]),
    st.sampled_from([I32, torch.int64]),
)
def test_offsets_are_the_inclusive_sum(splits, multiplier, given_dtype, dtype):
    got = ops.compute_offsets(torch.tensor(splits, dtype=given_dtype), multiplier, dtype)
    assert got.dtype == dtype
    assert got.tolist() == [multiplier * sum(splits[: g + 1]) for g in range(len(splits))]


def test_offsets_count_past_32_bits():
    got = ops.compute_offsets(
        torch.tensor([1 << 30, 1 << 30, 1 << 30], dtype=I32), 4096, torch.int64
    )
    assert got.tolist() == [(g + 1) << 42 for g in range(3)]


@pytest.mark.parametrize("dtype", [I32, torch.int64])
def test_offsets_saturate_at_the_limits_of_their_dtype(dtype):
    info = torch.iinfo(dtype)
    for multiplier in (1, 3, 1 << 20, (1 << 31) - 1):
        limit = info.max // multiplier
        splits = [limit - 2, 1, 1, 1, info.max - limit - 1, -info.max, -limit, -limit, -limit]
        want = [
            min(max(total * multiplier, info.min), info.max)
            for total in torch.tensor(splits).cumsum(0).tolist()
        ]
        assert ops.compute_offsets(torch.tensor(splits), multiplier, dtype).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_amax_of_ragged_groups(splits, dtype):
    """Compare amaxes of ragged groups with a NumPy oracle."""
    x = special_values(sum(splits) + 2, 20, dtype)
    x[sum(splits) :] = torch.inf  # the tail
    groups, _ = oracle.ragged_groups(end_rows(splits), len(x))
    want = torch.tensor(np.array(oracle.group_amaxes(x.float().numpy(), groups)))
    assert_same_bytes(ops.grouped_amax(x, offs_from_splits(splits)), want)


def test_amax_of_uniform_groups():
    x = sample(3, 9, 20)
    assert_same_bytes(ops.grouped_amax(x), x.float().abs().amax((1, 2)))


def tree_sum(rows):
    """Sum 128 fp32 rows: i and i + 64, then i and i + 32, and so on."""
    rows = list(rows)
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [rows[i] + rows[i + half] for i in range(half)]
    return rows[0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("splits", [(300, 0, 1, 127, 128, 129), (0,), (1,)], ids=str)
def test_dbias_sums_in_the_documented_order(splits, dtype):
    """Check that dbias sums in the documented order."""
    dy = sample(sum(splits) + 3, 7, dtype=dtype)
    dy[sum(splits) :] = torch.nan  # the tail
    want = np.zeros((len(splits), 7), np.float32)
    values = dy.float().numpy()
    for g, (start, end) in enumerate(row_ranges(splits)):
        for row in range(start, end, 128):
            tile = np.zeros((128, 7), np.float32)
            tile[: min(128, end - row)] = values[row : min(end, row + 128)]
            want[g] = want[g] + tree_sum(tile)
    got = ops.grouped_dbias(dy, offs_from_splits(splits))
    assert_same_bytes(got, torch.from_numpy(want))
    out = poisoned(got)
    ops.grouped_dbias_out(dy, offs_from_splits(splits), dbias=out)
    assert_same_bytes(out, got)


def test_dbias_of_uniform_groups():
    dy = sample(3, 130, 7)
    assert_same_bytes(
        ops.grouped_dbias(dy), ops.grouped_dbias(dy.flatten(0, 1), offs_from_splits((130,) * 3))
    )
    assert_same_bytes(ops.grouped_dbias(dy[:, :0]), torch.zeros(3, 7))
