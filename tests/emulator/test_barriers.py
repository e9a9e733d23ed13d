"""Named barriers, mbarriers, clusters, and what they find wrong."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.ptx import fails, run, store_words, wait

INIT = """.shared .align 8 .b64 bar; mov.u32 %r0, bar; setp.eq.u32 %q0, %t, 0;
@%q0 mbarrier.init.shared::cta.b64 [%r0], {count}; bar.sync 0;"""


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers_pass_data_around(seed):
    """Warps hand a value round, each pair on a barrier of its own."""
    out = np.zeros((128, 1), np.uint32)
    body = """.shared .align 4 .b8 s[128]; mov.u32 %r0, s; shr.u32 %r1, %t, 5; and.b32 %r8, %t, 31;
    setp.eq.u32 %q0, %r1, 0; mov.b32 %r2, 100;
    @%q0 bra FIRST;
    bar.sync %r1, 64; ld.shared.b32 %r2, [%r0]; add.u32 %r2, %r2, 1;
    FIRST: setp.ne.u32 %q1, %r8, 0; @%q1 bra NEXT; st.shared.b32 [%r0], %r2;
    NEXT: bar.warp.sync -1; add.u32 %r3, %r1, 1; setp.eq.u32 %q2, %r1, 3; @%q2 bra DONE;
    bar.arrive %r3, 64; DONE:"""
    with emulator.options(mode="chaos", seed=seed, races=True):
        run(body + store_words("%p0", ["%r2"]), out, block=128)
    assert (out[:, 0] == 100 + np.arange(128) // 32).all()


def test_differing_thread_counts():
    body = """shr.u32 %r0, %t, 5; setp.eq.u32 %q0, %r0, 0;
    @%q0 bar.sync 1, 64; @!%q0 bar.sync 1, 96;"""
    with fails("differs from the"):
        run(body, block=96)


def test_deadlock_names_every_warp():
    body = "setp.lt.u32 %q0, %t, 32; @%q0 bra DONE; bar.sync 2, 64; DONE:"
    with pytest.raises(emulator.EmulatorError) as error:
        run(body, block=64)
    assert "deadlock" in str(error.value)
    assert "warp 1 at line" in str(error.value)
    assert "named barrier 2: 32 of 64 threads" in str(error.value)
    run("setp.lt.u32 %q0, %t, 32; bar.sync 2, 64;", block=64)


def test_deadlock_on_an_mbarrier():
    body = INIT.format(count=2) + "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r0];" + wait("%r0")
    with fails(r"waits for mbarrier at shared offset \d+"):
        run(body)
    run(body.replace("@%q0 mbarrier.arrive", "mbarrier.arrive").replace("], 2", "], 32"))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_idle_insns": 50_000}, r"(?s)livelock.*warp 0 at line"),
        ({"max_insns": 10_000}, "instruction budget of 10000"),
    ],
)
def test_polling_for_nothing(limit, message):
    body = INIT.format(count=1) + (
        "SPIN: mbarrier.test_wait.parity.shared::cta.b64 %q1, [%r0], 0; @!%q1 bra SPIN;"
    )
    with emulator.options(**limit):
        with fails(message):
            run(body)
        run(body.replace("SPIN:", "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r0]; SPIN:"))


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_mbarrier_phases(mode):
    """A ring of one slot: full and empty barriers, ten turns."""
    out = np.zeros(10, np.uint32)
    body = """.shared .align 8 .b64 bars[2]; .shared .b32 slot; mov.u32 %r0, bars;
    add.u32 %r1, %r0, 8; mov.u32 %r2, slot; setp.eq.u32 %q0, %t, 0; mov.b32 %r3, 0;
    @%q0 mbarrier.init.shared::cta.b64 [%r0], 32; @%q0 mbarrier.init.shared::cta.b64 [%r1], 32;
    bar.sync 0; setp.ge.u32 %q1, %t, 32; @%q1 bra CONSUMER;
    PRODUCER: and.b32 %r4, %r3, 1; xor.b32 %r5, %r4, 1;
    E: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r1], %r5; @!%q2 bra E;
    mul.lo.u32 %r6, %r3, %r3; @%q0 st.shared.b32 [%r2], %r6;
    mbarrier.arrive.shared::cta.b64 %d0, [%r0];
    add.u32 %r3, %r3, 1; setp.lt.u32 %q3, %r3, 10; @%q3 bra PRODUCER; bra END;
    CONSUMER: and.b32 %r4, %r3, 1;
    F: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r0], %r4; @!%q2 bra F;
    ld.shared.b32 %r6, [%r2]; mul.wide.u32 %d1, %r3, 4; add.u64 %d1, %p0, %d1;
    setp.eq.u32 %q4, %t, 32; @%q4 st.global.b32 [%d1], %r6;
    mbarrier.arrive.shared::cta.b64 %d0, [%r1];
    add.u32 %r3, %r3, 1; setp.lt.u32 %q3, %r3, 10; @%q3 bra CONSUMER; END:"""
    for seed in range(3):
        out[:] = 0
        with emulator.options(mode=mode, seed=seed, races=True):
            run(body, out, block=64)
        assert (out == np.arange(10) ** 2).all()


def test_too_many_arrivals():
    body = INIT.format(count="{}") + "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r0], 2;"
    run(body.replace("{}", "2") + wait("%r0"))
    with fails("2 arrivals but only 1 were pending"):
        run(body.replace("{}", "1"))


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_uninitialised_mbarrier(mode):
    body = INIT.format(count=32) + "mbarrier.arrive.shared::cta.b64 %d0, [%r0];" + wait("%r0")
    with emulator.options(mode=mode):
        run(body)
        with fails("not initialised"):
            run(body.replace("@%q0 mbarrier.init.shared::cta.b64 [%r0], 32;", ""))


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_distributed_shared_memory(mode):
    """Every CTA writes its rank into its neighbour, and reads what it was sent."""
    out = np.zeros((4, 32, 1), np.uint32)
    body = """.shared .align 4 .b8 s[128]; mov.u32 %r0, s; shl.b32 %r1, %t, 2;
    add.u32 %r0, %r0, %r1; mov.u32 %r2, %cluster_ctarank; add.u32 %r3, %r2, 1; and.b32 %r3, %r3, 3;
    mapa.shared::cluster.u32 %r4, %r0, %r3;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mad.lo.u32 %r6, %r3, 10, %r2; st.shared::cluster.b32 [%r4], %r6;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.b32 %r5, [%r0]; mov.u32 %r7, %ctaid.x; mul.wide.u32 %d0, %r7, 128;
    add.u64 %d1, %p0, %d0;"""
    with emulator.options(mode=mode, races=True):
        run(body + store_words("%d1", ["%r5"]), out, grid=4, cluster=4)
    ranks = np.arange(4)
    assert (out[:, :, 0] == (ranks * 10 + (ranks - 1) % 4)[:, None]).all()


def test_exited_cta_is_out_of_reach():
    body = """.shared .align 4 .b8 s[128]; mov.u32 %r0, s; mov.u32 %r2, %cluster_ctarank;
    setp.eq.u32 %q0, %r2, 1; @%q0 bra DONE; mov.b32 %r5, 0;
    SPIN: add.u32 %r5, %r5, 1; setp.lt.u32 %q1, %r5, 30000; @%q1 bra SPIN;
    mapa.shared::cluster.u32 %r4, %r0, 1; st.shared::cluster.b32 [%r4], %r2; DONE:{wait}"""
    with fails("CTA rank 1, which has exited"):
        run(body.format(wait=""), grid=2, cluster=2)
    stay = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    run(body.format(wait=stay), grid=2, cluster=2)
