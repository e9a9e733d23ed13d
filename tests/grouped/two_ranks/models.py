"""Layers, mixtures and inputs that both ranks build alike, and comparisons with one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear, MoE
from tests.helpers import BF16, assert_same_bytes, seeded_generator

from .runner import world

#: Sizes of a grouped linear layer, and the end rows of its groups.
GROUPS, N, K = 4, 32, 48
OFFS = [3, 3, 7, 10]
SQUARE_FP8 = grouped.FP8Block(block=(128, 128))

#: Sizes of a mixture of experts, and the tokens of each rank.
H, I, TOKENS = 128, 128, (9, 7)  # noqa: E741


def plain_weight(shift=0.0, groups=GROUPS):
    return torch.randn(groups, N, K, generator=seeded_generator(7)).bfloat16() + shift


def quantized(fmt=None, shift=0.0, groups=GROUPS):
    """Return a quantized weight, equal on both ranks; the rows of its NVFP4 codes are padded."""
    return grouped.quantize(plain_weight(shift, groups), fmt or grouped.NVFP4(), columnwise=True)


def layer_input():
    """Return x: (10, K), bfloat16, equal on both ranks."""
    return torch.randn(10, K, generator=seeded_generator(9)).bfloat16().requires_grad_()


def linear_layer(fmt, recipe, train):
    """Return a grouped linear layer with a quantized weight."""
    torch.manual_seed(3)
    module = GroupedLinear(GROUPS, K, N, recipe=recipe, dtype=BF16)
    module.weight = nn.Parameter(quantized(fmt), requires_grad=train)
    return module


def gradients(module):
    return [p.grad for p in module.parameters() if p.requires_grad]


def mixture(recipe, **options):
    """Return a mixture of 4 experts, with a shared expert if the recipe allows a comparison."""
    torch.manual_seed(4)
    # In NVFP4RowScaled gradients share a scale; a shared expert sees only the tokens of its rank.
    shared = 0 if isinstance(recipe, recipes.NVFP4RowScaled) else I
    return MoE(H, I, 4, 2, recipe=recipe, dtype=BF16, shared_intermediate_size=shared, **options)


def quantize_experts(moe, train=False):
    """Quantize the experts' weights of ``moe``; leave them as they are if ``train`` is None."""
    for layer in (moe.experts.gate_up, moe.experts.down) if train is not None else ():
        layer.weight = nn.Parameter(
            grouped.quantize(layer.weight, grouped.NVFP4(), columnwise=True), train
        )
    return moe


def tokens():
    """Return the tokens of both ranks: (16, H), bfloat16."""
    x = torch.randn(sum(TOKENS), H, generator=seeded_generator(11)).bfloat16()
    return x.requires_grad_()


def local_rows():
    """Return the slice of this rank's tokens."""
    return slice(TOKENS[0], None) if world.rank else slice(0, TOKENS[0])


def full(t):
    """Return the whole of a DTensor; a plain tensor as it is."""
    if not isinstance(t, DTensor):
        return t
    placement = t.placements[0]
    if len(t.placements) > 1 or not isinstance(placement, _StridedShard):
        return t.full_tensor()
    # ``full_tensor`` of torch 2.11 refuses a strided shard on a mesh of one dimension.
    parts = [
        part.chunk(placement.split_factor, placement.dim) for part in gather(t.to_local().detach())
    ]
    return torch.cat(
        [piece for pieces in zip(*parts, strict=True) for piece in pieces], placement.dim
    )


def gather(t):
    """Return the tensors that both ranks have for ``t``."""
    tensors = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(tensors, t.contiguous())
    return tensors


def step(moe, x, dy):
    y = moe(x)
    y.backward(dy)
    return y.detach()


def assert_same_step(single, moe, rows, dy):
    """Compare a step of one process with a step of this rank's ``rows``: the bits are equal.

    Returns:
        All tokens, with the gradient of the single process.
    """
    x, local = tokens(), tokens().detach()[rows].requires_grad_()
    y, got = step(single, x, dy), step(moe, local, dy[rows])
    assert_same_bytes(got, y[rows])
    assert_same_bytes(local.grad, x.grad[rows])
    return x


def assert_close_gradients(moe, single):
    """Compare the gradients of router and shared expert.

    Nobody has to sum them: on each rank they are the gradients of all tokens.
    """
    for (name, p), q in zip(moe.named_parameters(), single.parameters(), strict=True):
        if not name.startswith("experts."):
            assert p.placements == p.grad.placements == (Replicate(),), name
            torch.testing.assert_close(p.grad.to_local(), q.grad, rtol=0.02, atol=0.02)


def gradient_norm(model):
    """Return the fp64 norm of the full gradients."""
    return torch.stack([full(p.grad).double().norm() for p in model.parameters()]).norm()


def sharded_copy(module, shard):
    """Return a copy of ``module`` whose parameters are the DTensors that ``shard`` makes."""
    module = copy.deepcopy(module)
    for name, p in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(shard(p.detach()), p.requires_grad))
    return module
