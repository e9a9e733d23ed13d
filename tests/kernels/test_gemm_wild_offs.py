"""End rows that break every rule: no GEMM leaves its buffers, on either architecture."""

import dataclasses

import torch

from tests.helpers import each, ends
from tests.kernels import test_gemm_decoded as decoded
from tests.kernels import test_gemm_fp8 as fp8
from tests.kernels import test_gemm_sm90 as sm90
from tests.kernels import test_gemm_sm100 as sm100
from tests.kernels import test_gemm_sm100_fp8 as sm100_fp8

from .gemm_support import product_of
from .op_support import watching

SMALLEST, LARGEST = -(2**31), 2**31 - 1
#: For groups of 130, 10 and 60 rows in a buffer of 211.
WILD = {
	"negative": ends(-5, -1, -300),
	"falling": ends(200, 60, 10),
	"falls and rises": ends(150, 20, 211),
	"past the buffer": ends(212, 1000, 2000),
	"largest": ends(LARGEST, LARGEST, LARGEST),
	"smallest": ends(SMALLEST, SMALLEST, SMALLEST),
	"smallest, then largest": ends(SMALLEST, LARGEST, 211),
	"largest, then smallest": ends(LARGEST, SMALLEST, LARGEST),
}
#: One configuration for each way to find a tile's rows.
CONFIGS = {
	"sm_90a nvfp4": sm90.FPROP_ALL,
	"sm_90a cluster": sm90.CLUSTER,
	"sm_90a fitted": sm90.FITTED,
	"sm_90a zeroed tail": dataclasses.replace(
		sm90.FPROP, out_dtype="float32", bias_dtype="bfloat16", zero_tail=True, tile=sm90.M_TILES["256x32"]
	),
	"sm_90a bf16": sm90.PLAIN,
	"sm_90a w4a16": sm90.W4A16,
	"sm_90a fp8_block": dataclasses.replace(fp8.UNSWAPPED, zero_tail=True),
	"sm_90a squares x rows": fp8.TURNED,
	"sm_90a wgrad": sm90.WGRAD_ADD,
	"sm_90a rows x squares wgrad": fp8.WGRADS["rows x squares"],
	"sm_90a bf16 wgrad": sm90.PLAIN_WGRAD,
	"sm_100a nvfp4": sm100.FPROP_ALL,
	"sm_100a two CTAs": sm100.TILED["256x256 partial"],
	"sm_100a swapped": sm100.TILED["swapped 128x32"],
	"sm_100a zeroed tail": dataclasses.replace(sm100.FPROP_FP32, zero_tail=True, tile=sm100.TILED["swapped 128x32"].tile),
	"sm_100a bf16": sm100.PLAIN,
	"sm_100a promoted": sm100_fp8.M_GROUPED["promoted all"],
	"sm_100a promoted few": sm100_fp8.M_GROUPED["promoted few"],
	"sm_100a promoted wgrad": sm100_fp8.K_GROUPED["promoted"],
	"sm_100a mxfp8 wgrad": sm100_fp8.K_GROUPED["mxfp8 add"],
	"sm_100a w4a16": decoded.CONFIGS["nvfp4 256x128"],
	"sm_100a wgrad": sm100.WGRAD_ADD,
	"sm_100a bf16 wgrad": sm100.PLAIN_WGRAD,
}


@each("config", CONFIGS)
def test_wild_end_rows_do_no_harm(config):
	product = product_of(config, [130, 10, 60], 72, 96, 11)
	# Storage of the buffers alone: that is what is watched.
	out = product.before.clone()
	prepared = product.prepared(out, 2)
	for offs in WILD.values():
		arguments = prepared._replace(offs=offs)
		with watching(*arguments):
			product.launch(arguments)


@each("config", CONFIGS)
def test_rows_that_no_group_has_stay(config):
	"""End rows that are not above 0, or all empty groups: nothing to write; zeros in wgrad."""
	product = product_of(config, [0, 0, 0], 72, 96, 200)
	keeps = config.accumulate or config.grouping == "m_grouped" and not config.zero_tail
	want = product.before if keeps else 0
	for offs in (ends(0, 0, 0), WILD["negative"], WILD["smallest"]):
		product.offs = offs
		out = product.run(2)
		assert torch.equal(out, torch.zeros_like(out) + want)
