"""PEFT's adapters beside quantized experts of transformers' models, and of them."""

import copy

import pytest
import torch
from torch import nn

import grouped
from grouped import GroupedTensor
from tests.helpers import BF16, assert_same_bytes, contains_all

from .test_transformers import ids_of, integration, model_of

peft = pytest.importorskip("peft")

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {**ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
NVFP4 = grouped.NVFP4()


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def plain_model(name="Qwen3Moe", implementation="grouped_bf16"):
    model = model_of(name).train()
    model.set_experts_implementation(implementation)
    return model


def quantized_model(*names, **options):
    model = plain_model(*names)
    integration.prepare(model, NVFP4, **options)
    return model


def adapted(model, targets):
    """Return a model with LoRA adapters of random values."""
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **targets))
    for name, p in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(p, 0, 0.05)
    return model


def losses(model):
    """Train for three steps, and return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    values = []
    for _ in range(3):
        loss = model(ids_of(), labels=ids_of()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    assert values[-1] < values[0]
    return values


@pytest.mark.parametrize("implementation", ["grouped_bf16", "grouped_nvfp4", "grouped_fp8_block"])
def test_adapters_of_attention_beside_frozen_experts(implementation):
    """In either order."""
    before = adapted(quantized_model("Qwen3Moe", implementation, columnwise=True), ATTENTION)
    after = adapted(plain_model("Qwen3Moe", implementation), ATTENTION)
    assert integration.prepare(after, NVFP4, columnwise=True) == 2
    assert losses(before) == losses(after)
    assert not any(p.requires_grad for p in after.parameters() if isinstance(p, GroupedTensor))


def test_advice_without_the_columnwise_copy_can_be_followed():
    model = adapted(quantized_model(), ATTENTION)
    with pytest.raises(
        RuntimeError,
        match=r"no columnwise copy.*no_grad.*grouped\.prepare or .* with columnwise=True",
    ):
        model(ids_of(), labels=ids_of())
    with torch.no_grad():
        assert model(ids_of()).logits.isfinite().all()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("implementation", ["grouped_bf16", "grouped_nvfp4"])
def test_adapters_of_quantized_experts_add_to_decoded_weights(name, implementation):
    """Compare adapters of quantized experts with adapters of decoded experts."""
    decoded = plain_model(name, implementation)
    for layer in decoded.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            lies = weight.data.mT if layer.mlp.experts.is_transposed else weight.data
            lies.copy_(grouped.quantize(lies.contiguous(), NVFP4).dequantize())
    model = adapted(quantized_model(name, implementation), EXPERTS)
    for got, want in zip(losses(model), losses(adapted(decoded, EXPERTS)), strict=True):
        assert got == pytest.approx(want, rel=1e-2)
    merged = model.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.experts.down_proj, GroupedTensor)


def test_adapted_experts_are_not_replaced():
    for targets in (EXPERTS, {**ATTENTION, "modules_to_save": ["experts"]}):
        model = adapted(plain_model(), targets)
        with torch.no_grad():
            want = model(ids_of()).logits
            with pytest.raises(
                ValueError,
                match=contains_all(
                    ".mlp.experts.", "a PEFT adapter adds to it", "merge_and_unload"
                ),
            ):
                integration.prepare(model, NVFP4, columnwise=True)
            assert_same_bytes(model(ids_of()).logits, want)
    merged = adapted(plain_model(), EXPERTS).merge_and_unload()
    assert integration.prepare(merged, NVFP4) == 2


def test_products_of_a_quantized_factor_are_refused():
    """Check that ``baddbmm`` takes a quantized summand and refuses quantized factors."""
    w = grouped.quantize(torch.ones(2, 32, 32, dtype=BF16), NVFP4)
    plain = torch.ones(2, 32, 32, dtype=BF16)
    assert_same_bytes(torch.baddbmm(w, plain, plain), torch.baddbmm(w.dequantize(), plain, plain))
    for factors in ((w, plain), (plain, copy.copy(w))):
        with pytest.raises(TypeError, match="grouped.grouped_gemm multiplies it"):
            torch.baddbmm(plain, *factors)
