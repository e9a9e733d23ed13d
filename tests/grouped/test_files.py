"""``to_parts`` and ``from_parts``: plain tensors of a GroupedTensor for files."""

import pickle
import pickletools

import pytest
import torch

import grouped
from cute_kernels import formats
from grouped import GroupedTensor, recipes
from tests.helpers import (
    E4M3,
    F32,
    U8,
    assert_same_buffers,
    assert_same_bytes,
    sample,
    save_and_load,
)

from .cases import EVERY_FORMAT, FORMATS, bytes_of, decode_member

ENDS = [7, 7, 133]


def quantized(fmt, ragged):
    # The last rows are a tail; 176 columns fill neither a pitch nor a tile of scales.
    cols = 176 if fmt.k_multiple == 16 else 192
    return (
        grouped.quantize(sample(140, cols), fmt, offs=ENDS)
        if ragged
        else grouped.quantize(sample(3, 130, cols), fmt)
    )


def has_parts(fmt, ragged, layout):
    """Return False for ragged square blocks, whose scales have no linear layout."""
    return layout == "tiles" or not ragged or not fmt.has_squares


@pytest.mark.parametrize(
    ("fmt", "ragged", "layout"),
    [
        pytest.param(fmt, ragged, layout, id=f"{name}-{'ragged' * ragged or 'uniform'}-{layout}")
        for name, fmt in EVERY_FORMAT.items()
        for ragged in (False, True)
        for layout in ("linear", "tiles")
        if has_parts(fmt, ragged, layout)
    ],
)
def test_from_parts_restores_the_tensor(fmt, ragged, layout):
    """Check that ``from_parts`` restores the bytes that ``to_parts`` returned."""
    q = quantized(fmt, ragged)
    read = save_and_load({name: t.clone() for name, t in q.to_parts(layout).items()})
    restored = GroupedTensor.from_parts(
        formats.parse(fmt.text), **read, layout=layout, dtype=q.dtype
    )
    assert (restored.format, restored.shape, restored.dtype) == (fmt, q.shape, q.dtype)
    assert restored.columnwise is None
    assert_same_buffers(bytes_of(restored), bytes_of(q))
    # Parts may be views with any storage offset.
    moved = {name: torch.cat([t[:1], t])[1:] if name == "codes" else t for name, t in read.items()}
    assert_same_bytes(
        GroupedTensor.from_parts(fmt, **moved, layout=layout).dequantize(), q.dequantize()
    )


@pytest.mark.parametrize(
    "fmt", [pytest.param(f, id=name) for name, f in EVERY_FORMAT.items() if f.has_squares]
)
def test_ragged_square_blocks_have_no_linear_scales(fmt):
    with pytest.raises(ValueError, match="no linear scales"):
        quantized(fmt, ragged=True).to_parts("linear")


nvfp4 = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


@nvfp4
def test_linear_parts_are_matrices(fmt):
    """They decode to the same values by the text of the format."""
    q = quantized(fmt, False)
    tensors = q.to_parts()
    assert tensors["scales"].dtype == E4M3
    for g, values in enumerate(q.dequantize(F32)):
        assert_same_bytes(
            decode_member(*(tensors[name][g] for name in ("codes", "scales", "amax")), 176), values
        )


@nvfp4
def test_parts_with_a_global_scale_as_modelopt_has(fmt):
    """Check that parts convert to and from ModelOpt's global scale."""
    q = quantized(fmt, False)
    tensors = q.to_parts(global_scale=True)
    torch.testing.assert_close(tensors["global_scale"], q.amax / 2688, rtol=2e-7, atol=0)
    restored = GroupedTensor.from_parts(q.format, **tensors)
    torch.testing.assert_close(restored.dequantize(F32), q.dequantize(F32), rtol=4e-7, atol=0)


@nvfp4
def test_parts_may_have_the_dtypes_of_packed_codes(fmt):
    """Check that parts may have packed E2M1 and uint8 dtypes."""
    q = quantized(fmt, False)
    tensors = q.to_parts()
    packed = tensors | {
        "codes": tensors["codes"].view(torch.float4_e2m1fn_x2),
        "scales": tensors["scales"].view(U8),
    }
    assert_same_buffers(bytes_of(GroupedTensor.from_parts(q.format, **packed)), bytes_of(q))


