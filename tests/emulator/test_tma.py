"""TMA loads, stores and tensor maps, against NumPy slices, and their faults."""

import types

import numpy as np
import pytest

import ptx_emulator as emulator

from .ptx import aligned, fails, run, wait

SETUP = """.shared .align 1024 .b8 s[{smem}]; .shared .align 8 .b64 bar; mov.u32 %r0, s;
mov.u32 %r1, bar; setp.eq.u32 %q0, %t, 0; @%q0 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
"""
EXPECT = "@%q0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {bytes};"
LOAD = (
    "@%q0 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    " [%r0], [%p0, {{{coordinates}}}], [%r1];"
)
WAIT = wait("%r1")
ZEROS = aligned(np.zeros((8, 8), np.float32))
# Copies shared memory, word by word, to the array at {to}.
DUMP = """mov.u32 %r20, %t; COPY: shl.b32 %r21, %r20, 2; add.u32 %r22, %r0, %r21;
ld.shared.b32 %r23, [%r22]; cvt.u64.u32 %d20, %r21; add.u64 %d20, {to}, %d20;
st.global.b32 [%d20], %r23; add.u32 %r20, %r20, 32; setp.lt.u32 %q9, %r20, {words}; @%q9 bra COPY;
"""


def _load(array, box, coordinates, swizzle=0):
    """Return a box as it lies in shared memory.

    ``coordinates`` are innermost first. If there are more than dimensions of the box, the load
    gathers four rows.
    """
    rows, load = 1, LOAD
    if len(coordinates) > len(box):
        rows, load = 4, LOAD.replace(".tile.", ".tile::gather4.")
    size = rows * int(np.prod(box)) * array.itemsize
    out = np.full(size, 0xEE, np.uint8)
    body = (
        SETUP.format(smem=size)
        + EXPECT.format(bytes=size)
        + load.format(rank=len(box), coordinates=", ".join(map(str, coordinates)))
        + WAIT
        + DUMP.format(words=size // 4, to="%p1")
    )
    run(body, emulator.tensor_map(array, box, swizzle=swizzle), out)
    if swizzle:
        # Swizzling permutes the 16-byte chunks of a row by the row's number within the pattern.
        chunks = np.arange(0, size, 16)
        out = out.reshape(-1, 16)[(chunks ^ (chunks >> 3 & swizzle - 16)) // 16].flatten()
    return out.view(array.dtype).reshape(-1, *box[1:])


def _box(array, box, coordinates):
    """Return the expected box: elements of the array, and zeros outside."""
    out = np.zeros(box, array.dtype)
    for index in np.ndindex(*box):
        position = tuple(i + c for i, c in zip(index, reversed(coordinates), strict=True))
        if all(0 <= p < n for p, n in zip(position, array.shape, strict=True)):
            out[index] = array[position]
    return out


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize(
    ("shape", "box", "coordinates"),
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
def test_loads_fill_outside_with_zeros(shape, box, coordinates, mode):
    array = aligned(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    with emulator.options(mode=mode):
        assert (_load(array, box, coordinates) == _box(array, box, coordinates)).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
def test_loads_of_other_element_types(dtype):
    array = aligned(np.arange(32 * 64).reshape(32, 64).astype(dtype))
    assert (_load(array, (8, 16), (16, 3)) == _box(array, (8, 16), (16, 3))).all()


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzled_loads(swizzle):
    array = aligned(np.arange(64 * 128, dtype=np.uint8).reshape(64, 128))
    assert (_load(array, (32, swizzle), (0, 8), swizzle) == array[8:40, :swizzle]).all()


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize(
    ("swizzle", "coordinates"),
    [(0, (16, 5, 0, 5, 19)), (64, (40, -1, 3, 20, 2**31 - 1)), (128, (0, 1, 2, 3, -(2**31)))],
)
def test_gather4_loads_rows_by_number(swizzle, coordinates, mode):
    """Row numbers outside of the tensor and columns past the last give zeros."""
    array = aligned(np.arange(20 * 48, dtype=np.float32).reshape(20, 48))
    box = (1, swizzle // 4 or 24)
    with emulator.options(mode=mode, races=True):
        got = _load(array, box, coordinates, swizzle)
    assert (
        got.reshape(4, -1)
        == np.concatenate([_box(array, box, (coordinates[0], row)) for row in coordinates[1:]])
    ).all()


STORE = (
    "@%q0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%p1, {%r30, %r31}], [%r0];"
    "@%q0 cp.async.bulk.commit_group; @%q0 cp.async.bulk.wait_group.read 0;"
)
FILL = """mov.u32 %r20, %t; FILL: shl.b32 %r21, %r20, 2; add.u32 %r22, %r0, %r21;
st.shared.b32 [%r22], %r20; add.u32 %r20, %r20, 32; setp.lt.u32 %q9, %r20, {words}; @%q9 bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
"""


def _store(target, box, coordinates, body=STORE, fill=FILL):
    """Fill shared memory with numbers and store it as a box of the target."""
    words = int(np.prod(box))
    head = (
        SETUP.format(smem=4 * words)
        + fill.format(words=words)
        + f"mov.b32 %r30, {coordinates[0]}; mov.b32 %r31, {coordinates[1]};"
    )
    run(head + body, np.zeros(1), emulator.tensor_map(target, box))


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_stores_drop_elements_outside(mode):
    """Check that a TMA store drops elements outside of the tensor."""
    target = aligned(np.full((12, 16), -1, np.int32))
    with emulator.options(mode=mode, races=True):
        _store(target, (8, 8), (12, 7))
    want = np.full((12, 16), -1, np.int32)
    want[7:, 12:] = np.arange(64).reshape(8, 8)[:5, :4]
    assert (target == want).all()


def test_a_tensor_map_with_a_misaligned_address_fails():
    tensor_map = np.frombuffer(emulator.tensor_map(ZEROS, (8, 8)), np.uint64).copy()
    tensor_map[0] += 8
    with fails(f"global address {tensor_map[0]:#x} is not a multiple of 16 bytes"):
        _load_zeros(tensor_map=tensor_map.tobytes())


def test_a_misaligned_address_computed_by_a_kernel_fails():
    """The CuTe DSL makes one by ordinary instructions, which keep bits 4 to 56 of the address."""
    out = np.zeros(1, np.uint64)
    body = f"add.u64 %d0, %p0, {{}}; and.b64 %d1, %d0, {(1 << 57) - 16}; st.global.b64 [%p1], %d1;"
    array = aligned(np.zeros(64, np.uint8))
    run(body.format(32), array, out)
    assert out[0] == array.ctypes.data + 32
    with fails(
        f"made by the kernel: the global address {out[0] - 24:#x} is not a multiple of 16 bytes"
    ):
        run(body.format(8), array, out)


def test_long_strides_of_a_tensor_map():
    """A stride has 36 bits, in units of 16 bytes; the highest four of all strides share a word."""
    row, stride = aligned(np.arange(32, dtype=np.float32)), 1 << 37
    tall = types.SimpleNamespace(
        dtype=row.dtype, shape=(2, 32), strides=(stride, 4), itemsize=4, ctypes=row.ctypes
    )
    assert (_load(tall, (1, 32), (0, 0)) == row).all()
    emulator.watch(row)
    with fails(f"{row.ctypes.data + stride:#x}"):
        _load(tall, (1, 32), (0, 1))


def _head(rank=2, coordinates="0, 0", dst="%r0", smem=256, expected=256):
    load = LOAD.format(rank=rank, coordinates=coordinates).replace("[%r0]", f"[{dst}]")
    return SETUP.format(smem=smem) + EXPECT.format(bytes=expected) + load


def _load_zeros(array=ZEROS, tensor_map=None, tail=WAIT, **head):
    run(_head(**head) + tail, tensor_map or emulator.tensor_map(array, (8, 8)))


def test_a_load_outside_of_watched_memory_fails():
    """Check that a TMA load outside of watched memory fails."""
    emulator.watch(ZEROS)
    _load_zeros()
    emulator.unwatch()
    emulator.watch(ZEROS[:4])
    with fails("TMA load out of bounds"):
        _load_zeros()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"dst": "%r0+128", "smem": 128}, "TMA load out of bounds: shared offset"),
        ({"dst": "%r0+16", "smem": 512}, "is not 128-byte aligned"),
        ({"rank": 3, "coordinates": "0, 0, 0"}, "3 coordinates through a rank-2"),
        ({"tensor_map": bytes(128)}, "holds no tensor map"),
        ({"expected": 512}, "deadlock"),
        ({"tail": ""}, "operations are in flight"),
    ],
)
def test_wrong_loads_fail(fault, message):
    _load_zeros()
    with fails(message):
        _load_zeros(**fault)


@pytest.mark.parametrize(
    ("box", "swizzle", "message"),
    [
        ((8, 3), 0, "multiple of 16 bytes"),
        ((8, 32), 64, "wider than the swizzle"),
        ((300, 4), 0, "1..256"),
    ],
)
def test_invalid_tensor_maps_raise(box, swizzle, message):
    array = aligned(np.zeros((512, 64), np.float32))
    with pytest.raises(ValueError, match=message):
        emulator.tensor_map(array, box, swizzle=swizzle)


def test_a_missing_proxy_fence_fails():
    """Check that a TMA store or load without its proxy fence fails."""
    needed_fence = "fence.proxy.async.shared::cta;"
    load = (
        EXPECT.format(bytes=256)
        + LOAD.format(rank=2, coordinates="0, 0").replace("%p0", "%p1")
        + WAIT
    )

    def store(fence, body=STORE):
        _store(aligned(ZEROS), (8, 8), (0, 0), body, FILL.replace(needed_fence, fence))

    # A fence for global memory does not order shared memory.
    for fence in ("", "fence.proxy.async.global;"):
        with fails(r"TMA store reads .* no fence.proxy.async"):
            store(fence)
        with fails(r"load overwrites .* no fence.proxy.async"):
            store(fence, load)
    store(needed_fence, load)
    with emulator.options(check_fences=False):
        store("")


def test_exit_with_a_pending_store_fails():
    unwaited = STORE.replace("@%q0 cp.async.bulk.wait_group.read 0;", "")
    _store(aligned(ZEROS), (8, 8), (0, 0))
    with fails("exits while a bulk store still reads"):
        _store(aligned(ZEROS), (8, 8), (0, 0), unwaited)


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_a_ring_of_two_stores(mode):
    """With one store pending, the older of two slots may be written again, but not the newer."""
    source = aligned(np.arange(4 * 32, dtype=np.uint32).reshape(4, 32))
    target = aligned(np.zeros((4, 32), np.uint32))
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


def test_a_missing_wait_gives_wrong_results_or_a_race():
    """Check that a missing wait gives wrong values in chaos mode, and a data race otherwise."""
    array = aligned(np.arange(64, dtype=np.float32).reshape(8, 8))
    out = np.zeros((8, 8), np.float32)

    def load(*tail):
        run(_head() + "".join(tail), emulator.tensor_map(array, (8, 8)), out)
        return (out == array).all()

    dump = DUMP.format(words=64, to="%p1")
    with emulator.options(mode="chaos", seed=0):
        assert not load(dump, WAIT)
        assert load(WAIT, dump)
    with emulator.options(races=True), fails("data race on shared offset"):
        load(dump, WAIT)
