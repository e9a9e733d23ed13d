"""Barriers, mbarriers and clusters: deadlocks, wrong arrivals, polling, shared memory."""

import numpy as np
import pytest

import ptx_emulator as emulator
from tests.helpers import contains_all

from .ptx import fails, outcome, run, wait

BARRIER = ".shared .align 8 .b64 bar; mov.u32 %r0, bar; setp.eq.u32 %q0, %t, 0;"
INIT = f"""{BARRIER}
@%q0 mbarrier.init.shared::cta.b64 [%r0], {{count}}; bar.sync 0;"""
CLUSTER_WAIT = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def test_differing_thread_counts_of_a_barrier_fail():
    body = """shr.u32 %r0, %t, 5; setp.eq.u32 %q0, %r0, 0;
    @%q0 bar.sync 1, 64; @!%q0 bar.sync 1, 96;"""
    with fails("differs from the"):
        run(body, block=96)


def test_a_deadlock_names_every_warp():
    body = "setp.lt.u32 %q0, %t, 32; @%q0 bra DONE; bar.sync 2, 64; DONE:"
    with pytest.raises(
        emulator.EmulatorError,
        match=contains_all("deadlock", "warp 1 at line", "named barrier 2: 32 of 64 threads"),
    ):
        run(body, block=64)
    run("setp.lt.u32 %q0, %t, 32; bar.sync 2, 64;", block=64)


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r0]"


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (INIT.format(count=2) + f"@%q0 {ARRIVE};", r"waits for mbarrier at shared offset \d+"),
        (INIT.format(count=1) + f"@%q0 {ARRIVE}, 2;", "2 arrivals but only 1 were pending"),
        (BARRIER + f"{ARRIVE};", "not initialised"),
    ],
)
def test_wrong_arrivals_fail(faulty, message, mode):
    with emulator.options(mode=mode):
        run(INIT.format(count=32) + f"{ARRIVE};" + wait("%r0"))
        run(INIT.format(count=2) + f"@%q0 {ARRIVE}, 2;" + wait("%r0"))
        with fails(message):
            run(faulty + wait("%r0"))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_idle_insns": 50_000}, r"(?s)livelock.*warp 0 at line"),
        ({"max_insns": 10_000}, "instruction budget of 10000"),
    ],
)
def test_endless_polling_fails(limit, message):
    body = INIT.format(count=1) + (
        "SPIN: mbarrier.test_wait.parity.shared::cta.b64 %q1, [%r0], 0; @!%q1 bra SPIN;"
    )
    with emulator.options(**limit):
        with fails(message):
            run(body)
        run(body.replace("SPIN:", f"@%q0 {ARRIVE}; SPIN:"))


@pytest.mark.parametrize("mode", ["eager", "chaos"])
def test_ctas_of_a_cluster_share_memory(mode):
    """Check that CTAs of a cluster read and write each other's shared memory."""
    body = """.shared .align 4 .b8 s[128]; mov.u32 %r0, s; shl.b32 %r1, %t, 2;
    add.u32 %r0, %r0, %r1; mov.u32 %r2, %cluster_ctarank; add.u32 %r3, %r2, 1; and.b32 %r3, %r3, 3;
    mapa.shared::cluster.u32 %r4, %r0, %r3; {wait}
    mad.lo.u32 %r6, %r3, 10, %r2; st.shared::cluster.b32 [%r4], %r6; {wait}
    ld.shared.b32 %r5, [%r0];"""
    with emulator.options(mode=mode, races=True):
        out = outcome(body.format(wait=CLUSTER_WAIT), "%r5", grid=4, cluster=4)
    ranks = np.arange(4)
    assert (out.reshape(4, 32) == (ranks * 10 + (ranks - 1) % 4)[:, None]).all()


def test_access_to_an_exited_cta_fails():
    body = """.shared .align 4 .b8 s[128]; mov.u32 %r0, s; mov.u32 %r2, %cluster_ctarank;
    setp.eq.u32 %q0, %r2, 1; @%q0 bra DONE; mov.b32 %r5, 0;
    SPIN: add.u32 %r5, %r5, 1; setp.lt.u32 %q1, %r5, 30000; @%q1 bra SPIN;
    mapa.shared::cluster.u32 %r4, %r0, 1; st.shared::cluster.b32 [%r4], %r2; DONE:{wait}"""
    with fails("CTA rank 1, which has exited"):
        run(body.format(wait=""), grid=2, cluster=2)
    run(body.format(wait=CLUSTER_WAIT), grid=2, cluster=2)
