"""A byte-level transformer whose feed-forward layers are mixtures of experts."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped

from ..recipes import Recipe
from ..tensor.validation import check_size

_NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    ``hidden``, the width of the residual stream, is a multiple of 16 and of ``heads``.
    ``intermediate``, the width inside each expert, is a multiple of 16. A position attends to at
    most ``context`` bytes, including itself.

    Raises:
        ValueError: A size is invalid.
    """

    hidden: int = 64
    intermediate: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    context: int = 64

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            check_size(name, size)
            if name in ("hidden", "intermediate") and size % 16:
                raise ValueError(f"{name} must be a multiple of 16, got {size}")
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden = {self.hidden}, got {self.heads}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k must be at most experts = {self.experts}, got {self.top_k}")

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for sizes that the products of a recipe do not support."""
        for name in ("hidden", "intermediate"):
            check_size(name, getattr(self, name), recipe.multiple, type(recipe).__name__)


class ModelOutput(NamedTuple):
    """Result of a forward pass.

    Attributes:
        logits: (batch, context, 256) fp32.
        balance_loss: () fp32. Load-balancing loss, averaged over the layers; 1 if balanced.
        tokens_per_expert: (layers, experts) int32.
    """

    logits: Tensor
    balance_loss: Tensor
    tokens_per_expert: Tensor


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position of (batch, context, hidden) with the positions before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class _Block(nn.Module):
    """A transformer block: attention, then a mixture of experts."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = grouped.nn.MoE(
            config.hidden, config.intermediate, config.experts, config.top_k, recipe=recipe
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden state, the balance loss and the token counts of the experts."""
        x = x + self.attention(self.attention_norm(x))
        tokens = self.moe_norm(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            y, losses = self.moe(tokens, losses=True)
        return x + y, losses.balance, losses.tokens_per_expert


class LanguageModel(nn.Module):
    """Predicts the next byte. Only the experts compute in the recipe's formats.

    The other layers are fp32, which on a CPU is twice as fast as bf16 (EPYC with AVX512-BF16, one
    thread).
    """

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        self.byte = nn.Embedding(_NUM_BYTES, config.hidden)
        # Attention would learn to attend to the previous byte, but not within the demo's steps.
        self.previous_byte = nn.Embedding(_NUM_BYTES, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(_Block(config, recipe) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, _NUM_BYTES, bias=False)
        for embedding in (self.byte, self.previous_byte, self.position):
            nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, inputs: Tensor) -> ModelOutput:
        """Compute the logits of the byte after each of ``inputs`` (batch, <= context) int64."""
        x = self.byte(inputs) + self.previous_byte(F.pad(inputs, (1, 0))[:, :-1])
        x = x + self.position.weight[: inputs.shape[1]]
        balances, counts = [], []
        for block in self.blocks:
            x, balance, count = block(x)
            balances.append(balance)
            counts.append(count)
        return ModelOutput(
            self.head(self.norm(x)), torch.stack(balances).mean(), torch.stack(counts)
        )
