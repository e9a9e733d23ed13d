"""Quantized parameters and experts in two processes, whose checks are in ``two_ranks``.

Also the one-process parts of distributed training: capacities, checkpoints, and cuts of groups.
"""

import pytest
import torch

import grouped
from grouped.parallel import expert_capacity
from tests.helpers import assert_same_buffers, sample

from .cases import (
    EVERY_FORMAT,
    FORMATS,
    WEIGHT_FORMAT,
    assert_same_tensor,
    bytes_of,
    parameter,
    weight,
)
from .two_ranks.models import quantized
from .two_ranks.runner import assert_passed, launch, load_checks

dcp = pytest.importorskip("torch.distributed.checkpoint")

#: Modules of ``two_ranks``; after failures one rank is gone.
SUBJECTS = (
    "data_parallel",
    "dtensors",
    "expert_parallel",
    "tensor_parallel",
    "optimizers",
    "delayed_scaling",
    "failures",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launch(SUBJECTS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", load_checks(SUBJECTS))
def test_on_two_ranks(folder, name):
    assert_passed(folder, name)


def test_capacity_of_even_routing():
    """Documented numbers, what drops nothing, and the shares of tokens with random experts."""
    assert expert_capacity(4096, 8, 256, 2) == (20480, 4096)
    assert expert_capacity(4096, 8, 256, 2, slack=1.0) == (16384, 4082)
    assert expert_capacity(100, 2, 8, 4, slack=100.0) == (100 * 2, 100)
    assert expert_capacity(100, 4, 8, 8, slack=100.0) == (100, 100)
    pairs, count = expert_capacity(20000, 4, 32, 8, slack=1.0)
    ids = torch.rand(20000, 32).topk(4).indices // 4
    assert (
        abs((ids == 0).sum() / pairs - 1) < 0.05 and abs((ids == 0).any(1).sum() / count - 1) < 0.05
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 2, 8, 4), ValueError, "num_tokens must be positive, got 0"),
        ((9, 2, 9, 4), ValueError, "num_experts must be a multiple of 4"),
        ((9, 9, 8, 4), ValueError, "top_k must be at most num_experts = 8, got 9"),
        ((9, 2, 8, 4, 0.5), ValueError, "slack must be at least 1 and finite, got 0.5"),
        ((9, 2, 8, True), TypeError, "num_ranks must be"),
        ((9, 2, 8, 4, "2"), TypeError, "slack must be"),
    ],
)
def test_expert_capacity_checks_its_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        expert_capacity(*arguments)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_one_process_loads_what_two_have_saved(folder):
    """Check that one process loads a checkpoint that two processes saved."""
    state = {"layer": {"weight": quantized(shift=1.0)}, "odd": quantized(groups=3, shift=1.0)}
    dcp.load(state, checkpoint_id=folder / "saved", no_dist=True)
    assert_same_tensor(state["layer"]["weight"], quantized())
    assert_same_tensor(state["odd"], quantized(groups=3))


def state_of():
    return {
        "tokens": grouped.quantize(sample(40, 48), FORMATS["row-scaled"], offs=[13, 40]),
        **{name: parameter(fmt=fmt) for name, fmt in EVERY_FORMAT.items()},
        "prepacked": grouped.quantize(weight(), WEIGHT_FORMAT).prepack(),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoints_keep_the_bytes_of_every_format(tmp_path, is_async):
    """An asynchronous save does not follow later writes."""
    state, loaded = state_of(), {name: t.detach() for name, t in state_of().items()}
    expected = {name: bytes_of(t) for name, t in state.items()}
    if is_async:
        future = dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True)
        with torch.no_grad():
            state["1x16"].zero_()
        future.result()
    else:
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, want in expected.items():
        assert_same_buffers(bytes_of(loaded[name]), want)


def test_groups_are_cut_and_joined_as_rows_of_a_tensor():
    """Check that slices and concatenations along the groups match those of the decoded tensor."""
    x = quantized()
    dense = x.dequantize()
    for cut in (
        lambda t: t[1:3],
        lambda t: t.narrow(0, 2, 2),
        lambda t: t.chunk(3)[1],
        lambda t: t[4:],
    ):
        assert type(cut(x)) is grouped.GroupedTensor
        assert torch.equal(cut(x).dequantize(), cut(dense))
    assert_same_tensor(torch.cat(x.split([1, 0, 3])), x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2))
    assert torch.equal(padded.dequantize(), torch.cat([dense, torch.zeros_like(dense[:2])]))
    x[1:2].zero_()
    assert not x.dequantize()[1].any() and x.dequantize()[2].any()
    ragged = grouped.quantize(dense[0], x.format, offs=[8, 32])
    for refused in (
        lambda: x[:, 1:3],
        lambda: x.split(8, dim=1),
        lambda: ragged[:8],
        lambda: torch.nn.functional.pad(x, (0, 2)),
        lambda: torch.cat([x, dense]),
        lambda: torch.cat([x, x.prepack()]),
        lambda: x.as_strided((4,), (1,)),
        lambda: x.view(-1).sum(),
        lambda: x[::2],
    ):
        with pytest.raises(
            TypeError, match=r"does not work on a GroupedTensor|cat needs GroupedTensors"
        ):
            refused()
