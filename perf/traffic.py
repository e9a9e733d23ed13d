"""Work of a pass of a layer: the least bytes that a contender moves, and the useful operations.

Both are derived from the case, the contender's name and its recipe, when it is measured and when an
older record is read. The bytes count

- inputs and results, each once;
- the weights of groups with rows, once for each product that reads them. Kept weights are codes and
  scales. A call that quantizes the weights reads all of them in bf16 and also writes their codes;
- the gradients of the weights;
- the values that are saved for the backward pass: inputs of products and inputs of SwiGLU.

Values that the kernels of one pass exchange do not count, since kernels may be fused. Biases do not
count either: they are about a thousandth of the weights.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cute_kernels.formats import Format
from grouped import recipes

from .cases import MOE_OPTIONS, split_rows
from .suites.base import element_bytes

_BF16 = 2.0
#: Recipes of peers, by their names in records: our recipes with as many bytes per element.
_PEER_RECIPES = {"FP8 rowwise": "FP8Current", "FP8 current": "FP8Current"}


@dataclasses.dataclass(frozen=True)
class Work:
    """Least work of a call.

    Attributes:
        flops: Useful operations, without padding.
        once: Bytes that are read from memory or written to it once.
        reused: Bytes of each tensor that the call itself writes and reads again.
    """

    flops: float
    once: float
    reused: tuple[float, ...] = ()

    @property
    def bytes(self) -> float:
        """All bytes that the call moves."""
        return self.once + 2 * sum(self.reused)


@dataclasses.dataclass(frozen=True)
class _Products:
    """Products of rows with several weights, one after the other.

    Attributes:
        rows: Rows of all groups.
        filled_groups: Number of groups with rows; an expected value if a router chooses.
        sizes: (n, k) of each weight (groups, n, k).
        weight: Format of the weights.
        input: Format of the inputs.
    """

    rows: float
    groups: int
    filled_groups: float
    sizes: tuple[tuple[int, int], ...]
    weight: Format | None
    input: Format | None

    def forward(self, quantizes: bool) -> Work:
        """Return the work of the forward pass."""
        return self._sum(self._read(n * k, 1, quantizes) for n, k in self.sizes)

    def training(self, quantizes: bool) -> Work:
        """Return the work of the forward and the backward pass."""
        terms = [self._read(n * k, 2, quantizes) for n, k in self.sizes]
        # Gradients of the weights, also the zeros of empty groups.
        terms += [Work(0.0, _BF16 * self.groups * n * k) for n, k in self.sizes]
        if self.input is not None:
            terms.append(
                Work(0.0, 0.0, (element_bytes(self.input) * self.rows * self.sizes[0][1],))
            )
        if len(self.sizes) > 1:
            terms.append(Work(0.0, 0.0, (_BF16 * self.rows * self.sizes[0][0],)))
        return self._sum(terms, 3)

    def _read(self, elements: int, times: int, quantizes: bool) -> Work:
        """Return the work of reading one weight in ``times`` products."""
        read, codes = self.filled_groups * elements, element_bytes(self.weight)
        if self.weight is None or not quantizes:
            return Work(0.0, times * codes * read)
        # All groups are quantized, also empty ones.
        once = (_BF16 + times * codes) * self.groups * elements - times * codes * read
        return Work(0.0, once, (codes * read,) * times)

    def _sum(self, terms: Any, passes: int = 1) -> Work:
        flops = 2.0 * self.rows * sum(n * k for n, k in self.sizes) * passes
        return total([Work(flops, 0.0), *terms])


def total(terms: list[Work]) -> Work:
    """Return the sum of several terms."""
    reused = (size for term in terms for size in term.reused)
    return Work(sum(term.flops for term in terms), sum(term.once for term in terms), tuple(reused))


def recipe_of(name: str) -> recipes.Recipe:
    """Return the recipe of a record of layers.

    Raises:
        ValueError: ``name`` is not a recipe of this package or of a peer.
    """
    known = _PEER_RECIPES.get(name, name)
    if known not in recipes.NAMES:
        choices = ", ".join((*recipes.NAMES, *_PEER_RECIPES))
        raise ValueError(f"recipe must be one of {choices}, got {name!r}")
    recipe: recipes.Recipe = getattr(recipes, known)()
    return recipe


def layer_work(
    case: Mapping[str, Any],
    contender: str,
    recipe: str,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Work:
    """Return the work of a pass of a layer, an MLP or a mixture of experts.

    Args:
        case: Case of a record of the suites ``layer`` and ``moe``.
        contender: Name of the contender. ``", cached weight"`` means that weights were quantized
            before.
        recipe: Name of the recipe.
        seed: Seed of the routing.
        options: Options that only some models have. By default those of ``MOE_OPTIONS`` if
            ``scope`` is ``"model"``, or none.

    Raises:
        ValueError: ``recipe`` is not a recipe.
    """
    if options is None:
        options = MOE_OPTIONS[case["model"]] if case.get("scope") == "model" else {}
    formats, hidden, intermediate = recipe_of(recipe), case["hidden"], case["intermediate"]
    quantized = {"weight": formats.weight, "input": formats.input}
    mlp = ((2 * intermediate, hidden), (hidden, intermediate))
    rows, tokens, filled_groups = _routed(case, seed)
    is_mixture = "tokens" in case and case.get("scope") != "experts"
    is_linear = case.get("layer") == "linear"
    products = [_Products(rows, case["experts"], filled_groups, mlp[: 2 - is_linear], **quantized)]
    if is_mixture:
        products.append(_Products(tokens, 1, 1, ((case["experts"], hidden),), None, None))
        if shared := options.get("shared_intermediate_size"):
            products.append(
                _Products(tokens, 1, 1, ((2 * shared, hidden), (hidden, shared)), **quantized)
            )
    trains, quantizes = "backward" in case["pass"], not contender.endswith("cached weight")
    # The experts alone return results and gradients by row, a mixture by token.
    results = tokens if is_mixture else rows
    x = tokens * hidden
    y = results * (2 * intermediate if is_linear else hidden)
    dx = results * hidden
    saved_x = x if formats.input is None else 0.0
    inputs = Work(0.0, _BF16 * (x + y + trains * (y + dx + saved_x)))
    return total([inputs, *((p.training if trains else p.forward)(quantizes) for p in products)])


def _routed(case: Mapping[str, Any], seed: int) -> tuple[float, float, float]:
    """Return the rows, the tokens, and the number of experts with rows.

    If a router chooses the experts, the last is an expected value.
    """
    experts, routing = case["experts"], case.get("routing", "random")
    if "tokens" not in case:
        sizes = split_rows(routing, experts, case["rows"], seed)
        return case["rows"], case["rows"], sum(map(bool, sizes))
    tokens, top_k = case["tokens"], case["top_k"]
    biases = [0.0] * experts
    if routing == "zipf":
        biases = [math.log(max(0.5, size)) for size in split_rows(routing, experts, tokens, seed)]
    filled_groups = sum(1 - (1 - chance) ** tokens for chance in _chances(biases, top_k))
    return tokens * top_k, tokens, filled_groups


def _chances(biases: Sequence[float], top_k: int) -> list[float]:
    """Return the probability that a token goes to each expert.

    Logits are normal around the biases. An expert is chosen if its logit is above a threshold, at
    which ``top_k`` experts are chosen on average.
    """
    normal = statistics.NormalDist()
    low, high = min(biases) - 10.0, max(biases) + 10.0
    for _ in range(50):
        middle = (low + high) / 2
        chances = [normal.cdf(bias - middle) for bias in biases]
        low, high = (middle, high) if sum(chances) > top_k else (low, middle)
    return chances


def work_of(fields: Mapping[str, Any]) -> Work | None:
    """Return the work of a record by its fields, or None if it is not a pass of a layer."""
    suite, case = fields["suite"], fields["case"]
    if suite not in ("layer", "moe") and not (suite == "counts" and "pass" in case):
        return None
    return layer_work(case, fields["contender"], fields.get("format", ""), fields.get("seed") or 0)
