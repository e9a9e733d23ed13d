"""wgmma and tcgen05 against NumPy (numerics: reference/test_tensor_core.py), and their checkers."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.ptx import registers, run, store_words, wait
from tests.emulator.test_memory import _aligned

RNG = np.random.default_rng(0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _core_matrices(raw: np.ndarray) -> np.ndarray:
    """(rows, bytes) to the unswizzled K-major layout: 8 x 16-byte blocks, along K first."""
    rows, size = raw.shape
    return raw.reshape(rows // 8, 8, size // 16, 16).transpose(0, 2, 1, 3).reshape(-1)


def _descriptor(register: str, address: str, row_bytes: int, version: int) -> str:
    """Leading dimension (next block along K) 128 bytes, stride (next 8 rows) 8 rows of bytes."""
    high = (8 * row_bytes >> 4) | version << 14
    return f"""shr.u32 %r200, {address}, 4; or.b32 %r200, %r200, {128 >> 4 << 16};
    mov.b64 {register}, {{%r200, {high}}};"""


def _copy_in(words: int, to: str, source: str, threads: int = 128, n: str = "0") -> str:
    """Words from global memory to shared memory."""
    return f"""mov.u32 %r201, %t; IN{n}: shl.b32 %r202, %r201, 2; add.u32 %r203, {to}, %r202;
    cvt.u64.u32 %d50, %r202; add.u64 %d50, {source}, %d50; ld.global.b32 %r204, [%d50];
    st.shared.b32 [%r203], %r204; add.u32 %r201, %r201, {threads};
    setp.lt.u32 %q10, %r201, {words}; @%q10 bra IN{n};"""


# ---- wgmma


def _wgmma(a, b, c, kind, types, k, n=16, negate=False, fence="fence.proxy.async.shared::cta;"):
    """64 x n of D = A B^T + C, A and B being raw bytes by row."""
    a_bytes, b_bytes = a.size, b.size
    out = np.zeros((64, n), np.float32)
    accumulators = n // 2
    loads = "".join(
        f"ld.global.f32 %f{4 * j + 2 * h + e}, [%d10+{4 * (j * 8 + h * 8 * n + e)}];"
        for j in range(n // 8)
        for h in range(2)
        for e in range(2)
    )
    stores = loads.replace("ld.global.f32 ", "st.global.f32 ").replace("%d10", "%d11")
    stores = "".join(
        f"st.global.f32 [%d11+{4 * (j * 8 + h * 8 * n + e)}], %f{4 * j + 2 * h + e};"
        for j in range(n // 8)
        for h in range(2)
        for e in range(2)
    )
    scale_a = -1 if negate else 1
    transposes = ", 0, 0" if kind in ("f16", "bf16") else ""
    body = f"""
    .shared .align 128 .b8 s[{a_bytes + b_bytes}]; mov.u32 %r100, s;
    add.u32 %r101, %r100, {a_bytes};
    {_copy_in(a_bytes // 4, "%r100", "%p0", n="a")} {_copy_in(b_bytes // 4, "%r101", "%p1", n="b")}
    {fence} bar.sync 0;
    {_descriptor("%d1", "%r100", a.shape[1], 0)} {_descriptor("%d2", "%r101", b.shape[1], 0)}
    shr.u32 %r1, %t, 5; and.b32 %r2, %t, 31; shr.u32 %r3, %r2, 2; and.b32 %r4, %r2, 3;
    mad.lo.u32 %r5, %r1, 16, %r3; mul.lo.u32 %r6, %r5, {4 * n}; mad.lo.u32 %r6, %r4, 8, %r6;
    cvt.u64.u32 %d9, %r6; add.u64 %d10, %p2, %d9; add.u64 %d11, %p3, %d9; {loads}
    setp.ne.u32 %q1, %t, 9999;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{types} {registers("f", accumulators)},
    %d1, %d2, %q1, {scale_a}, 1{transposes};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {stores}"""
    run(
        body,
        _aligned(_core_matrices(a)),
        _aligned(_core_matrices(b)),
        c,
        out,
        block=128,
        target="sm_90a",
    )
    return out


def _integers(rows: int, columns: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.integers(-4, 5, (rows, columns)).astype(dtype)


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize("negate", [False, True])
def test_wgmma_f16(mode, negate):
    a, b, c = _integers(64, 16, np.float16), _integers(16, 16, np.float16), _integers(64, 16)
    with emulator.options(mode=mode, seed=1, races=True):
        got = _wgmma(a.view(np.uint8), b.view(np.uint8), c, "f16", "f16.f16", 16, negate=negate)
    assert (got == (-1 if negate else 1) * a.astype(np.float32) @ b.T.astype(np.float32) + c).all()
    assert emulator.stats()["mma_flops"] == 2 * 64 * 16 * 16


def _e4m3(v: np.ndarray) -> np.ndarray:
    """Codes of numbers that the format holds exactly."""
    codes = np.arange(127, dtype=np.uint8)
    exponent, mantissa = (codes >> 3).astype(int), codes & 7
    table = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), mantissa / 512)
    index = np.searchsorted(table, np.abs(v))
    assert (table[index] == np.abs(v)).all()
    return (index | np.signbit(v) * 0x80).astype(np.uint8)


def test_wgmma_needs_a_proxy_fence():
    a, b, c = _integers(64, 16, np.float16), _integers(16, 16, np.float16), _integers(64, 16)
    with pytest.raises(emulator.EmulatorError, match=r"wgmma A reads .* no fence.proxy.async"):
        _wgmma(a.view(np.uint8), b.view(np.uint8), c, "f16", "f16.f16", 16, fence="")


def test_wgmma_a_from_registers_b_transposed():
    """The one transpose that this form has is that of B."""
    a, b = _integers(64, 16, np.float16), _integers(16, 16, np.float16)
    out = np.zeros((64, 16), np.float32)
    # B lies as (k, n): 8 (k) x 8 (n) blocks; along n first.
    blocks = b.T.reshape(2, 8, 2, 8).transpose(0, 2, 1, 3).copy()
    body = f"""
    .shared .align 128 .b8 s[512]; mov.u32 %r101, s; {_copy_in(128, "%r101", "%p1")}
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r200, %r101, 4; or.b32 %r200, %r200, {256 >> 4 << 16};
    mov.b64 %d2, {{%r200, {128 >> 4}}};
    shr.u32 %r1, %t, 5; and.b32 %r2, %t, 31; shr.u32 %r3, %r2, 2; and.b32 %r4, %r2, 3;
    mad.lo.u32 %r5, %r1, 16, %r3; mul.lo.u32 %r6, %r5, 32; mad.lo.u32 %r6, %r4, 4, %r6;
    cvt.u64.u32 %d9, %r6; add.u64 %d10, %p0, %d9;
    ld.global.b32 %r10, [%d10]; ld.global.b32 %r11, [%d10+256];
    ld.global.b32 %r12, [%d10+16]; ld.global.b32 %r13, [%d10+272];
    setp.eq.u32 %q1, %t, 9999; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {registers("f", 8)},
    {{%r10, %r11, %r12, %r13}}, %d2, %q1, 1, 1, 1;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mad.lo.u32 %r6, %r5, 64, 0; mad.lo.u32 %r6, %r4, 8, %r6; cvt.u64.u32 %d9, %r6;
    add.u64 %d11, %p2, %d9;
    st.global.v2.f32 [%d11], {{%f0, %f1}}; st.global.v2.f32 [%d11+512], {{%f2, %f3}};
    st.global.v2.f32 [%d11+32], {{%f4, %f5}}; st.global.v2.f32 [%d11+544], {{%f6, %f7}};"""
    run(body, a, _aligned(blocks.reshape(-1)), out, block=128, target="sm_90a")
    assert (out == a.astype(np.float32) @ b.T.astype(np.float32)).all()


# ---- tcgen05

ALLOCATE = """.shared .b32 tm; .shared .align 8 .b64 bar; mov.u32 %r110, tm; mov.u32 %r111, bar;
setp.eq.u32 %q0, %t, 0; shr.u32 %r1, %t, 5; setp.eq.u32 %q1, %r1, 0;
@%q0 mbarrier.init.shared::cta.b64 [%r111], 1;
@%q1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r110], 64;
@%q1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.shared.b32 %r112, [%r110]; shl.b32 %r113, %r1, 21; add.u32 %r114, %r112, %r113;
"""
COMMIT = """@%q0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r111];
"""
RELEASE = """tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%q1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r112, 64;
"""
F32_ACCUMULATORS = 1 << 4


def _tcgen05(
    a, b, kind, formats, n=16, scales="", mma_tail="", commit=COMMIT, waited=True, extra=()
):
    """128 x n of A B^T by one tcgen05.mma, A and B being raw bytes by row."""
    out = np.zeros((128, n), np.float32)
    idesc = formats | n >> 3 << 17 | 128 >> 4 << 24
    body = f"""
    .shared .align 128 .b8 s[{a.size + b.size}]; mov.u32 %r100, s;
    add.u32 %r101, %r100, {a.size};
    {_copy_in(a.size // 4, "%r100", "%p0", n="a")} {_copy_in(b.size // 4, "%r101", "%p1", n="b")}
    fence.proxy.async.shared::cta; {ALLOCATE}
    {_descriptor("%d1", "%r100", a.shape[1], 1)} {_descriptor("%d2", "%r101", b.shape[1], 1)}
    {scales} tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    mov.b32 %r115, {idesc}; setp.ne.u32 %q2, %t, %t;
    @%q0 tcgen05.mma.cta_group::1.{kind} [%r112], %d1, %d2, %r115, {mma_tail}%q2;
    {commit} {wait("%r111") if waited else ""} tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {registers("r", n, 220)}, [%r114];
    tcgen05.wait::ld.sync.aligned;
    {store_words("%p2", [f"%r{220 + i}" for i in range(n)])} {RELEASE}"""
    run(body, _aligned(_core_matrices(a)), _aligned(_core_matrices(b)), out, *extra, block=128)
    return out


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_tcgen05_f16(mode):
    a, b = _integers(128, 16, np.float16), _integers(16, 16, np.float16)
    with emulator.options(mode=mode, seed=2, races=True):
        got = _tcgen05(a.view(np.uint8), b.view(np.uint8), "kind::f16", F32_ACCUMULATORS)
    assert (got == a.astype(np.float32) @ b.T.astype(np.float32)).all()


def test_tcgen05_fp8_negated():
    a, b = _integers(128, 32), _integers(16, 32)
    got = _tcgen05(_e4m3(a), _e4m3(b), "kind::f8f6f4", F32_ACCUMULATORS | 1 << 13)
    assert (got == -(a @ b.T)).all()


# Scales in columns 32.. (A, four of them) and 40.. (B): row r in lane r % 32 of column r / 32.
SCALES = """add.u32 %r120, %r114, 32; add.u32 %r121, %r114, 40; and.b32 %r122, %t, 31;
mul.wide.u32 %d20, %r122, 16; add.u64 %d21, %p3, %d20; mul.wide.u32 %d22, %r122, 4;
add.u64 %d23, %p4, %d22; ld.global.v4.b32 {%r130, %r131, %r132, %r133}, [%d21];
ld.global.b32 %r134, [%d23];
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r120], {%r130, %r131, %r132, %r133};
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r121], {%r134}; tcgen05.wait::st.sync.aligned;
add.u32 %r123, %r112, 32; add.u32 %r124, %r112, 40;"""


def _scale_words(codes: np.ndarray) -> np.ndarray:
    """(rows, 1..4) codes to (32, columns) words."""
    rows, count = codes.shape
    padded = np.zeros(((rows + 31) // 32 * 32, 4), np.uint8)
    padded[:rows, :count] = codes
    words = padded.view(np.uint32)[:, 0].reshape(-1, 32).T
    return _aligned(np.ascontiguousarray(words), 16)


def _pack_e2m1(codes: np.ndarray) -> np.ndarray:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize("kind", ["mxf4nvf4", "mxf4", "mxf8f6f4"])
def test_tcgen05_block_scaled(kind, mode):
    k, block, modifier = {
        "mxf4nvf4": (64, 16, "scale_vec::4X"),
        "mxf4": (64, 32, "scale_vec::2X"),
        "mxf8f6f4": (32, 32, "scale_vec::1X"),
    }[kind]
    if kind == "mxf8f6f4":
        a, b = _integers(128, k), _integers(16, k)
        raw_a, raw_b = _e4m3(a), _e4m3(b)
        formats = 0
    else:
        codes_a, codes_b = (RNG.integers(0, 16, (rows, k)) for rows in (128, 16))
        a, b = (np.where(c & 8, -1, 1) * E2M1[c & 7] for c in (codes_a, codes_b))
        raw_a, raw_b = _pack_e2m1(codes_a), _pack_e2m1(codes_b)
        formats = 1 << 7 | 1 << 10
    if kind == "mxf4nvf4":  # ue4m3: 1, 1.5, 2
        scale_codes, scale_values = np.array([0x38, 0x3C, 0x40]), np.array([1, 1.5, 2])
    else:
        scale_codes, scale_values = np.array([126, 127, 129]), np.array([0.5, 1, 4])
        formats |= 1 << 23
    index_a, index_b = (RNG.integers(0, 3, (rows, k // block)) for rows in (128, 16))
    with emulator.options(mode=mode, seed=3, races=True):
        got = _tcgen05(
            raw_a,
            raw_b,
            f"kind::{kind}.block_scale.{modifier}",
            formats,
            scales=SCALES,
            mma_tail="[%r123], [%r124], ",
            extra=(
                _scale_words(scale_codes[index_a].astype(np.uint8)),
                _scale_words(scale_codes[index_b].astype(np.uint8)),
            ),
        )
    scaled_a = a * np.repeat(scale_values[index_a], block, axis=1)
    scaled_b = b * np.repeat(scale_values[index_b], block, axis=1)
    assert (got == scaled_a @ scaled_b.T).all()


def test_missing_wait_for_tensor_memory_stores():
    """In chaos the scales are not there without tcgen05.wait::st."""
    codes = RNG.integers(0, 8, (128, 64))
    raw = _pack_e2m1(codes)
    ones = _scale_words(np.full((128, 4), 0x38, np.uint8))
    want = E2M1[codes] @ E2M1[codes[:16]].T
    with emulator.options(mode="chaos", seed=0):
        for scales, right in (
            (SCALES, True),
            (SCALES.replace("tcgen05.wait::st.sync.aligned;", ""), False),
        ):
            got = _tcgen05(
                raw,
                raw[:16],
                "kind::mxf4nvf4.block_scale.scale_vec::4X",
                1 << 7 | 1 << 10,
                scales=scales,
                mma_tail="[%r123], [%r124], ",
                extra=(ones, ones),
            )
            assert (got == want).all() == right


def test_missing_wait_for_the_tensor_core():
    a, b = _integers(128, 16, np.float16), _integers(16, 16, np.float16)
    raw = a.view(np.uint8), b.view(np.uint8)
    want = a.astype(np.float32) @ b.T.astype(np.float32)
    with emulator.options(mode="chaos", seed=0), pytest.raises(emulator.EmulatorError):
        got = _tcgen05(*raw, "kind::f16", F32_ACCUMULATORS, waited=False)
        assert not (got == want).all()
    with (
        emulator.options(races=True),
        pytest.raises(emulator.EmulatorError, match="data race on tensor memory column"),
    ):
        _tcgen05(*raw, "kind::f16", F32_ACCUMULATORS, waited=False)


@pytest.mark.parametrize(
    ("shape", "count", "place"),
    [
        ("32x32b.x4", 4, lambda t, i: (t, i)),
        ("16x128b.x2", 4, lambda t, i: (t // 4 + i % 2 * 8, i // 2 * 4 + t % 4)),
        (
            "16x256b.x1",
            4,
            lambda t, i: (t // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2),
        ),
    ],
)
def test_tensor_memory_shapes(shape, count, place):
    """Stored by one shape and loaded lane by lane."""
    out = np.zeros((128, 8), np.uint32)
    values = [f"%r{40 + i}" for i in range(count)]
    fill = "".join(f"mad.lo.u32 {v}, %t, {count}, {i};" for i, v in enumerate(values))
    clear = ", ".join(["%r60"] * 8)
    body = f"""{ALLOCATE} {fill} mov.b32 %r60, 0;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r114], {{{clear}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.st.sync.aligned.{shape}.b32 [%r114], {{{", ".join(values)}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{", ".join(f"%r{70 + i}" for i in range(8))}}}, [%r114];
    tcgen05.wait::ld.sync.aligned; {RELEASE}"""
    run(body + store_words("%p0", [f"%r{70 + i}" for i in range(8)]), out, block=128)
    want = np.zeros((128, 8), np.uint32)
    for warp in range(4):
        for t in range(32):
            for i in range(count):
                lane, column = place(t, i)
                want[warp * 32 + lane, column] = (warp * 32 + t) * count + i
    assert (out == want).all()


def test_copy_to_tensor_memory():
    """32x128b.warpx4: 32 rows of 16 bytes into all four quarters."""
    source = RNG.integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype(np.uint32)
    out = np.zeros((128, 4), np.uint32)
    body = f"""
    .shared .align 128 .b8 s[512]; mov.u32 %r100, s; {_copy_in(128, "%r100", "%p0")}
    fence.proxy.async.shared::cta; {ALLOCATE} {_descriptor("%d1", "%r100", 16, 1)}
    @%q0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r112], %d1; {COMMIT} {wait("%r111")}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r40, %r41, %r42, %r43}}, [%r114];
    tcgen05.wait::ld.sync.aligned; {RELEASE}"""
    body += store_words("%p1", [f"%r{40 + i}" for i in range(4)])
    run(body, _aligned(source), out, block=128)
    assert (out == np.tile(source, (4, 1))).all()


def test_leaked_tensor_memory():
    run(ALLOCATE + RELEASE, block=128)
    with pytest.raises(emulator.EmulatorError, match="exits holding 64 columns"):
        run(ALLOCATE, block=128)


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        ("add.u32 %r9, %r114, 64; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r9];",
         "columns 64..64, outside any allocation"),
        ("add.u32 %r9, %r112, 0x400000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r9];",
         "may only reach lanes"),
        ("@%q1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r112, 128;", "free tensor memory"),
        ("@%q1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r110], 32;",
         "after relinquish_alloc_permit"),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r2}, [%r114];", "not modelled"),
    ],
)  # fmt: skip
def test_tensor_memory_faults(ptx, message):
    with pytest.raises(emulator.EmulatorError, match=message):
        run(ALLOCATE + ptx + RELEASE, block=128)


@pytest.mark.parametrize(
    ("kind", "formats", "message"),
    [
        ("kind::f16", F32_ACCUMULATORS | 1 << 2, "sparse"),
        ("kind::f16", F32_ACCUMULATORS | 3 << 7, "operand format 3"),
        ("kind::f8f6f4", F32_ACCUMULATORS | 5 << 7, "unpacked 4- and 6-bit"),
        ("kind::f16", 2 << 4, "integer accumulators"),
    ],
)
def test_mma_faults(kind, formats, message):
    a = np.zeros((128, 32), np.uint8)
    with pytest.raises(emulator.EmulatorError, match=message):
        _tcgen05(a, a[:16], kind, formats)
