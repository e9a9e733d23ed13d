import math

import pytest
import torch

from cute_kernels.formats import FP8, NVFP4, parse
from cute_kernels.layout.buffers import buffers, member_parts

T, K, G, N = 300, 416, 5, 200


def test_a_row_scaled_uniform_tensor_has_one_level_a_row():
    assert buffers(NVFP4(row_scaled=True), (G, N, K), None)["amax"].shape == (G, N)


@pytest.mark.parametrize("fmt", [NVFP4(), FP8()], ids=lambda fmt: fmt.text)
@pytest.mark.parametrize("cols", [16, 48, 416])
def test_rows_of_codes_are_16_bytes_apart(fmt, cols):
    codes = buffers(fmt, (3, cols), 1)["codes"]
    assert codes.strides[0] * codes.dtype.itemsize % 16 == 0
    assert 0 <= codes.strides[0] - codes.shape[1] < 16
    assert codes.allocate(torch.device("cpu"), True).stride() == codes.strides


def test_a_shared_level_is_there_once():
    assert list(buffers(FP8(), (T, K), G, columnwise=True)) == [
        *("codes", "scale_inv", "scale", "amax"),
        "codes_t",
    ]


SHAPES = [(5, 48), (0, 32), (130, 16), (1, 160)]


@pytest.mark.parametrize("text", ["nvfp4:row_scaled", "mxfp8", "fp8_block", "fp8"])
def test_flat_buffers_hold_those_of_each_member_alone_one_after_the_other(text):
    fmt = parse(text)
    found = buffers(fmt, (10_000,), None, columnwise=True, shapes=SHAPES)
    parts = member_parts(fmt, SHAPES, columnwise=True)
    alone = [buffers(fmt, (1, *shape), None, columnwise=True) for shape in SHAPES]
    assert all(list(found) == list(some) for some in (parts, *alone))
    for name, spec in found.items():
        assert spec.pitch is None and not spec.zeroed
        buffer = spec.allocate(torch.device("cpu"), zeroed=True)
        is_vector = "amax" in name or name in ("scale", "scale_inv")
        step, start = 1 if is_vector else 128 // spec.dtype.itemsize, 0
        for part, of in zip(parts[name], alone, strict=True):
            assert (part.start, part.spec) == (start, of[name])
            view = part.of(buffer)
            assert view.shape == part.spec.shape
            assert not view.numel() or view.stride() == part.spec.strides
            assert (
                not view.numel() or view.data_ptr() - buffer.data_ptr() == start * buffer.itemsize
            )
            # Rows of codes are padded to 16 bytes, the last one too.
            *rows, width = view.shape
            size = math.prod(rows) * (part.spec.pitch or width)
            assert part.spec.extent == size
            start = -(-(start + size) // step) * step
        assert spec.shape == (start,)


def test_each_direction_has_its_own_flat_buffers():
    both = buffers(NVFP4(), (9,), None, columnwise=True, shapes=SHAPES)
    columnwise = buffers(NVFP4(), (9,), None, shapes=SHAPES, rowwise=False, columnwise=True)
    assert columnwise == {name: both[name] for name in ("codes_t", "scales_t", "amax_t")}
