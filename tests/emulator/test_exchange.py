import numpy as np
import pytest

from cute_kernels import emulator
from tests.helpers import each

from .ptx import elementwise, run, store_words

LANES = np.arange(32)
VALUES = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)


@each("mode", ["all", "any", "uni"])
@each("limit", [0, 7, 32])
def test_vote(mode, limit):
	ptx = f""".reg .pred %p, %v; setp.lt.u32 %p, %a0, {limit};
    vote.sync.{mode}.pred %v, %p, -1; selp.b32 %out, 1, 0, %v;"""
	got = elementwise(ptx, LANES.astype(np.uint32))
	want = {"all": limit == 32, "any": limit > 0, "uni": limit in (0, 32)}[mode]
	assert (got == want).all()


def test_match_all():
	keys = (LANES % 3).astype(np.uint32)
	same = np.full(32, 9, np.uint32)
	ptx = ".reg .pred %p; match.all.sync.b32 %out|%p, %a0, -1;"
	assert (elementwise(ptx, same) == 0xFFFFFFFF).all()
	assert (elementwise(ptx, keys) == 0).all()


def test_redux_of_floats():
	values = np.random.default_rng(1).standard_normal(32).astype(np.float32)
	got = elementwise("redux.sync.max.abs.f32 %out, %a0, -1;", values, out=np.float32)
	assert (got == np.abs(values).max()).all()
	values[7] = np.nan
	got = elementwise("redux.sync.min.f32 %out, %a0, -1;", values, out=np.float32)
	assert (got == np.nanmin(values)).all()
	got = elementwise("redux.sync.min.NaN.f32 %out, %a0, -1;", values, out=np.float32)
	assert np.isnan(got).all()


def test_elect_and_member_masks():
	ptx = """.reg .pred %p, %q; .reg .b32 %v; setp.lt.u32 %p, %a0, 8; mov.b32 %out, 77;
    @%p bra SKIP; elect.sync %v|%q, 0xffffff00; selp.b32 %out, 1, 0, %q; SKIP:"""
	got = elementwise(ptx, LANES.astype(np.uint32))
	assert got.tolist() == [77] * 8 + [1] + [0] * 23


def test_divergent_loop_reconverges():
	ptx = """.reg .pred %p; .reg .b32 %i, %s; mov.b32 %i, 0; mov.b32 %s, 0;
    LOOP: setp.ge.u32 %p, %i, %a0; @%p bra DONE;
    add.u32 %i, %i, 1; add.u32 %s, %s, %i; bra LOOP;
    DONE: shfl.sync.bfly.b32 %out, %s, 1, 31, -1;"""
	turns = (LANES * 7 % 13).astype(np.uint32)
	got = elementwise(ptx, turns)
	assert (got == (turns * (turns + 1) // 2)[LANES ^ 1]).all()


def test_indirect_branch():
	ptx = """.reg .b32 %i; and.b32 %i, %a0, 3; TABLE: .branchtargets L0, L1, L2, L3;
    brx.idx %i, TABLE;
    L0: mov.b32 %out, 10; bra END; L1: mov.b32 %out, 11; bra END;
    L2: mov.b32 %out, 12; bra END; L3: mov.b32 %out, 13; END:"""
	assert (elementwise(ptx, LANES.astype(np.uint32)) == 10 + LANES % 4).all()


def test_special_registers():
	out = np.zeros((4, 64, 6), np.uint32)
	body = """mov.u32 %r0, %ctaid.x; mul.wide.u32 %d0, %r0, 1536; add.u64 %d1, %p0, %d0;
    mov.u32 %r1, %laneid; mov.u32 %r2, %warpid; mov.u32 %r3, %cluster_ctarank;
    mov.u32 %r4, %nctaid.x; mov.u32 %r5, %lanemask_lt;"""
	run(body + store_words("%d1", [f"%r{i}" for i in range(6)]), out, grid=4, block=64, cluster=2)
	threads = np.arange(64)
	assert (out[..., 0] == np.arange(4)[:, None]).all()
	assert (out[..., 1] == threads % 32).all()
	assert (out[..., 2] == threads // 32).all()
	assert (out[..., 3] == np.arange(4)[:, None] % 2).all()
	assert (out[..., 4] == 4).all()
	assert (out[..., 5] == (1 << threads % 32) - 1).all()


def test_incomplete_warp_is_an_error_for_whole_warp_instructions():
	body = """.shared .align 16 .b8 s[512]; mov.u32 %r0, s; setp.lt.u32 %q0, %t, 16;
    @%q0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0];"""
	with pytest.raises(emulator.EmulatorError, match="must be executed by all 32 lanes"):
		run(body)
