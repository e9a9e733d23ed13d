"""Quantize the experts of a bf16 checkpoint: ``python -m grouped.convert SRC DST --to nvfp4``.

It reads and writes safetensors files tensor by tensor, without a model. It finds the weights of
experts by their names in DeepSeek, Qwen3 and Mixtral: one tensor per expert and projection, or one
for all experts of a layer. Gate and up of an expert get one global scale. Everything else is
copied. ``--calibrate`` runs the model over token ids or text, and writes the static scales of
experts' inputs. ``--report`` writes the signal-to-noise ratio of every expert as an HTML page.
"""

import argparse
import collections
import html
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .calibrate import input_amaxes
from .config import (
    QuantizedWeight,
    check_plain,
    config_files,
    describes_quantization,
    is_plain_dtype,
)
from .files import CHECKPOINT_SUFFIXES, CLAIM, CONFIG, SHARD_BYTES, Reader, Writer, progress
from .layouts import Layout, get_writable_layout
from .plain_tensors import check_finite, quantize_weight, signal_to_noise
from .weights import ALIASES

#: Default layout of each format.
_LAYOUTS = {"nvfp4": "modelopt", "fp8_block": "deepseek"}
_PROJECTIONS = "|".join([*ALIASES, *ALIASES.values()])
#: Names of weights of one expert, and of all experts.
_ONE = re.compile(
    rf"(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<projection>{_PROJECTIONS})\.weight"
)
_ALL = re.compile(
    rf"(?P<layer>(?:.*\.)?experts)\.(?P<projection>gate_up_proj|{_PROJECTIONS})(\.weight)?"
)
#: Index of the input of a projection: 1 for the activations; others have 0, for the tokens.
_INPUTS = {"down_proj": 1, "w2": 1}
_PARTNERS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


@torch.no_grad()
def convert(
    source: str | Path,
    target: str | Path,
    *,
    layout: str = "modelopt",
    transposed: bool = False,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device | str = "cpu",
    calibrate: str | Path | None = None,
) -> list[tuple[str, str, int, float]]:
    """Quantize the experts of a checkpoint.

    Args:
        source: A folder of safetensors files. Other files are copied. ``config.json`` gets the
            quantization config.
        target: A folder without safetensors files, their index and ``hf_quant_config.json``.
        layout: As in ``grouped.checkpoint.save``.
        transposed: False if tensors of all experts are (E, N, K). True if they are (E, K, N).
        shard_bytes: Limit of the bytes in a file.
        device: Device that quantizes. It also runs the model for ``calibrate``.
        calibrate: A file of token ids, or of text if ``source`` has a tokenizer. See
            ``grouped.checkpoint.token_ids.read_ids``. The model in ``source`` runs over it in
            transformers. Each quantized weight gets the static scale of its input:
            ``input_scale`` (modelopt) or ``input_global_scale`` (compressed-tensors). An expert
            that gets no token has the largest scale of the other experts in its layer.

    Returns:
        Layer, projection, expert and signal-to-noise ratio in dB of each weight.

    Raises:
        FileNotFoundError: ``source`` or ``calibrate`` lacks files.
        FileExistsError: ``target`` has files of a checkpoint, or another process writes to it.
        ValueError: There are no experts, the layout cannot be written, weights are quantized
            already, or K is not a multiple of 16. Or ``transposed`` contradicts the shapes of
            ``gate_up_proj`` and ``down_proj``, or ``shard_bytes`` is not a positive integer. Or the
            layout of ``calibrate`` has no input scales, the model does not have the ids, or
            transformers does not run its experts.
        OSError: A file cannot be written, for example on a full disk.

    Warns:
        UserWarning: transformers' ``from_pretrained`` would misread the new folder, or fail.
    """
    files, record = Reader(source), get_writable_layout(layout)
    if calibrate is not None and record.input_scale is None:
        raise ValueError(
            f"layout {layout} has no input scales to calibrate: its readers scale activations as "
            "they run"
        )
    experts = {
        name: match for name in files if (match := _ONE.fullmatch(name) or _ALL.fullmatch(name))
    }
    if not experts:
        raise ValueError(
            f"{source} has no weights of experts, such as ...experts.0.gate_proj.weight"
        )
    _check_source(files, experts, transposed)
    noise: list[tuple[str, str, int, float]] = []
    weights: list[QuantizedWeight] = []
    with Writer(target, shard_bytes) as writer:
        amaxes = (
            None
            if calibrate is None
            else input_amaxes(source, calibrate, sorted({*_layers(experts, files)}), device)
        )
        for name in progress(list(files), "tensors"):
            if name not in experts:
                writer.add(name, files[name])
                continue
            match, projection = experts[name], experts[name]["projection"]
            is_single = _is_single(match)
            weight, amax = _read_experts(name, files, is_single, transposed, record, device), None
            if record.global_scale_maps is not None:
                amax = weight.abs().amax((1, 2)).float()
                start, end = match.span("projection")
                partner = name[:start] + _PARTNERS.get(projection, projection) + name[end:]
                if partner in files:
                    partner_weight = _read_experts(
                        partner, files, is_single, transposed, record, device
                    )
                    amax = torch.maximum(amax, partner_weight.abs().amax((1, 2)).float())
            quantized = quantize_weight(weight, record.fmt, amax)
            weights.append(QuantizedWeight(name.removesuffix(".weight"), not is_single))
            stored = record.stored(quantized.expert(0) if is_single else quantized)
            for suffix, t in stored.items():
                writer.add(weights[-1].tensor(suffix), t)
            if amaxes is not None and record.input_scale:
                inputs = amaxes[match["layer"]][_INPUTS.get(projection, 0)]
                scale = record.static_input_scale(
                    inputs[int(match["expert"])] if is_single else inputs
                )
                writer.add(weights[-1].tensor(record.input_scale), scale)
            for g, rows in enumerate(weight):
                snr = signal_to_noise(rows, quantized.expert(g), record.fmt)
                expert = int(match["expert"]) if is_single else g
                noise.append((match["layer"], projection, expert, snr))
        _finish(files, writer, record, weights, [n for n in files if n not in experts])
    return noise


