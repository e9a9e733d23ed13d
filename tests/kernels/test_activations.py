"""Activations in front of kernels on the emulator, to the bit of the reference backend."""

import itertools
import re

import torch

import cute_kernels
from cute_kernels.activations import parse_activation
from cute_kernels.formats import parse
from cute_kernels.quantize import Prologue, QuantizeProblem, TileConfig
from cute_kernels.reference.activations import activate, activate_gradient
from perf.compiled import compile_for_emulator
from perf.cubin import read_resources
from tests.helpers import DTYPES, assert_same_bytes, each, ends, many_groups, ops, poisoned

from .op_support import ARCHITECTURES, MODE_IDS, MODES, array_of, check, check_touched
from .quantize_support import compiled, random_input, special_input

from .activation_kernel import ActivationConfig  # isort: skip


BF16 = torch.bfloat16
CLAMPED = "clamped_swiglu:alpha=1.5,limit=2.0"
CURVES = ("geglu", "swiglu", "qgeglu", "reglu", "sreglu", CLAMPED)
#: (rows of the buffer, K, end rows), and what is in them. Halves of 136 and 144 columns.
RAGGED = {
	"odd rows, odd K": (300, 288, ends(7, 136, 137, 300), random_input),
	"empty first, middle, last; tail": (210, 96, ends(0, 0, 65, 65, 65, 190, 200, 200), None),
	"one row": (1, 32, ends(1), random_input),
	"special values": (150, 256, ends(3, 40, 150), special_input),
	"all empty": (64, 32, ends(0, 0), random_input),
}


