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
    # The last rows are a tail; 176 columns are no whole pitch, and no whole tile of scales.
    cols = 176 if fmt.k_multiple == 16 else 192
    return (
        grouped.quantize(sample(140, cols), fmt, offs=ENDS)
        if ragged
        else grouped.quantize(sample(3, 130, cols), fmt)
    )


@pytest.mark.parametrize("layout", ["linear", "tiles"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("fmt", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
def test_parts_make_the_tensor_again(fmt, ragged, layout):
    q = quantized(fmt, ragged)
    if layout == "linear" and ragged and fmt.has_squares:
        with pytest.raises(ValueError, match="no linear scales"):
            q.to_parts(layout)
        return
    read = save_and_load({name: t.clone() for name, t in q.to_parts(layout).items()})
    again = GroupedTensor.from_parts(formats.parse(fmt.text), **read, layout=layout, dtype=q.dtype)
    assert (again.format, again.shape, again.dtype, again.columnwise) == (
        fmt,
        q.shape,
        q.dtype,
        None,
    )
    assert_same_buffers(bytes_of(again), bytes_of(q))
    # Views that begin or end anywhere are taken, too.
    moved = {name: torch.cat([t[:1], t])[1:] if name == "codes" else t for name, t in read.items()}
    assert_same_bytes(
        GroupedTensor.from_parts(fmt, **moved, layout=layout).dequantize(), q.dequantize()
    )


@pytest.mark.parametrize("fmt", ["1x16", "16x16", "row-scaled"])
def test_linear_parts_are_matrices(fmt):
    """Against values written from the format's text, and numbers as ModelOpt has them."""
    q = quantized(FORMATS[fmt], False)
    parts = q.to_parts()
    assert parts["scales"].dtype == E4M3
    for g, values in enumerate(q.dequantize(F32)):
        assert_same_bytes(
            decode_member(*(parts[name][g] for name in ("codes", "scales", "amax")), 176), values
        )
    by_scale = q.to_parts(global_scale=True)
    torch.testing.assert_close(by_scale["global_scale"], parts["amax"] / 2688, rtol=2e-7, atol=0)
    again = GroupedTensor.from_parts(q.format, **by_scale)
    torch.testing.assert_close(again.dequantize(F32), q.dequantize(F32), rtol=4e-7, atol=0)
    packed = by_scale | {"codes": by_scale["codes"].view(torch.float4_e2m1fn_x2)}
    packed["scales"] = packed["scales"].view(U8)
    assert_same_buffers(bytes_of(GroupedTensor.from_parts(q.format, **packed)), bytes_of(again))
    one = {"amax": torch.tensor(3.0), "codes": parts["codes"], "scales": parts["scales"]}
    assert (GroupedTensor.from_parts(q.format, **one).amax == 3).all()


def test_parts_that_follow():
    q = quantized(grouped.FP8(), True)
    codes, inverse = q.rowwise.codes, q.rowwise.scale_inv
    again = GroupedTensor.from_parts(q.format, codes, global_scale=inverse, offs=ENDS)
    assert_same_bytes(again.dequantize(), q.dequantize())
    torch.testing.assert_close(again.rowwise.scale, q.rowwise.scale)
    torch.testing.assert_close(again.amax, q.amax, rtol=1e-6, atol=0)
    w = grouped.quantize(sample(3, 128, 64), FORMATS["16x16"])
    assert_same_buffers(w.prepack().to_parts(), w.to_parts())
    empty = grouped.quantize(torch.zeros(0, 64), FORMATS["1x16"], offs=[0]).to_parts()
    assert empty["scales"].shape == (0, 4) and GroupedTensor.from_parts(
        FORMATS["1x16"], **empty
    ).shape == (0, 64)


#: What changes of the parts of an NVFP4 tensor (3, 130, 176), and what is said of it.
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
    "no second level": (
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
def test_parts_that_do_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        GroupedTensor.from_parts(**{"fmt": FORMATS["1x16"], **PARTS} | change)


def test_what_has_no_parts():
    for q in (
        grouped.quantize(sample(512), FORMATS["1x16"], shapes=[(8, 64)]),
        grouped.quantize(sample(3, 32, 64), FORMATS["1x16"], rowwise=False, columnwise=True),
    ):
        with pytest.raises(ValueError, match="to_parts is of the rowwise copy"):
            q.to_parts()


def test_pickles_name_the_module_of_the_first_release():
    """Files of release 0.1.0 load, and it loads new files."""
    q = grouped.quantize(sample(2, 32, 64), grouped.NVFP4())
    names = [argument for opcode, argument, _ in pickletools.genops(pickle.dumps(q, protocol=2))]
    assert "grouped.tensor _rebuild" in names
    assert GroupedTensor.__module__ == "grouped.tensor"
    assert grouped.tensor.GroupedTensor is GroupedTensor
    assert recipes.NVFP4.__module__ == "grouped.recipes"
