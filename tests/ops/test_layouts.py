"""Every op on operands in all layouts: views give the bits of dense copies."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from cute_kernels import backend
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import buffers
from cute_kernels.ops import registration
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    U8,
    assert_all_same,
    dequantize_arguments,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    offs_tensor,
    ops,
    sample,
)

pytestmark = pytest.mark.usefixtures("garbage")
OFFS = offs_from_splits((5, 0, 28, 7))
ROWS, K, N = 43, 64, 48  # three rows of tail
GROUPS = len(OFFS)


def copy_with_strides(x, strides, offset):
    """Return a copy with these strides inside a larger buffer."""
    extent = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    buffer = torch.full(((offset + extent + 7) * x.itemsize,), 0x5A, dtype=U8)
    return buffer.view(x.dtype).as_strided(x.shape, strides, offset).copy_(x)


def dense_strides(x):
    return x.contiguous().stride()


def strides_with_gap(x, gap):
    """Return row-major strides with ``gap`` elements between rows."""
    if x.dim() < 2:
        return (2,)
    strides = [1, x.shape[-1] + gap]
    for size in x.shape[-2:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def strides_of_every_second(x):
    outer, *inner = dense_strides(x)
    return (2 * outer, *inner)


def in_one_buffer(tensors):
    """Return copies that lie in one buffer per dtype, with odd offsets."""
    sizes = {}
    for x in tensors:
        sizes[x.dtype] = sizes.get(x.dtype, 1) + x.numel()
    buffers = {dtype: torch.full((size,), 3).to(dtype) for dtype, size in sizes.items()}
    positions, out = dict.fromkeys(sizes, 1), []
    for x in tensors:
        view = buffers[x.dtype][positions[x.dtype] : positions[x.dtype] + x.numel()].view(x.shape)
        positions[x.dtype] += x.numel()
        out.append(view.copy_(x))
    return out


def for_each_tensor(change):
    return lambda tensors: [change(x) for x in tensors]


LAYOUTS = {
    "misaligned": for_each_tensor(lambda x: copy_with_strides(x, dense_strides(x), 1)),
    "flat parameters": in_one_buffer,
    "wider rows": for_each_tensor(lambda x: copy_with_strides(x, strides_with_gap(x, 32), 0)),
    "odd pitch, misaligned": for_each_tensor(
        lambda x: copy_with_strides(x, strides_with_gap(x, 1), 3)
    ),
    "every second": for_each_tensor(lambda x: copy_with_strides(x, strides_of_every_second(x), 0)),
    "transposed": for_each_tensor(lambda x: x.mT.contiguous().mT if x.dim() > 1 else x),
    "expanded": for_each_tensor(lambda x: x[:1].expand(x.shape) if x.dim() > 1 else x),
    "expanded from one": for_each_tensor(
        lambda x: x.flatten()[:1].expand(x.shape) if x.is_floating_point() else x
    ),
}


def quantized(x, offs=OFFS, text="nvfp4", columnwise=False):
    with backend("reference"):
        return ops.grouped_quantize(x, text, offs, None, not columnwise, columnwise)


def decoding(x, rows, dtype, offs=OFFS, **options):
    codes, *scales = quantized(x, offs, **options)
    options = {"text": "nvfp4", "columnwise": False} | options
    return codes, scales, options["text"], rows, dtype, offs, options["columnwise"]


def x(cols=K, dtype=BF16):
    return sample(ROWS, cols, dtype=dtype)


def w(n=N, k=K):
    return sample(GROUPS, n, k)


def bias(n=N, dtype=BF16):
    return torch.randn(GROUPS, n).to(dtype)


def alpha():
    return torch.rand(GROUPS)


PAIRS = torch.arange(ROWS, dtype=I32)
#: Omitted options, and the last arguments of fused ops: activation, interleaved, keeps_z.
NONE, SWIGLU = (False, None, False, *[None] * 5), ("swiglu", False, True)
CALLS = {
    "offsets": ("compute_offsets", lambda: (torch.tensor([3, 0, 4]), 2)),
    "routing": ("compute_routing", lambda: (torch.tensor([[3, 0], [4, 1]]), 4)),
    "mapped routing": (
        "compute_routing",
        lambda: (torch.tensor([[3, 0], [4, 1]]), 2, torch.tensor([0, -1, 1, 0], dtype=I32)),
    ),
    "gather": ("moe_gather", lambda: (x(), torch.tensor([2, 0, -1], dtype=I32))),
    "activate": ("moe_activate", lambda: (x(), "swiglu", OFFS)),
    "activate gradient": (
        "moe_activate_gradient",
        lambda: (x(), x(), "silu", OFFS, False, torch.rand(ROWS, 1), PAIRS),
    ),
    "quantize gradient": (
        "moe_quantize_gradient",
        lambda: (
            *(x(256), x(128), "fp8:scaling=delayed", "mxfp8", "swiglu", OFFS, False),
            *(torch.rand(ROWS, 1), PAIRS, alpha()),
        ),
    ),
    "combine": (
        "moe_combine",
        lambda: (x(), torch.tensor([[2, 0], [-1, 1]], dtype=I32), torch.rand(2, 2)),
    ),
    "amax": ("grouped_amax", lambda: (x(), OFFS)),
    "uniform amax": ("grouped_amax", lambda: (w(),)),
    "dbias": ("grouped_dbias", lambda: (x(37), OFFS)),
    "fp32 dbias": ("grouped_dbias", lambda: (x(dtype=F32), OFFS)),
    "quantize": ("grouped_quantize", lambda: (x(), "nvfp4", OFFS, None, True, True)),
    "quantize rows": ("grouped_quantize", lambda: (x(dtype=F16), "nvfp4:row_scaled", OFFS)),
    "quantize with amax": ("grouped_quantize", lambda: (x(), "nvfp4", OFFS, alpha())),
    "quantize activated": (
        "grouped_quantize",
        lambda: (x(), "nvfp4", OFFS, None, True, False, None, None, "silu"),
    ),
    "quantize weights": (
        "grouped_quantize",
        lambda: (w(), "nvfp4:block=16x16", None, None, True, True),
    ),
    "dequantize": ("grouped_dequantize", lambda: decoding(x(), ROWS, BF16)),
    "dequantize rows": (
        "grouped_dequantize",
        lambda: decoding(x(), ROWS, F32, text="nvfp4:row_scaled"),
    ),
    "dequantize columns": (
        "grouped_dequantize",
        lambda: decoding(x(), ROWS, BF16, columnwise=True),
    ),
    "dequantize weights": ("grouped_dequantize", lambda: decoding(w(), N, BF16, None)),
    "fprop": ("m_grouped_gemm", lambda: (x(), w(), OFFS, bias(), alpha())),
    "fprop, fp32 bias": ("m_grouped_gemm", lambda: (x(), w(), OFFS, bias(dtype=F32))),
    "fprop, fp16 bias": ("m_grouped_gemm", lambda: (x(), w(), OFFS, bias(dtype=F16))),
    "dgrad": ("m_grouped_gemm", lambda: (x(N), w(), OFFS, None, None, True)),
    "wgrad": ("k_grouped_gemm", lambda: (x(N), x(), OFFS, alpha(), F32)),
    "nvfp4 fprop": (
        "m_grouped_gemm",
        lambda: m_grouped_arguments(
            quantized(x()), quantized(w(), None), OFFS, bias=bias(), alpha=alpha()
        ),
    ),
    "nvfp4 dgrad": (
        "m_grouped_gemm",
        lambda: m_grouped_arguments(
            quantized(x(N), text="nvfp4:row_scaled"),
            quantized(w(), None, columnwise=True),
            OFFS,
            bias=bias(K, F32),
            transpose_b=True,
            out_dtype=F32,
            a_format="nvfp4:row_scaled",
        ),
    ),
    "nvfp4 wgrad": (
        "k_grouped_gemm",
        lambda: k_grouped_arguments(
            quantized(x(N), columnwise=True), quantized(x(), columnwise=True), OFFS, alpha=alpha()
        ),
    ),
    "w4a16": (
        "m_grouped_gemm",
        lambda: m_grouped_arguments(x(), quantized(w(), None), OFFS, bias=bias(), alpha=alpha()),
    ),
    "quantizing fprop": ("m_grouped_quantize_gemm", lambda: quantizing(bias(), alpha())),
    "route": ("moe_route", lambda: (x(dtype=F32), torch.randn(K), OFFS[-1:], 3)),
    "route gradient": (
        "moe_route_gradient",
        lambda: (x(3, F32), None, PAIRS.view(-1, 1).long() + torch.arange(3), x(dtype=F32)),
    ),
    "activating": (
        "m_grouped_gemm_activate",
        lambda: (x(), w(), OFFS, bias(), alpha(), False, *[None] * 5, *NONE[2:6], *SWIGLU),
    ),
    "activating, quantizing": (
        "m_grouped_quantize_gemm_activate",
        lambda: (*quantizing(bias(256), alpha(), 256), *NONE, *SWIGLU),
    ),
}


def quantizing(bias, alpha, n=N):
    codes, *scales = quantized(w(n), None)
    return x(), codes, OFFS, scales, "nvfp4:row_scaled", "nvfp4", bias, alpha


EMULATED = ("emulated:sm_90a", "emulated:sm_100a")
#: Each call in each layout, on the reference and on one emulated architecture in turn.
CASES = [
    (name, layout, where)
    for i, name in enumerate(CALLS)
    for j, layout in enumerate(LAYOUTS)
    for where in ("reference", EMULATED["activating" not in name and (i + j) % 2])
]


def test_every_op_has_a_call():
    names = {n.split("::")[1] for n in registration._LIBRARY._op_defs}
    # Ops without an ``_out`` form write their arguments, which must be dense.
    functional = {n for n in names if f"{n}_out" in names}
    assert {op for op, _ in CALLS.values()} == functional


def storage_bytes(tensor):
    return torch.empty(0, dtype=U8).set_(tensor.untyped_storage()).clone()


def call(op, arguments):
    results = getattr(ops, op)(*arguments)
    return results if isinstance(results, list) else [results]


@pytest.mark.parametrize(("name", "layout", "backend_name"), CASES)
def test_any_layout_gives_the_bits_of_a_dense_copy(name, layout, backend_name):
    """Check that strided and offset arguments give the bits of contiguous ones."""
    op, make = CALLS[name]
    leaves, structure = tree_flatten(list(make()))
    tensor_indices = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
    for i, tensor in zip(
        tensor_indices, LAYOUTS[layout]([leaves[i] for i in tensor_indices]), strict=True
    ):
        leaves[i] = tensor
    before = [storage_bytes(leaves[i]) for i in tensor_indices]
    copies = list(leaves)
    for i in tensor_indices:
        copies[i] = leaves[i].clone(memory_format=torch.contiguous_format)
    with backend(backend_name):
        want = call(op, tree_unflatten(copies, structure))
        got = call(op, tree_unflatten(leaves, structure))
    assert_all_same(got, want)
    for i, old in zip(tensor_indices, before, strict=True):
        assert storage_bytes(leaves[i]).equal(old), f"argument {i} was written"


def misaligned_output(*shape, dtype):
    out = torch.full((torch.Size(shape).numel() + 1,), 0x25).to(dtype)[1:].view(shape)
    assert out.data_ptr() % 16
    return out


def write_outputs():
    """Yield outputs over a pattern, with rows of 8 bytes or odd addresses; kernels need 16."""
    torch.manual_seed(0)
    x, w = torch.randn(100, 16).bfloat16(), torch.randn(3, 32, 16).bfloat16()
    offs = offs_tensor(10, 40, 90)
    for text in ("nvfp4:row_scaled", "nvfp4"):
        codes, *scale_specs = buffers(parse(text), x.shape, 3).values()
        copy = [torch.full(codes.shape, 0xA5, dtype=codes.dtype)]
        copy += [misaligned_output(*spec.shape, dtype=spec.dtype) for spec in scale_specs]
        ops.grouped_quantize_out(x, text, offs, out=copy)
        assert (copy[0][90:] == 0xA5).all()
        yield from copy
        out = misaligned_output(100, 16, dtype=BF16)
        ops.grouped_dequantize_out(*dequantize_arguments(copy, text, 100, out.dtype, offs), out=out)
        yield out
    out = misaligned_output(100, 32, dtype=F32)
    ops.m_grouped_gemm_out(x, w, offs, out_dtype=out.dtype, out=out, accumulate=True)
    assert (out[90:] == 0x25).all()
    yield out


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_outputs_that_kernels_cannot_write_directly(arch):
    with backend(f"reference:{arch}"):
        want = list(write_outputs())
    with backend(f"emulated:{arch}"):
        got = list(write_outputs())
    assert_all_same(got, want)
