"""PTX by name, whose answers on an H200 are in ``h200.npz`` as digests; the answers are in commit 913b744.

A snippet reads %a, %b, %c (as floats %fa, %fb, %fc), %A ({a, b}) and %B ({c, d}), and leaves 32 bits in %r or 64 in %R.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ANSWERS = Path(__file__).parent / "h200.npz"


@dataclass(frozen=True)
class Snippet:
	ptx: str
	bits: int = 32


_snippets = {}


def _add(name, ptx, bits=32):
	_snippets[name] = Snippet(ptx, bits)


def _add_float(name, ptx):
	_add(name, f"{ptx} mov.b32 %r, %fr;")


def _add_integer_arithmetic():
	for t in ("s32", "u32"):
		for op in ("add", "sub", "min", "max"):
			_add(f"{op}.{t}", f"{op}.{t} %r, %a, %b;")
		_add(f"mul.hi.{t}", f"mul.hi.{t} %r, %a, %b;")
		_add(f"mul.wide.{t}", f"mul.wide.{t} %R, %a, %b;", 64)
		_add(f"mad.lo.{t}", f"mad.lo.{t} %r, %a, %b, %c;")
		_add(f"mad.wide.{t}", f"mad.wide.{t} %R, %a, %b, %B;", 64)
		_add(f"div.{t}", f"or.b32 %t, %b, 1; div.{t} %r, %a, %t;")
		_add(f"rem.{t}", f"or.b32 %t, %b, 1; rem.{t} %r, %a, %t;")
		_add(f"shr.{t}", f"shr.{t} %r, %a, %b;")
		_add(f"bfe.{t}", f"bfe.{t} %r, %a, %b, %c;")
		for cmp in ("lt", "le", "gt", "ge", "eq", "ne"):
			_add(f"setp.{cmp}.{t}", f"setp.{cmp}.{t} %p, %a, %b; selp.b32 %r, 1, 0, %p;")
	_add("abs.s32", "abs.s32 %r, %a;")
	_add("neg.s32", "neg.s32 %r, %a;")


def _add_bits():
	_add("shl.b32", "shl.b32 %r, %a, %b;")
	_add("bfi.b32", "bfi.b32 %r, %a, %b, %c, 7;")
	_add("popc", "popc.b32 %r, %a;")
	_add("clz", "clz.b32 %r, %a;")
	_add("brev", "brev.b32 %r, %a;")
	for shift in ("l.wrap", "r.clamp", "r.wrap"):
		_add(f"shf.{shift}", f"shf.{shift}.b32 %r, %a, %b, %c;")
	_add("prmt", "prmt.b32 %r, %a, %b, %c;")
	for table in (0x96, 0xE8, 0x1B, 0xCA):
		_add(f"lop3.{table:02x}", f"lop3.b32 %r, %a, %b, %c, {table};")
	_add("mul64", "mul.lo.u64 %R, %A, %B;", 64)
	_add("mulhi64", "mul.hi.u64 %R, %A, %B;", 64)
	_add("shr.s64", "and.b32 %t, %c, 63; shr.s64 %R, %A, %t;", 64)
	_add("min.s64", "min.s64 %R, %A, %B;", 64)
	_add("mul.lo.u32", "mul.lo.u32 %r, %a, %b;")


_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _add_float_arithmetic():
	for op in ("add", "sub", "mul"):
		for rnd in _ROUNDINGS:
			_add_float(f"{op}.{rnd}.f32", f"{op}.{rnd}.f32 %fr, %fa, %fb;")
		for mod in ("ftz", "sat"):
			_add_float(f"{op}.{mod}", f"{op}.rn.{mod}.f32 %fr, %fa, %fb;")
	for rnd in _ROUNDINGS:
		_add_float(f"fma.{rnd}.f32", f"fma.{rnd}.f32 %fr, %fa, %fb, %fc;")
		_add_float(f"div.{rnd}.f32", f"div.{rnd}.f32 %fr, %fa, %fb;")
		_add_float(f"rcp.{rnd}.f32", f"rcp.{rnd}.f32 %fr, %fa;")
		_add_float(f"sqrt.{rnd}.f32", f"sqrt.{rnd}.f32 %fr, %fa;")
	for op in ("min", "max"):
		for mod in ("", ".NaN", ".ftz", ".xorsign.abs"):
			_add_float(f"{op}{mod}.f32", f"{op}{mod}.f32 %fr, %fa, %fb;")
	_add_float("abs.f32", "abs.f32 %fr, %fa;")
	_add_float("neg.f32", "neg.f32 %fr, %fa;")
	for cmp in ("lt", "le", "gt", "ge", "eq", "ne", "ltu", "geu", "num", "nan"):
		_add(f"setp.{cmp}.f32", f"setp.{cmp}.f32 %p, %fa, %fb; selp.b32 %r, 1, 0, %p;")


def _add_conversions():
	for rnd in ("rni", "rzi", "rmi", "rpi"):
		for t in ("s32", "u32"):
			_add(f"cvt.{rnd}.{t}.f32", f"cvt.{rnd}.{t}.f32 %r, %fa;")
		_add_float(f"cvt.{rnd}.f32.f32", f"cvt.{rnd}.f32.f32 %fr, %fa;")
		_add(f"cvt.{rnd}.s64.f32", f"cvt.{rnd}.s64.f32 %R, %fa;", 64)
		_add(f"cvt.{rnd}.u8.f32", f"cvt.{rnd}.u8.f32 %r, %fa; and.b32 %r, %r, 255;")
	for rnd in _ROUNDINGS:
		_add_float(f"cvt.{rnd}.f32.s32", f"cvt.{rnd}.f32.s32 %fr, %a;")
		_add_float(f"cvt.{rnd}.f32.u64", f"cvt.{rnd}.f32.u64 %fr, %A;")
	for t in ("s8", "u8", "s16", "u16"):
		_add(f"cvt.s32.{t}", f"cvt.s32.{t} %r, %a;")
	for t in ("u8", "s8"):
		_add(f"cvt.sat.{t}.s32", f"cvt.sat.{t}.s32 %r, %a; and.b32 %r, %r, 255;")
	for rnd in ("rn", "rz"):
		for t in ("f16", "bf16"):
			_add(f"cvt.{rnd}.{t}.f32", f"cvt.{rnd}.{t}.f32 %h, %fa; cvt.u32.u16 %r, %h;")
		for t in ("f16x2", "bf16x2"):
			_add(f"cvt.{rnd}.{t}.f32", f"cvt.{rnd}.{t}.f32 %r, %fa, %fb;")
			_add(f"cvt.{rnd}.relu.{t}.f32", f"cvt.{rnd}.relu.{t}.f32 %r, %fa, %fb;")
	for t in ("f16", "bf16"):
		_add_float(f"cvt.f32.{t}", f"cvt.u16.u32 %h, %a; cvt.f32.{t} %fr, %h;")
	for t in ("e4m3x2", "e5m2x2"):
		narrow = f"cvt.rn.satfinite.{t}"
		_add(f"cvt.{t}.f32", f"{narrow}.f32 %h, %fa, %fb; cvt.u32.u16 %r, %h;")
		relu = f"cvt.rn.satfinite.relu.{t}.f32 %h, %fa, %fb;"
		_add(f"cvt.relu.{t}.f32", f"{relu} cvt.u32.u16 %r, %h;")
		_add(f"cvt.{t}.f16x2", f"{narrow}.f16x2 %h, %a; cvt.u32.u16 %r, %h;")
		_add(f"cvt.f16x2.{t}", f"cvt.u16.u32 %h, %a; cvt.rn.f16x2.{t} %r, %h;")


def _add_packed_halves():
	for t in ("f16x2", "bf16x2"):
		for op in ("add", "sub", "mul"):
			_add(f"{op}.{t}", f"{op}.rn.{t} %r, %a, %b;")
		_add(f"fma.{t}", f"fma.rn.{t} %r, %a, %b, %c;")
		_add(f"fma.relu.{t}", f"fma.rn.relu.{t} %r, %a, %b, %c;")
		_add(f"min.{t}", f"min.{t} %r, %a, %b;")
		_add(f"max.NaN.{t}", f"max.NaN.{t} %r, %a, %b;")
		_add(f"abs.{t}", f"abs.{t} %r, %a;")
		_add(f"neg.{t}", f"neg.{t} %r, %a;")
	_add("fma.sat.f16x2", "fma.rn.sat.f16x2 %r, %a, %b, %c;")
	_add("mul.ftz.f16x2", "mul.rn.ftz.f16x2 %r, %a, %b;")


def _add_exchanges():
	# The predicate goes into bit 16 of the result.
	inside = "selp.b32 %t, 65536, 0, %p; xor.b32 %r, %r, %t;"
	for mode in ("idx", "up", "down", "bfly"):
		for name, lanes, clamp in (("", 31, 31), (".seg8", 7, 0x181F)):
			bound = clamp & ~31 if mode == "up" else clamp
			_add(
				f"shfl.{mode}{name}",
				f"and.b32 %t, %b, {lanes}; mov.b32 %u, {bound};shfl.sync.{mode}.b32 %r|%p, %a, %t, %u, -1; {inside}",
			)
	_add("vote.ballot", "setp.lt.s32 %p, %a, 0; vote.sync.ballot.b32 %r, %p, -1;")
	_add("match.any", "and.b32 %t, %a, 7; match.any.sync.b32 %r, %t, -1;")
	_add("elect", "elect.sync %t|%p, -1; selp.b32 %r, 1, 0, %p; add.u32 %r, %r, %t;")
	for op in ("add", "min", "max"):
		_add(f"redux.{op}.s32", f"redux.sync.{op}.s32 %r, %a, -1;")
	for op in ("and", "or", "xor"):
		_add(f"redux.{op}", f"redux.sync.{op}.b32 %r, %a, -1;")


def snippets():
	if not _snippets:
		_add_integer_arithmetic()
		_add_bits()
		_add_float_arithmetic()
		_add_conversions()
		_add_packed_halves()
		_add_exchanges()
	return _snippets


def ptx():
	"""One kernel for each snippet, ``k0`` and so on: inputs of 16 bytes, results of 8."""
	kernels = [
		f"""
