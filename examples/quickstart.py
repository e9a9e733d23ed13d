"""Quantize the tokens and the weights of four experts, multiply them, and train a layer.

Run it on any machine, with or without a GPU:

    python examples/quickstart.py

It prints the size and the error of the 4-bit tensors and products, and checks that a compiled layer
has the bits of the eager one.
"""

import torch

import grouped


def relative_error(result, exact):
    """Return the norm of the error over the norm of the exact values."""
    return float((result.float() - exact).norm() / exact.norm())


def main():
    """Quantize, multiply, and train a layer."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # 256 tokens of width 128, sorted by expert. ``offs`` has the END row of each expert; the third
    # expert has no tokens. Nothing reads offs on the host.
    x = torch.randn(256, 128, dtype=torch.bfloat16, device=device)
    offs = torch.tensor([80, 128, 128, 256], dtype=torch.int32, device=device)
    w = torch.randn(4, 64, 128, dtype=torch.bfloat16, device=device)  # (experts, outputs, inputs)

    # Each token gets a global scale of its own (row-scaled). Weights have square blocks, so that
    # their transpose has the same values.
    xq = grouped.quantize(x, grouped.NVFP4(row_scaled=True), offs=offs)
    wq = grouped.quantize(w, grouped.NVFP4(block=(16, 16)))
    print(f"tokens: {x.nbytes} bytes in bf16, {xq.nbytes} in {xq.format}")
    print(f"error of the tokens: {relative_error(xq.dequantize(), x.float()):.3f}")

    # The tokens of each expert times the transpose of its weight: the exact product first.
    ends = [0, *offs.tolist()]
    exact = torch.cat([x[ends[g] : ends[g + 1]].float() @ w[g].float().T for g in range(4)])
    y = grouped.grouped_gemm(xq, wq)  # 4-bit tokens and weights (W4A4)
    y16 = grouped.grouped_gemm(x, wq, offs=offs)  # bf16 tokens (W4A16)
    errors = relative_error(y, exact), relative_error(y16, exact)
    print(f"error of the products: W4A4 {errors[0]:.3f}, W4A16 {errors[1]:.3f}")
    assert errors[1] < errors[0] < 0.2

    # The same as a layer, whose gradients are products of 4-bit numbers, too.
    recipe = grouped.recipes.NVFP4RowScaled()
    layer = grouped.nn.GroupedLinear(4, 128, 64, recipe=recipe, dtype=torch.bfloat16, device=device)
    out = layer(x, offs)
    out.float().square().mean().backward()
    assert layer.weight.grad.shape == (4, 64, 128)
    assert not layer.weight.grad[2].any()  # the expert without tokens

    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(x, offs), out)
    print("the compiled layer has the bits of the eager one")


if __name__ == "__main__":
    main()
