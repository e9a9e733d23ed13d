"""Tensor-core instructions as PTX kernels on the emulator: one CTA, one tile, K in steps."""

import functools

import torch

import ptx_emulator as emulator

STEP_BYTES = 32  # bytes of K per instruction, for any element type
_PTX_TYPES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "tf32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_CORE_MATRIX = 128  # 8 rows of 16 bytes; without swizzle, both matrices of a step are adjacent
_DESCRIPTOR = (_CORE_MATRIX >> 4) << 16 | (2 * _CORE_MATRIX >> 4) << 32

_HEAD = """
.version 8.8
.target {arch}
.address_size 64
.visible .entry {name}(
.param .u64 p_tiles, .param .u64 p_acc, .param .u64 p_scales, .param .u64 p_out)
{{
.reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %p<4>; .reg .b32 %f<16>; .reg .b32 %s<16>;
.reg .b64 %da; .reg .b64 %db; .reg .b64 %base;
.shared .align 1024 .b8 tiles[{smem}];
.shared .align 8 .b64 mbar;
.shared .align 4 .b32 slot;
mov.u32 %r0, %tid.x;
mov.u32 %r1, tiles;
ld.param.u64 %rd0, [p_tiles];
ld.param.u64 %rd1, [p_acc];
ld.param.u64 %rd2, [p_scales];
ld.param.u64 %rd3, [p_out];
shl.b32 %r2, %r0, 4;
copy:
setp.ge.u32 %p0, %r2, {smem};
@%p0 bra copied;
cvt.u64.u32 %rd4, %r2;
add.u64 %rd4, %rd4, %rd0;
ld.global.v4.b32 {{%f0, %f1, %f2, %f3}}, [%rd4];
add.u32 %r3, %r1, %r2;
st.shared.v4.b32 [%r3], {{%f0, %f1, %f2, %f3}};
add.u32 %r2, %r2, 2048;
bra copy;
copied:
fence.proxy.async.shared::cta;
shr.u32 %r3, %r1, 4;
cvt.u64.u32 %base, %r3;
or.b64 %base, %base, {descriptor};
"""

_TMEM_COLUMNS = 64
_A_SCALES, _B_SCALES = 16, 32  # columns; D takes the first 16


def _vector(prefix, count, start=0):
    return "{" + ", ".join(f"%{prefix}{start + i}" for i in range(count)) + "}"


def _descriptors(rows, step, steps):
    start = step * rows[0] * STEP_BYTES, (steps * rows[0] + step * rows[1]) * STEP_BYTES
    return " ".join(
        f"add.u64 %d{x}, %base, {offset >> 4};" for x, offset in zip("ab", start, strict=True)
    )


def _quads(pattern):
    """Return one instruction per four of %f0 to %f15; ``pattern`` takes them and their offset."""
    return "\n".join(pattern.format(_vector("f", 4, 4 * i), 16 * i) for i in range(4))


def _wgmma_ptx(head, dtypes, half, steps, rows):
    """Return the kernel of ``steps`` wgmma instructions."""
    a, b = (_PTX_TYPES[dtype] for dtype in dtypes)
    registers = 2 if half else 4
    shape = f"m64n8k{STEP_BYTES // dtypes[0].itemsize}.{'f16' if half else 'f32'}.{a}.{b}"
    accumulators = _vector("f", registers)
    transposed = ", 0, 0" * (dtypes[0].itemsize == 2)
    products = "\n".join(
        f"{_descriptors(rows, step, steps)} wgmma.mma_async.sync.aligned.{shape} {accumulators}, "
        f"%da, %db, %p1, 1, 1{transposed};"
        for step in range(steps)
    )
    return f"""{head}
bar.sync 0;
mul.wide.u32 %rd4, %r0, {4 * registers};
add.u64 %rd1, %rd1, %rd4;
add.u64 %rd3, %rd3, %rd4;
ld.global.v{registers}.b32 {accumulators}, [%rd1];
setp.eq.u32 %p1, 0, 0;
wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.v{registers}.b32 [%rd3], {accumulators};
ret;
}}"""


def _tcgen05_ptx(head, kind, idesc, scaled, steps, rows):
    """Return the kernel of ``steps`` tcgen05.mma instructions."""
    scales, products = "", ""
    for step in range(steps):
        scale_operands = ""
        if scaled:
            scale_operands = "[%r12], [%r13], "
            columns = [f"%r7, {column + 4 * step};" for column in (_A_SCALES, _B_SCALES)]
            products += f"add.u32 %r12, {columns[0]} add.u32 %r13, {columns[1]}\n"
            # Scales of row 32 j + l of A are in lane l of column j, in each quarter of lanes.
            for side, column in ((0, _A_SCALES), (16, _B_SCALES)):
                scales += f"""
ld.global.v4.b32 {_vector("s", 4)}, [%rd2+{step * 32 * 32 + side}];
add.u32 %r10, %r8, {column + 4 * step};
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r10], {_vector("s", 4)};"""
        products += f"""{_descriptors(rows, step, steps)}
tcgen05.mma.cta_group::1.{kind} [%r7], %da, %db, %r11, {scale_operands}%p3;
"""
    # Bit 46 marks tcgen05's descriptors; a warp's lanes begin at 32 times its number.
    return f"""{head}
or.b64 %base, %base, {1 << 46};
mov.u32 %r4, mbar;
mov.u32 %r5, slot;
shr.u32 %r6, %r0, 5;
setp.eq.u32 %p2, %r0, 0;
@%p2 mbarrier.init.shared::cta.b64 [%r4], 1;
setp.ne.u32 %p1, %r6, 0;
@%p1 bra allocated;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], {_TMEM_COLUMNS};
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
bar.sync 0;
ld.shared.b32 %r7, [%r5];
shl.b32 %r8, %r6, 21;
add.u32 %r8, %r8, %r7;
mul.wide.u32 %rd4, %r0, 64;
add.u64 %rd1, %rd1, %rd4;
add.u64 %rd3, %rd3, %rd4;
and.b32 %r9, %r0, 31;
mul.wide.u32 %rd4, %r9, 32;
add.u64 %rd2, %rd2, %rd4;
{_quads("ld.global.v4.b32 {}, [%rd1+{}];")}
tcgen05.st.sync.aligned.32x32b.x16.b32 [%r8], {_vector("f", 16)};{scales}
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
mov.u32 %r11, {idesc};
setp.eq.u32 %p3, 0, 0;
@!%p2 bra wait;
{products}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
wait:
mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r4], 0;
@!%p0 bra wait;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {_vector("f", 16)}, [%r8];
tcgen05.wait::ld.sync.aligned;
{_quads("st.global.v4.b32 [%rd3+{1}], {0};")}
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p1 bra freed;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, {_TMEM_COLUMNS};
freed:
ret;
}}"""