def _is_single(match: re.Match[str]) -> bool:
    """Return True for the name of a weight of one expert, False for all experts."""
    return "expert" in match.groupdict()


def _check_source(files: Reader, experts: Mapping[str, re.Match[str]], transposed: bool) -> None:
    """Raise ValueError for weights that contradict ``transposed``, or that are quantized."""
    stacked_layers = dict.fromkeys(
        match["layer"] for match in experts.values() if not _is_single(match)
    )
    for layer in stacked_layers:
        names = {m["projection"]: n for n, m in experts.items() if m["layer"] == layer}
        _check_transposed(layer, names, files, transposed)
    for name in experts:
        if not is_plain_dtype(dtype := files.header(name).dtype):
            raise ValueError(
                f"{name} is {dtype}, so {files.folder} is quantized already: convert the plain "
                "checkpoint of the model (bf16, fp16 or fp32), so that no weight is rounded twice"
            )
    was_quantized = describes_quantization(files.config())
    for name in files:
        if name not in experts:
            is_weight = was_quantized and len(files.shape(name)) > 1
            check_plain(name, files.header(name).dtype, is_weight)


def _layers(experts: Mapping[str, re.Match[str]], files: Reader) -> Iterator[tuple[str, int]]:
    """Yield the name of each layer of experts and its number of experts."""
    indices = collections.defaultdict[str, set[int]](set)
    for name, match in experts.items():
        indices[match["layer"]].update(
            [int(match["expert"])] if _is_single(match) else range(files.shape(name)[0])
        )
    return ((layer, max(experts_of_layer) + 1) for layer, experts_of_layer in indices.items())


def _check_transposed(
    layer: str, names: Mapping[str, str], files: Reader, transposed: bool
) -> None:
    """Raise ValueError if shapes of ``gate_up_proj`` and ``down_proj`` contradict ``transposed``.

    ``names`` maps the projections of a layer to the names of their tensors.
    """
    shapes = [tuple(files.shape(names[p])) for p in ("gate_up_proj", "down_proj") if p in names]
    if [len(shape) for shape in shapes] != [3, 3]:
        return
    (_, *gate_up), (_, *down) = shapes
    are_rows, are_columns = (gate_up == [2 * down[1], down[0]]), (gate_up == [down[1], 2 * down[0]])
    if are_rows != are_columns and are_columns != transposed:
        raise ValueError(
            f"{layer} has a gate_up_proj of {shapes[0]} and a down_proj of {shapes[1]}: its "
            "weights are "
            + (
                "(E, K, N), as gpt-oss has them: convert with --transposed"
                if are_columns
                else "(E, N, K): not --transposed"
            )
            + f" (transposed={are_columns})"
        )


def _read_experts(
    name: str,
    files: Reader,
    is_single: bool,
    transposed: bool,
    layout: Layout,
    device: torch.device | str,
) -> Tensor:
    """Read the plain weights (E, N, K) of a tensor to ``device``; E is 1 for a single expert.

    Raises:
        ValueError: The tensor has another shape or dtype, or numbers that are not finite.
    """
    tensor = files[name].to(device)
    weight = tensor[None] if is_single else tensor.mT if transposed else tensor
    is_plain = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    multiple = layout.fmt.k_multiple
    if weight.dim() != 3 or not is_plain or not weight.numel() or weight.shape[2] % multiple:
        raise ValueError(
            f"{name} must be a plain matrix of experts with a multiple of {multiple} columns, got "
            f"{weight.dtype} of shape {tuple(tensor.shape)}"
        )
    check_finite(name, weight)
    return weight


