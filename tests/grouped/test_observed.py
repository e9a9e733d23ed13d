"""How other tools see the ops: FLOP counters, profilers, and the cache keys of compiled graphs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import grouped
from grouped.nn import GroupedLinear, MoE
from tests.helpers import BF16, I32, run_python, sample

from .cases import RECIPES, WEIGHT_FORMAT

T, K, N = 256, 64, 32
OFFS = torch.tensor([100, 100, 256], dtype=I32)


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("ends", [[100, 100, 256], [0, 30, 30], [100, 100, 300]], ids=str)
def test_flops_of_a_step_are_three_products(recipe, ends):
    """Check that PyTorch's FLOP counter counts three products per step."""
    layer, offs = GroupedLinear(3, K, N, recipe=recipe), torch.tensor(ends, dtype=I32)
    x, product = sample(ends[-1], K).requires_grad_(), 2 * ends[-1] * N * K
    assert flops(lambda: layer(x, offs).sum().backward()) == 3 * product
    exported = torch.export.export(layer, (x, offs)).module()
    assert flops(lambda: exported(x, offs)) == product
    with torch.inference_mode():
        assert flops(lambda: exported(x.detach(), offs)) == product


def test_flops_of_products_of_grouped_tensors():
    """Check that the FLOP counter counts products of GroupedTensors."""
    x, y = (
        grouped.quantize(sample(T, n), grouped.NVFP4(), offs=OFFS, columnwise=True) for n in (K, N)
    )
    w, plain = grouped.quantize(sample(3, N, K), WEIGHT_FORMAT, columnwise=True), sample(T, K)
    want, gemm = 2 * T * N * K, grouped.grouped_gemm
    assert (
        flops(lambda: gemm(x, w))
        == flops(lambda: gemm(y, w, transpose_b=True))
        == flops(lambda: gemm(y, x))
        == want
    )
    assert flops(lambda: gemm(plain, w, offs=OFFS)) == want
    out = torch.zeros(3, N, K)
    assert flops(lambda: gemm(y, x, out=out, accumulate=True)) == want
    assert flops(lambda: gemm(plain, w, offs=OFFS, out=torch.zeros(T, N))) == want


def test_flops_of_a_mixture():
    # Fewer than eight experts are padded to eight columns of logits.
    moe, x = MoE(K, N, num_experts=8, top_k=2, dtype=BF16), sample(T, K)
    want = 2 * T * 8 * K + 2 * T * 2 * 3 * N * K
    for module in (moe, torch.export.export(moe, (x,)).module()):
        with torch.inference_mode():
            assert flops(lambda module=module: module(x)) == want


def test_profiles_name_the_ops():
    """Check that profiles show the names of the ops."""
    layer, x = GroupedLinear(3, K, N, recipe=RECIPES["nvfp4"]), sample(T, K)
    w = grouped.quantize(sample(3, N, K), WEIGHT_FORMAT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x, OFFS).sum().backward()
        grouped.grouped_gemm(grouped.quantize(x, grouped.NVFP4(), offs=OFFS), w)
    flat = {
        f"cute_kernels::{name}" for name in ("grouped_quantize", "m_grouped_gemm", "k_grouped_gemm")
    }
    assert {event.key for event in profile.key_averages()} >= flat | {
        "grouped::gemm",
        "_Linear",
        "_LinearBackward",
    }


def weight(shape=(2, 16, 32), fmt=WEIGHT_FORMAT, **options):
    return grouped.quantize(torch.ones(shape), fmt, **options)


PROCESS = """
import sys, torch, grouped
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
print(grouped.quantize(torch.ones(2, 16, 32), grouped.NVFP4(block=(16, 16)))._stable_hash_for_caching())
"""  # noqa: E501


def test_cache_keys_are_the_same_in_another_process(monkeypatch):
    """Importing this leaves the compiler alone; what its caches know a tensor by is the same."""
    weights = [
        weight(),
        weight((2, 32, 32)),
        weight(fmt=grouped.NVFP4()),
        weight(columnwise=True),
        weight().prepack(),
    ]
    weights += [weight().bfloat16(), weight().requires_grad_(), weight().to("meta")]
    hashes = [q._stable_hash_for_caching() for q in weights]
    assert len(set(hashes)) == len(hashes)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert run_python(PROCESS).split() == ["[]", hashes[0]]
