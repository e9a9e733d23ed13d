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
_MAX_VALIDATION_BATCHES = 8
_INSPECTED_STEPS = 16
#: Operands of the products of a grouped linear layer, by name and by role in the inspector.
ROLES = {"weights": "weight", "activations": "input", "gradients": "grad_output"}
#: Fixed, so that runs with any seed are measured on the same batches.
_VALIDATION_SEED = 1234


@dataclass(frozen=True)
class TrainConfig:
    """Options of the training.

    Attributes:
        steps: Steps of the optimizer.
        batch: Sequences per step.
        learning_rate: Maximum, reached after a warmup over the first tenth of the steps.
        seed: Seed of the initial weights and the batches, equal for every recipe.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: A number is invalid.
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
    def num_validation_batches(self) -> int:
        """Number of batches for the validation loss. It is small if there are few steps."""
        return max(1, min(_MAX_VALIDATION_BATCHES, self.steps // 10))

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a linear warmup, then half a cosine."""
        warmup = min(1.0, (step + 1) / max(1, self.steps // 10))
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * warmup * (0.05 + 0.95 * cosine)


@dataclass(frozen=True)
class ExpertLoad:
    """The distribution of one step's tokens over the experts.

    Attributes:
        max_over_mean: Tokens of the busiest expert over the mean, averaged over the layers.
        idle: Number of experts without a token, over all layers.
    """

    max_over_mean: float
    idle: int

    @classmethod
    def from_counts(cls, tokens_per_expert: Tensor) -> "ExpertLoad":
        """Return the load of (layers, experts) token counts."""
        counts = tokens_per_expert.double()
        return cls(float((counts.amax(1) / counts.mean(1)).mean()), int((counts == 0).sum()))


@dataclass
class Run:
    """Results of training in one recipe. An interrupted run has None for missing results.

    Attributes:
        recipe: Name of the recipe.
        losses: Training loss of each step. The unit is nats per byte.
        step_seconds: Duration of each step in seconds.
        start_loss: Validation loss before training.
        end_loss: Validation loss after training.
        snr_db: Signal-to-quantization-noise ratio in dB in the last step, by role. It is the mean
            over the layers.
        load: Load of the experts in the last step.
        interrupted: True if Ctrl-C ended the run early.
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
        """Median duration of a step in ms, or None without steps."""
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
        recipe: Name of the recipe.
        corpus: The text. It has a validation set.
        model_config: Sizes of the model.
        config: Options of the training.
        on_step: Called after each step with its loss.
        inspect: File to which the quantization loss of about 16 steps is appended
            (``grouped.inspect.inspect_quantization``).

    Returns:
        The losses and measurements. Ctrl-C ends the training, and the model is still evaluated. A
        second Ctrl-C ends the evaluation too.
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
    validation = list(batches(corpus.validation, config.num_validation_batches, _VALIDATION_SEED))
    try:
        run.start_loss = _evaluate(model, validation)
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
        run.end_loss = _evaluate(model, validation)
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
    """Take all steps and add their measurements to ``run``.

    The inspector looks at every so many of them, counted from the last one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, (inputs, targets) in enumerate(batches):
        started = time.perf_counter()
        remaining = config.steps - 1 - step
        is_inspected = remaining == 0 or (every is not None and remaining % every == 0)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with inspector if is_inspected else contextlib.nullcontext():
            output = model(inputs)
            loss = _cross_entropy(output.logits, targets)
            optimizer.zero_grad()
            (loss + _BALANCE_WEIGHT * output.balance_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()

        run.losses.append(loss.item())
        run.step_seconds.append(time.perf_counter() - started)
        run.load = ExpertLoad.from_counts(output.tokens_per_expert)
        if not remaining:
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
    """Return the mean signal-to-noise ratio of the layers in the last step, by role.

    The ratio is that of the rowwise copies, which fprop reads (of gradients, dgrad). It is None for
    a role without one.
    """
    entries = [
        entry
        for entry in inspector.summary()
        if entry["direction"] == "rowwise" and entry["snr_db"] is not None
    ]
    ratios_by_name = {
        name: [e["snr_db"] for e in entries if e["role"] == role] for name, role in ROLES.items()
    }
    return {
        name: statistics.fmean(ratios) if ratios else None
        for name, ratios in ratios_by_name.items()
    }