@functools.cache
def _load(arch, ptx, edits, steps, rows, *args):
    """Load a kernel into the emulator, with ``edits`` of its PTX, and return its name."""
    name = f"{ptx.__name__.strip('_')}_{abs(hash((edits, steps, args))):x}"
    smem = sum(rows) * STEP_BYTES * steps
    head = _HEAD.format(arch=arch, name=name, smem=smem, descriptor=_DESCRIPTOR)
    text = ptx(head, *args, steps, rows)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    emulator.load_ptx(text)
    return name


def _image(x):
    """Return the bytes of an operand as they lie in shared memory."""
    steps = x.view(torch.uint8).unflatten(1, (-1, STEP_BYTES)).unflatten(2, (2, 16))
    return steps.unflatten(0, (-1, 8)).permute(2, 0, 3, 1, 4).flatten()


def _launch(name, a, b, acc, scales, out):
    emulator.launch(name, [1], [128], [torch.cat([_image(a), _image(b)]), acc, scales, out])
    return out


def _fragments(half):
    """Return row and column of each accumulator register of wgmma."""
    thread = torch.arange(128)[:, None, None]
    h, e = torch.arange(2)[:, None], torch.arange(2)
    row = (thread // 32 * 16 + thread % 32 // 4 + 8 * h).expand(128, 2, 2)
    return row, (thread % 4 * 2 + e).expand(128, 2, 2)


def wgmma(a, b, acc, edits=()):
    """Return ``acc`` (64, 8) plus A (64, K) B (8, K)^T; ``edits`` replace pieces of PTX."""
    half = acc.dtype == torch.float16
    steps = a.shape[1] * a.dtype.itemsize // STEP_BYTES
    name = _load("sm_90a", _wgmma_ptx, edits, steps, (64, 8), (a.dtype, b.dtype), half)
    indices = _fragments(half)
    fragments = acc[indices].contiguous()
    out = _launch(name, a, b, fragments, fragments, torch.empty_like(fragments))
    result = torch.empty_like(acc)
    result[indices] = out
    return result


def tcgen05(a, b, acc, a_scales=None, b_scales=None, edits=(), flags=0):
    """Return ``acc`` (128, 16) plus A (128, K) B (16, K)^T.

    uint8 operands are packed E2M1. ``flags`` are extra bits of the instruction descriptor.
    """
    half, scaled, fp4 = acc.dtype == torch.float16, a_scales is not None, a.dtype == torch.uint8
    steps = a.shape[1] * a.dtype.itemsize // STEP_BYTES
    scale_words = torch.zeros(steps, 32, 2, 4, 4, dtype=torch.uint8)
    vectors = {torch.float32: "tf32", torch.float16: "f16", torch.bfloat16: "f16"}
    kind = "kind::" + vectors.get(a.dtype, "f8f6f4")
    codes = {torch.bfloat16: 1, torch.float8_e5m2: 1, torch.float32: 2, torch.uint8: 1}
    idesc = codes.get(a.dtype, 0) << 7 | codes.get(b.dtype, 0) << 10 | 2 << 17 | 8 << 24 | flags
    if not scaled:
        idesc |= (0 if half else 1) << 4
    else:
        e8m0 = a_scales.dtype == torch.float8_e8m0fnu
        idesc |= e8m0 << 23
        scales_per_step = a_scales.shape[1] // steps
        kind = "kind::" + ("mxf8f6f4" if not fp4 else "mxf4" if e8m0 else "mxf4nvf4")
        kind += f".block_scale.scale_vec::{scales_per_step}X"
        for side, scales in enumerate((a_scales, b_scales)):
            words = scales.view(torch.uint8).unflatten(1, (steps, scales_per_step)).transpose(0, 1)
            for row in range(0, words.shape[1], 32):
                rows = words[:, row : row + 32]
                scale_words[:, : rows.shape[1], side, row // 32, :scales_per_step] = rows
    name = _load("sm_100a", _tcgen05_ptx, edits, steps, (128, 16), kind, idesc, scaled)
    cells = acc.view(torch.int16 if half else torch.int32).int()
    out = _launch(name, a, b, cells, scale_words, torch.empty_like(cells))
    return (out.short() if half else out).view(acc.dtype)
