"""Shapes and strides of the buffers of a quantized tensor, per format."""

import math

import pytest
import torch

from cute_kernels.formats import FP8, NVFP4, parse
from cute_kernels.layout.buffers import buffers, member_spans

T, K, G, N = 300, 416, 5, 200


def test_a_row_scaled_uniform_tensor_has_one_global_scale_per_row():
    assert buffers(NVFP4(row_scaled=True), (G, N, K), None)["amax"].shape == (G, N)


@pytest.mark.parametrize("fmt", [NVFP4(), FP8()], ids=lambda fmt: fmt.text)
@pytest.mark.parametrize("cols", [16, 48, 416])
def test_rows_of_codes_are_16_bytes_apart(fmt, cols):
    """Check that rows of codes start at multiples of 16 bytes."""
    codes = buffers(fmt, (3, cols), 1)["codes"]
    assert codes.strides[0] * codes.dtype.itemsize % 16 == 0
    assert 0 <= codes.strides[0] - codes.shape[1] < 16
    assert codes.allocate(torch.device("cpu"), True).stride() == codes.strides


def test_both_copies_share_a_global_scale_of_the_tensor():
    assert list(buffers(FP8(), (T, K), G, columnwise=True)) == [
        "codes",
        "scale_inv",
        "scale",
        "amax",
        "codes_t",
    ]


SHAPES = [(5, 48), (0, 32), (130, 16), (1, 160)]


@pytest.mark.parametrize("text", ["nvfp4:row_scaled", "mxfp8", "fp8_block", "fp8"])
def test_flat_buffers_concatenate_the_buffers_of_the_members(text):
    """Check that flat buffers concatenate the buffers of the members."""
    fmt = parse(text)
    flat = buffers(fmt, (10_000,), None, columnwise=True, shapes=SHAPES)
    member_slices = member_spans(fmt, SHAPES, columnwise=True)
    separate = [buffers(fmt, (1, *shape), None, columnwise=True) for shape in SHAPES]
    assert all(list(flat) == list(other_names) for other_names in (member_slices, *separate))
    for name, spec in flat.items():
        assert spec.pitch is None and not spec.zeroed
        buffer = spec.allocate(torch.device("cpu"), zeroed=True)
        is_vector = "amax" in name or name in ("scale", "scale_inv")
        alignment, start = 1 if is_vector else 128 // spec.dtype.itemsize, 0
        for member, expected in zip(member_slices[name], separate, strict=True):
            assert (member.start, member.spec) == (start, expected[name])
            view = member.view_of(buffer)
            assert view.shape == member.spec.shape
            assert not view.numel() or view.stride() == member.spec.strides
            assert (
                not view.numel() or view.data_ptr() - buffer.data_ptr() == start * buffer.itemsize
            )
            # Every row of codes is padded to 16 bytes, including the last.
            *rows, width = view.shape
            size = math.prod(rows) * (member.spec.pitch or width)
            assert member.spec.extent == size
            start = -(-(start + size) // alignment) * alignment
        assert spec.shape == (start,)


def test_each_direction_has_its_own_flat_buffers():
    buffers_of_both = buffers(NVFP4(), (9,), None, columnwise=True, shapes=SHAPES)
    columnwise = buffers(NVFP4(), (9,), None, shapes=SHAPES, rowwise=False, columnwise=True)
    assert columnwise == {name: buffers_of_both[name] for name in ("codes_t", "scales_t", "amax_t")}