def inputs(act, backward, lead, cols, fill=None, dtype=BF16):
	def make(width, seed):
		wide = -(-width // 16) * 16
		if fill is special_input:
			return special_input(*lead, wide, dtype)[:, :width].roll(seed, 0).contiguous()
		return random_input((*lead, wide), dtype, seed)[..., :width].contiguous()

	record = parse_activation(act)
	if backward:
		return make(cols, 0), make(record.width(cols), 1)
	return make(cols * (2 if record.is_gated else 1), 0), None


def quantize(text, act, x, grad, offs, way, amax=None):
	fmt, groups = parse(text), len(x) if offs is None else len(offs)
	given = {"activation": act, "grad": grad, "amax": amax, "rowwise": way != "columnwise"}
	given["columnwise"] = way != "rowwise"
	if fmt.takes_scale:
		given["scale"] = torch.exp2(torch.arange(groups) % 17 - 8.0) * 1.3
	if fmt.is_stochastic:
		given["seed"] = torch.tensor([3, 4])
	with cute_kernels.backend("reference"):
		like = ops.grouped_quantize(x, text, offs, **given)
	out = [poisoned(t) for t in like]
	ops.grouped_quantize_out(x, text, offs, **given, out=out)
	return torch.cat([t.view(torch.uint8).flatten() for t in out])


def every_number():
	"""All of bf16, and fp32 numbers beside each that a step of the arithmetic turns at."""
	every = torch.arange(65536).short().view(BF16).float()
	edges = torch.cat([torch.linspace(-110, 110, 4001), torch.logspace(-42, 38, 1001)])
	near = torch.tensor([0.0, 1.5, 2.0, 10.0, 80.0, 89.0, 104.0, 2.0**32])[:, None]
	near = (near * (1 + torch.arange(-4, 5) * 2.0**-23)).flatten()
	return torch.cat([every, edges, near, -near])


@each("act", [*CURVES, "gelu"])
@each("arch", ARCHITECTURES)
def test_bits_of_every_curve(arch, act):
	a, record = every_number(), parse_activation(act)
	a = a[: len(a) // 2 * 2]
	generator = torch.Generator().manual_seed(0)
	b, grad = torch.randn(2, len(a), generator=generator) * 4
	b[:: len(a) // 7] = float("nan")
	b[1 :: len(a) // 7] = float("inf")
	got = [torch.zeros_like(a) for _ in range(3)]
	compiled(ActivationConfig(act, arch))(a, b, grad, *got)
	x = torch.stack([a, b], 1) if record.is_gated else a[:, None]
	want = [activate(x, record), *activate_gradient(x, grad[:, None], record).chunk(x.shape[1], 1)]
	for ours, theirs in zip(got, want, strict=False):
		assert_same_bytes(ours, theirs.flatten(), any_nan=True)


#: Each format with a unary activation and a gated one, its gradient or its value; each way, too.
CASES = [
	("sm_100a", "nvfp4", "silu", True, "both"),
	("sm_90a", "nvfp4", "swiglu", False, "both"),
	("sm_90a", "nvfp4:row_scaled", "gelu", False, "both"),
	("sm_100a", "nvfp4:row_scaled", "swiglu", True, "rowwise"),
	("sm_100a", "nvfp4:block=16x16", CLAMPED, False, "columnwise"),
	("sm_90a", "nvfp4:stochastic_rounding", "swiglu", True, "columnwise"),
	("sm_100a", "nvfp4:hadamard", "swiglu", False, "both"),
	("sm_100a", "fp8", "swiglu", False, "both"),
	("sm_90a", "fp8", CLAMPED, True, "rowwise"),
	("sm_90a", "fp8:dtype=e5m2,scaling=delayed", "swiglu", True, "both"),
	("sm_100a", "fp8:scaling=delayed", "qgelu", False, "rowwise"),
	("sm_90a", "fp8_block", "geglu", True, "both"),
	("sm_100a", "fp8_block", "srelu", True, "rowwise"),
	("sm_100a", "fp8_block:block=128x128", "reglu", False, "both"),
	("sm_100a", "mxfp8", "swiglu", False, "both"),
	("sm_90a", "mxfp8:block=32x32", "relu", True, "both"),
	("sm_90a", "mxfp8", "swiglu", False, "rowwise"),
]


@each(("arch", "text", "act", "backward", "way"), CASES)
def test_codes(arch, text, act, backward, way):
	for rows, cols, offs, fill in RAGGED.values():
		x, grad = inputs(act, backward, (rows,), cols, fill)
		x[int(offs[-1]) :] = float("nan")
		check(arch, lambda x=x, grad=grad, offs=offs: quantize(text, act, x, grad, offs, way))


@each("dtype", ["float16", "float32"])
def test_other_dtypes_and_uniform_groups(dtype):
	for text, act, backward in (("mxfp8", "swiglu", False), ("fp8", "swiglu", True)):
		x, grad = inputs(act, backward, (3, 70), 96, dtype=DTYPES[dtype])
		check("sm_90a", lambda a=(text, act, x, grad): quantize(*a, None, "both"))
	x, grad = inputs("swiglu", True, (150,), 272, dtype=DTYPES[dtype])
	offs = ends(20, 149)
	check("sm_100a", lambda: quantize("nvfp4:row_scaled", "swiglu", x, grad, offs, "rowwise"))


@each("mode", MODES, MODE_IDS)
def test_any_order(mode):
	x, grad = inputs("swiglu", True, (300,), 272)
	offs = ends(0, 130, 131, 290)
	for arch, text, way in (
		("sm_90a", "nvfp4:stochastic_rounding", "columnwise"),
		("sm_100a", "nvfp4:row_scaled", "rowwise"),
		("sm_90a", "fp8:dtype=e5m2,scaling=delayed", "both"),
	):
		check(arch, lambda a=(text, "swiglu", x, grad, offs, way): quantize(*a), **mode)


def test_given_amaxes_and_many_groups():
	offs = many_groups()
	x, _ = inputs("swiglu", False, (int(offs[-1]) + 5,), 48)
	amax = torch.rand(len(offs)) - 0.5
	check("sm_90a", lambda: quantize("nvfp4", "swiglu", x, None, offs, "both", amax))


def test_only_the_rows_of_groups_are_read():
	offs = ends(3, 131, 219)
	x, grad = inputs("swiglu", True, (260,), 160)
	given = {"activation": "swiglu", "grad": grad}
	for text, way in (("nvfp4:row_scaled", "rowwise"), ("fp8:dtype=e5m2,scaling=delayed", "both")):
		given["scale"] = torch.ones(3) if "delayed" in text else None
		given["columnwise"] = way == "both"
		out = ops.grouped_quantize(x, text, offs, **given)
		others = [offs, given["scale"], *(array_of(t.view(torch.uint8)) for t in out)]
		with cute_kernels.backend("emulated:sm_90a" if way == "both" else "emulated:sm_100a"):
			check_touched(
				lambda text=text, out=out: ops.grouped_quantize_out(x, text, offs, **given, out=out),
				[array_of(x)[:219], array_of(grad)[:219]],
				others,
			)


@each(
	("arch", "act", "backward", "cols"),
	[("sm_90a", "swiglu", True, 272), ("sm_100a", CLAMPED, True, 14), ("sm_100a", "gelu", False, 24)],
)
def test_dbias(arch, act, backward, cols):
	for dtype in (BF16,) if cols == 14 else (BF16, torch.float32):
		for offs in (ends(7, 136, 137, 137, 700), ends(0)):
			x, grad = inputs(act, backward, (705,), cols, dtype=dtype)
			x[int(offs[-1]) :] = float("nan")
			check(arch, lambda x=x, grad=grad, offs=offs: ops.grouped_dbias(x, offs, act, grad))
	x, grad = inputs(act, backward, (3, 130), cols)
	check(arch, lambda: ops.grouped_dbias(x, None, act, grad))


def test_code():
	"""Exact arithmetic and no spills, of what is compiled ahead of time."""
	for arch, text, backward in itertools.product(ARCHITECTURES, ("nvfp4", "mxfp8"), (False, True)):
		prologue = Prologue("bfloat16", "swiglu", backward)
		config = TileConfig.choose(
			parse(text), QuantizeProblem("bfloat16", 256, "ragged", prologue), arch, columnwise=True, compute_amax=True
		)
		kernel = compile_for_emulator(config, arch)
		assert not re.findall(r"\.ftz|\.approx", kernel.ptx)
		assert all(r.stack_bytes == 0 for r in read_resources(kernel.cubin).values())
