"""How much of a signal survives quantization, in decibels."""

from grouped import debug

#: What enters the products of a grouped linear layer, and the lens's names of it.
ROLES = {"weights": "weight", "activations": "input", "gradients": "grad_output"}


def mean_db(lens: debug.inspect) -> dict[str, float | None]:
	"""Mean ratio over the layers in the last step, by role; None for a role without one.

	Of the rowwise copies, which fprop and, of gradients, dgrad read.
	"""
	entries = [entry for entry in lens.summary() if entry["direction"] == "rowwise"]
	means: dict[str, float | None] = {}
	for name, role in ROLES.items():
		ratios = [entry["snr_db"] for entry in entries if entry["role"] == role]
		known = [ratio for ratio in ratios if ratio is not None]
		means[name] = sum(known) / len(known) if known else None
	return means