def _finish(
    files: Reader, writer: Writer, layout: Layout, weights: list[QuantizedWeight], copied: list[str]
) -> None:
    """Write the pending tensors, the configuration and copies of other files."""
    plain = [
        n.removesuffix(".weight")
        for n in copied
        if n.endswith(".weight") and len(files.shape(n)) > 1
    ]
    if any(n.split(".")[-1] == "embed_tokens" for n in plain) and not any(
        n.split(".")[-1] == "lm_head" for n in plain
    ):
        # A tied lm_head is not in the files. Readers create it and look it up in the config.
        plain.append("lm_head")
    no_copy = (*CHECKPOINT_SUFFIXES, ".partial", CONFIG, CLAIM)
    copies = [
        path
        for path in files.folder.iterdir()
        if path.is_file() and not path.name.endswith(no_copy)
    ]
    writer.close(lambda: config_files(files.config(), layout, weights, plain, writer.names), copies)


def report(noise: Sequence[tuple[str, str, int, float]], title: str) -> str:
    """Return an HTML page with the signal-to-noise ratios in dB.

    It has a row per layer and projection, and a column per expert.

    Args:
        noise: Result of ``convert``.
        title: Title of the page.
    """
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for layer, projection, expert, snr in noise:
        rows.setdefault((layer, projection), {})[expert] = snr
    values = [snr for *_, snr in noise]
    low, high = min(values), max(values)
    columns = sorted({expert for _, _, expert, _ in noise})

    def cell(snr: float | None) -> str:
        """Return a table cell, red for the lowest and green for the highest ratio."""
        if snr is None:
            return "<td></td>"
        hue = 120 * (snr - low) / (high - low) if 0 < high - low < float("inf") else 120
        return f'<td style="background:hsl({hue:.0f} 70% 80%)">{snr:.1f}</td>'

    body = "".join(
        f"<tr><th>{html.escape(layer)} {projection}</th><td>{min(row.values()):.1f}</td>"
        + "".join(cell(row.get(expert)) for expert in columns)
        + "</tr>"
        for (layer, projection), row in rows.items()
    )
    head = "".join(f"<th>{expert}</th>" for expert in columns)
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif}td,th{padding:2px 6px;text-align:right}"
        "th:first-child{text-align:left;position:sticky;left:0;background:#fff}</style>"
        f"<h1>{html.escape(title)}</h1><p>Signal-to-noise ratio of experts' weights in dB: lowest "
        f"{low:.2f}, median {sorted(values)[len(values) // 2]:.2f}, highest {high:.2f}.</p>"
        f"<table><tr><th></th><th>lowest</th>{head}</tr>{body}</table>"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: Arguments of the command. None takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m grouped.convert", description=__doc__.split("\n")[0]
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", choices=list(_LAYOUTS), required=True, help="the format")
    parser.add_argument(
        "--layout", help="modelopt, compressed-tensors (nvfp4) or deepseek (fp8_block)"
    )
    parser.add_argument(
        "--transposed", action="store_true", help="tensors of all experts are (E, K, N)"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="token ids or text to measure experts' inputs on",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report", type=Path, help="HTML page of the SNR of every expert")
    options = parser.parse_args(arguments)
    layout = options.layout or _LAYOUTS[options.to]
    try:
        if get_writable_layout(layout).fmt.name != options.to:
            parser.error(f"layout {layout} does not hold {options.to}")
        if options.report and not options.report.absolute().parent.is_dir():
            raise FileNotFoundError(f"no folder {options.report.absolute().parent} for the report")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            noise = convert(
                options.source,
                options.target,
                layout=layout,
                transposed=options.transposed,
                device=_device(options.device),
                calibrate=options.calibrate,
            )
        if options.report:
            options.report.write_text(report(noise, f"{options.source.name} in {options.to}"))
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {' '.join(str(error).split())}\n")
    for message in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        print(f"{parser.prog}: warning: {message}", file=sys.stderr)
    values = sorted(snr for *_, snr in noise)
    middle = values[len(values) // 2]
    print(
        f"{len(noise)} weights of experts: SNR {values[0]:.2f} to {values[-1]:.2f} dB, "
        f"median {middle:.2f}"
    )
    return 0


def _device(name: str) -> torch.device:
    """Return the device of a name.

    Raises:
        ValueError: There is no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r}: {str(error).splitlines()[0]}") from None
    return device


if __name__ == "__main__":
    sys.exit(main())
