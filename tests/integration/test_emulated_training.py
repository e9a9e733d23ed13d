"""A training step on the emulated GPU: the kernels under the modules, forward and backward."""

import functools
import itertools

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import BF16, I32

OFFS = torch.tensor([40, 40, 57, 96], dtype=I32)
BOTH = [grouped.recipes.BF16, grouped.recipes.NVFP4, grouped.recipes.NVFP4RowScaled]
BOTH += [functools.partial(grouped.recipes.NVFP4, hadamard=True, stochastic_rounding=True)]
FP8 = [
    grouped.recipes.FP8Block,
    grouped.recipes.FP8Current,
    grouped.recipes.MXFP8,
    grouped.recipes.FP8Delayed,
]
ALL = itertools.product(["sm_90a", "sm_100a"], BOTH + FP8)
STEPS = [
    (arch, recipe)
    for arch, recipe in ALL
    if cute_kernels.support("grouped_gemm", recipe().input, arch)
]


class TwoLayers(torch.nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            grouped.nn.GroupedMLP(4, 256, 128, bias=True, recipe=recipe) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, OFFS)
        return x


def step(recipe, backend):
    """Loss and gradients of one step; rows from 96 on are the tail of a capacity buffer."""
    torch.manual_seed(0)
    model = TwoLayers(recipe())
    x = torch.randn(104, 256).bfloat16().requires_grad_()
    with cute_kernels.backend(backend):
        loss = model(x)[:96].float().square().mean()
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}


@pytest.mark.emulated
@pytest.mark.parametrize(("arch", "recipe"), STEPS)
def test_a_step_has_the_bits_of_the_tensor_core_reference(recipe, arch):
    """Compare an emulated step with the reference of its tensor core."""
    cute_kernels.emulator.reset_stats()
    loss, gradients = step(recipe, f"emulated:{arch}")
    assert cute_kernels.emulator.stats()["mma_flops"] > 0
    same_loss, same_gradients = step(recipe, f"reference:{arch}")
    assert torch.equal(loss, same_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same_gradients[name]), name

    # The plain reference adds in another order: bf16 rounds the difference away, or to one ulp,
    # which a quantizer may turn into another code. FP8 sums are cut to 13 bits besides.
    near_loss, near = step(recipe, "reference")
    loss_bound, bound = (1e-3, 0.1) if recipe in FP8 else (1e-4, 0.02)
    torch.testing.assert_close(loss, near_loss, rtol=loss_bound, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - near[name]).norm() <= bound * near[name].norm(), name


SERVED = (grouped.recipes.BF16, grouped.recipes.MXFP8, grouped.recipes.FP8Current)


@pytest.mark.emulated
@pytest.mark.parametrize("recipe", SERVED)
def test_nvfp4_weights_beside_other_activations(recipe):
    """W4A16 and W4A8 in a module: y and the gradient of x."""
    layer = grouped.nn.GroupedLinear(4, 256, 128, recipe=recipe(), dtype=BF16)
    fmt = grouped.NVFP4(block=(16, 16))
    layer.weight = torch.nn.Parameter(
        grouped.quantize(layer.weight.detach(), fmt, columnwise=True), requires_grad=False
    )
    x, dy = (torch.randn(96, k).bfloat16() for k in (256, 128))
    got_value = []
    for backend in ("emulated:sm_100a", "reference:sm_100a"):
        leaf = x.clone().requires_grad_()
        with cute_kernels.backend(backend):
            y = layer(leaf, OFFS)
            y.backward(dy)
        got_value.append((y.detach(), leaf.grad))
    for got, want in zip(*got_value, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        exact = layer(x, OFFS)
    assert (got_value[0][0] - exact).norm() <= 0.01 * exact.norm()
