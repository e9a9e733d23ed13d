import numpy as np
import pytest

from cute_kernels import emulator
from tests.helpers import each

from .ptx import run, store_words

RNG = np.random.default_rng(0)


def test_narrow_loads_extend():
	source = np.arange(256, dtype=np.uint8)[::-8].copy()
	out = np.zeros((32, 2), np.uint32)
	body = """cvt.u64.u32 %d0, %t; add.u64 %d0, %p0, %d0;
    ld.global.s8 %r0, [%d0]; ld.global.u8 %r1, [%d0];"""
	run(body + store_words("%p1", ["%r0", "%r1"]), source, out)
	assert (out[:, 0].view(np.int32) == source.view(np.int8)).all()
	assert (out[:, 1] == source).all()


def test_loads_extend_to_64_bits():
	source = np.array([-3] * 32, np.int32)
	out = np.zeros((32, 2), np.int64)
	body = """ld.global.s32 %d0, [%p0]; ld.global.u32 %d1, [%p0]; mul.wide.u32 %d2, %t, 16;
    add.u64 %d2, %p1, %d2; st.global.b64 [%d2], %d0; st.global.b64 [%d2+8], %d1;"""
	run(body, source, out)
	assert (out == [-3, (1 << 32) - 3]).all()


def test_shared_static_and_dynamic_do_not_overlap():
	out = np.zeros((32, 2), np.uint32)
	text = f"""
    .version 8.8
    .target sm_100a
    .address_size 64
    .extern .shared .align 16 .b8 dynamic[];
    .visible .entry k(.param .u64 p0) {{
    .reg .b32 %t, %r<8>; .reg .b64 %p0, %d<64>;
    .shared .align 4 .b8 fixed[128];
    ld.param.u64 %p0, [p0]; mov.u32 %t, %tid.x; shl.b32 %r0, %t, 2;
    mov.u32 %r1, dynamic; add.u32 %r1, %r1, %r0; mov.u32 %r2, fixed; add.u32 %r2, %r2, %r0;
    st.shared.b32 [%r1], %t; not.b32 %r3, %t; st.shared.b32 [%r2], %r3;
    ld.shared.b32 %r4, [%r1]; ld.shared.b32 %r5, [%r2];
    {store_words("%p0", ["%r4", "%r5"])} ret; }}"""
	emulator.load_ptx(text)
	emulator.launch("k", (1,), (32,), (out,), dynamic_smem=128)
	lanes = np.arange(32, dtype=np.uint32)
	assert (out[:, 0] == lanes).all()
	assert (out[:, 1] == ~lanes).all()


def test_bank_conflicts_are_counted():
	body = """.shared .align 128 .b8 s[8192]; mov.u32 %r0, s; mad.lo.u32 %r1, %t, {stride}, %r0;
    st.shared.b32 [%r1], %t;"""
	run(body.format(stride=4))
	assert emulator.stats()["smem_wavefronts"] == emulator.stats()["smem_accesses"] == 1
	emulator.reset_stats()
	run(body.format(stride=128))
	assert emulator.stats()["smem_wavefronts"] == 32


def test_constants_and_local_memory():
	out = np.zeros((32, 2), np.uint32)
	text = f"""
    .version 8.8
    .target sm_100a
    .address_size 64
    .const .align 4 .b32 table[4] = {{3, 5, 0x10, 7}};
    .visible .entry k(.param .u64 p0) {{
    .reg .b32 %t, %r<8>; .reg .b64 %p0, %d<64>; .local .align 4 .b8 frame[16];
    ld.param.u64 %p0, [p0]; mov.u32 %t, %tid.x; and.b32 %r0, %t, 3;
    mov.u64 %d0, table; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1;
    ld.const.b32 %r1, [%d0];
    mov.u64 %d2, frame; cvta.local.u64 %d2, %d2; add.u64 %d2, %d2, %d1;
    st.b32 [%d2], %t; ld.b32 %r2, [%d2];
    {store_words("%p0", ["%r1", "%r2"])} ret; }}"""
	emulator.load_ptx(text)
	emulator.watch(out)  # constants belong to the module and need no watch
	emulator.launch("k", (1,), (32,), (out,))
	lanes = np.arange(32)
	assert (out[:, 0] == np.array([3, 5, 16, 7])[lanes % 4]).all()
	assert (out[:, 1] == lanes).all()


@each(
	("op", "type_name", "dtype", "reference"),
	[
		("add", "u32", np.uint32, lambda v: v.sum(dtype=np.uint32)),
		("min", "s32", np.int32, np.min),
		("max", "s64", np.int64, np.max),
		("and", "b32", np.uint32, np.bitwise_and.reduce),
		("or", "b32", np.uint32, np.bitwise_or.reduce),
		("xor", "b64", np.uint64, np.bitwise_xor.reduce),
		("add", "f32", np.float32, lambda v: np.float32(v.sum())),
	],
)
@each("space", ["global", "shared"])
def test_atomics(op, type_name, dtype, reference, space):
	size = np.dtype(dtype).itemsize
	values = RNG.integers(-1000, 1000, 33).astype(dtype)
	result = values[32:].copy()
	value = "%r0" if size == 4 else "%d2"
	bits = size * 8
	body = f"""mul.wide.u32 %d0, %t, {size}; add.u64 %d1, %p0, %d0;
    ld.global.b{bits} {value}, [%d1];"""
	if space == "global":
		body += f"red.global.{op}.{type_name} [%p1], {value};"
	else:
		copy = "%r3" if size == 4 else "%d5"
		body += f"""
        .shared .align 8 .b8 s[8]; mov.u32 %r1, s; setp.eq.u32 %q0, %t, 0;
        ld.global.b{bits} {copy}, [%p1]; @%q0 st.shared.b{bits} [%r1], {copy}; bar.sync 0;
        atom.shared.{op}.{type_name} {copy}, [%r1], {value}; bar.sync 0;
        ld.shared.b{bits} {copy}, [%r1]; @%q0 st.global.b{bits} [%p1], {copy};"""
	run(body, values, result)
	assert result[0] == reference(values)


