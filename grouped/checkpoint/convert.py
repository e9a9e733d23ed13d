"""Quantize the experts of a bf16 checkpoint: ``python -m grouped.convert SRC DST --to nvfp4``.

Reads and writes safetensors files tensor by tensor, without a model. Weights of experts are those
whose names end as DeepSeek's, Qwen3's or Mixtral's do, one an expert and projection, or all of a
layer in one tensor; gate and up of an expert get one second level. Everything else is copied.
``--calibrate`` runs the model over token ids or text, and writes the static scales of experts'
inputs. ``--report`` writes the signal-to-noise ratio of every expert as an HTML page.
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
from .config import Quantized, check_plain, config_files, describes_quantization
from .files import CLAIM, CONFIG, OF_CHECKPOINTS, SHARD_BYTES, Reader, Writer, progress
from .layouts import Layout, writable
from .plain_tensors import check_finite, quantize_weight, signal_to_noise
from .weights import ALIASES

#: The layout of each format, unless another is named.
_LAYOUTS = {"nvfp4": "modelopt", "fp8_block": "deepseek"}
_PROJECTIONS = "|".join([*ALIASES, *ALIASES.values()])
#: Names of experts' weights: of one expert and of all of them.
_ONE = re.compile(
    rf"(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<projection>{_PROJECTIONS})\.weight"
)
_ALL = re.compile(
    rf"(?P<layer>(?:.*\.)?experts)\.(?P<projection>gate_up_proj|{_PROJECTIONS})(\.weight)?"
)
#: Which of a layer's two inputs a projection takes: 0 the tokens, 1 the activations between.
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
        source: a folder of safetensors files; its other files are copied, its ``config.json``
            with the quantization added.
        target: a folder without safetensors files, their index or a ``hf_quant_config.json``.
        layout: as of ``grouped.checkpoint.save``.
        transposed: weights of all experts in one tensor are (E, K, N), not (E, N, K).
        shard_bytes: the most bytes of a file.
        device: where to quantize, and to run the model for ``calibrate``.
        calibrate: a file of token ids, or of text if ``source`` has a tokenizer, as
            ``grouped.checkpoint.token_ids.read_ids`` takes it. The model in ``source``, made by
            transformers, runs over it, and each quantized weight gets the static scale of
            its input: ``input_scale`` (modelopt) or ``input_global_scale``
            (compressed-tensors). An expert that sees no token gets the largest scale of its
            layer's others.

    Returns:
        Layer, projection, expert and SNR in dB of each weight.

    Raises:
        FileNotFoundError: ``source`` or ``calibrate`` lacks files.
        FileExistsError: ``target`` has files of a checkpoint, or another process writes to it.
        ValueError: no experts, a layout that cannot be written, weights that are quantized
            already, K no multiple of 16, ``transposed`` that the shapes of ``gate_up_proj``
            and ``down_proj`` contradict, ``shard_bytes`` no positive integer; ``calibrate``
            with a layout without input scales, with ids that the model does not have, or
            for a model whose experts transformers does not run.
        OSError: a file cannot be written, as on a full disk.

    Warns:
        UserWarning: transformers' ``from_pretrained`` would read the new folder wrongly or not
            at all.
    """
    files, record = Reader(source), writable(layout)
    if calibrate is not None and record.input_scale is None:
        raise ValueError(
            f"layout {layout} has no input scales to calibrate: its readers scale activations as they run"
        )
    experts = {
        name: found for name in files if (found := _ONE.fullmatch(name) or _ALL.fullmatch(name))
    }
    if not experts:
        raise ValueError(
            f"{source} has no weights of experts, such as ...experts.0.gate_proj.weight"
        )
    for layer in dict.fromkeys(
        found["layer"] for found in experts.values() if "expert" not in found.groupdict()
    ):
        _check_turned(
            layer,
            {found["projection"]: n for n, found in experts.items() if found["layer"] == layer},
            files,
            transposed,
        )
    was_quantized = describes_quantization(files.config())
    for name in files:
        if name not in experts:
            check_plain(
                name, files.header(name).dtype, was_quantized and len(files.shape(name)) > 1
            )
    noise, weights = list[tuple[str, str, int, float]](), list[Quantized]()
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
            found, projection = experts[name], experts[name]["projection"]
            is_one = "expert" in found.groupdict()
            weight, amax = _checked(name, files[name].to(device), is_one, transposed, record), None
            if record.level is not None:
                amax = weight.abs().amax((1, 2)).float()
                start, end = found.span("projection")
                partner = name[:start] + _PARTNERS.get(projection, projection) + name[end:]
                if partner in files:
                    other = _checked(partner, files[partner].to(device), is_one, transposed, record)
                    amax = torch.maximum(amax, other.abs().amax((1, 2)).float())
            parts = quantize_weight(weight, record.fmt, amax)
            weights.append(Quantized(name.removesuffix(".weight"), not is_one))
            for suffix, t in record.stored(parts.expert(0) if is_one else parts).items():
                writer.add(weights[-1].tensor(suffix), t)
            if amaxes is not None and record.input_scale:
                inputs = amaxes[found["layer"]][_INPUTS.get(projection, 0)]
                scale = record.input_level(inputs[int(found["expert"])] if is_one else inputs)
                writer.add(weights[-1].tensor(record.input_scale), scale)
            for g, rows in enumerate(weight):
                snr = signal_to_noise(rows, parts.expert(g), record.fmt)
                noise.append(
                    (found["layer"], projection, int(found["expert"]) if is_one else g, snr)
                )
        _finish(files, writer, record, weights, [n for n in files if n not in experts])
    return noise


