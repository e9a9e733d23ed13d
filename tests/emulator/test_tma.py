import types

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.ptx import fails, run, wait
from tests.emulator.test_memory import _aligned
from tests.helpers import each

SETUP = """.shared .align 1024 .b8 s[{smem}]; .shared .align 8 .b64 bar; mov.u32 %r0, s;
mov.u32 %r1, bar; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
"""
EXPECT = "@%q0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {bytes};"
LOAD = (
	"@%q0 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
	" [%r0], [%p0, {{{coordinates}}}], [%r1];"
)
WAIT = wait("%r1")
# Shared memory, word by word, to the array behind %p1.
DUMP = """mov.u32 %r20, %t; COPY: shl.b32 %r21, %r20, 2; add.u32 %r22, %r0, %r21;
ld.shared.b32 %r23, [%r22]; cvt.u64.u32 %d20, %r21; add.u64 %d20, {to}, %d20;
st.global.b32 [%d20], %r23; add.u32 %r20, %r20, 32; setp.lt.u32 %q9, %r20, {words}; @%q9 bra COPY;
"""


def _load(array, box, at, swizzle=0):
	"""The box at coordinates ``at`` (innermost first), as it lies in shared memory."""
	size = int(np.prod(box)) * array.itemsize
	out = np.full(size, 0xEE, np.uint8)
	body = (
		SETUP.format(smem=size)
		+ EXPECT.format(bytes=size)
		+ LOAD.format(rank=len(box), coordinates=", ".join(map(str, at)))
		+ WAIT
		+ DUMP.format(words=size // 4, to="%p1")
	)
	run(body, emulator.tensor_map(array, box, swizzle=swizzle), out)
	return out.view(array.dtype).reshape(box)


def _box(array, box, at):
	out = np.zeros(box, array.dtype)
	for index in np.ndindex(*box):
		position = tuple(i + c for i, c in zip(index, reversed(at), strict=True))
		if all(0 <= p < n for p, n in zip(position, array.shape, strict=True)):
			out[index] = array[position]
	return out


@each("mode", ["eager", "chaos"])
@each(
	("shape", "box", "at"),
	[
		((64,), (32,), (16,)),
		((20, 32), (8, 16), (8, 4)),
		((20, 32), (8, 16), (24, 16)),  # beyond two edges
		((20, 32), (8, 16), (-4, -3)),
		((3, 5, 16), (2, 4, 8), (4, 2, 2)),
		((2, 3, 4, 8), (2, 2, 2, 4), (0, 3, 2, 1)),
		((2, 2, 3, 4, 8), (1, 2, 2, 2, 8), (0, 1, 2, 1, 1)),
	],
)
def test_load(shape, box, at, mode):
	array = _aligned(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
	with emulator.options(mode=mode):
		assert (_load(array, box, at) == _box(array, box, at)).all()


@each("dtype", [np.uint8, np.float16, np.int64])
def test_element_types(dtype):
	array = _aligned(np.arange(32 * 64).reshape(32, 64).astype(dtype))
	assert (_load(array, (8, 16), (16, 3)) == _box(array, (8, 16), (16, 3))).all()


@each("swizzle", [32, 64, 128])
def test_swizzle(swizzle):
	"""The 16-byte chunks of a row change places by the row's number within the pattern."""
	array = _aligned(np.arange(64 * 128, dtype=np.uint8).reshape(64, 128))
	rows = 32
	got = _load(array, (rows, swizzle), (0, 8), swizzle).reshape(-1, 16)
	want = np.zeros_like(got)
	for chunk in range(len(want)):
		address = chunk * 16
		moved = address ^ (address >> 3 & swizzle - 16)
		row, column = divmod(address, swizzle)
		want[moved // 16] = array[8 + row, column : column + 16]
	assert (got == want).all()


@each("mode", ["eager", "chaos"])
@each(("swizzle", "at"), [(0, (16, 5, 0, 5, 19)), (64, (40, -1, 3, 20, 2**31 - 1)), (128, (0, 1, 2, 3, -(2**31)))])
def test_gather4(swizzle, at, mode):
	"""Four rows by their numbers, zeros for what is none and for columns past the last."""
	array = _aligned(np.arange(20 * 48, dtype=np.float32).reshape(20, 48))
	width = swizzle // 4 or 24
	size = 16 * width
	out, load = np.full(size, 0xEE, np.uint8), LOAD.replace(".tile.", ".tile::gather4.")
	parts = [SETUP.format(smem=size), EXPECT.format(bytes=size), load.format(rank=2, coordinates=", ".join(map(str, at)))]
	with emulator.options(mode=mode, races=True):
		parts += [WAIT, DUMP.format(words=size // 4, to="%p1")]
		run("".join(parts), emulator.tensor_map(array, (1, width), swizzle=swizzle), out)
	want = np.concatenate([_box(array, (1, width), (at[0], row)) for row in at[1:]])
	got = out.reshape(-1, 16)
	chunks = np.arange(len(got)) * 16
	moved = chunks ^ (chunks >> 3 & max(0, swizzle - 16))
	assert (got[moved // 16] == want.view(np.uint8).reshape(-1, 16)).all()


STORE = (
	"@%q0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%p1, {%r30, %r31}], [%r0];"
	"@%q0 cp.async.bulk.commit_group; @%q0 cp.async.bulk.wait_group.read 0;"
)
FILL = """mov.u32 %r20, %t; FILL: shl.b32 %r21, %r20, 2; add.u32 %r22, %r0, %r21;
st.shared.b32 [%r22], %r20; add.u32 %r20, %r20, 32; setp.lt.u32 %q9, %r20, {words}; @%q9 bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
"""


def _store(target, box, at, body=STORE, fill=FILL):
	words = int(np.prod(box))
	run(
		SETUP.format(smem=4 * words) + fill.format(words=words) + f"mov.b32 %r30, {at[0]}; mov.b32 %r31, {at[1]};" + body,
		np.zeros(1),
		emulator.tensor_map(target, box),
	)


@each("mode", ["eager", "chaos"])
def test_store_drops_what_is_outside(mode):
	target = _aligned(np.full((12, 16), -1, np.int32))
	with emulator.options(mode=mode, races=True):
		_store(target, (8, 8), (12, 7))
	want = np.full((12, 16), -1, np.int32)
	want[7:, 12:] = np.arange(64).reshape(8, 8)[:5, :4]
	assert (target == want).all()


def test_a_misaligned_tensor_map_in_memory():
	array = _aligned(np.zeros((8, 8), np.float32))
	tensor_map = np.frombuffer(emulator.tensor_map(array, (8, 8)), np.uint64).copy()
	tensor_map[0] += 8
	body = SETUP.format(smem=256) + LOAD.format(rank=2, coordinates="0, 0")
	address = f"global address {tensor_map[0]:#x} is not a multiple of 16 bytes"
	with fails(address):
		run(body, tensor_map.tobytes())


def test_a_tensor_map_that_a_kernel_makes():
	"""As CuTe DSL makes one: ordinary instructions keep bits 4 to 56 of the address."""
	out = np.zeros(1, np.uint64)
	body = f"add.u64 %d0, %p0, {{}}; and.b64 %d1, %d0, {(1 << 57) - 16}; st.global.b64 [%p1], %d1;"
	array = _aligned(np.zeros(64, np.uint8))
	run(body.format(32), array, out)
	assert out[0] == array.ctypes.data + 32
	bad = array.ctypes.data + 8
	message = f"made by the kernel: the global address {bad:#x} is not a multiple of 16 bytes"
	with fails(message):
		run(body.format(8), array, out)


def test_long_strides_of_a_tensor_map():
	"""A stride has 36 bits, in units of 16 bytes: the highest four of all strides share a word."""
	row, stride = _aligned(np.arange(32, dtype=np.float32)), 1 << 37
	tall = types.SimpleNamespace(dtype=row.dtype, shape=(2, 32), strides=(stride, 4), itemsize=4, ctypes=row.ctypes)
	assert (_load(tall, (1, 32), (0, 0)) == row).all()
	emulator.watch(row)
	with fails(f"{row.ctypes.data + stride:#x}"):
		_load(tall, (1, 32), (0, 1))


def _head(rank=2, at="0, 0", dst="%r0", smem=256, expected=256):
	load = LOAD.format(rank=rank, coordinates=at).replace("[%r0]", f"[{dst}]")
	return SETUP.format(smem=smem) + EXPECT.format(bytes=expected) + load


def _load_zeros(array=None, tensor_map=None, tail=WAIT, **head):
	if array is None:
		array = _aligned(np.zeros((8, 8), np.float32))
	run(_head(**head) + tail, tensor_map or emulator.tensor_map(array, (8, 8)))


def test_load_out_of_bounds_of_the_allocation():
	array = _aligned(np.zeros((8, 8), np.float32))
	emulator.watch(array)
	_load_zeros(array)
	emulator.unwatch()
	emulator.watch(array[:4])
	with fails("TMA load out of bounds"):
		_load_zeros(array)


@each(
	("fault", "message"),
	[
		({"dst": "%r0+128", "smem": 128}, "TMA load out of bounds: shared offset"),
		({"dst": "%r0+16", "smem": 512}, "is not 128-byte aligned"),
		({"rank": 3, "at": "0, 0, 0"}, "3 coordinates through a rank-2"),
		({"tensor_map": bytes(128)}, "holds no tensor map"),
		({"expected": 512}, "deadlock"),
		({"tail": ""}, "operations are in flight"),
	],
)
def test_faulty_loads(fault, message):
	_load_zeros()
	with fails(message):
		_load_zeros(**fault)


@each(
	("box", "swizzle", "message"),
	[((8, 3), 0, "multiple of 16 bytes"), ((8, 32), 64, "wider than the swizzle"), ((300, 4), 0, "1..256")],
)
def test_invalid_tensor_maps(box, swizzle, message):
	array = _aligned(np.zeros((512, 64), np.float32))
	with pytest.raises(ValueError, match=message):
		emulator.tensor_map(array, box, swizzle=swizzle)


def test_missing_proxy_fence():
	target = _aligned(np.zeros((8, 8), np.int32))
	_store(target, (8, 8), (0, 0))
	unfenced = FILL.replace("fence.proxy.async.shared::cta;", "")
	with fails(r"TMA store reads .* no fence.proxy.async"):
		_store(target, (8, 8), (0, 0), fill=unfenced)
	# A fence of global memory orders no shared memory.
	only_global = FILL.replace("async.shared::cta", "async.global")
	with fails("no fence.proxy.async"):
		_store(target, (8, 8), (0, 0), fill=only_global)
	with emulator.options(check_fences=False):
		_store(target, (8, 8), (0, 0), fill=unfenced)


def test_exit_under_a_pending_store():
	target = _aligned(np.zeros((8, 8), np.int32))
	unwaited = STORE.replace("@%q0 cp.async.bulk.wait_group.read 0;", "")
	with fails("exits while a bulk store still reads"):
		_store(target, (8, 8), (0, 0), unwaited)


@each("mode", ["eager", "chaos"])
def test_ring_of_stores(mode):
	"""Two slots, one store pending: the older slot may be written again, the newer may not."""
	source = _aligned(np.arange(4 * 32, dtype=np.uint32).reshape(4, 32))
	target = _aligned(np.zeros((4, 32), np.uint32))
	body = (
		SETUP.format(smem=256)
		+ """mov.b32 %r3, 0; shl.b32 %r4, %t, 2; cvt.u64.u32 %d0, %r4;
    add.u64 %d1, %p0, %d0; mov.u64 %d2, %p1;
    TURN: and.b32 %r5, %r3, 1; mad.lo.u32 %r6, %r5, 128, %r0; add.u32 %r7, %r6, %r4;
    ld.global.b32 %r8, [%d1]; st.shared.b32 [%r7], %r8; fence.proxy.async.shared::cta; bar.sync 0;
    @%q0 cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r6], 128;
    @%q0 cp.async.bulk.commit_group; @%q0 cp.async.bulk.wait_group.read {pending}; bar.sync 0;
    add.u64 %d1, %d1, 128; add.u64 %d2, %d2, 128; add.u32 %r3, %r3, 1; setp.lt.u32 %q1, %r3, 4;
    @%q1 bra TURN; @%q0 cp.async.bulk.wait_group 0;"""
	)
	with emulator.options(mode=mode, races=True):
		run(body.replace("{pending}", "1"), source, target)
		assert (target == source).all()
		with fails("after a read by a bulk store of warp 0"):
			run(body.replace("{pending}", "2"), source, target)


def test_missing_wait_is_seen():
	array = _aligned(np.arange(64, dtype=np.float32).reshape(8, 8))
	out = np.zeros((8, 8), np.float32)
	head = _head()
	tensor_map = emulator.tensor_map(array, (8, 8))
	dump = DUMP.format(words=64, to="%p1")
	with emulator.options(mode="chaos", seed=0):
		run(head + dump + WAIT, tensor_map, out)
		assert not (out == array).all()
		run(head + WAIT + dump, tensor_map, out)
		assert (out == array).all()
	with emulator.options(races=True), fails("data race on shared offset"):
		run(head + dump + WAIT, tensor_map, out)
