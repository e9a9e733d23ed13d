"""Serve a Qwen3-MoE model of transformers with 4-bit experts.

Run it; it needs ``pip install transformers`` and no network, since the weights are random:

    python examples/serve_transformers.py

It prints the size of the experts before and after quantization, how far the logits move, and the
tokens that the quantized model generates.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import grouped
from grouped.integrations.transformers import prepare, register


def expert_bytes(model):
    """Return the bytes of all expert weights."""
    return sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)


def main():
    """Quantize the experts of a model and generate tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    register()  # adds our implementations of experts to transformers: grouped_bf16, ...

    # For a real model: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        stock = model(prompt).logits

    # The same model on grouped kernels, with plain weights: only the order of sums changes.
    model.set_experts_implementation("grouped_bf16")
    with torch.no_grad():
        plain = model(prompt).logits
    torch.testing.assert_close(plain, stock, rtol=0.05, atol=0.05)

    # Quantize the experts once, in place. Tokens stay in bf16 (W4A16); no call quantizes anything.
    before = expert_bytes(model)
    prepare(model, grouped.NVFP4())
    after = expert_bytes(model)
    print(f"experts: {before} bytes in bf16, {after} in NVFP4")
    assert after < 0.35 * before

    with torch.no_grad():
        quantized = model(prompt).logits
    change = float((quantized - stock).float().norm() / stock.float().norm())
    print(f"relative change of the logits: {change:.3f}")
    assert change < 0.2

    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    print("tokens:", tokens[0].tolist())
    assert tokens.shape == (1, 12)


if __name__ == "__main__":
    main()
