"""Loads, stores, atomics, copies and matrices in every state space, against NumPy."""

import numpy as np
import pytest

import ptx_emulator as emulator

from .ptx import aligned, fails, outcome, run, wait

RNG = np.random.default_rng(0)
LANES = np.arange(32, dtype=np.uint32)


def test_narrow_loads_extend_their_values():
    """Check that 8-bit loads extend with the sign or with zeros."""
    source = np.arange(256, dtype=np.uint8)[::-8].copy()
    body = """cvt.u64.u32 %d0, %t; add.u64 %d0, %p0, %d0;
    ld.global.s8 %r0, [%d0]; ld.global.u8 %r1, [%d0];"""
    out = outcome(body, "%r0 %r1", source)
    assert (out[:, 0].view(np.int32) == source.view(np.int8)).all()
    assert (out[:, 1] == source).all()


def test_32_bit_loads_extend_to_64_bits():
    """Check that 32-bit loads extend to 64 bits with the sign or with zeros."""
    out = np.zeros((32, 2), np.int64)
    body = """ld.global.s32 %d0, [%p0]; ld.global.u32 %d1, [%p0]; mul.wide.u32 %d2, %t, 16;
    add.u64 %d2, %p1, %d2; st.global.b64 [%d2], %d0; st.global.b64 [%d2+8], %d1;"""
    run(body, np.array([-3] * 32, np.int32), out)
    assert (out == [-3, (1 << 32) - 3]).all()


def test_static_and_dynamic_shared_memory_do_not_overlap():
    """Check that static and dynamic shared memory have different addresses."""
    body = """.shared .align 4 .b8 fixed[128]; shl.b32 %r0, %t, 2;
    mov.u32 %r1, dynamic; add.u32 %r1, %r1, %r0; mov.u32 %r2, fixed; add.u32 %r2, %r2, %r0;
    st.shared.b32 [%r1], %t; not.b32 %r3, %t; st.shared.b32 [%r2], %r3;
    ld.shared.b32 %r4, [%r1]; ld.shared.b32 %r5, [%r2];"""
    out = outcome(
        body, "%r4 %r5", header=".extern .shared .align 16 .b8 dynamic[];", dynamic_smem=128
    )
    assert (out[:, 0] == LANES).all()
    assert (out[:, 1] == ~LANES).all()


def test_bank_conflicts_are_counted():
    """Check that the statistics count the wavefronts of bank conflicts."""
    body = """.shared .align 128 .b8 s[8192]; mov.u32 %r0, s; mad.lo.u32 %r1, %t, {stride}, %r0;
    st.shared.b32 [%r1], %t;"""
    run(body.format(stride=4))
    assert emulator.stats()["smem_wavefronts"] == emulator.stats()["smem_accesses"] == 1
    emulator.reset_stats()
    run(body.format(stride=128))
    assert emulator.stats()["smem_wavefronts"] == 32


def test_constants_and_local_memory():
    """Check loads of constants and of local memory, also through generic addresses."""
    body = """.local .align 4 .b8 frame[16]; and.b32 %r0, %t, 3; mul.wide.u32 %d1, %r0, 4;
    mov.u64 %d0, table; add.u64 %d0, %d0, %d1; ld.const.b32 %r1, [%d0];
    mov.u64 %d2, frame; cvta.local.u64 %d2, %d2; add.u64 %d2, %d2, %d1; st.b32 [%d2], %t;
    ld.b32 %r2, [%d2];"""
    table = ".const .align 4 .b32 table[4] = {3, 5, 0x10, 7};"
    out = outcome(body, "%r1 %r2", header=table)
    assert (out[:, 0] == np.array([3, 5, 16, 7])[LANES % 4]).all()
    assert (out[:, 1] == LANES).all()
    emulator.watch(LANES)
    with fails("global store out of bounds"):  # Constants of the module need no watch.
        outcome(body, "%r1 %r2", header=table)


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(op, type_name, dtype, reference, space):
    """Check atomics and reductions against NumPy, in global and in shared memory."""
    size = np.dtype(dtype).itemsize
    values = RNG.integers(-1000, 1000, 33).astype(dtype)
    result = values[32:].copy()
    value, copy = ("%r0", "%r3") if size == 4 else ("%d2", "%d5")
    bits = size * 8
    body = f"""mul.wide.u32 %d0, %t, {size}; add.u64 %d1, %p0, %d0;
    ld.global.b{bits} {value}, [%d1];"""
    if space == "global":
        body += f"red.global.{op}.{type_name} [%p1], {value};"
    else:
        body += f"""
        .shared .align 8 .b8 s[8]; mov.u32 %r1, s; setp.eq.u32 %q0, %t, 0;
        ld.global.b{bits} {copy}, [%p1]; @%q0 st.shared.b{bits} [%r1], {copy}; bar.sync 0;
        atom.shared.{op}.{type_name} {copy}, [%r1], {value}; bar.sync 0;
        ld.shared.b{bits} {copy}, [%r1]; @%q0 st.global.b{bits} [%p1], {copy};"""
    run(body, values, result)
    assert result[0] == reference(values)


