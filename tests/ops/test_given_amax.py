"""A second level that the caller gives: a magnitude, and one answer on every backend."""

import importlib.util

import pytest
import torch

import cute_kernels
from cute_kernels.runtime.backend import BACKENDS
from tests.helpers import assert_same_bytes, offsets, ops, sample

NAMES = [name for name in BACKENDS if name == "reference" or name.startswith("emulated")]
if importlib.util.find_spec("cutlass") is None:
    NAMES = ["reference"]
SPLITS = (3, 5, 12, 10, 1, 9, 5)
FLAGS = {
    "rowwise": {},
    "both": {"columnwise": True},
    "columnwise": {"rowwise": False, "columnwise": True},
    "row-scaled": {"row_scaled": True, "columnwise": True},
    "square": {"block_2d": True, "columnwise": True},
}
#: One a group.
SIGNED = torch.tensor([-5.0, torch.nan, torch.inf, -torch.inf, -0.0, -1e-42, 3.0])


def on(name, *arguments, **flags):
    with cute_kernels.backend(name):
        return ops.grouped_quantize_nvfp4(*arguments, **flags)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("name", NAMES)
def test_the_sign_of_an_amax_is_dropped(name, flags):
    x, offs = sample(sum(SPLITS), 64), offsets(SPLITS)
    want = on("reference", x, offs, SIGNED.abs(), **flags)
    for got, expected in zip(on(name, x, offs, SIGNED, **flags), want, strict=True):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_sign_of_an_amax_of_uniform_groups_is_dropped(name):
    w, amax = sample(2, 16, 32), torch.tensor([-4.0, 2.0])
    want = on("reference", w, None, amax.abs(), block_2d=True, columnwise=True)
    for got, expected in zip(
        on(name, w, None, amax, block_2d=True, columnwise=True), want, strict=True
    ):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_groups_without_elements_keep_the_given_amax(name, uniform, flags):
    x = torch.empty(*((2, 0) if uniform else (0,)), 32)
    offs = None if uniform else offsets((0, 0))
    _, _, amax, _, _, amax_t = on(name, x, offs, torch.tensor([2.5, -3.0]), **flags)
    if flags.get("rowwise", True) and not flags.get("row_scaled"):
        assert amax.tolist() == [2.5, 3.0]
    if flags.get("columnwise"):
        assert amax_t.tolist() == [2.5, 3.0]


@pytest.mark.parametrize("name", NAMES)
def test_groups_without_elements_into_given_buffers(name):
    codes, scales = (torch.empty(shape, dtype=torch.uint8) for shape in ((0, 16), (2, 1, 512)))
    amax = torch.full((2,), torch.nan)
    with cute_kernels.backend(name):
        ops.grouped_quantize_nvfp4_out(
            torch.empty(0, 32),
            offsets((0, 0)),
            torch.tensor([2.5, -3.0]),
            out_codes=codes,
            out_scales=scales,
            out_amax=amax,
        )
    assert amax.tolist() == [2.5, 3.0]
