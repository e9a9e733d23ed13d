"""Command line of the demo: ``python -m grouped.demo``."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.hub import tqdm  # type: ignore[attr-defined]

import cute_kernels
from grouped import recipes
from grouped.demo import report

from .data import Corpus, load_corpus, unigram_entropy
from .model import ModelConfig
from .train import Run, TrainConfig, train

_DEFAULT = ("BF16", "NVFP4", "NVFP4RowScaled")
_ALL = "all"
_LEGEND = """\
Losses are in nats per byte. A model without context reaches {entropy:.3f} (unigram entropy).
SNR: signal-to-quantization-noise ratio in the last step. max/mean: tokens of the busiest expert
over the mean. idle: experts without a token. ms/step: median."""
#: Help texts of the options that are fields of the configurations.
_HELP = {
    "steps": "optimizer steps",
    "batch": "sequences per step",
    "learning_rate": "maximum learning rate",
    "seed": "seed of initial weights and batches",
    "device": "cpu or cuda",
    "hidden": "width of the model",
    "intermediate": "width of an expert",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "experts": "experts per block",
    "top_k": "experts per token",
    "context": "bytes per sequence",
}
_INTERRUPTED = 130  # Exit status of a process that Ctrl-C ended, as in shells.


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m grouped.demo",
        description="Train a small byte-level mixture-of-experts language model on the help texts "
        "of Python, once in each recipe from the same seed, and compare. Ctrl-C stops early and "
        "reports the results so far.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipe",
        nargs="+",
        choices=(*recipes.NAMES, _ALL),
        default=_DEFAULT,
        metavar="RECIPE",
        help=f"recipes to train in: one or more of {', '.join(recipes.NAMES)}, or {_ALL}",
    )
    add("--out", type=Path, default=Path("demo_out"), help="folder for the results")
    add(
        "--plot",
        choices=("auto", "always", "never"),
        default="auto",
        help="plot the losses: if matplotlib is installed, always (an error without it), or never",
    )
    add(
        "--inspect",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write the quantization loss by step, layer, role and expert: JSON lines of "
        "grouped.inspect.inspect_quantization, which python -m perf dashboard draws",
    )
    for config in (TrainConfig(), ModelConfig()):
        for name, default in asdict(config).items():
            add(
                f"--{name.replace('_', '-')}", type=type(default), default=default, help=_HELP[name]
            )
    # At these sizes a second thread saves no time, and costs much on a busy machine.
    add("--threads", type=int, default=1, help="CPU threads")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message and status 2 if an argument is invalid or its requirement is missing."""
    if args.threads < 1:
        parser.error(f"threads must be positive, got {args.threads}")
    try:
        kind = torch.empty(0, device=args.device).device.type
    except (RuntimeError, AssertionError) as error:
        parser.error(f"device {args.device!r} cannot be used: {error}")
    if kind not in ("cpu", "cuda"):
        parser.error(f"device must be cpu or cuda, got {args.device}")
    if not report.can_plot():
        missing = f"matplotlib is not installed; {report.INSTALL}"
        if args.plot == "always":
            parser.error(f"--plot always: {missing}")
        if args.plot == "auto":
            print(f"There will be no plot: {missing}", file=sys.stderr)
            args.plot = "never"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    args.inspect = getattr(args, "inspect", None)
    if args.inspect is not None:
        try:
            args.inspect.write_text("")
        except OSError as error:
            parser.error(f"--inspect: {error}")


def _selected_recipes(args: argparse.Namespace) -> list[str]:
    """Return the recipes to train in, BF16 first, since the others are compared with it."""
    names = recipes.NAMES if _ALL in args.recipe else args.recipe
    return sorted(set(names), key=recipes.NAMES.index)


def _train_with_progress(
    recipe: str,
    corpus: Corpus,
    model_config: ModelConfig,
    config: TrainConfig,
    inspect: Path | None,
) -> Run:
    # Without tqdm this is PyTorch's replacement, which shows percents.
    with tqdm(total=config.steps, desc=recipe, unit="step", dynamic_ncols=True) as progress:

        def on_step(loss: float) -> None:
            progress.set_description(f"{recipe} loss {loss:.3f}", refresh=False)
            progress.update(1)

        return train(recipe, corpus, model_config, config, on_step, inspect)


def _train_all(
    args: argparse.Namespace,
    corpus: Corpus,
    model_config: ModelConfig,
    config: TrainConfig,
    metadata: dict[str, Any],
) -> tuple[list[Run], int]:
    """Train in each recipe that runs here, until Ctrl-C, and save the results after each.

    Returns:
        The runs, and the exit status.
    """
    runs: list[Run] = []
    status = 0
    for recipe in _selected_recipes(args):
        try:
            run = _train_with_progress(recipe, corpus, model_config, config, args.inspect)
        except cute_kernels.UnsupportedError as error:
            print(f"error: {recipe} does not run here: {error}", file=sys.stderr)
            status = 1
            continue
        runs.append(run)
        report.write_results(args.out, runs, metadata)
        if run.interrupted:
            return runs, _INTERRUPTED
    return runs, status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Command line arguments. None takes those of the process.

    Returns:
        0, 1 if a recipe does not run on this backend, or 130 after Ctrl-C.

    Raises:
        SystemExit: With status 2, for invalid arguments.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    torch.set_num_threads(args.threads)

    def selected(kind: type[Any]) -> dict[str, Any]:
        return {field.name: getattr(args, field.name) for field in fields(kind)}

    try:
        model_config = ModelConfig(**selected(ModelConfig))
        for name in _selected_recipes(args):
            # Recipes that do not run here are reported when it is their turn.
            with contextlib.suppress(cute_kernels.UnsupportedError):
                model_config.check(getattr(recipes, name)())
        config = TrainConfig(**selected(TrainConfig))
        backend = cute_kernels.active_backend(torch.device(config.device))
        corpus = load_corpus()
        corpus.check_context(model_config.context)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))

    entropy = unigram_entropy(torch.cat([corpus.train, corpus.validation]))
    metadata = {
        "unigram_entropy": entropy,
        "backend": backend.name,
        "torch": torch.__version__,
        "model": asdict(model_config),
        "training": asdict(config),
    }
    runs, status = _train_all(args, corpus, model_config, config, metadata)
    if not runs:
        return status
    files = report.write_results(args.out, runs, metadata)
    if args.inspect is not None:
        files.append(args.inspect)
    if args.plot != "never":
        files.append(report.write_plot(args.out, runs, entropy))
    print(f"\n{report.table(runs)}\n\n{_LEGEND.format(entropy=entropy)}")
    print("Wrote " + ", ".join(map(str, files)))
    return status


if __name__ == "__main__":
    sys.exit(main())