def _layers(experts: Mapping[str, re.Match[str]], files: Reader) -> Iterator[tuple[str, int]]:
    """The name of each layer of experts, and how many experts it has, once or more."""
    indices = collections.defaultdict[str, set[int]](set)
    for name, found in experts.items():
        is_one = "expert" in found.groupdict()
        indices[found["layer"]].update(
            [int(found["expert"])] if is_one else range(files.shape(name)[0])
        )
    return ((layer, max(of_layer) + 1) for layer, of_layer in indices.items())


def _check_turned(layer: str, names: Mapping[str, str], files: Reader, transposed: bool) -> None:
    """Raise ValueError if shapes of ``gate_up_proj`` and ``down_proj`` say that ``transposed`` is
    wrong.
    """
    shapes = [tuple(files.shape(names[p])) for p in ("gate_up_proj", "down_proj") if p in names]
    if [len(shape) for shape in shapes] != [3, 3]:
        return
    (_, *gate_up), (_, *down) = shapes
    are_rows, are_columns = (gate_up == [2 * down[1], down[0]]), (gate_up == [down[1], 2 * down[0]])
    if are_rows != are_columns and are_columns != transposed:
        raise ValueError(
            f"{layer} has a gate_up_proj of {shapes[0]} and a down_proj of {shapes[1]}: its weights are "
            + (
                "(E, K, N), as gpt-oss has them: convert with --transposed"
                if are_columns
                else "(E, N, K): not --transposed"
            )
            + f" (transposed={are_columns})"
        )


def _checked(name: str, tensor: Tensor, is_one: bool, transposed: bool, layout: Layout) -> Tensor:
    weight = tensor[None] if is_one else tensor.mT if transposed else tensor
    is_plain = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    multiple = layout.fmt.k_multiple
    if weight.dim() != 3 or not is_plain or not weight.numel() or weight.shape[2] % multiple:
        raise ValueError(
            f"{name} must be a plain matrix of experts with a multiple of {multiple} columns, got {weight.dtype} of shape "
            f"{tuple(tensor.shape)}"
        )
    check_finite(name, weight)
    return weight


def _finish(
    files: Reader, writer: Writer, layout: Layout, weights: list[Quantized], copied: list[str]
) -> None:
    """Write the last file, the configuration and copies of other files."""
    plain = [
        n.removesuffix(".weight")
        for n in copied
        if n.endswith(".weight") and len(files.shape(n)) > 1
    ]
    if any(n.split(".")[-1] == "embed_tokens" for n in plain) and not any(
        n.split(".")[-1] == "lm_head" for n in plain
    ):
        plain.append(
            "lm_head"
        )  # Tied, so not in the files; readers make it and ask whether it is quantized.
    no_copy = (*OF_CHECKPOINTS, ".partial", CONFIG, CLAIM)
    copies = [
        path
        for path in files.folder.iterdir()
        if path.is_file() and not path.name.endswith(no_copy)
    ]
    writer.close(lambda: config_files(files.config(), layout, weights, plain, writer.names), copies)


def report(noise: Sequence[tuple[str, str, int, float]], title: str) -> str:
    """An HTML page: a row for each layer and projection, a cell for each expert, its SNR in dB."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for layer, projection, expert, snr in noise:
        rows.setdefault((layer, projection), {})[expert] = snr
    values = [snr for *_, snr in noise]
    low, high = min(values), max(values)
    columns = sorted({expert for _, _, expert, _ in noise})

    def cell(snr: float | None) -> str:
        if snr is None:
            return "<td></td>"
        hue = 120 * (snr - low) / (high - low) if 0 < high - low < float("inf") else 120
        return f'<td style="background:hsl({hue:.0f} 70% 80%)">{snr:.1f}</td>'

    body = "".join(
        f"<tr><th>{html.escape(layer)} {projection}</th><td>{min(of.values()):.1f}</td>"
        + "".join(cell(of.get(expert)) for expert in columns)
        + "</tr>"
        for (layer, projection), of in rows.items()
    )
    head = "".join(f"<th>{expert}</th>" for expert in columns)
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>body{{font:14px sans-serif}}"
        "td,th{padding:2px 6px;text-align:right}th:first-child{text-align:left;position:sticky;left:0;background:#fff}"
        f"</style><h1>{html.escape(title)}</h1><p>Signal-to-noise ratio of experts' weights in dB: lowest {low:.2f}, "
        f"median {sorted(values)[len(values) // 2]:.2f}, highest {high:.2f}.</p><table><tr><th></th><th>lowest</th>"
        f"{head}</tr>{body}</table>"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
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
        if writable(layout).fmt.name != options.to:
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
        f"{len(noise)} weights of experts: SNR {values[0]:.2f} to {values[-1]:.2f} dB, median {middle:.2f}"
    )
    return 0


def _device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ValueError: there is none.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r}: {str(error).splitlines()[0]}") from None
    return device


if __name__ == "__main__":
    sys.exit(main())
