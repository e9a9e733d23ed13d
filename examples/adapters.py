"""Train low-rank adapters (LoRA) on frozen 4-bit experts, written by hand in a few lines.

Run it:

    python examples/adapters.py

Each expert computes y = W x + B (A x). W is quantized to NVFP4 and frozen, A and B have rank 4 and
are trained. The adapters learn how another layer differs from W. It prints the loss, which falls by
more than a factor of ten, and checks that no byte of W changed.
"""

import torch
from torch import nn
from torch.nn import functional as F

import grouped

EXPERTS, WIDTH, RANK = 4, 64, 4
BF16 = grouped.recipes.BF16()


class AdaptedLinear(nn.Module):
    """A frozen quantized layer of experts plus a trained low-rank product for each expert."""

    def __init__(self, base: grouped.nn.GroupedLinear, rank: int) -> None:
        super().__init__()
        experts, outputs, inputs = base.weight.shape
        self.base = base
        # B starts at zero, so that training starts at the values of the base.
        self.a = nn.Parameter(torch.randn(experts, rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(experts, outputs, rank))

    def forward(self, x, offs):
        """Return (tokens, outputs) for tokens that are sorted by expert."""
        # Two thin grouped products, with gradients for A, B and x. The adapters are fp32 masters
        # that are cast for each call.
        low = grouped.linear(x, self.a.to(x.dtype), None, offs, BF16)
        return self.base(x, offs) + grouped.linear(low, self.b.to(x.dtype), None, offs, BF16)

    def merge(self) -> torch.Tensor:
        """Return the plain weight W + B A of each expert, for example to quantize it again."""
        return self.base.weight.dequantize(torch.float32) + self.b.detach() @ self.a.detach()


def main():
    """Train adapters of a layer whose weights stay as they are."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = grouped.nn.GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    # The columnwise copy is for the gradient of the input, which layers before this one need.
    grouped.prepare(base, grouped.NVFP4(), columnwise=True)
    layer = AdaptedLinear(base, RANK)
    frozen = base.weight.rowwise.codes.clone()

    # The target: the base plus a change of rank 4 for each expert.
    change = torch.randn(EXPERTS, WIDTH, RANK) @ torch.randn(EXPERTS, RANK, WIDTH) / WIDTH
    wanted = (base.weight.dequantize(torch.float32) + change).bfloat16()
    offs = torch.tensor([40, 40, 100, 128])  # expert 1 has no tokens

    trained = [p for p in layer.parameters() if p.requires_grad]
    assert len(trained) == 2  # A and B alone
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    history = []
    for step in range(101):
        x = torch.randn(128, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        target = grouped.linear(x.detach(), wanted, None, offs, BF16)
        loss = F.mse_loss(layer(x, offs).float(), target.float())
        loss.backward()
        assert x.grad is not None  # gradients pass through the quantized experts
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        if step % 50 == 0:
            print(f"step {step:3}  loss {history[-1]:.4f}")

    assert history[-1] < 0.1 * history[0], "the loss did not fall"
    assert torch.equal(base.weight.rowwise.codes, frozen)
    used = [0, 2, 3]  # the experts that had tokens
    distance = (layer.merge() - wanted.float())[used].norm() / change[used].norm()
    print(f"distance of the merged weights from the target: {float(distance):.2f} of the change")
    assert distance < 0.4


if __name__ == "__main__":
    main()
