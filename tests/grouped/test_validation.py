"""The constructor of ``GroupedTensor`` and files: parts that do not fit are named."""

import pytest
import torch

import grouped
from grouped import GroupedTensor
from tests.helpers import I32, assert_same_buffers, offs_tensor, sample, save_and_load

from .cases import EVERY_FORMAT, FORMATS, bytes_of, ragged, uniform

every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT.values(), ids=EVERY_FORMAT)


def parts_of(x):
    return [x.shape, x.dtype, x.format, x.offs, x.rowwise, x.columnwise]


@pytest.mark.parametrize("make", [ragged, uniform])
@pytest.mark.parametrize("directions", [(True, True), (True, False), (False, True)])
@every_format
def test_the_constructor_restores_a_tensor(fmt, make, directions):
    """Check that the constructor restores a tensor from its parts."""
    x = make(fmt)
    arguments = parts_of(x)
    for i, is_held in zip((4, 5), directions, strict=True):
        arguments[i] = arguments[i] if is_held else None
    got, copy = bytes_of(GroupedTensor(*arguments)), bytes_of(x)
    assert_same_buffers(got, {name: copy[name] for name in got})
    assert GroupedTensor(*arguments, requires_grad=True).requires_grad
    prepacked = uniform().prepack()
    assert GroupedTensor(*parts_of(prepacked)).format == prepacked.format


SHAPE, DTYPE, FORMAT, OFFS, ROWWISE, COLUMNWISE = range(6)
#: (make, which argument, what it becomes, error, message).
WRONG = {
    "shape of a uniform one": (
        ragged,
        SHAPE,
        lambda x: (3, 12, 64),
        ValueError,
        r"\(T, K\) with offs, got",
    ),
    "shape of a ragged one": (
        uniform,
        SHAPE,
        lambda x: (144, 64),
        ValueError,
        r"\(G, N, K\) without offs, got",
    ),
    "no groups": (uniform, SHAPE, lambda x: (0, 48, 64), ValueError, "at least one group"),
    "dtype": (ragged, DTYPE, lambda x: torch.float64, TypeError, "dtype must be bfloat16"),
    "a class as format": (ragged, FORMAT, type, TypeError, "fmt must be a format record"),
    "offs dtype": (ragged, OFFS, torch.Tensor.long, TypeError, "offs must be int32"),
    "offs of another G": (
        ragged,
        OFFS,
        lambda o: o[1:],
        ValueError,
        "rowwise scales must have size 2 in dimension 0",
    ),
    "offs device": (ragged, OFFS, lambda o: o.to("meta"), ValueError, "offs must be on the device"),
    "device": (
        uniform,
        COLUMNWISE,
        lambda h: h._replace(amax=h.amax.to("meta")),
        ValueError,
        "columnwise amax must be on",
    ),
}


@pytest.mark.parametrize(("make", "index", "change", "error", "match"), WRONG.values(), ids=WRONG)
def test_parts_are_checked(make, index, change, error, match):
    arguments = parts_of(make())
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=match):
        GroupedTensor(*arguments)


@pytest.mark.parametrize("make", [ragged, uniform])
@pytest.mark.parametrize("index", [ROWWISE, COLUMNWISE])
@every_format
def test_each_buffer_of_any_format_is_checked(fmt, index, make):
    arguments = parts_of(make(fmt))
    copy, direction = arguments[index], "rowwise" if index == ROWWISE else "columnwise"
    for name, buffer in copy._asdict().items():
        for wrong, error in (
            (buffer[..., :-1], ValueError),
            (buffer[:-1], ValueError),
            (buffer.unsqueeze(0), ValueError),
            (buffer.view(I32 if buffer.itemsize == 4 else torch.int8), TypeError),
        ):
            arguments[index] = copy._replace(**{name: wrong})
            with pytest.raises(error, match=f"{direction} {name} must"):
                GroupedTensor(*arguments)


def test_prepacked_activations_are_refused():
    with pytest.raises(ValueError, match="prepacked weights are uniform"):
        GroupedTensor(*parts_of(ragged(FORMATS["1x16"])), prepacked=True)


def test_a_file_of_a_newer_version_says_which_field_it_has():
    """Check that the error for a file of a newer version names the unknown field."""
    rebuild, arguments = ragged().__reduce_ex__(2)
    names = ("shape", "dtype", "name", "fields", "inner", "grad", "parameter", "version")
    fields = dict(zip(names, arguments, strict=True)) | {"version": "9.9"}
    for change, more, message in (
        (
            {"fields": fields["fields"] | {"swizzle": 7}},
            (),
            r"NVFP4 has no field 'swizzle'.*kernels 9\.9, this is",
        ),
        ({"name": "nvfp5"}, (), r"got 'nvfp5'.*written by grouped-kernels 9\.9"),
        (
            {"inner": fields["inner"] | {"_zeros": torch.zeros(3)}},
            (),
            r"no field _zeros.*9\.9, this is",
        ),
        ({}, ("more",), r"no field 'more'.*9\.9, this is"),
    ):
        with pytest.raises(ValueError, match=message):
            rebuild(*(fields | change).values(), *more)


def test_a_file_without_a_version_is_read():
    x = ragged()
    rebuild, arguments = x.__reduce_ex__(2)
    assert_same_buffers(bytes_of(rebuild(*arguments[:7])), bytes_of(x))


def test_a_file_whose_parts_do_not_fit_is_refused():
    x = ragged()
    x._codes = x._codes[:5]
    with pytest.raises(ValueError, match="rowwise codes must have size 36"):
        save_and_load(x, weights_only=False)


def test_vmap_over_quantize_names_the_batch_that_there_is():
    x, offs = sample(2, 36, 64), offs_tensor(7, 36)
    with pytest.raises(TypeError, match=r"vmap over grouped.quantize.*\(G, N, K\)"):
        torch.vmap(lambda rows: grouped.quantize(rows, FORMATS["1x16"], offs=offs).dequantize())(x)
    with pytest.raises(TypeError, match="vmap over grouped.quantize"):
        torch.vmap(lambda w: grouped.quantize(w, FORMATS["1x16"]).amax)(sample(2, 3, 48, 64))
