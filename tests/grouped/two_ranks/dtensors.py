"""Collectives and DTensors of quantized weights, and layers and products of DTensors."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from tests.grouped.cases import EVERY_FORMAT, assert_same_tensor
from tests.helpers import BF16, assert_same_bytes, seeded_generator

from .models import (
    GROUPS,
    OFFS,
    K,
    N,
    layer_input,
    linear_layer,
    plain_weight,
    quantized,
    sharded_copy,
)
from .runner import check, world


@check
def collectives():
    """Collectives that move data move the bytes; reductions raise TypeError."""
    local, remote = quantized(shift=world.rank), quantized(shift=1)
    gathered = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(gathered, local)
    assert_same_tensor(gathered[0], quantized())
    assert_same_tensor(gathered[1], remote)
    dist.broadcast(local, 1)
    assert_same_tensor(local, remote)
    if world.rank:
        dist.send(local, 0)
    else:
        dist.recv(gathered[0], 1)
        assert_same_tensor(gathered[0], remote)
    for reduce in (dist.all_reduce, lambda x: dist.reduce(x, 0)):
        with pytest.raises(TypeError, match="does not work on a GroupedTensor; decode it first"):
            reduce(local)
    with pytest.raises(TypeError, match="needs GroupedTensors of one format"):
        dist.all_gather([plain_weight(), plain_weight()], local)


def dtensor_weights():
    """Yield a quantized weight of 3 groups for every format that is not scaled per row."""
    for fmt in EVERY_FORMAT.values():
        if fmt.global_scale is not None and fmt.global_scale.per == "row":
            continue
        cols = 64 if fmt.k_multiple > 16 else K
        yield grouped.quantize(
            torch.randn(3, N, cols, generator=seeded_generator(1)), fmt, columnwise=True
        )


@check
def dtensors():
    """``Shard(0)`` cuts between groups, evenly or not, and ``full_tensor`` joins them."""
    for weight in dtensor_weights():
        for groups in (2, 3):
            x = weight[:groups]
            sharded = distribute_tensor(nn.Parameter(x, False), world.mesh, [Shard(0)])
            assert isinstance(sharded, DTensor)
            groups_per_rank = (groups + 1) // 2
            start = world.rank * groups_per_rank
            local = weight[start : min(groups, start + groups_per_rank)]
            assert_same_tensor(sharded.to_local(), local.clone())
            assert_same_tensor(sharded.full_tensor(), x.clone())


@check
def dtensors_of_one_group():
    """Rank 1 has no groups, and changes nothing in place."""
    for weight in dtensor_weights():
        x = distribute_tensor(nn.Parameter(weight[:1], False), world.mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x.mul_(0.5)
        assert len(x.to_local().dequantize()) == 1 - world.rank


@check
def replicated_dtensors():
    for weight in dtensor_weights():
        replica = distribute_tensor(weight, world.mesh, [Replicate()])
        assert_same_tensor(replica.to_local(), weight)
        assert_same_tensor(replica.redistribute(world.mesh, [Shard(0)]).full_tensor(), weight)


@check
def layers_of_dtensors():
    """A layer of DTensors multiplies this rank's groups, and caches their quantized copies."""
    for is_quantized in (False, True):
        if is_quantized:
            single = linear_layer(None, recipes.NVFP4(), False)
        else:
            single = GroupedLinear(GROUPS, K, N, recipe=recipes.NVFP4(), dtype=BF16)
        module = sharded_copy(single, lambda p: distribute_tensor(p, world.mesh, [Shard(0)]))
        y = single(x := layer_input(), OFFS)
        dy = torch.ones_like(y)
        y.backward(dy)
        rows, offs = (slice(3, 10), [4, 7]) if world.rank else (slice(0, 3), [3, 3])
        local = layer_input().detach()[rows].requires_grad_()
        for is_first in (True, False):
            local.grad = None
            got = module(local, offs, is_first_microbatch=is_first)
            got.backward(dy[rows])
            assert_same_bytes(got.detach(), y.detach()[rows])
            assert_same_bytes(local.grad, x.grad[rows])
        if not is_quantized:
            assert module.weight.grad.placements == (Shard(0),)
            assert_same_bytes(module.weight.grad.full_tensor(), 2 * single.weight.grad)


R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Operands:
    """Plain operands of a product, equal on both ranks.

    Attributes:
        x: (10, 64), bfloat16.
        weight: (GROUPS, N, 64), bfloat16.
        quantized_weight: The same in NVFP4, in both directions.
        bias: (GROUPS, N), bfloat16.
        dy: (10, N), bfloat16.
        offs: (GROUPS,), int64, the end row of each group.
    """

    def __init__(self):
        self.x = torch.randn(10, 64).bfloat16()
        self.weight = torch.randn(GROUPS, N, 64).bfloat16()
        self.bias = torch.randn(GROUPS, N).bfloat16()
        self.dy = torch.randn(10, N).bfloat16()
        self.offs = torch.tensor(OFFS)
        self.quantized_weight = grouped.quantize(self.weight, grouped.NVFP4(), columnwise=True)

    def distribute(self):
        """Return x sharded by columns and the weight sharded by groups."""
        return (
            distribute_tensor(self.x, world.mesh, [S1]),
            distribute_tensor(self.weight, world.mesh, [S0]),
        )