@nvfp4
def test_one_amax_for_all_groups(fmt):
    tensors = quantized(fmt, False).to_parts()
    q = GroupedTensor.from_parts(fmt, tensors["codes"], tensors["scales"], amax=torch.tensor(3.0))
    assert (q.amax == 3).all()


def test_fp8_parts_follow_from_the_inverse_scale():
    """Check that FP8 parts with only an inverse scale restore scale and amax."""
    q = quantized(grouped.FP8(), True)
    codes, inverse = q.rowwise.codes, q.rowwise.scale_inv
    restored = GroupedTensor.from_parts(q.format, codes, global_scale=inverse, offs=ENDS)
    assert_same_bytes(restored.dequantize(), q.dequantize())
    torch.testing.assert_close(restored.rowwise.scale, q.rowwise.scale)
    torch.testing.assert_close(restored.amax, q.amax, rtol=1e-6, atol=0)


def test_parts_of_prepacked_codes_are_in_plain_order():
    w = grouped.quantize(sample(3, 128, 64), FORMATS["16x16"])
    assert_same_buffers(w.prepack().to_parts(), w.to_parts())


def test_parts_of_no_rows():
    empty = grouped.quantize(torch.zeros(0, 64), FORMATS["1x16"], offs=[0]).to_parts()
    assert empty["scales"].shape == (0, 4) and GroupedTensor.from_parts(
        FORMATS["1x16"], **empty
    ).shape == (0, 64)


#: Changed arguments of the parts of an NVFP4 tensor (3, 130, 176), the error and its message.
PARTS = quantized(FORMATS["1x16"], False).to_parts()
WRONG = {
    "codes of FP8": (
        {"codes": torch.zeros(3, 130, 88).to(E4M3)},
        TypeError,
        "codes must be float4_e2m1fn_x2 or uint8",
    ),
    "scales": (
        {"scales": torch.zeros(3, 130, 10).to(E4M3)},
        ValueError,
        "scales must have size 11 in dimension 2",
    ),
    "tiles": ({"layout": "tiles"}, ValueError, "rowwise scales must have 4 dimensions"),
    "scales' dtype": (
        {"scales": torch.zeros(3, 130, 11)},
        TypeError,
        "scales must be float8_e4m3fn or uint8",
    ),
    "device": (
        {"amax": torch.zeros(3, device="meta")},
        ValueError,
        "amax must be on the device of codes",
    ),
    "neither": ({"amax": None}, ValueError, "either amax or global_scale, got none"),
    "amax": ({"amax": torch.ones(4)}, ValueError, "amax must have size 3"),
    "no scale": (
        {"fmt": grouped.FP8(), "codes": torch.zeros(3, 130, 176).to(E4M3), "scales": None},
        ValueError,
        "global_scale is missing",
    ),
    "no global scale": (
        {
            "fmt": grouped.FP8Block(),
            "codes": torch.zeros(3, 130, 128).to(E4M3),
            "scales": torch.zeros(3, 130, 1),
        },
        ValueError,
        "amax given, but fp8_block has no scales above its blocks",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_invalid_parts(change, error, message):
    with pytest.raises(error, match=message):
        GroupedTensor.from_parts(**{"fmt": FORMATS["1x16"], **PARTS} | change)


def test_to_parts_needs_a_rowwise_copy():
    for q in (
        grouped.quantize(sample(512), FORMATS["1x16"], shapes=[(8, 64)]),
        grouped.quantize(sample(3, 32, 64), FORMATS["1x16"], rowwise=False, columnwise=True),
    ):
        with pytest.raises(ValueError, match="to_parts needs the rowwise copy"):
            q.to_parts()


def test_pickles_name_the_module_of_the_first_release():
    """Files of release 0.1.0 load, and it loads new files."""
    q = grouped.quantize(sample(2, 32, 64), grouped.NVFP4())
    names = [argument for opcode, argument, _ in pickletools.genops(pickle.dumps(q, protocol=2))]
    assert "grouped.tensor _rebuild" in names
    assert GroupedTensor.__module__ == "grouped.tensor"
    assert grouped.tensor.GroupedTensor is GroupedTensor
    assert recipes.NVFP4.__module__ == "grouped.recipes"
