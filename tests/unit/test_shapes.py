"""Properties of the layout arithmetic: slots, scale tiles and clamped end rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.layout import shapes, slots
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.scales import tile_scales

sizes = st.integers(0, 1 << 40)
row_counts = st.lists(st.one_of(st.just(0), st.integers(0, 700)), min_size=1, max_size=20)


@given(sizes, st.integers(1, 1 << 20))
def test_round_up_is_the_smallest_multiple_that_is_not_less(a, b):
    """Check that ``round_up`` returns the smallest multiple that is not less."""
    rounded = shapes.round_up(a, b)
    assert rounded % b == 0
    assert rounded - b < a <= rounded
    assert shapes.ceil_div(a, b) * b == rounded


@given(row_counts, st.integers(0, 300))
def test_slots_never_overlap_and_fit(splits, tail):
    end_of_previous, start = 0, 0
    for group, rows in enumerate(splits):
        first_tile = slots.slot_tile(start, group)
        assert first_tile >= end_of_previous
        end_of_previous = first_tile + shapes.ceil_div(rows, slots.TILE_ROWS)
        start += rows
    assert end_of_previous <= slots.num_slot_tiles(start + tail, len(splits))


@given(st.integers(1, 1 << 31), st.integers(1, 5000))
def test_slot_buffer_is_no_larger_than_the_layout_needs(rows, num_groups):
    last_tile = slots.slot_tile(rows - 1, num_groups - 1)  # the last group holds one row
    needed = last_tile + 1
    assert slots.num_slot_tiles(rows, num_groups) == needed + (rows % slots.TILE_ROWS == 0)


@given(st.integers(1, 1 << 20), st.sampled_from([16, 32]))
def test_scale_tiles_hold_every_block_and_waste_less_than_a_tile(elements, sf_vec_size):
    covered = shapes.scale_tiles(elements, sf_vec_size) * shapes.SF_TILE_COLS * sf_vec_size
    assert 0 <= covered - elements < shapes.SF_TILE_COLS * sf_vec_size


@given(st.integers(0, 1 << 20))
def test_uniform_tiles_hold_every_row(rows):
    assert 0 <= slots.uniform_tiles(rows) * slots.TILE_ROWS - rows < slots.TILE_ROWS


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.integers(0, 600))
def test_any_end_rows_stay_inside_the_buffers(offs, rows):
    """Check that all end rows, even invalid ones, are clamped to the buffers."""
    groups = Groups.ragged(torch.tensor(offs, dtype=torch.int32), rows)
    assert (groups.rows >= 0).all()
    assert int(groups.starts.min()) >= 0 and int((groups.starts + groups.rows).max()) <= rows
    tile, _, row = groups.used_tiles()
    assert ((tile >= 0) & (tile < groups.num_tiles)).all()
    assert tile.unique().numel() == tile.numel()
    assert row.numel() == 0 or int(row.max()) < rows
    live, slot = groups.slot_of_row()
    assert len(live) <= rows
    assert ((slot >= 0) & (slot < groups.num_tiles * slots.TILE_ROWS)).all()


def test_row_positions_in_a_scale_tile_match_the_reference():
    tile = tile_scales(torch.arange(512).view(128, 4)).flatten()
    assert all(tile[shapes.row_in_tile(row)] == row % 128 * 4 for row in range(256))


def test_scale_offsets_match_the_reference():
    """Check offsets of integers and of tensors against the tiles that the reference lays out."""
    linear = torch.arange(256 * 8).view(256, 8)
    tiles = tile_scales(linear)
    rows, blocks = torch.arange(256).unsqueeze(1), torch.arange(8)
    offsets = shapes.scale_offset(rows, blocks, tiles.shape[-2])
    assert tiles.flatten()[offsets].equal(linear)
    assert shapes.scale_offset(130, 5, 2) == offsets[130, 5]