def test_compare_and_swap():
    """Check that one lane of a compare-and-swap succeeds and the other lanes see its value."""
    words = np.array([5], np.uint32)
    old = outcome("atom.global.cas.b32 %r0, [%p0], 5, 9;", "%r0", words)
    assert words[0] == 9
    assert (old[1:] == 9).all()


WORDS = aligned(np.arange(1, 129, dtype=np.uint32).reshape(32, 4))


def _cp_async(tail, sizes="16", setup="", hint=""):
    body = f""".shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; mov.u32 %r0, s;
    shl.b32 %r1, %t, 4; add.u32 %r2, %r0, %r1; cvt.u64.u32 %d0, %r1; add.u64 %d1, %p0, %d0; {setup}
    cp.async.ca.shared.global{hint} [%r2], [%d1], {sizes}; {tail}
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2];"""
    return outcome(body, "%r4 %r5 %r6 %r7", WORDS)


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize(
    "tail", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"]
)
def test_cp_async(mode, tail):
    with emulator.options(mode=mode, seed=1):
        assert (_cp_async(tail) == WORDS).all()


def test_cp_async_needs_a_wait():
    with fails("operations are in flight"):
        _cp_async("cp.async.commit_group;")


@pytest.mark.parametrize(
    ("sizes", "setup", "hint", "is_copied"),
    [
        ("16, 8", "", "", lambda t, i: i < 2),
        # The source size precedes the cache policy.
        (
            "16, 4, %d9",
            "createpolicy.fractional.L2::evict_first.b64 %d9;",
            ".L2::cache_hint",
            lambda t, i: i < 1,
        ),
        # ignore-src is a predicate.
        ("16, %q1", "setp.lt.u32 %q1, %t, 4;", "", lambda t, i: t >= 4),
    ],
)
def test_cp_async_fills_with_zeros(sizes, setup, hint, is_copied):
    out = _cp_async("cp.async.wait_all;", sizes, setup, hint)
    assert (out == WORDS * is_copied(*np.ogrid[:32, :4])).all()


def test_cp_async_arrives_on_an_mbarrier():
    setup = """mov.u32 %r8, bar; setp.eq.u32 %q0, %t, 0;
    @%q0 mbarrier.init.shared::cta.b64 [%r8], 32; bar.sync 0;"""
    tail = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];" + wait("%r8")
    for seed in range(3):
        with emulator.options(mode="chaos", seed=seed):
            assert (_cp_async(tail, setup=setup) == WORDS).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_and_ldmatrix(transposed):
    """Check that ``ldmatrix`` reads what ``stmatrix`` stored, plain and transposed."""
    trans = ".trans" if transposed else ""
    body = f"""
    .shared .align 128 .b8 s[512]; mov.u32 %r0, s; shl.b32 %r1, %t, 4; add.u32 %r2, %r0, %r1;
    mad.lo.u32 %r5, %t, 0x00020002, 0x00010000; add.u32 %r6, %r5, 0x00400040;
    add.u32 %r7, %r6, 0x00400040; add.u32 %r8, %r7, 0x00400040;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {{%r5, %r6, %r7, %r8}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];
    """
    out = outcome(body, "%r10 %r11 %r12 %r13")
    # Lane l of tile i holds elements 2 l and 2 l + 1 of the row-major 8x8 tile.
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    got = out.view(np.uint16).reshape(32, 4, 2).transpose(1, 0, 2).reshape(4, 8, 8)
    assert (got == (tiles.transpose(0, 2, 1) if transposed else tiles)).all()


def test_generic_addresses_of_shared_memory():
    body = """.shared .align 4 .b8 s[128]; mov.u64 %d0, s; cvta.shared.u64 %d1, %d0;
    mul.wide.u32 %d2, %t, 4; add.u64 %d1, %d1, %d2; st.b32 [%d1], %t; ld.b32 %r0, [%d1];"""
    assert (outcome(body, "%r0")[:, 0] == LANES).all()


def test_line_information_is_ignored():
    out = outcome("mov.b32 %r0, 3;\n.loc 1 20 3\nadd.u32 %r0, %r0, %t;\n", "%r0")
    assert (out[:, 0] == 3 + LANES).all()
