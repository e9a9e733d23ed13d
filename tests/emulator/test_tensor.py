"""wgmma and tcgen05: faults and data movement; ``reference/test_tensor_core.py`` tests numerics."""

import numpy as np
import pytest
import torch

import ptx_emulator as emulator
from tests.helpers import E4M3, F16, F32
from tests.reference.tensor_core_kernels import tcgen05, wgmma

from .ptx import aligned, fails, outcome, run, wait

RNG = np.random.default_rng(0)


def _integers(rows, columns):
    """Return FP16 integers whose products every tensor core adds exactly."""
    return torch.randint(-4, 5, (rows, columns)).half()


def test_wgmma_needs_a_proxy_fence():
    a, b, c = _integers(64, 16), _integers(8, 16), torch.zeros(64, 8)
    with fails(r"wgmma A reads .* no fence.proxy.async"):
        wgmma(a, b, c, (("fence.proxy.async.shared::cta;", ""),))


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


WAIT_FOR_MMA = "mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r4], 0;\n@!%p0 bra wait;"


def test_a_missing_wait_for_tensor_memory_stores_gives_wrong_results():
    """In chaos mode, stored scales and accumulators arrive only with tcgen05.wait::st."""
    codes = torch.randint(0, 256, (128, 32), dtype=torch.uint8)
    scales = torch.ones(128, 4).to(E4M3)
    operands = codes, codes[:16], torch.ones(128, 16), scales, scales[:16]
    want = tcgen05(*operands)
    with emulator.options(mode="chaos", seed=0):
        assert (tcgen05(*operands) == want).all()
        assert not (
            tcgen05(*operands, edits=(("tcgen05.wait::st.sync.aligned;", ""),)) == want
        ).all()


def test_a_missing_wait_for_the_tensor_core_fails():
    """Check that a kernel without its wait for the tensor core fails, or has a race."""
    operands = _integers(128, 16), _integers(16, 16), torch.zeros(128, 16)
    edits = ((WAIT_FOR_MMA, ""),)
    with emulator.options(mode="chaos", seed=0), pytest.raises(emulator.EmulatorError):
        tcgen05(*operands, edits=edits)
    with emulator.options(races=True), fails("data race on tensor memory column"):
        tcgen05(*operands, edits=edits)


@pytest.mark.parametrize(
    ("shape", "count", "lane_and_column"),
    [
        ("32x32b.x4", 4, lambda t, i: (t, i)),
        ("16x128b.x2", 4, lambda t, i: (t // 4 + i % 2 * 8, i // 2 * 4 + t % 4)),
        ("16x256b.x1", 4, lambda t, i: (t // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2)),
    ],
)
def test_stores_to_tensor_memory_have_the_layout_of_their_shape(shape, count, lane_and_column):
    """Check that ``tcgen05.st`` stores to the lanes and columns of its shape."""
    values = [f"%r{40 + i}" for i in range(count)]
    fill = "".join(f"mad.lo.u32 {v}, %t, {count}, {i};" for i, v in enumerate(values))
    clear, got = ", ".join(["%r60"] * 8), " ".join(f"%r{70 + i}" for i in range(8))
    body = f"""{ALLOCATE} {fill} mov.b32 %r60, 0;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r114], {{{clear}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.st.sync.aligned.{shape}.b32 [%r114], {{{", ".join(values)}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{got.replace(" ", ", ")}}}, [%r114];
    tcgen05.wait::ld.sync.aligned; {RELEASE}"""
    want = np.zeros((4, 32, 8), np.uint32)
    for warp, t, i in np.ndindex(4, 32, count):
        want[(warp, *lane_and_column(t, i))] = (warp * 32 + t) * count + i
    assert (outcome(body, got, block=128) == want.reshape(128, 8)).all()


def test_tcgen05_cp_copies_to_all_warps():
    """Check that ``tcgen05.cp`` copies to the lanes of all four warps."""
    source = RNG.integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype(np.uint32)
    body = f"""
    .shared .align 128 .b8 s[512]; mov.u32 %r100, s; shl.b32 %r202, %t, 2;
    add.u32 %r203, %r100, %r202;
    cvt.u64.u32 %d50, %r202; add.u64 %d50, %p0, %d50; ld.global.b32 %r204, [%d50];
    st.shared.b32 [%r203], %r204;
    fence.proxy.async.shared::cta; {ALLOCATE}
    shr.u32 %r200, %r100, 4; or.b32 %r200, %r200, {128 >> 4 << 16};
    mov.b64 %d1, {{%r200, {8 * 16 >> 4 | 1 << 14}}};
    @%q0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r112], %d1; {COMMIT} {wait("%r111")}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r40, %r41, %r42, %r43}}, [%r114];
    tcgen05.wait::ld.sync.aligned; {RELEASE}"""
    out = outcome(body, "%r40 %r41 %r42 %r43", aligned(source), block=128)
    assert (out == np.tile(source, (4, 1))).all()


def test_unreleased_tensor_memory_fails():
    run(ALLOCATE + RELEASE, block=128)
    with fails("exits holding 64 columns"):
        run(ALLOCATE, block=128)


@pytest.mark.parametrize(("ptx", "message"), [
        ("add.u32 %r9, %r114, 64; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r9];",
         "columns 64..64, outside any allocation"),
        ("add.u32 %r9, %r112, 0x400000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r9];",
         "may only reach lanes"),
        ("@%q1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r112, 128;", "free tensor memory"),
        ("@%q1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r110], 32;",
         "after relinquish_alloc_permit"),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r2}, [%r114];", "not modelled"),
    ])  # fmt: skip
def test_wrong_use_of_tensor_memory_fails(ptx, message):
    with fails(message):
        run(ALLOCATE + ptx + RELEASE, block=128)


@pytest.mark.parametrize(
    ("dtype", "acc", "flags", "message"),
    [
        (F16, F32, 1 << 2, "sparse"),
        (F16, F32, 1 << 13, "negated"),
        (F16, F32, 3 << 7, "operand format 3"),
        (E4M3, F32, 5 << 7, "unpacked 4- and 6-bit"),
        (F16, F16, 2 << 4, "integer accumulators"),
    ],
)
def test_unmodelled_mma_operands_fail(dtype, acc, flags, message):
    a = torch.zeros(128, 32).to(dtype)
    with fails(message):
        tcgen05(a, a[:16], torch.zeros(128, 16).to(acc), flags=flags)
