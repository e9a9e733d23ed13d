"""Trains the model in one recipe and measures it."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grouped import recipes
from grouped.inspect import QuantizationInspector, inspect_quantization

from ..tensor.validation import check_size
from .data import Batch, Corpus, sample_batch
from .model import LanguageModel, ModelConfig

_BALANCE_WEIGHT = 0.01
_MAX_GRAD_NORM = 1.0
_MOST_HELD_OUT_BATCHES = 8
_INSPECTED_STEPS = 16
#: What enters the products of a grouped linear layer, and the inspector's names of it.
ROLES = {"weights": "weight", "activations": "input", "gradients": "grad_output"}
#: Fixed: runs of any seed are measured on the same batches.
_HELD_OUT_SEED = 1234


@dataclass(frozen=True)
class TrainConfig:
    """How to train: steps of the optimizer, of ``batch`` sequences each.

    The learning rate is its maximum, after a warmup over the first tenth of the steps; the seed is
    of the initial weights and the batches, the same for every recipe.

    Raises:
        ValueError: a number that breaks a rule.
    """

    steps: int = 240
    batch: int = 16
    learning_rate: float = 6e-3
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            check_size(name, getattr(self, name))
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")

    @property
    def held_out_batches(self) -> int:
        """Batches that the loss is measured on before and after: few when the steps are few."""
        return max(1, min(_MOST_HELD_OUT_BATCHES, self.steps // 10))

    def learning_rate_at(self, step: int) -> float:
        """Linear warmup, then half a cosine down to a twentieth."""
        warmup = min(1.0, (step + 1) / max(1, self.steps // 10))
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * warmup * (0.05 + 0.95 * cosine)


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly one step spread its tokens over the experts.

    Attributes:
        max_over_mean: tokens of the busiest expert over the mean, averaged over the layers.
        idle: experts without a token, all layers together.
    """

    max_over_mean: float
    idle: int

    @classmethod
    def of(cls, tokens_per_expert: Tensor) -> "ExpertLoad":
        """The load of (layers, experts) token counts."""
        counts = tokens_per_expert.double()
        return cls(float((counts.amax(1) / counts.mean(1)).mean()), int((counts == 0).sum()))


@dataclass
class Run:
    """What training in one recipe gave; None for what an interrupted run did not get to.

    Attributes:
        recipe: name of the recipe.
        losses: training loss of each step, in nats a byte.
        step_seconds: duration of each step.
        start_loss: held-out loss before training.
        end_loss: held-out loss afterwards.
        snr_db: signal-to-quantization-noise ratio in the last step by role, mean over the
            layers.
        load: of the last step.
        interrupted: whether Ctrl-C ended it early.
    """

    recipe: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    start_loss: float | None = None
    end_loss: float | None = None
    snr_db: dict[str, float | None] = field(default_factory=dict)
    load: ExpertLoad | None = None
    interrupted: bool = False

    @property
    def milliseconds_per_step(self) -> float | None:
        """Median over the steps."""
        return 1e3 * statistics.median(self.step_seconds) if self.step_seconds else None


def train(
    recipe: str,
    corpus: Corpus,
    model_config: ModelConfig,
    config: TrainConfig,
    on_step: Callable[[float], None] = lambda loss: None,
    inspect: Path | None = None,
) -> Run:
    """Train a fresh model in one recipe, named as in ``grouped.recipes``.

    Args:
        recipe: its name.
        corpus: the text.
        model_config: sizes of the model.
        config: how to train.
        on_step: called after each step with its loss.
        inspect: file to which what quantization did is appended, in about 16 of the steps
            (``grouped.inspect.inspect_quantization``).

    Returns:
        The losses and measurements. Ctrl-C ends the training, but what was learned until then
        is still measured; a second one ends that too.
    """
    run = Run(recipe)
    torch.manual_seed(config.seed)
    model = LanguageModel(model_config, getattr(recipes, recipe)()).to(config.device)

    def batches(data: Tensor, count: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            inputs, targets = sample_batch(data, config.batch, model_config.context, generator)
            yield inputs.to(config.device), targets.to(config.device)

    inspector = inspect_quantization(model)
    held_out = list(batches(corpus.held_out, config.held_out_batches, _HELD_OUT_SEED))
    try:
        run.start_loss = _evaluate(model, held_out)
        every = None if inspect is None else math.ceil(config.steps / _INSPECTED_STEPS)
        _train_steps(
            model,
            batches(corpus.train, config.steps, config.seed),
            config,
            run,
            on_step,
            inspector,
            every,
        )
    except KeyboardInterrupt:
        run.interrupted = True
    if inspect is not None:
        inspector.save(inspect, run=recipe, append=True)
    try:
        run.end_loss = _evaluate(model, held_out)
    except KeyboardInterrupt:
        run.interrupted = True
    return run


def _train_steps(
    model: LanguageModel,
    batches: Iterator[Batch],
    config: TrainConfig,
    run: Run,
    on_step: Callable[[float], None],
    inspector: QuantizationInspector,
    every: int | None,
) -> None:
    """Take all steps, noting their measurements in ``run`` as they come.

    The inspector looks at every so many of them, counted from the last one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, (inputs, targets) in enumerate(batches):
        started = time.perf_counter()
        left = config.steps - 1 - step
        looks = left == 0 or (every is not None and left % every == 0)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with inspector if looks else contextlib.nullcontext():
            output = model(inputs)
            loss = _cross_entropy(output.logits, targets)
            optimizer.zero_grad()
            (loss + _BALANCE_WEIGHT * output.balance_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()

        run.losses.append(loss.item())
        run.step_seconds.append(time.perf_counter() - started)
        run.load = ExpertLoad.of(output.tokens_per_expert)
        if not left:
            run.snr_db = _mean_db(inspector)
        inspector.step()
        on_step(run.losses[-1])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def _evaluate(model: LanguageModel, batches: list[Batch]) -> float:
    return (
        torch.stack([_cross_entropy(model(inputs).logits, targets) for inputs, targets in batches])
        .mean()
        .item()
    )


def _mean_db(inspector: QuantizationInspector) -> dict[str, float | None]:
    """Mean signal-to-noise ratio over the layers in the last step, by role;

    None for a role without one.

    Of the rowwise copies, which fprop and, of gradients, dgrad read.
    """
    entries = [
        entry
        for entry in inspector.summary()
        if entry["direction"] == "rowwise" and entry["snr_db"] is not None
    ]
    found = {
        name: [e["snr_db"] for e in entries if e["role"] == role] for name, role in ROLES.items()
    }
    return {name: statistics.fmean(ratios) if ratios else None for name, ratios in found.items()}
