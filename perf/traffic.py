"""Work of a pass of a layer: the least bytes that a contender moves, and the useful operations.

Both are derived from the case, the contender's name and its recipe, when it is measured and when an
older record is read. The bytes are those of

- inputs and results, each once;
- weights of the groups that have rows, once for each product that reads them. Weights that were
  quantized before are codes and scales. A call that quantizes them reads all of them in bf16 and
  writes their codes as well;
- gradients of the weights, and values that the backward pass reads: inputs of products, and those
before SwiGLU.

Values that kernels of one pass exchange are not counted, since kernels may be fused. Biases are not
counted either: they are about a thousandth of the weights.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cute_kernels.formats import Format
from grouped import recipes

from .cases import OWN, split_rows
from .suites.base import element_bytes

_BF16 = 2.0
#: Recipes of peers, by the name that they have in records: ours whose elements take as many bytes.
_PEERS = {"FP8 rowwise": "FP8Current", "FP8 current": "FP8Current"}


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of a call.

    Attributes:
        flops: useful operations; padding is none.
        once: bytes that come from memory or go there.
        reused: bytes of each tensor that the call itself writes and reads again.
    """

    flops: float
    once: float
    reused: tuple[float, ...] = ()

    @property
    def bytes(self) -> float:
        return self.once + 2 * sum(self.reused)


@dataclasses.dataclass(frozen=True)
class _Products:
    """Products of rows with the weights (groups, n, k) of each of ``sizes``, of which ``filled``
    groups have rows.
    """

    rows: float
    groups: int
    filled: float
    sizes: tuple[tuple[int, int], ...]
    weight: Format | None
    input: Format | None

    def forward(self, quantizes: bool) -> Work:
        """Work of the forward pass."""
        return self._sum(self._read(n * k, 1, quantizes) for n, k in self.sizes)

    def training(self, quantizes: bool) -> Work:
        """Work of the forward and the backward pass."""
        terms = [self._read(n * k, 2, quantizes) for n, k in self.sizes]
        # Gradients of the weights; of groups without rows they are zeros.
        terms += [Work(0.0, _BF16 * self.groups * n * k) for n, k in self.sizes]
        if self.input is not None:
            terms.append(
                Work(0.0, 0.0, (element_bytes(self.input) * self.rows * self.sizes[0][1],))
            )
        if len(self.sizes) > 1:
            terms.append(Work(0.0, 0.0, (_BF16 * self.rows * self.sizes[0][0],)))
        return self._sum(terms, 3)

    def _read(self, elements: int, times: int, quantizes: bool) -> Work:
        """Work of reading one weight in so many products."""
        read, codes = self.filled * elements, element_bytes(self.weight)
        if self.weight is None or not quantizes:
            return Work(0.0, times * codes * read)
        # All groups are quantized, also those without rows.
        once = (_BF16 + times * codes) * self.groups * elements - times * codes * read
        return Work(0.0, once, (codes * read,) * times)

    def _sum(self, terms: Any, passes: int = 1) -> Work:
        flops = 2.0 * self.rows * sum(n * k for n, k in self.sizes) * passes
        return total([Work(flops, 0.0), *terms])


def total(terms: list[Work]) -> Work:
    """Sum of the work of several terms."""
    reused = (size for term in terms for size in term.reused)
    return Work(sum(term.flops for term in terms), sum(term.once for term in terms), tuple(reused))


def recipe_of(name: str) -> recipes.Recipe:
    """The recipe of a record of layers.

    Raises:
        ValueError: ``name`` is no recipe of this package or of a peer.
    """
    known = _PEERS.get(name, name)
    if known not in recipes.NAMES:
        raise ValueError(
            f"recipe must be one of {', '.join((*recipes.NAMES, *_PEERS))}, got {name!r}"
        )
    recipe: recipes.Recipe = getattr(recipes, known)()
    return recipe


def layer_work(
    case: Mapping[str, Any],
    contender: str,
    recipe: str,
    seed: int = 0,
    own: Mapping[str, Any] | None = None,
) -> Work:
    """The work of a pass of a layer, an MLP or a mixture of experts.

    Args:
        case: as in ``Record``, of the suites ``layer`` and ``moe``.
        contender: ``", weight kept"`` says that weights were quantized before.
        recipe: name of the recipe.
        seed: of the routing.
        own: what a model has that others do not; by default that of ``OWN`` where ``scope`` is
            ``"model"``.

    Raises:
        ValueError: ``recipe`` is no recipe.
    """
    if own is None:
        own = OWN[case["model"]] if case.get("scope") == "model" else {}
    formats, hidden, wide = recipe_of(recipe), case["hidden"], case["intermediate"]
    quantized = {"weight": formats.weight, "input": formats.input}
    mlp = ((2 * wide, hidden), (hidden, wide))
    rows, tokens, filled = _routed(case, seed)
    is_mixture, is_linear = (
        "tokens" in case and case.get("scope") != "experts",
        case.get("layer") == "linear",
    )
    products = [_Products(rows, case["experts"], filled, mlp[: 2 - is_linear], **quantized)]
    if is_mixture:
        products.append(_Products(tokens, 1, 1, ((case["experts"], hidden),), None, None))
        if shared := own.get("shared_intermediate_size"):
            products.append(
                _Products(tokens, 1, 1, ((2 * shared, hidden), (hidden, shared)), **quantized)
            )
    trains, quantizes = "backward" in case["pass"], not contender.endswith("weight kept")
    x, y = tokens * hidden, (tokens if is_mixture else rows) * (2 * wide if is_linear else hidden)
    # Gradients of the experts alone are by row.
    dx = (tokens if is_mixture else rows) * hidden
    again = x if formats.input is None else 0.0
    inputs = Work(0.0, _BF16 * (x + y + trains * (y + dx + again)))
    return total(
        [inputs, *((each.training if trains else each.forward)(quantizes) for each in products)]
    )


def _routed(case: Mapping[str, Any], seed: int) -> tuple[float, float, float]:
    """Rows, tokens, and how many experts have rows: on the average, where a router chooses."""
    experts, routing = case["experts"], case.get("routing", "random")
    if "tokens" not in case:
        return (
            case["rows"],
            case["rows"],
            sum(map(bool, split_rows(routing, experts, case["rows"], seed))),
        )
    tokens, top_k = case["tokens"], case["top_k"]
    biases = [0.0] * experts
    if routing == "zipf":
        biases = [math.log(max(0.5, size)) for size in split_rows(routing, experts, tokens, seed)]
    return (
        tokens * top_k,
        tokens,
        sum(1 - (1 - chance) ** tokens for chance in _chances(biases, top_k)),
    )


def _chances(biases: Sequence[float], top_k: int) -> list[float]:
    """Probability that a token goes to each expert, whose logit is normal around a bias.

    An expert is chosen if its logit is above a threshold, by which ``top_k`` experts are chosen on
    the average.
    """
    normal = statistics.NormalDist()
    low, high = min(biases) - 10.0, max(biases) + 10.0
    for _ in range(50):
        middle = (low + high) / 2
        chances = [normal.cdf(bias - middle) for bias in biases]
        low, high = (middle, high) if sum(chances) > top_k else (low, middle)
    return chances


def work_of(facts: Mapping[str, Any]) -> Work | None:
    """The work that a record's fields say; None if they are not those of a pass of a layer."""
    suite, case = facts["suite"], facts["case"]
    if suite not in ("layer", "moe") and not (suite == "counts" and "pass" in case):
        return None
    return layer_work(case, facts["contender"], facts.get("format", ""), facts.get("seed") or 0)
