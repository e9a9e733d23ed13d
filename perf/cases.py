"""Cases that are measured, as data: models, their shapes, rows and routings."""

import collections
import dataclasses
import itertools
import random
from typing import Any


@dataclasses.dataclass(frozen=True)
class Model:
    """The experts of a model.

    Attributes:
        hidden: Features of a token.
        intermediate: Features inside an expert.
        experts: Experts per layer.
        top_k: Experts per token.
        expert_parallel: Numbers of ranks that share a layer, the usual one first.
        gated: True if the first product gives a gate and a value, as for SwiGLU.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    expert_parallel: tuple[int, ...]
    gated: bool = True

    def shape(self, layer: str, ranks: int | None = None) -> "GroupedShape":
        """Return the weights of one rank.

        Args:
            layer: ``"up"`` or ``"down"``.
            ranks: Ranks that share the experts; by default the usual number.

        Raises:
            ValueError: ``layer`` is another one, or ``ranks`` do not divide the experts.
        """
        ranks = self.expert_parallel[0] if ranks is None else ranks
        if self.experts % ranks:
            raise ValueError(f"{self.name} has {self.experts} experts, not a multiple of {ranks}")
        width = self.intermediate * (2 if self.gated else 1)
        sizes = {"up": (width, self.hidden), "down": (self.hidden, self.intermediate)}
        if layer not in sizes:
            raise ValueError(f"layer must be up or down, got {layer!r}")
        return GroupedShape(self.name, layer, self.experts // ranks, *sizes[layer])


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """Weights (experts, n, k) of a layer on one rank."""

    model: str
    layer: str
    experts: int
    n: int
    k: int

    @property
    def case(self) -> dict[str, str | int]:
        """Fields for the case of a record."""
        return dataclasses.asdict(self)


#: Model cards of 2024 to 2026.
MODELS = {
    model.name: model
    for model in (
        Model("DeepSeek-V3", 7168, 2048, 256, 8, (8, 16, 32, 64)),
        Model("Mixtral-8x7B", 4096, 14336, 8, 2, (1, 8)),
        Model("Qwen3-30B-A3B", 2048, 768, 128, 8, (1, 4, 8)),
        Model("Qwen3-235B-A22B", 4096, 1536, 128, 8, (8, 16, 32)),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, (1, 8)),
        Model("Kimi-K2", 7168, 2048, 384, 8, (8, 16, 32, 64)),
        Model("Llama-4-Scout", 5120, 8192, 16, 1, (4, 16)),
        Model("Llama-4-Maverick", 5120, 8192, 128, 1, (8, 32)),
        Model("Qwen3.5-397B", 4096, 1024, 512, 10, (32, 8)),
        Model("DeepSeek-V4-Flash", 4096, 2048, 256, 6, (8,)),
        Model("DeepSeek-V4-Pro", 7168, 3072, 384, 6, (8,)),
        Model("Nemotron-3-Nano", 2688, 1856, 128, 6, (1, 8), gated=False),
        Model("DeepSeek-V2", 5120, 1536, 160, 6, (8,)),
        Model("DeepSeek-V2-Lite", 2048, 1408, 64, 6, (1,)),
        Model("Mixtral-8x22B", 6144, 16384, 8, 2, (8,)),
    )
}
#: Options of ``grouped.nn.MoE`` that only some models have, by model.
MOE_OPTIONS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "score": "sigmoid",
        "selection_bias": True,
        "expert_groups": 8,
        "top_groups": 4,
        "routed_scaling_factor": 2.5,
        "shared_intermediate_size": 2048,
    },
    "gpt-oss-120b": {
        "activation": "clamped_swiglu",
        "bias": True,
        "interleaved": True,
        "router_bias": True,
    },
}
#: Shapes that a run measures without ``--full``: many rows and few, wide and narrow.
HEADLINE = (
    ("DeepSeek-V3", "up"),
    ("DeepSeek-V3", "down"),
    ("Mixtral-8x7B", "up"),
    ("Qwen3-30B-A3B", "up"),
)
#: Tokens of a decode step. Each goes to ``top_k`` experts.
DECODE_TOKENS = (1, 8, 32, 128, 512)
#: Routed rows on a rank in training and prefill.
TRAINING_ROWS = (8192, 32768, 131072)
#: Forward product, gradient of the rows, gradient of the weights.
PRODUCTS = ("fprop", "dgrad", "wgrad")
#: All experts equal; Zipf's law with exponent 1.2; half of the rows in one expert; three in ten
#: experts without a row; a random expert for each row.
ROUTINGS = ("balanced", "zipf", "hot", "empty", "random")
_EXPONENT = 1.2
_EMPTY = 0.3


def split_rows(routing: str, groups: int, rows: int, seed: int = 0) -> list[int]:
    """Return the rows of each expert.

    Args:
        routing: One of ``ROUTINGS``, where chance decides which experts get many rows. Or the rows
            themselves, as ``"432 80 160 32"``.
        groups: Number of experts.
        rows: Rows of all experts.
        seed: Seed of the random numbers.

    Raises:
        ValueError: ``routing`` is another one, or does not give ``rows`` to ``groups``.
    """
    if routing[:1].isdigit():
        sizes = [int(size) for size in routing.split()]
        if (len(sizes), sum(sizes)) != (groups, rows):
            raise ValueError(f"routing must be {rows} rows in {groups} groups, got {routing!r}")
        return sizes
    rng = random.Random(seed)
    weights = [1.0] * groups
    if routing == "random":
        counts = collections.Counter(rng.choices(range(groups), k=rows))
        return [counts[group] for group in range(groups)]
    if routing == "zipf":
        weights = [(rank + 1) ** -_EXPONENT for rank in range(groups)]
    elif routing == "hot":
        weights[0] = max(1.0, groups - 1.0)
    elif routing == "empty":
        weights[: round(_EMPTY * groups)] = [0.0] * round(_EMPTY * groups)
    elif routing != "balanced":
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing}")
    rng.shuffle(weights)
    # Rounding the end rows, not the sizes, keeps the sum exact.
    end_rows = [0, *(round(total / sum(weights) * rows) for total in itertools.accumulate(weights))]
    return [end - start for start, end in itertools.pairwise(end_rows)]


def end_rows_of(sizes: list[int]) -> list[int]:
    """Return the end row of each group."""
    return list(itertools.accumulate(sizes))
