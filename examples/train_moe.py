"""Train a mixture of experts whose weights exist only in 8 bits, with fp32 masters.

Run it:

    python examples/train_moe.py

The layer has to learn eight linear maps, one for each kind of token. Its experts are quantized to
FP8 with blocks of 128x128 once, and the optimizer updates fp32 masters and quantizes them again: no
bf16 copy of the weights exists. It prints the loss every 20 steps, which falls from 1.1 to less
than 0.1, and the memory of the expert weights.
"""

import torch
from torch.nn import functional as F

import grouped

HIDDEN, INNER, EXPERTS = 128, 128, 8


def make_task():
    """Return a function that draws tokens and their targets."""
    fixed = torch.Generator().manual_seed(0)
    centers = torch.randn(EXPERTS, HIDDEN, generator=fixed)
    maps = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=fixed) / HIDDEN**0.5
    generator = torch.Generator().manual_seed(1)

    def draw(size):
        kind = torch.randint(EXPERTS, (size,), generator=generator)
        x = centers[kind] + 0.25 * torch.randn(size, HIDDEN, generator=generator)
        return x.bfloat16(), torch.einsum("th,toh->to", x, maps[kind])

    return draw


def main():
    """Train and print the loss."""
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    torch.manual_seed(0)
    moe = grouped.nn.MoE(
        HIDDEN,
        INNER,
        num_experts=EXPERTS,
        top_k=2,
        recipe=grouped.recipes.FP8Block(),
        dtype=torch.bfloat16,
    )
    before = sum(p.nbytes for p in moe.experts.parameters())

    # ``prepare`` replaces the expert weights by GroupedTensors that require gradients, and puts the
    # plain values into ``masters``. ``master_weights`` gives the bf16 router a master, too.
    masters = {}
    grouped.prepare(moe, trainable=True, masters=masters)
    optimizer = grouped.optim.AdamW(moe.parameters(), lr=5e-3, masters=masters, master_weights=True)
    masters.clear()  # The optimizer has fp32 copies: free the bf16 values.
    after = sum(p.nbytes for p in moe.experts.parameters())
    print(f"expert weights: {before} bytes in bf16, {after} in FP8 with both orientations")

    draw, history = make_task(), []
    for step in range(61):
        x, target = draw(256)
        y, losses = moe(x, losses=True)
        error = F.mse_loss(y.float(), target)
        # ``balance`` is 1 if all experts get equally many tokens; else it is larger.
        (error + 0.01 * losses.balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(error.item())
        if step % 20 == 0:
            print(f"step {step:3}  loss {history[-1]:.3f}  balance {losses.balance.item():.2f}")

    assert history[-1] < 0.1 * history[0], "the loss did not fall"
    for weight in (moe.experts.gate_up.weight, moe.experts.down.weight):
        assert isinstance(weight.data, grouped.GroupedTensor)  # still quantized


if __name__ == "__main__":
    main()
