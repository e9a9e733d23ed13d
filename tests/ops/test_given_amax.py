"""Given amaxes of NVFP4: signs are ignored, and groups without elements keep them."""

import pytest
import torch

from cute_kernels import backend
from cute_kernels.formats import parse
from cute_kernels.runtime.backend import BACKENDS
from tests.helpers import NVFP4_TEXTS, assert_same_buffers, offs_from_splits, ops, sample

NAMES = [name for name in BACKENDS if name == "reference" or name.startswith("emulated")]
SPLITS = (3, 5, 12, 10, 1, 9, 5)
#: (format text, rowwise, columnwise).
CALLS = {
    "rowwise": ("nvfp4", True, False),
    "both": ("nvfp4", True, True),
    "columnwise": ("nvfp4", False, True),
    "row-scaled": (NVFP4_TEXTS["row-scaled"], True, True),
    "square": (NVFP4_TEXTS["16x16"], True, True),
}
#: One amax per group.
SIGNED = torch.tensor([-5.0, torch.nan, torch.inf, -torch.inf, -0.0, -1e-42, 3.0])


def quantize_on(name, call, x, offs, amax):
    """Quantize on a backend and return buffers by name."""
    text, rowwise, columnwise = call
    with backend(name):
        tensors = ops.grouped_quantize(x, text, offs, amax, rowwise, columnwise)
    fmt = parse(text)
    return dict(
        zip(
            fmt.buffer_names(False) * rowwise + fmt.buffer_names(True) * columnwise,
            tensors,
            strict=True,
        )
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_the_sign_of_an_amax_is_ignored(name, call):
    x, offs = sample(sum(SPLITS), 64), offs_from_splits(SPLITS)
    assert_same_buffers(
        quantize_on(name, call, x, offs, SIGNED),
        quantize_on("reference", call, x, offs, SIGNED.abs()),
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_groups_without_elements_keep_the_given_amax(name, uniform, call):
    """Check that groups without elements return the given amax."""
    x = torch.empty(*((2, 0) if uniform else (0,)), 32)
    text, rowwise, columnwise = call
    named_buffers = quantize_on(
        name, call, x, None if uniform else offs_from_splits((0, 0)), torch.tensor([2.5, -3.0])
    )
    if rowwise and not parse(text).row_scaled:
        assert named_buffers["amax"].tolist() == [2.5, 3.0]
    if columnwise:
        assert named_buffers["amax_t"].tolist() == [2.5, 3.0]