.visible .entry k{i}(.param .u64 pin, .param .u64 pout) {{
  .reg .pred %p; .reg .b16 %h; .reg .b32 %a, %b, %c, %d, %r, %t, %u, %x, %y;
  .reg .f32 %fa, %fb, %fc, %fr; .reg .b64 %A, %B, %R, %i, %o, %q;
  ld.param.u64 %i, [pin]; ld.param.u64 %o, [pout];
  mov.u32 %x, %ctaid.x; mov.u32 %y, %ntid.x; mul.lo.u32 %x, %x, %y;
  mov.u32 %y, %tid.x; add.u32 %x, %x, %y;
  mul.wide.u32 %q, %x, 16; add.u64 %i, %i, %q; mul.wide.u32 %q, %x, 8; add.u64 %o, %o, %q;
  ld.global.v4.b32 {{%a, %b, %c, %d}}, [%i];
  mov.b64 %A, {{%a, %b}}; mov.b64 %B, {{%c, %d}};
  mov.b32 %fa, %a; mov.b32 %fb, %b; mov.b32 %fc, %c; mov.b64 %R, 0; mov.b32 %r, 0;
  {snippet.ptx}
  {"cvt.u64.u32 %R, %r;" if snippet.bits == 32 else ""} st.global.b64 [%o], %R; ret;
}}"""
		for i, snippet in enumerate(snippets().values())
	]
	return ".version 8.6\n.target sm_90a\n.address_size 64\n" + "".join(kernels)


_SPECIAL = [
    0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000,
    1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x43E00000, 0x43E80000,
    0x43F00000, 0x477FE000, 0x477FF000, 0x33000000, 0x33800000, 0x38000000, 0x3B000000,
    0x3A800000, 0x3C000000, 0x4F000000, 0x5F000000, 0xCF000000, 0xFFFFFFFF, 0x7FFFFFFF,
    0x80000002, 31, 32, 33, 63, 64,
]  # fmt: skip


def inputs():
	"""(1024, 4) uint32: random bits, floats of several ranges, special values, small integers."""
	count, eighth = 8192, 1024
	g = np.random.default_rng(5)
	x = g.integers(0, 1 << 32, (count, 4), dtype=np.uint64).astype(np.uint32)
	shape = (eighth, 4)

	def floats(values):
		return values.astype(np.float32).view(np.uint32)

	def part(i):
		return slice(i * eighth, (i + 1) * eighth)

	x[part(1)] = floats(g.standard_normal(shape))
	x[part(2)] = floats(g.standard_normal(shape) * np.exp2(g.integers(-20, 20, shape)))
	x[part(3)] = floats(np.round(g.standard_normal(shape) * 64) / 8)
	special = np.array(_SPECIAL, np.uint32)
	x[part(4)] = special[g.integers(0, len(special), shape)]
	x[part(5)] = g.integers(0, 40, shape)
	x[part(6)] = floats(g.integers(-1024, 1024, shape) / 2.0 ** g.integers(0, 12, shape))
	# The GPU answered all of them; one warp in eight is kept.
	return np.ascontiguousarray(x[np.arange(count) // 32 % 8 == 0])


def canonical(name, results):
	"""Results (1024,) uint64 with one NaN for all, for which it is depends on operands' order."""
	if ".f32" not in name and "f32." not in name:
		return results
	is_nan = (results & 0x7F800000 == 0x7F800000) & (results & 0x7FFFFF != 0)
	return np.where(is_nan, np.uint64(0x7FFFFFFF), results)


def digest(name, results):
	"""64 bits for results (1024,) uint64, all NaN alike."""
	hashed = hashlib.blake2b(canonical(name, results).tobytes(), digest_size=8).digest()
	return int.from_bytes(hashed, "little")


def answers():
	with np.load(_ANSWERS) as held:
		return dict(zip(snippets(), held["digests"].tolist(), strict=True))
