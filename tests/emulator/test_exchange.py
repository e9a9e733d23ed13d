"""Votes, matches, reductions, shuffles, branches and special registers of a warp, against NumPy."""

import numpy as np
import pytest

from .ptx import elementwise, fails, outcome, run

LANES = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize("mode", ["all", "any", "uni"])
@pytest.mark.parametrize("limit", [0, 7, 32])
def test_votes(mode, limit):
    """Check all modes of ``vote.sync`` against their definition."""
    ptx = f""".reg .pred %p, %v; setp.lt.u32 %p, %a0, {limit};
    vote.sync.{mode}.pred %v, %p, -1; selp.b32 %out, 1, 0, %v;"""
    got = elementwise(ptx, LANES)
    want = {"all": limit == 32, "any": limit > 0, "uni": limit in (0, 32)}[mode]
    assert (got == want).all()


def test_match_all_compares_all_lanes():
    ptx = ".reg .pred %p; match.all.sync.b32 %out|%p, %a0, -1;"
    assert (elementwise(ptx, np.full(32, 9, np.uint32)) == 0xFFFFFFFF).all()
    assert (elementwise(ptx, LANES % 3) == 0).all()


def test_redux_of_floats():
    """Check ``redux.sync`` of floats, with and without NaN."""
    values = np.random.default_rng(1).standard_normal(32).astype(np.float32)

    def redux(op):
        return elementwise(f"redux.sync.{op}.f32 %out, %a0, -1;", values, out=np.float32)

    assert (redux("max.abs") == np.abs(values).max()).all()
    values[7] = np.nan
    assert (redux("min") == np.nanmin(values)).all()
    assert np.isnan(redux("min.NaN")).all()


def test_elect_and_member_masks():
    ptx = """.reg .pred %p, %q; .reg .b32 %v; setp.lt.u32 %p, %a0, 8; mov.b32 %out, 77;
    @%p bra SKIP; elect.sync %v|%q, 0xffffff00; selp.b32 %out, 1, 0, %q; SKIP:"""
    got = elementwise(ptx, LANES)
    assert got.tolist() == [77] * 8 + [1] + [0] * 23


def test_divergent_loop_reconverges():
    """Check that lanes meet again after a loop with different trip counts."""
    ptx = """.reg .pred %p; .reg .b32 %i, %s; mov.b32 %i, 0; mov.b32 %s, 0;
    LOOP: setp.ge.u32 %p, %i, %a0; @%p bra DONE;
    add.u32 %i, %i, 1; add.u32 %s, %s, %i; bra LOOP;
    DONE: shfl.sync.bfly.b32 %out, %s, 1, 31, -1;"""
    iterations = LANES * 7 % 13
    got = elementwise(ptx, iterations)
    assert (got == (iterations * (iterations + 1) // 2)[LANES ^ 1]).all()


def test_indirect_branches():
    ptx = """.reg .b32 %i; and.b32 %i, %a0, 3; TABLE: .branchtargets L0, L1, L2, L3;
    brx.idx %i, TABLE;
    L0: mov.b32 %out, 10; bra END; L1: mov.b32 %out, 11; bra END;
    L2: mov.b32 %out, 12; bra END; L3: mov.b32 %out, 13; END:"""
    assert (elementwise(ptx, LANES) == 10 + LANES % 4).all()


def test_special_registers_have_their_values():
    """Check the values of special registers in a grid of clusters."""
    names = ("ctaid.x", "laneid", "warpid", "cluster_ctarank", "nctaid.x", "lanemask_lt")
    body = "".join(f"mov.u32 %r{i}, %{name};" for i, name in enumerate(names))
    out = outcome(body, "%r0 %r1 %r2 %r3 %r4 %r5", grid=4, block=64, cluster=2)
    cta, thread = np.divmod(np.arange(256), 64)
    expected = cta, thread % 32, thread // 32, cta % 2, np.full(256, 4), (1 << thread % 32) - 1
    assert (out == np.stack(expected, axis=1)).all()


def test_instructions_of_whole_warps_fail_in_a_partial_warp():
    body = """.shared .align 16 .b8 s[512]; mov.u32 %r0, s; setp.lt.u32 %q0, %t, 16;
    @%q0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0];"""
    with fails("must be executed by all 32 lanes"):
        run(body)
