"""Quantize the experts of a bf16 checkpoint: ``python -m grouped.convert SRC DST --to nvfp4``.

Reads and writes safetensors files tensor by tensor, without a model. Weights of experts are those
whose names end as DeepSeek's, Qwen3's or Mixtral's do, one an expert and projection, or all of a
layer in one tensor; gate and up of an expert get one second level. Everything else is copied.
``--report`` writes the signal-to-noise ratio of every expert as an HTML page.
"""

import argparse
import html
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint.files import SHARD_BYTES, Reader, Writer, progress
from .checkpoint.layouts import Layout, stacked_suffix, writable
from .checkpoint.parts import quantized, signal_to_noise
from .checkpoint.weights import ALIASES

#: The layout of each format, unless another is named.
_LAYOUTS = {"nvfp4": "modelopt", "fp8_block": "deepseek"}
_PROJECTIONS = "|".join([*ALIASES, *ALIASES.values()])
#: Names of experts' weights: of one expert and of all of them.
_ONE = re.compile(rf"(?P<layer>.*experts)\.(?P<expert>\d+)\.(?P<projection>{_PROJECTIONS})\.weight")
_ALL = re.compile(rf"(?P<layer>.*experts)\.(?P<projection>gate_up_proj|{_PROJECTIONS})(\.weight)?")
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
) -> list[tuple[str, str, int, float]]:
	"""Quantize the experts of a checkpoint.

	Args:
		source: a folder of safetensors files; its other files are copied, its ``config.json`` with the quantization added.
		target: a folder without safetensors files.
		layout: as of ``grouped.checkpoint.save``.
		transposed: weights of all experts in one tensor are (E, K, N), not (E, N, K).
		shard_bytes: the most bytes of a file.
		device: where to quantize.

	Returns:
		Layer, projection, expert and SNR in dB of each weight.

	Raises:
		FileNotFoundError: ``source`` lacks files.
		FileExistsError: ``target`` has safetensors files.
		ValueError: no experts, a layout that cannot be written, weights that are quantized already, or K no multiple of 16.
	"""
	files, record = Reader(source), writable(layout)
	experts = {name: found for name in files if (found := _ONE.fullmatch(name) or _ALL.fullmatch(name))}
	if not experts:
		raise ValueError(f"{source} has no weights of experts, such as ...experts.0.gate_proj.weight")
	noise = list[tuple[str, str, int, float]]()
	with Writer(target, shard_bytes) as writer:
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
			parts = quantized(weight, record.fmt, amax)
			base = name.removesuffix(".weight")
			for suffix, t in record.stored(parts.expert(0) if is_one else parts).items():
				writer.add(base + (suffix if is_one else stacked_suffix(suffix)), t)
			for g, rows in enumerate(weight):
				snr = signal_to_noise(rows, parts.expert(g), record.fmt)
				noise.append((found["layer"], projection, int(found["expert"]) if is_one else g, snr))
		_finish(files, writer, Path(target), record, [n for n in files if n not in experts])
	return noise


def _checked(name: str, tensor: Tensor, is_one: bool, transposed: bool, layout: Layout) -> Tensor:
	weight = tensor[None] if is_one else tensor.mT if transposed else tensor
	is_plain = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
	multiple = layout.fmt.k_multiple
	if weight.dim() != 3 or not is_plain or not weight.numel() or weight.shape[2] % multiple:
		raise ValueError(
			f"{name} must be a plain matrix of experts with a multiple of {multiple} columns, got {weight.dtype} of shape "
			f"{tuple(tensor.shape)}"
		)
	return weight


def _finish(files: Reader, writer: Writer, target: Path, layout: Layout, plain: list[str]) -> None:
	ignored = [n.removesuffix(".weight") for n in plain if n.endswith(".weight") and len(files.shape(n)) == 2]
	config = {**files.config(), "quantization_config": {**layout.config, "ignore": ignored}}
	writer.close(lambda: {"config.json": config})
	for path in files.folder.iterdir():
		is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
		if path.is_file() and not is_weights and not (target / path.name).exists():
			shutil.copy2(path, target)


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
	parser = argparse.ArgumentParser(prog="python -m grouped.convert", description=__doc__.split("\n")[0])
	parser.add_argument("source", type=Path)
	parser.add_argument("target", type=Path)
	parser.add_argument("--to", choices=list(_LAYOUTS), required=True, help="the format")
	parser.add_argument("--layout", help="modelopt, compressed-tensors (nvfp4) or deepseek (fp8_block)")
	parser.add_argument("--transposed", action="store_true", help="tensors of all experts are (E, K, N)")
	parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
	parser.add_argument("--report", type=Path, help="HTML page of the SNR of every expert")
	options = parser.parse_args(arguments)
	layout = options.layout or _LAYOUTS[options.to]
	try:
		if writable(layout).fmt.name != options.to:
			parser.error(f"layout {layout} does not hold {options.to}")
		noise = convert(options.source, options.target, layout=layout, transposed=options.transposed, device=options.device)
	except (ValueError, OSError) as error:
		parser.exit(1, f"{error}\n")
	values = sorted(snr for *_, snr in noise)
	middle = values[len(values) // 2]
	print(f"{len(noise)} weights of experts: SNR {values[0]:.2f} to {values[-1]:.2f} dB, median {middle:.2f}")
	if options.report:
		options.report.write_text(report(noise, f"{options.source.name} in {options.to}"))
	return 0


if __name__ == "__main__":
	sys.exit(main())