def compare_placements(run, tensors, placements, dy, expected, exact=True):
    """Compare ``run`` of DTensors with ``run`` of plain tensors, outputs and gradients.

    Args:
        run: Function of tensors.
        tensors: Its plain arguments.
        placements: Placement of each argument.
        dy: Gradient of the output.
        expected: Placement of the output.
        exact: Whether the bits must be equal.
    """
    results = []
    for distribute in (
        lambda t, _: t.detach().clone(),
        lambda t, placement: distribute_tensor(t.detach(), world.mesh, [placement]),
    ):
        arguments = [distribute(t, p) for t, p in zip(tensors, placements, strict=True)]
        leaves = [
            argument.requires_grad_()
            for t, argument in zip(tensors, arguments, strict=True)
            if type(t) is torch.Tensor
        ]
        y = run(*arguments)
        y.backward(distribute(dy, R))
        results.append([y, *(t.grad for t in leaves)])
    assert results[1][0].placements == (expected,)
    for want, got in zip(*results, strict=True):
        got = got.full_tensor()
        assert torch.equal(want, got) if exact else (want - got).norm() < 0.02 * want.norm()


@check
def linear_of_dtensors():
    """``grouped.linear`` takes these placements; shards of groups give the bits of one process."""
    t = Operands()

    def linear(recipe):
        def run(x, w, b=None):
            return grouped.linear(x.view(2, 5, -1), w, b, OFFS, recipe).view(10, -1)

        return run

    for recipe, weight in (
        (recipes.NVFP4(), t.weight),
        (recipes.NVFP4(), t.quantized_weight),
        (recipes.BF16(), t.weight),
    ):
        run = linear(recipe)
        compare_placements(run, [t.x, weight, t.bias], [R, S0, S0], t.dy, Partial())
        compare_placements(run, [t.x, weight, t.bias], [S0, R, S0], t.dy, R)
    run = linear(recipes.BF16())
    compare_placements(run, [t.x, t.weight], [R, S1], t.dy, S1, exact=False)
    compare_placements(run, [t.x, t.weight], [S1, S2], t.dy, Partial(), exact=False)


@check
def grouped_gemm_of_dtensors():
    """Forward and dgrad take these placements; shards of groups give the bits of one process."""
    t = Operands()

    def forward(x, w):
        return grouped.grouped_gemm(x, w, offs=[3, 7, 10])

    def dgrad(x, w):
        return grouped.grouped_gemm(x, w, offs=t.offs, transpose_b=True)

    compare_placements(forward, [t.x, t.weight[:3]], [S1, S0], t.dy, R)
    transposed = t.weight.mT.contiguous()
    for x_placement, w_placement, expected in (
        (R, S0, Partial()),
        (S1, S1, Partial()),
        (R, S2, S1),
    ):
        placements = [x_placement, w_placement]
        exact = w_placement == S0
        compare_placements(dgrad, [t.x, transposed], placements, t.dy, expected, exact)


@check
def quantized_dtensors():
    """``grouped.quantize`` of a DTensor returns one, which ``grouped_gemm`` multiplies."""
    t = Operands()
    x, weight = t.distribute()
    q_weight = grouped.quantize(weight, grouped.NVFP4(), columnwise=True)
    q_rows = grouped.quantize(x, grouped.NVFP4(), offs=distribute_tensor(t.offs, world.mesh, [R]))
    assert q_weight.placements == (S0,)
    assert_same_tensor(q_weight.full_tensor(), t.quantized_weight)
    assert_same_bytes(
        grouped.grouped_gemm(q_rows, q_weight).to_local(),
        grouped.grouped_gemm(q_rows.to_local(), t.quantized_weight),
    )


@check
def wgrad_of_dtensors():
    t = Operands()
    x, _ = t.distribute()
    assert_same_bytes(
        grouped.grouped_gemm(x, x, offs=t.offs).to_local(),
        grouped.grouped_gemm(t.x, t.x, offs=t.offs),
    )


@check
def unsupported_calls_of_dtensors():
    """Mixed operands, random numbers and ``out`` raise errors that name them."""
    t = Operands()
    x, weight = t.distribute()
    out = grouped.quantize(weight, grouped.NVFP4(), columnwise=True)
    random = recipes.NVFP4(stochastic_rounding=True)
    with pytest.raises(TypeError, match="must all be DTensors"):
        grouped.linear(x, t.weight, None, t.offs, recipes.BF16())
    with pytest.raises(ValueError, match="rounds stochastically"):
        grouped.linear(x, weight, None, t.offs, random)
    with pytest.raises(ValueError, match="out does not go with"):
        grouped.grouped_gemm(x, weight, offs=t.offs, out=t.dy)
    with pytest.raises(ValueError, match="goes with offs"):
        grouped.quantize(weight, grouped.NVFP4(), out=out)