def test_compare_and_swap():
	words = np.array([5], np.uint32)
	old = np.zeros((32, 1), np.uint32)
	run("atom.global.cas.b32 %r0, [%p0], 5, 9;" + store_words("%p1", ["%r0"]), words, old)
	assert words[0] == 9
	assert (old[1:, 0] == 9).all()


def _words():
	return np.arange(128, dtype=np.uint32).reshape(32, 4), np.zeros((32, 4), np.uint32)


def _cp_async(tail, sizes="16", setup=""):
	return f"""
    .shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; mov.u32 %r0, s;
    shl.b32 %r1, %t, 4; add.u32 %r2, %r0, %r1; cvt.u64.u32 %d0, %r1; add.u64 %d1, %p0, %d0;
    {setup}
    cp.async.ca.shared.global [%r2], [%d1], {sizes}; {tail}
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2];
    """ + store_words("%p1", ["%r4", "%r5", "%r6", "%r7"])


@each("mode", ["eager", "chaos"])
@each("tail", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_cp_async(mode, tail):
	source, out = _words()
	with emulator.options(mode=mode, seed=1):
		run(_cp_async(tail), _aligned(source), out)
	assert (out == source).all()


def _aligned(array, to=128):
	raw = np.zeros(array.nbytes + to, np.uint8)
	start = -raw.ctypes.data % to
	view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
	view[:] = array
	return view


def test_cp_async_without_a_wait_reads_too_early():
	source, out = _words()
	with pytest.raises(emulator.EmulatorError, match="operations are in flight"):
		run(_cp_async("cp.async.commit_group;"), _aligned(source), out)
	assert not (out == source).all()


def test_cp_async_fills_with_zeros():
	source, out = _words()
	source += 1
	wait = "cp.async.wait_all;"
	run(_cp_async(wait, "16, 8"), _aligned(source), out)
	assert (out[:, :2] == source[:, :2]).all()
	assert (out[:, 2:] == 0).all()
	# With a cache policy the size of the source comes before it.
	policy = "createpolicy.fractional.L2::evict_first.b64 %d9;"
	hinted = _cp_async(wait, "16, 4, %d9", policy).replace(
		"cp.async.ca.shared.global [", "cp.async.ca.shared.global.L2::cache_hint ["
	)
	run(hinted, _aligned(source), out)
	assert (out[:, 0] == source[:, 0]).all()
	assert (out[:, 1:] == 0).all()
	# ignore-src is a predicate.
	run(_cp_async(wait, "16, %q1", "setp.lt.u32 %q1, %t, 4;"), _aligned(source), out)
	assert (out[:4] == 0).all()
	assert (out[4:] == source[4:]).all()


def test_cp_async_arrives_on_an_mbarrier():
	source, out = _words()
	setup = """mov.u32 %r8, bar; setp.eq.u32 %q0, %t, 0;
    @%q0 mbarrier.init.shared::cta.b64 [%r8], 32; bar.sync 0;"""
	tail = """cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];
    W: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r8], 0; @!%q2 bra W;"""
	for seed in range(3):
		with emulator.options(mode="chaos", seed=seed):
			run(_cp_async(tail, setup=setup), _aligned(source), out)
		assert (out == source).all()


@each("transposed", [False, True])
def test_matrices(transposed):
	out = np.zeros((32, 4), np.uint32)
	trans = ".trans" if transposed else ""
	body = f"""
    .shared .align 128 .b8 s[512]; mov.u32 %r0, s; shl.b32 %r1, %t, 4; add.u32 %r2, %r0, %r1;
    shl.b32 %r3, %t, 1; add.u32 %r4, %r3, 1; shl.b32 %r4, %r4, 16; or.b32 %r5, %r3, %r4;
    add.u32 %r6, %r5, 0x00400040; add.u32 %r7, %r6, 0x00400040; add.u32 %r8, %r7, 0x00400040;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {{%r5, %r6, %r7, %r8}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];
    """
	run(body + store_words("%p0", ["%r10", "%r11", "%r12", "%r13"]), out)
	# Lane l of tile i holds elements 2 l and 2 l + 1 of the row-major 8x8 tile.
	tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
	got = out.view(np.uint16).reshape(32, 4, 2).transpose(1, 0, 2).reshape(4, 8, 8)
	assert (got == (tiles.transpose(0, 2, 1) if transposed else tiles)).all()


def test_generic_addresses():
	out = np.zeros((32, 1), np.uint32)
	body = """.shared .align 4 .b8 s[128]; mov.u64 %d0, s; cvta.shared.u64 %d1, %d0;
    mul.wide.u32 %d2, %t, 4; add.u64 %d1, %d1, %d2; st.b32 [%d1], %t; ld.b32 %r0, [%d1];"""
	run(body + store_words("%p0", ["%r0"]), out)
	assert (out[:, 0] == np.arange(32)).all()


def test_line_information_is_no_statement():
	out = np.zeros((32, 1), np.uint32)
	run("mov.b32 %r0, 3;\n.loc 1 20 3\nadd.u32 %r0, %r0, %t;\n" + store_words("%p0", ["%r0"]), out)
	assert (out[:, 0] == 3 + np.arange(32)).all()
