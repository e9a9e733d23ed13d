"""PTX kernels for tests, built from a few lines of code."""

import numpy as np
import pytest

import ptx_emulator as emulator

_REGISTERS = """
.reg .pred %q<16>; .reg .b16 %h<64>; .reg .b32 %r<300>; .reg .f32 %f<300>; .reg .b64 %d<64>;
.reg .b32 %t;
"""


def wait(bar):
    """Return PTX that waits until phase 0 of the mbarrier is complete."""
    return f" WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q15, [{bar}], 0; @!%q15 bra WAIT; "


def fails(match):
    """Expect an ``EmulatorError`` whose message matches."""
    return pytest.raises(emulator.EmulatorError, match=match)


def module(body, args, name, header):
    """Return a kernel with its parameters in %p0, %p1, ... (b64; b32 for ints) and tid.x in %t."""
    params, loads = [], []
    for i, arg in enumerate(args):
        if isinstance(arg, bytes):
            params.append(f".param .align 64 .b8 p{i}[{len(arg)}]")
            loads.append(f".reg .b64 %p{i}; mov.b64 %p{i}, p{i}; cvta.param.u64 %p{i}, %p{i};")
        else:
            bits = 32 if isinstance(arg, int) else 64
            params.append(f".param .u{bits} p{i}")
            loads.append(f".reg .b{bits} %p{i}; ld.param.u{bits} %p{i}, [p{i}];")
    return (
        f".version 8.8\n.target sm_100a\n.address_size 64\n{header}"
        f".visible .entry {name}({', '.join(params)}) {{{_REGISTERS}"
        + "\n".join(loads)
        + f"\nmov.u32 %t, %tid.x;\n{body}\nret;\n}}\n"
    )


def run(body, *args, grid=1, block=32, cluster=None, dynamic_smem=0, name="kernel", header=""):
    """Launch a kernel with this body on one-dimensional grids, blocks and clusters."""
    emulator.load_ptx(module(body, args, name, header))
    clusters = None if cluster is None else (cluster,)
    emulator.launch(name, (grid,), (block,), args, cluster=clusters, dynamic_smem=dynamic_smem)


def elementwise(ptx, *inputs, out=np.uint32):
    """Run ``ptx`` once per element: inputs in %a0, %a1, ..., the result in %out."""
    count = len(inputs[0])
    assert count % 32 == 0
    result = np.zeros(count, out)
    lines = []
    for i, array in enumerate([*inputs, result]):
        size = array.dtype.itemsize
        register = "%out" if array is result else f"%a{i}"
        lines.append(f".reg .b{size * 8} {register}; mul.wide.u32 %d0, %r0, {size};")
        lines.append(f"add.u64 %d{i + 1}, %p{i}, %d0;")
        if array is not result:
            lines.append(f"ld.global.b{size * 8} {register}, [%d{i + 1}];")
    size = result.dtype.itemsize
    body = (
        "mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 32, %t;\n"
        + "\n".join(lines)
        + f"\n{{ {ptx} }}\nst.global.b{size * 8} [%d{len(inputs) + 1}], %out;"
    )
    run(body, *(np.ascontiguousarray(a) for a in inputs), result, grid=count // 32)
    return result


def outcome(body, names, *args, grid=1, block=32, **launch):
    """Run ``body`` and return the 32-bit registers ``names``: (threads, registers), uint32."""
    names = names.split()
    out = np.zeros((grid * block, len(names)), np.uint32)
    stores = "".join(f"st.global.b32 [%d60+{4 * i}], {name};" for i, name in enumerate(names))
    body += f"""mov.u32 %r298, %ctaid.x; mad.lo.u32 %r299, %r298, {block}, %t;
mul.wide.u32 %d60, %r299, {4 * len(names)}; add.u64 %d60, %d60, %p{len(args)}; {stores}"""
    run(body, *args, out, grid=grid, block=block, **launch)
    return out


def aligned(array, to=128):
    """Return a copy of the array whose address is a multiple of ``to`` bytes."""
    raw = np.zeros(array.nbytes + to, np.uint8)
    start = -raw.ctypes.data % to
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[:] = array
    return view
